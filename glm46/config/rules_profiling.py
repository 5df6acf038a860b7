"""Rules about profiles: some step is recorded as stated, on ranks that exist."""

from glm46.config.faults import Fault, Faults, counted, show
from glm46.config.model import ModelShape
from glm46.config.run_config import RunConfig


def recorded_steps_fit_between_profiles(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """A profile with its warm-up ends before the next one begins."""
    profiling = config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and needed > profiling.profile_freq:
        yield Fault(
            ("profiling.profile_freq", "profiling.profiler_warmup", "profiling.profiler_active"),
            f"profiling.profile_freq = {profiling.profile_freq}: must be at least profiling.profiler_warmup + "
            f"profiling.profiler_active = {needed}; raise it, or lower one of them",
        )


def some_step_is_profiled(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """A run of a stated number of steps reaches the first profile."""
    profiling, steps = config.profiling, config.training.steps
    is_on = profiling.enable_profiling or profiling.enable_memory_snapshot
    if is_on and steps is not None and profiling.profile_freq > steps:
        yield Fault(
            ("profiling.profile_freq", "training.steps"),
            f"profiling.profile_freq = {profiling.profile_freq}: no step would be profiled, because the run ends at "
            f"training.steps = {steps}; lower it to at most {steps}",
        )


def profiled_ranks_exist(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """Each rank that records is a rank of the run, and is named once."""
    ranks = config.profiling.ranks
    if len(set(ranks)) < len(ranks):
        yield Fault(("profiling.ranks",), f"profiling.ranks = {show(ranks)}: names a rank twice; name each once")
    if world_size is not None and max(ranks) >= world_size:
        yield Fault(
            ("profiling.ranks", "parallelism"),
            f"profiling.ranks = {show(ranks)}: the run has {counted(world_size, 'process')}, so its last rank is "
            f"{world_size - 1}; name ranks up to that",
        )


PROFILING_RULES = (recorded_steps_fit_between_profiles, some_step_is_profiled, profiled_ranks_exist)
