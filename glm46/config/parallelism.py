"""The sections that say how a run is spread over processes and kept small and fast on each."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from glm46.config.section import CountOrAll, Needs, Section


class PipelineSchedule(NamedTuple):
    """What the rules and the planner must know of a schedule of torch.distributed.pipelining."""

    stages_per_rank: int
    """Stages of each rank, if not stated."""
    has_one_stage: bool = False
    """Whether a rank cannot have several."""
    is_v_shaped: bool = False
    """Rank r holds stages r and last - r, so always two of them; else every n-th stage."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed apart, to fill the bubble with the latter."""


PIPELINE_SCHEDULES = {
    "GPipe": PipelineSchedule(1, has_one_stage=True),
    "1F1B": PipelineSchedule(1, has_one_stage=True),
    "Interleaved1F1B": PipelineSchedule(2),
    "InterleavedZeroBubble": PipelineSchedule(2, splits_backward=True),
    "ZBVZeroBubble": PipelineSchedule(2, is_v_shaped=True, splits_backward=True),
    "DualPipeV": PipelineSchedule(2, is_v_shaped=True, splits_backward=True),
}


class Parallelism(Section):
    """[parallelism]: the mesh. Degrees multiply to the number of processes; experts borrow their axis."""

    data_parallel_replicate_degree: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP)."""

    data_parallel_shard_degree: CountOrAll = -1
    """Ranks over which parameters, gradients and optimizer states are sharded (FSDP2). -1: all that are left."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after forward (always), keep them for backward (never), or always except under pipeline
    parallelism (default)."""

    tensor_parallel_degree: int = Field(1, ge=1)
    """Ranks that share each matrix (tensor with sequence parallel)."""

    pipeline_parallel_degree: int = Field(1, ge=1)
    """Ranks that hold different layers."""

    pipeline_parallel_schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        Needs("pipeline_parallel_degree", above=1),
    ] = "1F1B"
    """Order in which the stages of a pipeline work on the micro-batches of a step, which are the micro-batches of
    gradient accumulation."""

    pipeline_parallel_stages_per_rank: Annotated[int | None, Needs("pipeline_parallel_degree", above=1)] = Field(
        None, ge=1
    )
    """Stages of each rank of a pipeline. Not set: 1 under GPipe and 1F1B, else 2."""

    context_parallel_degree: int = Field(1, ge=1)
    """Ranks that share each sequence."""

    expert_parallel_degree: int = Field(1, ge=1)
    """Ranks over which the experts of a layer are spread, borrowed from data_parallel_shard * context * tensor."""

    @property
    def stated_ranks(self) -> int:
        """Product of all degrees but that of the shards, which may be left open."""
        return (
            self.data_parallel_replicate_degree
            * self.tensor_parallel_degree
            * self.pipeline_parallel_degree
            * self.context_parallel_degree
        )

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank of the pipeline."""
        stated = self.pipeline_parallel_stages_per_rank
        return PIPELINE_SCHEDULES[self.pipeline_parallel_schedule].stages_per_rank if stated is None else stated

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline_parallel_degree * self.stages_per_rank


class Comm(Section):
    """[comm]: timeouts of the process group."""

    init_timeout_seconds: int = Field(300, ge=1, le=604_800)
    """Longest wait for all ranks to join and finish the first step."""

    hang_seconds: float = Field(10.0, ge=0.0)
    """A rank that is silent within a step for five times the 99th percentile of step times, and for this long, is a
    hang: it is named, every rank's stacks are kept, and the run ends with exit code 76. 0 watches nothing."""


class Compile(Section):
    """[compile]: torch.compile of each transformer block."""

    enable: bool = False
    """Compile the blocks. Costs some seconds at the start."""


class ActivationCheckpoint(Section):
    """[activation_checkpoint]: trade compute for memory."""

    mode: Literal["none", "selective", "full"] = "none"
    """none keeps every activation; full keeps only the input of each block and computes the block again in backward;
    selective keeps the results of attention, experts and exchanges of tokens too, and computes the rest again."""
