"""The sections [optimizer] and [lr_scheduler]."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.faults import show
from glm46.config.field_rules import Excludes, Needs, Requires
from glm46.config.section import LocalPath, Removed, Section

_MUON = Needs("name", "Muon")


class OptimizerConfig(Section):
    """[optimizer]: Muon for the matrices and AdamW for the rest, or AdamW for everything."""

    removed = {
        "nesterov": Removed("Muon always looks ahead by one momentum step; remove it"),
        "ns_dtype": Removed("Newton-Schulz computes in training.mixed_precision_param; remove it"),
        "router": Removed("routers are under Muon; remove it"),
        "lm_head": Removed("the output head is under AdamW; remove it"),
    }

    name: Annotated[
        Literal["Muon", "AdamW"],
        Excludes(
            "adapter",
            when="Muon",
            reason="whose factors of a matrix Muon is not meant for",
            remedy='set optimizer.name = "AdamW"',
        ),
    ] = "Muon"
    """Muon: matrices, routers and experts under Muon; embedding, output head, norms and biases under AdamW, as in
    Moonlight. AdamW: everything under AdamW."""

    lr: float = Field(2.5e-4, gt=0.0)
    """Peak learning rate. With adjust_lr = "match_rms_adamw" one rate serves Muon and AdamW."""

    adamw_lr: Annotated[float | None, _MUON] = Field(None, gt=0.0)
    """Peak learning rate of the parameters under AdamW when Muon's differs. Absent: ``lr``."""

    weight_decay: float = Field(0.1, ge=0.0)
    """Decoupled weight decay of matrices, embedding and head. Norm weights and biases are not decayed."""

    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW: decay of the first moment."""

    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """AdamW: decay of the second moment."""

    eps: float = Field(1e-8, gt=0.0)
    """AdamW: term added to the denominator."""

    momentum: Annotated[float, _MUON] = Field(0.95, ge=0.0, lt=1.0)
    """Muon: decay of the momentum."""

    ns_steps: Annotated[int, _MUON] = Field(5, ge=1, lt=100)
    """Muon: Newton-Schulz iterations, in training.mixed_precision_param."""

    adjust_lr: Annotated[Literal["match_rms_adamw", "original"], _MUON] = "match_rms_adamw"
    """Muon: scale of the update. match_rms_adamw: 0.2 * sqrt(max(rows, columns)), as GLM-4.5 trains, with lr near
    2.5e-4. original: sqrt(max(1, rows / columns)), Keller Jordan's rule, with lr near 0.02."""

    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Type of the optimizer states. 8bit: torchao's levels, with a scale per block. Types other than FP32 are rounded
    stochastically (docs/training.md)."""

    state_offload: Annotated[
        Literal["none", "cpu", "nvme"],
        Requires("state_offload_folder", when="nvme", remedy="set optimizer.state_offload_folder to a local disk"),
    ] = "none"
    """cpu: optimizer states stay in host memory (pinned if there is a GPU) and are copied to the device and back while
    other weights are updated. nvme: they stay in a file on a local disk, and pass through host memory. Results and
    checkpoints are bit-identical."""

    state_offload_folder: Annotated[LocalPath | None, Needs("state_offload", "nvme")] = None
    """nvme: folder of the file, on a local disk of each node. Its space is free again when the run ends."""


def state_folder_message(folder: object, fault: str) -> str:
    """Return the message about an unfit ``state_offload_folder``."""
    return (
        f"optimizer.state_offload_folder = {show(str(folder))}: {fault}; name a folder on a local disk with enough "
        'room, or set optimizer.state_offload = "cpu"'
    )


class LRSchedulerConfig(Section):
    """[lr_scheduler]: the learning rate as a pure function of the tokens seen since the start of the curriculum."""

    warmup_tokens: int = Field(0, ge=0)
    """Tokens over which the rate rises linearly to its peak. A step counts its own tokens, so the first
    rate is not zero."""

    total_tokens: int | None = Field(None, ge=1)
    """Tokens of the whole curriculum, over all phases, at which the decay ends. Absent: the end of this run."""

    start_tokens: int = Field(0, ge=0)
    """Tokens of earlier phases, so that the schedule continues over phases."""

    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay from the peak to min_lr_factor."""

    decay_ratio: float | None = Field(None, gt=0.0, le=1.0)
    """Part of total_tokens, at its end, over which the rate decays; before that it is constant. Absent: the decay
    starts after the warm-up."""

    min_lr_factor: float = Field(0.1, ge=0.0, le=1.0)
    """Rate at the end of the decay, relative to the peak."""
