"""The printed table of optimizer roles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from glm46.compute.optim.roles import Role
from glm46.config.optimizer import OptimizerConfig
from glm46.engine.training.network import TrainedNetwork
from glm46.run.parameters import ADAPTER_PARAMETERS, PARAMETERS


@dataclass(frozen=True)
class RoleRow:
    """Printed line: a rule, its optimizer, its weight decay, and its numbers of tensors and parameters."""

    rule: str
    optimizer: str
    weight_decay: float
    tensors: int
    parameters: int


def whole_role_table(network: TrainedNetwork) -> list[RoleRow]:
    """Return the roles of the parameters of all pipeline stages. Collective over the ranks of a pipeline."""
    tensors = list(network.parameters.values())
    table = role_rows(tensors, network.optimizer.roles, network.plan.config.optimizer)
    pipeline = network.cluster.meshes.pipeline
    if pipeline is None:
        return table
    tables: list[Any] = [None] * dist.get_world_size(pipeline)
    dist.all_gather_object(tables, table, group=pipeline)
    return add_role_rows(tables)


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
    totals: dict[tuple[Any, ...], list[int]] = {}
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
