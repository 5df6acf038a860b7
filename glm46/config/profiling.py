"""The section [profiling]."""

from pydantic import Field

from glm46.config.section import Removed, Section


class ProfilingConfig(Section):
    """[profiling]: traces and memory snapshots of chosen steps on rank 0. A file named ``profile`` in
    job.dump_folder requests them for the next steps, without any key of this section."""

    removed = {
        "profiler_warmup": Removed("the profiler runs for three steps before a recorded one; remove it"),
        "ranks": Removed("rank 0 records; remove it"),
    }

    enable_profiling: bool = False
    """Record a trace in Chrome's format at every ``profile_freq``-th step, and a table of FLOPs by kind of module,
    in ``profile_traces/step-00000N`` under job.dump_folder. The profiler runs for three steps before, whose records are
    discarded, because its first steps are slow."""

    profile_freq: int = Field(100, ge=1)
    """Steps between two traces, and between two memory snapshots; step N is recorded if N is a multiple of it."""

    enable_memory_snapshot: bool = False
    """Record the allocations of the GPU, and write them at every ``profile_freq``-th step and when its memory is full,
    in ``memory_snapshot`` under job.dump_folder; pytorch.org/memory_viz shows them. Needs a GPU."""


def snapshot_fault(profiling: ProfilingConfig, *, has_gpu: bool) -> str | None:
    """Return the message about memory snapshots on a machine without a GPU; None if there is no fault."""
    if has_gpu or not profiling.enable_memory_snapshot:
        return None
    return (
        "profiling.enable_memory_snapshot = true: needs a GPU, and torch records no allocations of a CPU; train on a "
        "GPU, or set it to false (resident_memory_gib in metrics.jsonl is the memory of the process)"
    )
