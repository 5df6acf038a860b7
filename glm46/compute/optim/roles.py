"""Optimizer of each parameter, from the table in `run/parameters.py`, and the printed table of roles."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glm46.config.errors import raise_if
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig
from glm46.run.parameters import ADAPTER_PARAMETERS, PARAMETERS, find_parameter


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


@dataclass(frozen=True)
class RoleRow:
    """Printed line: a rule, its optimizer, its weight decay, and its numbers of tensors and parameters."""

    rule: str
    optimizer: str
    weight_decay: float
    tensors: int
    parameters: int


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


def role_rows(tensors: Sequence[Tensor], roles: Sequence[Role], config: OptimizerConfig) -> list[RoleRow]:
    """Build the table of the rules with parameters on this stage, in the order of ``PARAMETERS``; counts full
    tensors."""
    rows = []
    for rule in dict.fromkeys(row.group for row in (*PARAMETERS, *ADAPTER_PARAMETERS)):
        matching = [(tensor, role) for tensor, role in zip(tensors, roles, strict=True) if role.rule == rule]
        if matching:
            role = matching[0][1]
            decay = config.weight_decay if role.decay else 0.0
            parameters = sum(tensor.numel() for tensor, _ in matching)
            rows.append(RoleRow(rule, role.optimizer, decay, len(matching), parameters))
    return rows


def add_role_rows(tables: Sequence[Sequence[RoleRow]]) -> list[RoleRow]:
    """Add several tables, for example of pipeline stages."""
    totals: dict[tuple, list[int]] = {}
    for row in (row for table in tables for row in table):
        total = totals.setdefault((row.rule, row.optimizer, row.weight_decay), [0, 0])
        total[0] += row.tensors
        total[1] += row.parameters
    return [RoleRow(*key, *total) for key, total in totals.items()]


def format_role_table(rows: Sequence[RoleRow]) -> str:
    """Format the table as plain text."""
    cells = [("rule", "optimizer", "weight decay", "tensors", "parameters")]
    cells += [
        (row.rule, row.optimizer, f"{row.weight_decay:g}", f"{row.tensors:,}", f"{row.parameters:,}") for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
