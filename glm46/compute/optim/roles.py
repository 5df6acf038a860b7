"""Optimizer of each parameter, from the table in `run/parameters.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from glm46.config.errors import raise_if
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig
from glm46.run.parameters import find_parameter


@dataclass(frozen=True)
class Role:
    """Role of one parameter.

    ``rule`` is its line in the printed table, ``optimizer`` "muon" or "adamw". ``row_blocks`` equal blocks of rows are
    separate matrices that share one tensor, because a fused layout must not change the optimizer.
    """

    rule: str
    optimizer: str
    decay: bool
    row_blocks: int
    head_rows: tuple[int, ...] = ()
    """Rows of each matrix instead of equal blocks, see `Parameter.head_rows`."""


def assign_roles(names: Sequence[str], config: OptimizerConfig, shape: ModelShape | None = None) -> list[Role]:
    """Assign a role to each parameter, in the order of ``names``. ``shape``: shape of the model, required for latent
    attention.

    Raises:
        UserError: names without a row in the table; lists all of them.
    """
    roles = []
    faults = []
    for name in names:
        try:
            row = find_parameter(name)
        except KeyError:
            faults.append(f"parameter {name} has no row in glm46/run/parameters.py: add one")
            continue
        heads: tuple[int, ...] = ()
        if row.head_rows:
            assert shape is not None, f"{name} has a matrix for each head"
            heads = row.block_rows(shape)
        roles.append(Role(row.group, row.choose_optimizer(config), row.is_decayed, row.row_blocks, heads))
    raise_if(faults)
    return roles
