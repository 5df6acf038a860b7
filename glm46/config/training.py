"""The sections [training], [validation] and [debug]."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.field_rules import OF_TEXT, AtMost, Excludes, Needs
from glm46.config.section import CountOrAll, Schedule, Section, every_value

_SAME_SAMPLES = Needs("rl", absent=", whose weights would generate the same samples again")


class TrainingConfig(Section):
    """[training]: budget, batch size, precision and handling of loss spikes."""

    local_batch_size: int = Field(1, ge=1)
    """Sequences per rank and micro-batch; with [rl] the largest number of rows of a micro-batch."""

    global_batch_size: Annotated[Schedule, every_value(1)] | None = None
    """Sequences per optimizer step over all ranks; a multiple of local_batch_size times the data-parallel degree;
    the quotient is the number of gradient accumulation steps. A schedule is a batch-size ramp, rounded down to such a
    multiple. Absent: one micro-batch per rank."""

    seq_len: Annotated[
        int,
        AtMost(
            "model.shape.max_position_embeddings",
            remedy="shorten it, or raise max_position_embeddings (and rope_theta with it)",
        ),
    ] = Field(4096, ge=2)
    """Tokens per sequence."""

    tokens: int | None = Field(None, ge=1)
    """Training budget of this run in tokens. Give this or ``steps``."""

    steps: int | None = Field(None, ge=1)
    """Training budget of this run in optimizer steps. Give this or ``tokens``."""

    max_norm: float = Field(1.0, gt=0.0)
    """Largest global gradient norm; gradients above it are scaled down to it."""

    max_skipped_steps: int = Field(10, ge=0)
    """Consecutive steps that may be skipped, for a spike or a loss or gradient norm that is not finite, before the run
    rolls back (max_rollbacks) or stops with an error."""

    spike_sigmas: Annotated[float, Needs("rl", absent=", whose loss has no level")] = Field(10.0, ge=0.0)
    """A step is skipped if its loss, or the logarithm of its gradient norm, is more than this many robust deviations
    above the median of the last good steps; 0 switches it off."""

    max_rollbacks: Annotated[int, Needs("checkpoint.enable"), _SAME_SAMPLES] = Field(0, ge=0)
    """Number of times that the run may go back to the last checkpoint before such a series and skip its samples; 0
    stops instead."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights. BF16 updates are rounded stochastically (docs/training.md). Optimizer states follow
    ``optimizer.state_dtype``."""

    mixed_precision_param: Annotated[
        Literal["bfloat16", "float32"],
        Excludes(
            "float8.recipe_name",
            when="float32",
            unless="float8.emulate",
            reason="whose products are bfloat16 on a GPU",
            remedy='set training.mixed_precision_param = "bfloat16", or float8.emulate = true',
        ),
    ] = "bfloat16"
    """Type of weights and activations in forward and backward. BF16 is slow on a CPU: debug configs set float32."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""

    parameter_offload: Annotated[
        bool,
        Needs("optimizer.state_offload", ("cpu", "nvme")),
        Excludes("adapter.name", "dora", reason="whose norms are computed on the device"),
    ] = False
    """Sharded weights and their gradients stay in host memory (pinned if there is a GPU). FSDP2 copies the weights of a
    layer to the device to compute it, and Muon copies the gradients; AdamW updates on the CPU."""


class ValidationConfig(Section):
    """[validation]: loss on held-out documents."""

    enable: bool = False
    """Measure the validation loss before the first step, every ``freq`` steps and after the last."""

    freq: Annotated[int, Needs("enable")] = Field(100, ge=1)
    """Steps between two validations. A run always validates before its first step and after its last, too."""

    steps: Annotated[CountOrAll, Needs("enable"), OF_TEXT] = -1
    """Batches per source and validation; -1: all held-out text."""


class DebugConfig(Section):
    """[debug]: seeds and determinism."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the sample order. The same seed gives the same run on every layout."""

    deterministic: bool = False
    """Use only deterministic kernels; an operation without one is an error. On a GPU only such a run is reproducible
    bit for bit. It is slower, and sets CUBLAS_WORKSPACE_CONFIG to :4096:8, unless it is set."""
