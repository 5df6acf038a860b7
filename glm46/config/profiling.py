"""The section [profiling]."""

from typing import Annotated

from pydantic import Field

from glm46.config.section import Section


class ProfilingConfig(Section):
    """[profiling]: traces and memory snapshots of chosen steps on chosen ranks. A file named ``profile`` in
    job.dump_folder requests them of the next steps, without any key of this section."""

    enable_profiling: bool = False
    """Record a trace in Chrome's format at every ``profile_freq``-th step, and a table of time and FLOPs by kind of
    module, in ``profile_traces/step-00000N`` under job.dump_folder."""

    profile_freq: int = Field(100, ge=1)
    """Steps between two traces, and between two memory snapshots; step N is recorded if N is a multiple of it."""

    profiler_warmup: int = Field(3, ge=0)
    """Steps before it in which the profiler runs and drops what it records: its first steps are slow."""

    enable_memory_snapshot: bool = False
    """Record the allocations of the GPU, and write them at every ``profile_freq``-th step and when its memory is full,
    in ``memory_snapshot`` under job.dump_folder; pytorch.org/memory_viz shows them. Needs a GPU."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    """Ranks that record. A trace of a large model has hundreds of MB, so few ranks."""


def snapshot_fault(profiling: ProfilingConfig, *, has_gpu: bool) -> str | None:
    """The message of memory snapshots on a machine without a GPU; None if nothing is wrong."""
    if has_gpu or not profiling.enable_memory_snapshot:
        return None
    return (
        "profiling.enable_memory_snapshot = true: needs a GPU, and torch records no allocations of a CPU; train on a "
        "GPU, or set it to false (resident_memory_gib in metrics.jsonl is the memory of the process)"
    )
