"""Each shipped TOML fits the GPUs that it names, or a laptop; layouts that it mentions fit or not as it says; and each
value of a recipe has its source beside it.

A recipe says in comments what this file computes from its degrees:

    # Planned on 32 x H100: 50 GiB, and 28 GiB of the host
    # Does not fit: --activation_checkpoint.mode selective: 110 GiB
    # Fits too on 64: --activation_checkpoint.mode full
    #   --parallelism.tensor_parallel_degree 2: 40 GiB
"""

import re
import shlex
from pathlib import Path

import pytest

from glm46.config.check import check_config
from glm46.config.loader import load_config
from glm46.engine.observe.peaks import find_accelerator
from glm46.operate.estimate import requirement
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.operate.estimate.plan_sizes import batches_of
from glm46.operate.estimate.requirement import describe_requirement
from glm46.operate.estimate.run_cost import effective_time, run_cost
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.layout import smallest_world
from glm46.run.plan import resolve_plan
from glm46.run.schedule import schedule_value

FOLDER = Path(__file__).parents[3] / "train_configs"
FILES = sorted(FOLDER.glob("*.toml"))
GIB = 2**30
LAPTOP = Machine(cores=2, memory_bytes=16 * GIB, free_bytes=12 * GIB)
GPUS_PER_NODE = 8
NODE_BYTES = 1024 * GIB  # the documents' nodes have one or two terabytes
# GiB. Comments have whole ones, so a plan that changes by less than half of one never fails here.
ROUNDING = 1.0

SAYS = {path: path.read_text(encoding="utf-8").replace("\n#   --", " --") for path in FILES}
PLANNED = r"(?m)^# Planned on ([\d,]+) x (\w+): ([\d,]+) GiB(?:, and ([\d,]+) GiB of the host)?$"
RECIPES = [path for path in FILES if re.search(PLANNED, SAYS[path])]
OTHERS = [
    (path, *found)
    for path in RECIPES
    for found in re.findall(r"(?m)^# (Does not fit|Fits too)(?: on (\d+))?: (--.*): ([\d,]+) GiB$", SAYS[path])
]
PAGE = (Path(__file__).parents[3] / "docs/finetuning.md").read_text(encoding="utf-8")
TABLE = re.findall(
    r"^\| `(\w+)\.toml` \| (\d+) \| .* \| (\d+) \| [^|]* \| ([\d,]+) \| ([\d,]+) \| (?:(\d+), ([\d,]+) )?\|$",
    PAGE,
    re.M,
)
PAIRS = (
    "--finetune.preference.loss_type", "sigmoid", "--model.shape.num_nextn_predict_layers", "0", "--data.sources",
    '[{ name = "p", path = "p", packing = "best_fit", '
    'recipe = { input = ["p"], format = "preference", max_tokens = 2048 } }]',
)  # fmt: skip
# Of pages that round to three digits, and of the planner's bubble, which `plan` simulates and this file estimates.
SPEED_ROUNDING = 0.03
OUR_INTERVAL = r"(?m)^interval = .*# \[ours\]"
MARK = r"\[(page|bridge|paper|blog|document|quick start|slime|miles|prime-rl|assumption|regret|ours)( [\d, -]+)?\]"
# What belongs to the run and not to a recipe of anybody.
OWN = {"description", "dump_folder", "name", "path", "tokenizer_path", "initial_load_path", "start_tokens"}


@pytest.fixture(autouse=True)
def newest_torch(monkeypatch):
    """A recipe fits its GPUs with a torch that runs it, whatever torch is here."""
    for name in ("INTEGERS_TORCH", "SPLIT_BACKWARD_TORCH"):
        monkeypatch.setattr(requirement, name, (2, 11))


