"""The TOML files that are shipped: sound, and a phase differs from the one before only where the recipe does."""

import re
import shlex
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.config.check import check_config
from glm46.config.loader import load_config
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.memory import stage_memory
from glm46.operate.estimate.plan_sizes import batches_of, step_tokens
from glm46.operate.estimate.requirement import describe_requirement, stage_table
from glm46.run.plan import Plan, resolve_plan
from glm46.run.schedule import batch_sequences, learning_rate_factor, schedule_value

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "train_configs"
FILES = sorted(FOLDER.glob("*.toml"))
FAMILIES = {name: [f"{name}_phase{number}" for number in (1, 2, 3)] for name in ("glm45_paper", "glm46", "debug")}
LARGE = [*FAMILIES["glm45_paper"], *FAMILIES["glm46"]]
TRILLION = 10**12

# What the recipe changes from one phase to the next.
ALWAYS = {
    "job.description", "job.dump_folder", "data.sources", "training.tokens", "lr_scheduler.start_tokens",
    "checkpoint.initial_load_path",
}  # fmt: skip
LENGTHS = {"training.seq_len", "training.global_batch_size"}
STAGES = LENGTHS | {"data.stages"}
MESH = {"parallelism.context_parallel_degree", "parallelism.data_parallel_shard_degree"}
ALLOWED = {
    ("glm45_paper_phase1", "glm45_paper_phase2"): ALWAYS,
    ("glm45_paper_phase2", "glm45_paper_phase3"): ALWAYS | STAGES | MESH | {"model.shape", "checkpoint.interval"},
    ("glm46_phase1", "glm46_phase2"): ALWAYS | LENGTHS | {"checkpoint.interval"},
    ("glm46_phase2", "glm46_phase3"):
        ALWAYS | STAGES | MESH | {"parallelism.pipeline_parallel_degree", "checkpoint.interval"},
    ("debug_phase1", "debug_phase2"):
        ALWAYS | STAGES | {"training.local_batch_size", "parallelism.data_parallel_shard_degree"},
    ("debug_phase2", "debug_phase3"): ALWAYS | STAGES | MESH | {"training.local_batch_size"},
}  # fmt: skip


def phase(name: str) -> RunConfig:
    """A shipped run."""
    return load_config(FOLDER / f"{name}.toml")


def flat(config: RunConfig) -> dict[str, object]:
    """Every key with its value."""
    return {
        f"{name}.{key}": value for name, table in config.model_dump().items() for key, value in (table or {}).items()
    }


