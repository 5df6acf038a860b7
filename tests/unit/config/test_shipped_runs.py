"""The TOML files that are shipped: sound, and a phase differs from the one before only where the recipe does."""

from pathlib import Path

import pytest

from glm46.config.check import check_config
from glm46.config.loader import load_config
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.planner.schedule import batch_sequences, learning_rate_factor, schedule_value

FOLDER = Path(__file__).parents[3] / "train_configs"
FILES = sorted(FOLDER.glob("*.toml"))
PHASES = ["glm46_phase1", "glm46_phase2", "glm46_phase3"]
TRILLION = 10**12

# What the recipe changes from one phase to the next.
ALLOWED = {
    ("glm46_phase1", "glm46_phase2"): {
        "job.description", "job.dump_folder", "data.sources", "training.tokens", "lr_scheduler.start_tokens",
        "checkpoint.initial_load_path",
    },
    ("glm46_phase2", "glm46_phase3"): {
        "job.description", "job.dump_folder", "data.sources", "training.tokens", "lr_scheduler.start_tokens",
        "checkpoint.initial_load_path", "model.rope_theta", "training.seq_len", "training.global_batch_size",
    },
}  # fmt: skip


def phase(name: str) -> RunConfig:
    """A shipped run."""
    return load_config(FOLDER / f"{name}.toml")


def flat(config: RunConfig) -> dict[str, object]:
    """Every key with its value."""
    return {f"{name}.{key}": value for name, table in config.model_dump().items() for key, value in table.items()}


def ranks(config: RunConfig) -> int:
    """Data-parallel ranks of a phase, all of whose degrees are stated."""
    return config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_run_is_sound(path):
    config = load_config(path)
    assert check_config(config, world_size=None) == []


@pytest.mark.parametrize(("earlier", "later"), ALLOWED)
def test_phase_differs_only_where_the_recipe_does(earlier, later):
    before, after = flat(phase(earlier)), flat(phase(later))
    assert {key for key in before if before[key] != after[key]} == ALLOWED[earlier, later]


@pytest.mark.parametrize("name", PHASES)
def test_phase_is_laid_out_for_8192_processes(name):
    config = phase(name)
    assert check_config(config, world_size=8192) == []
    assert check_config(config, world_size=8191) != []
    assert resolve_shape(config.model).n_routed_experts == 160


def test_phases_follow_each_other_without_a_gap():
    """Each phase starts at the tokens, and from the last step, of the one before."""
    tokens = 0
    for earlier, later in zip(PHASES, PHASES[1:], strict=False):
        config, tokens = phase(earlier), tokens + phase(earlier).training.tokens
        assert phase(later).lr_scheduler.start_tokens == tokens
        trained = steps = 0
        while trained < config.training.tokens:
            clock = config.lr_scheduler.start_tokens + trained
            rows = batch_sequences(
                config.training.global_batch_size, clock, config.training.local_batch_size * ranks(config)
            )
            trained, steps = trained + rows * config.training.seq_len, steps + 1
        folder = f"{config.job.dump_folder}/{config.checkpoint.folder}/step-{steps:06d}"
        assert phase(later).checkpoint.initial_load_path == folder


def test_recipe_has_the_papers_numbers():
    """arXiv 2508.06471, section 2.4: one cosine, batch 16M to 64M tokens, rates that change at 15T tokens."""
    first, last = phase(PHASES[0]), phase(PHASES[2])
    scheduler = first.lr_scheduler
    assert first.optimizer.lr * learning_rate_factor(scheduler.warmup_tokens, scheduler, 1) == 2.5e-4
    end = scheduler.total_tokens
    # The paper states the end of the cosine: 2.5e-5. The product of two floats is exact to a rounding error.
    assert first.optimizer.lr * learning_rate_factor(end, scheduler, 1) == pytest.approx(2.5e-5, rel=1e-12)
    for tokens, million in ((0, 16), (500 * 10**9, 64), (10 * TRILLION, 64)):
        rows = batch_sequences(first.training.global_batch_size, tokens, ranks(first))
        assert rows * first.training.seq_len == million * 2**20
    assert last.training.global_batch_size * last.training.seq_len == 64 * 2**20
    for config in map(phase, PHASES):
        assert schedule_value(config.moe.bias_update_rate, 15 * TRILLION - 1) == 0.001
        assert schedule_value(config.moe.bias_update_rate, 15 * TRILLION) == 0.0
        assert schedule_value(config.mtp.loss_weight, 15 * TRILLION - 1) == 0.3
        assert schedule_value(config.mtp.loss_weight, 15 * TRILLION) == 0.1
    assert [phase(name).model.rope_theta for name in PHASES] == [1e4, 1e4, 1e6]
    assert [phase(name).training.seq_len for name in PHASES] == [4096, 4096, 32768]