def gpus_of(path: Path, others: str = "") -> tuple[int, Machine]:
    """The number of GPUs that a recipe names, or another one, and nodes of 8 of them."""
    number, kind, *_ = re.search(PLANNED, SAYS[path]).groups()
    gpus, accelerator = int((others or number).replace(",", "")), find_accelerator(kind)
    of_node = min(gpus, GPUS_PER_NODE)
    assert accelerator is not None and gpus % of_node == 0
    node = (Gpu(accelerator.name, accelerator.memory_bytes),) * of_node
    return gpus, Machine(64, NODE_BYTES, NODE_BYTES, node, nodes=gpus // of_node)


def test_recipes_are_found():
    assert len(RECIPES) == 42 and len(OTHERS) >= 5
    said = [line for text in SAYS.values() for line in re.findall(r"(?m)^# (?:Planned on|Does not fit|Fits too)", text)]
    assert len(said) == len(RECIPES) + len(OTHERS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_fits_the_gpus_that_it_names(path):
    config, (gpus, machine) = load_config(path), gpus_of(path)
    assert config.parallelism.data_parallel_shard_degree != -1 and smallest_world(config.parallelism) == gpus
    assert check_config(config, world_size=gpus) == []
    *_, gib, host = re.search(PLANNED, SAYS[path]).groups()
    memory = largest_stage(stage_memory(resolve_plan(config, gpus, host_ranks=GPUS_PER_NODE)))
    assert memory.total / GIB == pytest.approx(int(gib), abs=ROUNDING)
    assert memory.host / GIB == pytest.approx(int(host or 0), abs=ROUNDING)
    fits, why = describe_requirement(config, machine)
    assert fits, why


@pytest.mark.parametrize(("name", "gpus", "gib", "speed", "hours", "pairs_gib", "pairs_speed"), TABLE)
def test_the_page_of_fine_tuning_has_what_is_planned(name, gpus, gib, speed, hours, pairs_gib, pairs_speed):
    for options, *said in ([(), gib, speed], [PAIRS, pairs_gib, pairs_speed]):
        if not said[0]:
            continue
        config = load_config(FOLDER / f"{name}.toml", options, world_size=int(gpus))
        plan = resolve_plan(config, int(gpus), host_ranks=GPUS_PER_NODE)
        cost = run_cost(plan, TargetCluster(find_accelerator("H100"), int(gpus)))
        assert largest_stage(stage_memory(plan)).total / GIB == pytest.approx(int(said[0]), abs=ROUNDING)
        assert cost.tokens_per_second == pytest.approx(int(said[1].replace(",", "")), rel=SPEED_ROUNDING)
        if not options:
            per_thousand = cost.gpu_hours * 1000 / cost.steps
            assert per_thousand == pytest.approx(int(hours), rel=SPEED_ROUNDING, abs=0.5)


def test_the_page_of_fine_tuning_has_its_table():
    assert len(TABLE) == 11 and sum(bool(row[-1]) for row in TABLE) == 4


@pytest.mark.parametrize(
    ("path", "verdict", "others", "options", "gib"), OTHERS, ids=[f"{other[0].stem}: {other[3]}" for other in OTHERS]
)
def test_layouts_that_a_recipe_mentions_fit_as_it_says(path, verdict, others, options, gib):
    gpus, machine = gpus_of(path, others)
    config = load_config(path, shlex.split(options), world_size=gpus)
    memory = largest_stage(stage_memory(resolve_plan(config, gpus, host_ranks=GPUS_PER_NODE)))
    assert memory.total / GIB == pytest.approx(int(gib.replace(",", "")), abs=ROUNDING)
    assert describe_requirement(config, machine)[0] == (verdict == "Fits too")


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if re.search(OUR_INTERVAL, SAYS[path])],
    ids=lambda path: path.stem,
)
def test_a_checkpoint_interval_of_ours_loses_no_time_to_failures(path):
    """At most 1 % more than the best one; others are those of their sources, and `plan` says what they lose."""
    gpus, machine = gpus_of(path)
    plan = resolve_plan(load_config(path), gpus, host_ranks=GPUS_PER_NODE)
    cost = run_cost(plan, TargetCluster(find_accelerator(machine.gpus[0].name), gpus))
    found = effective_time(plan, cost)
    assert found is None or found.ratio > found.best_ratio - 0.01


@pytest.mark.parametrize("path", [path for path in FILES if path not in RECIPES], ids=lambda path: path.stem)
def test_other_runs_fit_a_laptop(path):
    fits, why = describe_requirement(load_config(path), LAPTOP)
    assert fits, why


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_value_has_its_source(path):
    """Beside the key, or in the comment over its lines; one comment may stand over several tables of an array."""
    bare, has_mark, was, header = [], False, "", ""
    for line in SAYS[path].splitlines():
        if line.startswith("#"):
            has_mark = bool(re.search(MARK, line)) or (has_mark and was.startswith("#"))
        elif line.startswith("["):
            has_mark, header = has_mark and (bool(was) or line == header), line
        elif key := re.match(r"(\w+) = ", line):
            has_mark = has_mark and bool(was)
            if not (key[1] in OWN or has_mark or re.search(f"#.*{MARK}", line)):
                bare.append(line)
        was = line
    assert bare == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_mark_is_explained(path):
    """In the head of the file, or of a file that the head names."""
    head = SAYS[path].partition("\n\n")[0]
    heads = [head, *(SAYS[FOLDER / name].partition("\n\n")[0] for name in re.findall(r"\w+\.toml", head))]
    explained = {mark for text in heads for mark, _ in re.findall(MARK, text)}
    assert {mark for mark, _ in re.findall(MARK, SAYS[path])} <= explained


@pytest.mark.parametrize(
    ("name", "world", "degrees", "rows"),
    # Air does not fit in the 4 pipeline ranks of the page, with rows of one.
    [("glm45_pretrain", 256, (2, 8, 16), 1), ("glm45_air_pretrain", 32, (1, 1, 8), 2)],
)
def test_recipes_of_the_glm_45_page_have_its_numbers(name, world, degrees, rows):
    """Its tables of parallelism and its example of pre-training; the rest from Megatron-Bridge's recipes."""
    plan = resolve_plan(load_config(FOLDER / f"{name}.toml"))
    config, layout = plan.config, plan.layout
    assert (layout.tp, layout.pp, layout.ep) == degrees and layout.world_size == world
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (100_000, 4096, rows)
    assert batches_of(plan, 0) == (2048, 2048) and plan.budget_tokens == 100_000 * 2048 * 4096
    scheduler, optimizer = config.lr_scheduler, config.optimizer
    assert optimizer.name == "AdamW" and optimizer.lr == 1e-4
    assert optimizer.lr * scheduler.min_lr_factor == pytest.approx(1e-5)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
    assert scheduler.warmup_tokens == 2000 * 2048 * 4096
    weights = [schedule_value(config.mtp.loss_weight, tokens) for tokens in (0, 15 * 10**12 - 1, 15 * 10**12)]
    assert weights == [0.3, 0.3, 0.1]


def test_the_experiment_is_the_documents():
    plan = resolve_plan(load_config(FOLDER / "scaled_64gpu.toml"))
    assert (plan.shape.num_hidden_layers, plan.shape.n_routed_experts) == (24, 32)
    assert plan.layout.world_size == 64 and plan.budget_tokens == 100 * 10**9
