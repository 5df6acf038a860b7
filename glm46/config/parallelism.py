"""The sections [parallelism], [comm], [compile] and [activation_checkpoint]."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from glm46.config.field_rules import Divides, Excludes, Needs
from glm46.config.section import DISTINCT, CountOrAll, Removed, Section


class PipelineSchedule(NamedTuple):
    """Properties of a torch.distributed.pipelining schedule that rules and planner need."""

    stages_per_rank: int
    """Default number of stages per rank."""
    has_one_stage: bool = False
    """True if a rank has exactly one stage."""
    is_v_shaped: bool = False
    """True if rank r holds the two stages r and last - r; else it holds every n-th stage."""
    splits_backward: bool = False
    """True if gradients of inputs and of weights are computed separately, to fill the bubble with the latter."""


PIPELINE_SCHEDULES = {
    "GPipe": PipelineSchedule(1, has_one_stage=True),
    "1F1B": PipelineSchedule(1, has_one_stage=True),
    "Interleaved1F1B": PipelineSchedule(2),
    "InterleavedZeroBubble": PipelineSchedule(2, splits_backward=True),
    "ZBVZeroBubble": PipelineSchedule(2, is_v_shaped=True, splits_backward=True),
    "DualPipeV": PipelineSchedule(2, is_v_shaped=True, splits_backward=True),
}

_SPLIT_BACKWARD = tuple(name for name, schedule in PIPELINE_SCHEDULES.items() if schedule.splits_backward)
_NO_DEEPEP = 'set parallelism.expert_exchange = "two_level"'


class ParallelismConfig(Section):
    """[parallelism]: the mesh. Degrees multiply to the number of processes; experts borrow their axis."""

    removed = {
        "defer_gradient_sync": Removed(
            "FSDP2 sums gradients after each micro-batch, and replicas and pipelines once per step; remove it"
        ),
    }

    data_parallel_replicate_degree: int = Field(1, ge=1)
    """Replicas of the sharded model (HSDP)."""

    data_parallel_shard_degree: CountOrAll = -1
    """Ranks over which parameters, gradients and optimizer states are sharded (FSDP2). -1: all remaining ranks."""

    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        Excludes(
            "pipeline_parallel_schedule",
            _SPLIT_BACKWARD,
            when="always",
            reason="which splits backward and loses gradients of weights that are freed after forward",
            remedy='set parallelism.fsdp_reshard_after_forward = "default" or "never"',
        ),
    ] = "default"
    """Free gathered weights after forward (always), keep them for backward (never), or always except under pipeline
    parallelism (default)."""

    tensor_parallel_degree: Annotated[
        int,
        Divides("model.shape.num_attention_heads"),
        Divides("model.shape.vocab_size"),
        # Tensor parallelism splits the part of a sequence that context parallelism leaves to a rank.
        Divides("training.seq_len", times="context_parallel_degree"),
    ] = Field(1, ge=1)
    """Ranks that share each matrix (tensor with sequence parallel). Divides model.shape.num_key_value_heads, or is a
    multiple of it: equal numbers of ranks then share a key head."""

    enable_async_tensor_parallel: Annotated[
        bool, Needs("tensor_parallel_degree", above=1), Needs("compile.enable", True)
    ] = False
    """Let inductor split the products next to the gathers and sums of tensor parallelism, and send a part while it
    multiplies another. For GPUs that are joined by NVLink."""

    pipeline_parallel_degree: int = Field(1, ge=1)
    """Ranks that hold different layers."""

    pipeline_parallel_schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        Needs("pipeline_parallel_degree", above=1),
    ] = "1F1B"
    """Order of the micro-batches of a step in the stages of a pipeline; they are the micro-batches of gradient
    accumulation."""

    pipeline_parallel_stages_per_rank: Annotated[int | None, Needs("pipeline_parallel_degree", above=1)] = Field(
        None, ge=1
    )
    """Stages of each rank of a pipeline. Absent: 1 under GPipe and 1F1B, else 2."""

    # A rank takes a piece of the head and one of the tail, so that causal attention costs each rank the same.
    context_parallel_degree: Annotated[int, Divides("training.seq_len", times=2)] = Field(1, ge=1)
    """Ranks that share each sequence."""

    expert_parallel_degree: Annotated[int, Divides("model.shape.n_routed_experts")] = Field(1, ge=1)
    """Ranks over which the experts of a layer are spread, borrowed from data_parallel_shard * context * tensor."""

    expert_exchange: Annotated[
        Literal["auto", "all_to_all", "two_level", "deepep"],
        Needs("expert_parallel_degree", above=1),
        Excludes(
            "training.mixed_precision_param",
            "float32",
            when="deepep",
            reason="and DeepEP sends BF16",
            remedy=f'set training.mixed_precision_param = "bfloat16", or {_NO_DEEPEP}',
        ),
        Excludes(
            "expert_exchange_chunks",
            2,
            when="deepep",
            reason="because DeepEP sends all tokens at once",
            remedy=f"remove parallelism.expert_exchange_chunks, or {_NO_DEEPEP}",
        ),
        Excludes(
            "rl",
            when="deepep",
            reason="because DeepEP needs to know the most tokens of a micro-batch, and the number of tokens of samples "
            "varies",
            remedy=_NO_DEEPEP,
        ),
    ] = "auto"
    """The way of tokens to their experts. all_to_all: one row for each expert of a token. two_level: one row to each
    host, and from there one to each rank, with sums on the way back; ranks that share experts must be on whole hosts of
    equal size, or on one host. deepep: the same with the kernels of DeepEP 2, a package for NVIDIA GPUs, in BF16. auto:
    two_level where possible, else all_to_all."""

    expert_exchange_chunks: Annotated[int | None, Needs("expert_parallel_degree", above=1)] = Field(None, ge=1, le=2)
    """Parts in which the tokens of a micro-batch travel to their experts. 2: one part travels while the experts compute
    the other. Absent: 2 with two_level over several hosts if each expert then has 512 rows per part on average (fewer
    rows make products slow), else 1."""

    @property
    def stated_ranks(self) -> int:
        """Product of all degrees except the shard degree, which may be -1."""
        return (
            self.data_parallel_replicate_degree
            * self.tensor_parallel_degree
            * self.pipeline_parallel_degree
            * self.context_parallel_degree
        )

    @property
    def keeps_gathered(self) -> bool:
        """True if the weights of layers stay gathered after forward. This is the default in a pipeline, for all
        micro-batches of a step: schedules that split backward silently lose the gradients of freed weights."""
        policy = self.fsdp_reshard_after_forward
        return policy == "never" or (policy == "default" and self.pipeline_parallel_degree > 1)

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank of the pipeline."""
        configured = self.pipeline_parallel_stages_per_rank
        return PIPELINE_SCHEDULES[self.pipeline_parallel_schedule].stages_per_rank if configured is None else configured

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline_parallel_degree * self.stages_per_rank


