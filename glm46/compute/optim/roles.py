"""The optimizer of each parameter, from the table in `run/parameters.py`, and the printed table of roles."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glm46.config.errors import raise_if
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig
from glm46.run.parameters import ADAPTER_PARAMETERS, PARAMETERS, find_parameter


@dataclass(frozen=True)
class Role:
    """The role of one parameter.

    ``rule`` is its line in the printed table, ``optimizer`` "muon" or "adamw". ``row_blocks`` equal blocks of rows are
    separate matrices that share one tensor, because a fused layout must not change the optimizer.
    """

    rule: str
    optimizer: str
    decay: bool
    row_blocks: int
    lr_ratio: float = 1.0
    """Of its learning rate to that of the others under AdamW."""
    head_rows: tuple[int, ...] = ()
    """Rows of the matrices in place of equal blocks, see `Parameter.head_rows`."""


@dataclass(frozen=True)
class RoleRow:
    """One printed line: a rule, its optimizer, its weight decay, and how many tensors and parameters it has here."""

    rule: str
    optimizer: str
    weight_decay: float
    tensors: int
    parameters: int


def assign_roles(
    names: Sequence[str], config: OptimizerConfig, b_lr_ratio: float = 1.0, shape: ModelShape | None = None
) -> list[Role]:
    """The role of each parameter, in the order given; ``b_lr_ratio`` is the `lr_ratio` of every B of an adapter,
    ``shape`` that of the model, which latent attention needs.

    Raises:
        UserError: names without a row in the table, all of them at once.
    """
    roles, faults = [], []
    for name in names:
        try:
            row = find_parameter(name)
        except KeyError:
            faults.append(f"parameter {name} has no row in glm46/run/parameters.py: add one")
            continue
        lr_ratio = b_lr_ratio if row.group == "adapter B" else 1.0
        heads: tuple[int, ...] = ()
        if row.head_rows:
            assert shape is not None, f"{name} has a matrix for each head"
            heads = row.block_rows(shape)
        roles.append(Role(row.group, row.choose_optimizer(config), row.is_decayed, row.row_blocks, lr_ratio, heads))
    raise_if(faults)
    return roles


def role_rows(tensors: Sequence[Tensor], roles: Sequence[Role], config: OptimizerConfig) -> list[RoleRow]:
    """The table of the rules that have parameters here, in the order of ``PARAMETERS``; whole tensors, not shards."""
    rows = []
    for rule in dict.fromkeys(row.group for row in (*PARAMETERS, *ADAPTER_PARAMETERS)):
        mine = [(tensor, role) for tensor, role in zip(tensors, roles, strict=True) if role.rule == rule]
        if mine:
            role = mine[0][1]
            decay = config.weight_decay if role.decay else 0.0
            parameters = sum(tensor.numel() for tensor, _ in mine)
            rows.append(RoleRow(rule, role.optimizer, decay, len(mine), parameters))
    return rows


def add_role_rows(tables: Sequence[Sequence[RoleRow]]) -> list[RoleRow]:
    """The sum of several tables, such as those of pipeline stages."""
    totals: dict[tuple, list[int]] = {}
    for row in (row for table in tables for row in table):
        total = totals.setdefault((row.rule, row.optimizer, row.weight_decay), [0, 0])
        total[0] += row.tensors
        total[1] += row.parameters
    return [RoleRow(*key, *total) for key, total in totals.items()]


def format_role_table(rows: Sequence[RoleRow]) -> str:
    """The table as plain text."""
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
