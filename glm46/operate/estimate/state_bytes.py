"""Bytes of the optimizer states of a parameter on one rank."""

from math import prod

from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig
from glm46.config.rules_layout import STATE_BLOCK, STATE_MIN_ENTRIES
from glm46.operate.estimate.activations import FP32
from glm46.operate.estimate.rank_parts import HeldRows
from glm46.run.checkpoint_size import STATE_WIDTHS


def state_bytes(optimizer: OptimizerConfig, held: HeldRows, shape: ModelShape) -> float:
    """Return the bytes of one momentum under Muon, or two moments under AdamW, for one parameter of ``held``.

    An 8-bit state has one code per entry, and an FP32 scale per block of columns. Vectors and small matrices stay in
    FP32.
    """
    states = held.row.states(optimizer)
    entries = prod(held.sizes)
    if optimizer.state_dtype != "8bit":
        return states * entries * STATE_WIDTHS[optimizer.state_dtype]
    if not held.row.is_matrix or held.row.numel(shape) < STATE_MIN_ENTRIES:
        return states * entries * FP32
    columns = held.sizes[-1]
    blocks = -(-columns // STATE_BLOCK)
    return states * prod(held.sizes[:-1]) * (columns + blocks * FP32)
