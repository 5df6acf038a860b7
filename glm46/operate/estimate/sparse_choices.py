"""Choices of keys that a rank keeps under sparse attention."""

from glm46.config.model import ModelShape
from glm46.config.parallelism import ActivationCheckpointConfig
from glm46.operate.estimate.rank_parts import StagePart


def kept_choices(part: StagePart, shape: ModelShape, checkpointing: ActivationCheckpointConfig) -> int:
    """Count the choices of keys that a stage keeps of a micro-batch. Attention keeps the choice for its backward,
    selective checkpointing as a result, and all checkpointing as an argument of the layers after it."""
    keeps_results = "core_attn" not in checkpointing.recompute
    kept: list[bool] = []
    for index, run in enumerate(part.runs(checkpointing)):
        is_prediction = run.block == "mtp"
        has_indexer = part.has_indexer(index, shape)
        is_checkpointed = run.has_backward and run.mode != "none"
        if kept and is_checkpointed and not is_prediction:
            kept[-1] = True
        if has_indexer:
            kept.append(False)
        if run.has_backward and (run.mode == "none" or (run.mode == "selective" and keeps_results)):
            kept[-1] = True
    return sum(kept)
