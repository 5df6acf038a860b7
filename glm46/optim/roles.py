"""Which optimizer trains which parameter: a table of rules over the parameter names; each name fits exactly one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.optimizer import Optimizer

# A decoder layer, or the block inside a multi-token prediction layer.
_BLOCK = r"(layers\.\d+|mtp\.\d+\.block)"


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    ``optimizer`` is "muon", "adamw", or the key of [optimizer] that decides it. ``row_blocks`` equal blocks of rows are
    separate matrices that share one tensor, because a fused layout must not change the optimizer.
    """

    name: str
    pattern: str
    optimizer: str
    decay: bool
    row_blocks: int = 1


RULES = (
    Rule("embedding", r"embed_tokens\.weight", "adamw", True),
    Rule("attention", _BLOCK + r"\.self_attn\.[qkvo]_proj\.weight", "muon", True),
    Rule("attention biases", _BLOCK + r"\.self_attn\.[qkv]_proj\.bias", "adamw", False),
    Rule("dense feed-forward", _BLOCK + r"\.mlp\.(gate|up|down)_proj\.weight", "muon", True),
    Rule("router", _BLOCK + r"\.mlp\.router\.weight", "router", True),
    Rule("experts gate and up", _BLOCK + r"\.mlp\.experts\.gate_up", "muon", True, row_blocks=2),
    Rule("experts down", _BLOCK + r"\.mlp\.experts\.down", "muon", True),
    Rule("shared experts", _BLOCK + r"\.mlp\.shared_experts\.(gate|up|down)_proj\.weight", "muon", True),
    Rule("MTP projection", r"mtp\.\d+\.eh_proj\.weight", "muon", True),
    Rule(
        "norms",
        r"norm\.weight|mtp\.\d+\.(enorm|hnorm|norm)\.weight|"
        + _BLOCK
        + r"\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight",
        "adamw",
        False,
    ),
    Rule("head", r"lm_head\.weight", "lm_head", True),
)


@dataclass(frozen=True)
class Role:
    """What one parameter got: its rule's name, "muon" or "adamw", whether it decays, and its blocks of rows."""

    rule: str
    optimizer: str
    decay: bool
    row_blocks: int


@dataclass(frozen=True)
class RoleRow:
    """One printed line: a rule, its optimizer, its weight decay, and how many tensors and parameters it has here."""

    rule: str
    optimizer: str
    weight_decay: float
    tensors: int
    parameters: int


def assign_roles(names: Sequence[str], config: Optimizer) -> list[Role]:
    """The role of each parameter, in the order given.

    Raises:
        UserError: names that fit no rule, or more than one, all of them at once.
    """
    roles, faults = [], []
    for name in names:
        fitting = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
        if len(fitting) != 1:
            found = ", ".join(rule.name for rule in fitting) or "none"
            faults.append(f"parameter {name}: fits {found} of the rules in glm46/optim/roles.py, must fit exactly one")
            continue
        rule = fitting[0]
        if config.name == "AdamW":
            optimizer = "adamw"
        else:
            optimizer = rule.optimizer if rule.optimizer in ("muon", "adamw") else getattr(config, rule.optimizer)
        roles.append(Role(rule.name, optimizer, rule.decay, rule.row_blocks))
    if faults:
        raise UserError(*faults)
    return roles


def role_rows(tensors: Sequence[Tensor], roles: Sequence[Role], config: Optimizer) -> list[RoleRow]:
    """The table of the rules that have parameters here, in the order of ``RULES``; whole tensors, not shards."""
    rows = []
    for rule in RULES:
        mine = [(tensor, role) for tensor, role in zip(tensors, roles, strict=True) if role.rule == rule.name]
        if mine:
            decay = config.weight_decay if rule.decay else 0.0
            parameters = sum(tensor.numel() for tensor, _ in mine)
            rows.append(RoleRow(rule.name, mine[0][1].optimizer, decay, len(mine), parameters))
    return rows


def add_role_rows(tables: Sequence[Sequence[RoleRow]]) -> list[RoleRow]:
    """One table for the parameters of several, such as those of pipeline stages."""
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
