"""The sections that say how a run is spread over processes and kept small and fast on each."""

from typing import Literal

from pydantic import Field

from glm46.config.section import Section


class Parallelism(Section):
    """[parallelism]: the mesh. Degrees multiply to the number of processes; experts borrow their axis."""

    data_parallel_replicate_degree: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP)."""

    data_parallel_shard_degree: int = Field(-1, ge=-1)
    """Ranks over which parameters, gradients and optimizer states are sharded (FSDP2). -1: all that are left."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after forward (always), keep them for backward (never), or always except under pipeline
    parallelism (default)."""

    tensor_parallel_degree: int = Field(1, ge=1)
    """Ranks that share each matrix (tensor with sequence parallel)."""

    pipeline_parallel_degree: int = Field(1, ge=1)
    """Pipeline stages that hold different layers."""

    context_parallel_degree: int = Field(1, ge=1)
    """Ranks that share each sequence."""

    expert_parallel_degree: int = Field(1, ge=1)
    """Ranks over which the experts of a layer are spread, borrowed from data_parallel_shard * context * tensor."""


class Comm(Section):
    """[comm]: timeouts of the process group."""

    init_timeout_seconds: int = Field(300, ge=1)
    """Longest wait for all ranks to join and finish the first step."""


class Compile(Section):
    """[compile]: torch.compile of each transformer block."""

    enable: bool = False
    """Compile the blocks. Costs some seconds at the start."""


class ActivationCheckpoint(Section):
    """[activation_checkpoint]: trade compute for memory."""

    mode: Literal["none", "selective", "full"] = "none"
    """none keeps every activation; full keeps only the input of each block and computes the block again in backward;
    selective keeps the results of attention, experts and exchanges of tokens too, and computes the rest again."""
