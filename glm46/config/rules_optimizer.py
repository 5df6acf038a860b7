"""Rules about the optimizer, so that wrong settings fail before the model is built."""

from collections.abc import Callable

from glm46.config.faults import Fault, Faults
from glm46.config.model import ModelShape
from glm46.config.run_config import RunConfig

DEEPSEEK_V4_STEPS = 10
"""Newton-Schulz steps of the set; a test holds it equal to `optim/newton_schulz.py`."""

STATE_BLOCK, STATE_LEAST_ENTRIES = 64, 4096
"""Columns that share a scale in 8-bit states, and entries of the smallest tensor with such states; a test holds both
equal to `optim/compact_state.py`."""


def coefficients_fit_the_steps(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """deepseek_v4 has enough steps: its last two bring the singular values to one."""
    optimizer = config.optimizer
    uses_muon = optimizer.name == "Muon"
    if uses_muon and optimizer.ns_coefficients == "deepseek_v4" and optimizer.ns_steps < DEEPSEEK_V4_STEPS:
        yield Fault(
            ("optimizer.ns_coefficients", "optimizer.ns_steps"),
            f'optimizer.ns_coefficients = "deepseek_v4": needs optimizer.ns_steps >= {DEEPSEEK_V4_STEPS}, not '
            f"{optimizer.ns_steps}; set ns_steps = {DEEPSEEK_V4_STEPS}, or use other coefficients",
        )


def state_blocks_are_not_cut(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """Tensor parallelism shards columns between the blocks of 8-bit states."""
    tensor = config.parallelism.tensor_parallel_degree
    if config.optimizer.state_dtype != "8bit" or tensor == 1:
        return
    cut = [("model.num_attention_heads * head_dim", shape.num_attention_heads * shape.head_dim)]
    if shape.first_k_dense_replace:
        cut.append(("model.intermediate_size", shape.intermediate_size))
    if shape.n_shared_experts:
        width = shape.n_shared_experts * shape.moe_intermediate_size
        cut.append(("model.n_shared_experts * moe_intermediate_size", width))
    for name, columns in cut:
        has_blocks = columns * shape.hidden_size >= STATE_LEAST_ENTRIES
        if has_blocks and columns % (STATE_BLOCK * tensor):
            yield Fault(
                ("optimizer.state_dtype", "parallelism.tensor_parallel_degree"),
                f'optimizer.state_dtype = "8bit": parallelism.tensor_parallel_degree = {tensor} shards {columns} '
                f"columns ({name}), which must leave multiples of {STATE_BLOCK} on each rank; use another degree, or "
                "another state_dtype",
            )


OPTIMIZER_RULES: tuple[Callable[[RunConfig, ModelShape, int | None], Faults], ...] = (
    coefficients_fit_the_steps,
    state_blocks_are_not_cut,
)