class CommConfig(Section):
    """[comm]: timeouts of the process group, and measurements of its bandwidth."""

    init_timeout_seconds: int = Field(300, ge=1, le=604_800)
    """Timeout for all ranks to join and finish the first step."""

    hang_seconds: float = Field(30.0, ge=0.0)
    """A rank without progress in a step for five times the 95th percentile of step times, and for at least this long,
    is a hang: the run writes the stacks of all ranks, names the rank and ends with exit code 76. 0 switches it off."""

    bandwidth_interval: int = Field(0, ge=0)
    """Steps between two measurements of the bandwidth between the ranks: an all-reduce of 64 MiB (1 MiB on a CPU) in
    the groups of each axis of the mesh. Each writes a row of metrics. 0: never."""


class CompileConfig(Section):
    """[compile]: torch.compile of each transformer block."""

    enable: bool = False
    """Compile the blocks; takes some seconds at the start."""


_NO_UNIFORM = (
    'Megatron\'s "uniform", which recomputes groups of layers, is not offered; write mode = "full", which recomputes '
    "layer by layer, or add every_n_layers = n, which recomputes one layer of n and keeps the others, for more memory"
)


class ActivationCheckpointConfig(Section):
    """[activation_checkpoint]: trade compute for memory."""

    refused = {
        "recompute_granularity": "it is Megatron's; write mode",
        "recompute_method": _NO_UNIFORM,
        "recompute_modules": 'it is Megatron\'s; write mode = "selective" and recompute',
        "recompute_num_layers": _NO_UNIFORM,
    }

    mode: Literal["none", "selective", "full"] = "none"
    """none keeps every activation. full keeps the input of each block and recomputes the block in backward. selective
    also keeps the results of attention, experts and token exchanges, and recomputes the rest."""

    recompute: Annotated[
        tuple[Literal["core_attn", "experts", "exchange"], ...],
        DISTINCT,
        Needs("mode", "selective"),
        Excludes(
            "parallelism.expert_parallel_degree",
            1,
            when="exchange",
            reason="because no rows come from other ranks",
            remedy='remove "exchange"',
        ),
    ] = ()
    """Results that selective does not keep but recomputes too, for memory between selective and full. core_attn:
    attention between its projections. experts: the products of routed experts. exchange: the rows that came from other
    ranks, which are sent again."""

    every_n_layers: Annotated[int, Needs("mode", ("selective", "full"))] = Field(1, ge=1)
    """Apply the mode to the first of every n layers of a pipeline stage, prediction layers included, and keep every
    activation of the others: a larger n uses more memory and is faster."""

    cpu_checkpointing: Annotated[bool, Needs("mode", ("selective", "full"))] = False
    """Keep in host memory what the mode keeps of a layer, its input and results, until backward needs it. A GPU copies
    it while it computes other layers; the last two layers of a forward stay on the GPU."""

    def mode_of(self, index: int) -> Literal["none", "selective", "full"]:
        """Return the mode of a layer, by its index in its pipeline stage."""
        return "none" if index % self.every_n_layers else self.mode

    def sends_again(self, mode: str) -> bool:
        """Return True if recomputing a layer under a mode sends its tokens to their experts again."""
        return mode == "full" or (mode == "selective" and "exchange" in self.recompute)
