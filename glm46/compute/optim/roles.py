"""The optimizer of each parameter, from the table in `run/parameters.py` or, for other modules than our model, from
its shape and module; and the printed table of roles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from glm46.config.errors import UserError, raise_if
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


# Their weights are not matrices: rows of an embedding are looked up, filters of a convolution have more dimensions.
_NOT_MATRICES = (
    nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)  # fmt: skip


def module_roles(
    model: nn.Module, config: OptimizerConfig, adamw: Sequence[str], row_blocks: Mapping[str, int]
) -> tuple[list[tuple[str, Tensor]], list[Role]]:
    """The trainable parameters of any module by name, and their roles.

    A module whose parameters all have rows in the table of parameters gets the roles of the table. In others Muon takes
    matrices and stacks of matrices; embeddings, weights tied to them and convolutions are under AdamW; so are, without
    decay, parameters of fewer than two dimensions.

    Args:
        adamw: patterns (`fnmatch`) of names of further parameters under AdamW.
        row_blocks: by pattern, the number of matrices that a parameter fuses along its rows.

    Raises:
        ValueError: a pattern that no matrix has, or blocks that do not divide the rows.
    """
    named: list[tuple[str, Tensor]] = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    try:
        roles = assign_roles([name for name, _ in named], config, shape=getattr(model, "shape", None))
    except UserError:
        others = [module for module in model.modules() if isinstance(module, _NOT_MATRICES)]
        looked_up = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
        roles = [_role_of(parameter, id(parameter) in looked_up) for _, parameter in named]
    for pattern in (*adamw, *row_blocks):
        chosen = [
            index for index, (name, _) in enumerate(named)
            if fnmatchcase(name, pattern) and roles[index].optimizer == "muon"
        ]  # fmt: skip
        if not chosen:
            raise ValueError(f"{pattern!r} matches no matrix under Muon; names: {', '.join(name for name, _ in named)}")
        for index in chosen:
            name, parameter = named[index]
            blocks = row_blocks.get(pattern, 1)
            if blocks < 1 or parameter.shape[-2] % blocks:
                raise ValueError(f"row_blocks[{pattern!r}] = {blocks}: must divide the {parameter.shape[-2]} of {name}")
            change = {"optimizer": "adamw"} if pattern in adamw else {"row_blocks": blocks, "head_rows": ()}
            roles[index] = replace(roles[index], **change)
    return named, roles


def _role_of(parameter: Tensor, is_looked_up: bool) -> Role:
    if parameter.ndim < 2:
        return Role("vectors", "adamw", False, 1)
    return Role("other weights", "adamw", True, 1) if is_looked_up else Role("matrices", "muon", True, 1)


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