def steps(plan: Plan) -> int:
    """Steps of a run of one stage, counted one by one through its ramp, if it has one."""
    training, (stage,) = plan.config.training, plan.text_stages
    if step_tokens(plan) is not None:
        return -(-training.tokens // step_tokens(plan))
    trained = count = 0
    while trained < training.tokens:
        clock = plan.config.lr_scheduler.start_tokens + trained
        rows = batch_sequences(training.global_batch_size, clock, plan.rows_per_micro_batch)
        trained, count = trained + rows * stage.seq_len, count + 1
    return count


def lengths(name: str) -> list[tuple[int, int]]:
    """Tokens and sequence length of each stage of a phase."""
    plan = resolve_plan(phase(name))
    return [(tokens, stage.seq_len) for tokens, stage in zip(plan.stage_tokens, plan.text_stages, strict=True)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_run_is_sound(path):
    config = load_config(path)
    assert check_config(config, world_size=None) == []


@pytest.mark.parametrize(("earlier", "later"), ALLOWED)
def test_phase_differs_only_where_the_recipe_does(earlier, later):
    before, after = flat(phase(earlier)), flat(phase(later))
    assert {key for key in before if before[key] != after[key]} == ALLOWED[earlier, later]


@pytest.mark.parametrize("name", LARGE)
def test_phase_is_laid_out_for_8192_gpus_and_fits_them(name):
    config = phase(name)
    assert check_config(config, world_size=8192) == []
    assert check_config(config, world_size=8191) != []
    assert resolve_shape(config.model).n_routed_experts == 160
    h800 = accelerator_of("H800")
    machine = Machine(1, 2**60, 2**60, (Gpu(h800.name, h800.memory_bytes),) * 8, nodes=1024)
    assert describe_requirement(config, machine, world_size=8192)[0]
    # Each number of micro-batches leaves less than half of a step to the bubble.
    plan = resolve_plan(config)
    header, *stages = stage_table(plan, stage_memory(plan))
    shares = [int(share) for line in stages for share in re.findall(r"(\d+)%", line)]
    assert len(stages) == len(config.data.stages or [1]) and shares and max(shares) < 50


@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_phases_follow_each_other_without_a_gap(names):
    """Each phase starts at the tokens, and from the last step, of the one before; the cosine ends with the last."""
    tokens = 0
    for earlier, later in zip(names, names[1:], strict=False):
        config = phase(earlier)
        plan = resolve_plan(config)
        tokens += plan.budget_tokens
        assert phase(later).lr_scheduler.start_tokens == tokens
        folder = f"{config.job.dump_folder}/{config.checkpoint.folder}/step-{steps(plan):06d}"
        assert phase(later).checkpoint.initial_load_path == folder
    assert phase(names[-1]).lr_scheduler.total_tokens == tokens + phase(names[-1]).training.tokens


def test_recipe_has_the_papers_numbers():
    """arXiv 2508.06471, section 2.4: one cosine, batch 16M to 64M tokens, rates that change at 15T tokens."""
    names = FAMILIES["glm45_paper"]
    first, last = (resolve_plan(phase(name)) for name in (names[0], names[2]))
    scheduler, optimizer = first.config.lr_scheduler, first.config.optimizer
    assert optimizer.lr * learning_rate_factor(scheduler.warmup_tokens, scheduler, 1) == 2.5e-4
    end = scheduler.total_tokens
    # The paper states the end of the cosine: 2.5e-5. The product of two floats is exact to a rounding error.
    assert optimizer.lr * learning_rate_factor(end, scheduler, 1) == pytest.approx(2.5e-5, rel=1e-12)
    for tokens, million in ((0, 16), (500 * 10**9, 64), (10 * TRILLION, 64)):
        rows = batch_sequences(first.config.training.global_batch_size, tokens, first.rows_per_micro_batch)
        assert rows * first.config.training.seq_len == million * 2**20
    for index, stage in enumerate(last.text_stages):
        assert {rows * stage.seq_len for rows in batches_of(last, index)} == {64 * 2**20}
    for config in map(phase, names):
        assert schedule_value(config.moe.bias_update_rate, 15 * TRILLION - 1) == 0.001
        assert schedule_value(config.moe.bias_update_rate, 15 * TRILLION) == 0.0
        assert schedule_value(config.mtp.loss_weight, 15 * TRILLION - 1) == 0.3
        assert schedule_value(config.mtp.loss_weight, 15 * TRILLION) == 0.1
    assert [phase(name).model.shape.rope_theta for name in names] == [1e4, 1e4, 1e6]
    (long, at_32k), (longest, at_128k) = lengths(names[2])
    assert [lengths(name)[0][1] for name in names[:2]] == [4096, 4096] and (at_32k, at_128k) == (32768, 131072)
    # A stage ends with a whole sample.
    assert TRILLION <= long < TRILLION + at_32k and long + longest == 1_100 * 10**9


def test_recipe_has_the_documents_numbers():
    """ "GLM-4.6 Pre-Training Methodology": mixtures, lengths, batches, rates and intervals."""
    plans = [resolve_plan(phase(name)) for name in FAMILIES["glm46"]]
    first, second, last = plans
    assert [plan.budget_tokens for plan in plans] == [15 * TRILLION, 7 * TRILLION, TRILLION]
    assert [[round(100 * source.weight) for source in plan.config.data.sources] for plan in plans] == [
        [35, 15, 8, 7, 5, 12, 8, 10], [35, 10, 15, 12, 8, 10, 10], [25, 30, 15, 10, 20],
    ]  # fmt: skip
    assert all(sum(source.weight for source in plan.config.data.sources) == pytest.approx(1) for plan in plans)
    assert [plan.config.training.seq_len for plan in plans] == [2048, 4096, 196_608]
    assert [plan.config.checkpoint.interval for plan in plans] == [5000, 3000, 1000]
    assert (step_tokens(first), step_tokens(second)) == (4 * 2**20, 4 * 2**20)
    assert [stage.seq_len for stage in last.text_stages] == [32_768, 65_536, 131_072, 196_608]
    assert [stage.shape.rope_scaling.factor * 4096 for stage in last.text_stages] == [
        stage.seq_len for stage in last.text_stages
    ]
    # Windows limit the middle stages to the length of the stage before.
    assert [stage.shape.sliding_window for stage in last.text_stages] == [None, 32_768, 65_536, None]
    batches = [batches_of(last, index) for index in range(4)]
    assert batches == [(64, 64), (32, 32), (16, 16), (10, 10)]
    for tokens, stage in zip(last.stage_tokens, last.text_stages, strict=True):
        assert abs(tokens - TRILLION // 4) < 2 * stage.seq_len
    for config in (plan.config for plan in plans):
        scheduler, optimizer, moe = config.lr_scheduler, config.optimizer, config.moe
        assert (optimizer.lr, optimizer.adamw_lr, optimizer.adjust_lr) == (0.02, 3e-4, "original")
        assert scheduler.warmup_tokens == 2000 * step_tokens(first) and scheduler.total_tokens == 23 * TRILLION
        assert learning_rate_factor(23 * TRILLION, scheduler, 1) == 0.1
        assert [schedule_value(moe.router_temperature, n * 10**9) for n in (0, 50, 100, 200)] == [1.0, 1.25, 1.5, 1.5]
        assert (moe.balance, moe.bias_ema_decay, moe.bias_clamp, moe.capacity_factor) == ("proportional", 0.99, 5, 1.25)


def other_layouts() -> list[tuple[str, list[str]]]:
    """The commands of docs/curriculum.md that plan the long phase on other layouts, each with the comment above it."""
    text = (ROOT / "docs" / "curriculum.md").read_text(encoding="utf-8")
    return [(said, shlex.split(line)) for said, line in re.findall(r"(?m)^# (.*)\n(python -m glm46 plan .*)$", text)]


@pytest.mark.parametrize(("said", "command"), other_layouts(), ids=lambda value: str(value).partition(":")[0])
def test_other_layouts_of_the_long_phase_are_legal_and_fit(said, command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(command[3:]) == 0
    printed = capsys.readouterr().out
    assert "\n  yes: each GPU needs " in printed
    table = printed.partition("stages of text")[2].partition("\n\n")[0]
    shares = re.findall(r"\d+%", table)
    assert shares == re.findall(r"\d+%", said) and " no" not in table.replace("none", "")
