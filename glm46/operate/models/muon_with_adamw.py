"""Combines Muon and AdamW in one torch optimizer for any module: ``from glm46 import MuonWithAdamW``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from glm46.compute.optim.optimizers import make_pair
from glm46.compute.optim.roles import Role, assign_roles
from glm46.config.errors import UserError
from glm46.config.loader import config_from
from glm46.config.optimizer import OptimizerConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a module and AdamW for the rest, with the arithmetic of training (docs/muon.md).

    ``param_groups``: first the groups of Muon, one for each division into row blocks, then those of AdamW, with and
    without decay; empty groups are omitted. A learning-rate scheduler changes their ``lr``. All states exist from the
    start. Parameters may be DTensors, as after ``fully_shard``; ``step`` is then collective. Construction is collective
    over all ranks of the process group, if there is one.

    Args:
        model: module whose trainable parameters are collected once, at construction. Roles: see `_module_roles`.
        muon_lr: learning rate of Muon, on the scale of ``adjust_lr``.
        adamw_lr: learning rate of AdamW.
        adjust_lr: "original" for rates near 0.02, "match_rms_adamw" for rates near AdamW's.
        adamw: patterns (`fnmatch`) of names of matrices to update with AdamW as well, such as ``["lm_head.*"]``.
        row_blocks: maps a pattern to the number of matrices that a parameter fuses along its rows, such as
            ``{"*.in_proj_weight": 3}``; each is orthogonalised separately.
        ns_dtype: dtype of Muon's products, ``torch.bfloat16`` or ``torch.float32``.
        options: other keys of [optimizer], such as ``weight_decay=0.1``, ``momentum=0.95`` or ``beta2=0.95``.

    Raises:
        UserError: unknown options, values out of range, or parameters in FP16.
        ValueError: a pattern matches no matrix, or the module has no trainable parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float = 0.02,
        adamw_lr: float = 3e-4,
        *,
        adjust_lr: str = "original",
        adamw: Sequence[str] = (),
        row_blocks: Mapping[str, int] | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ):
        keys = dict(name="Muon", lr=muon_lr, adamw_lr=adamw_lr, adjust_lr=adjust_lr, **options)
        config = config_from({"optimizer": keys}).optimizer
        _check_types(model)
        named, roles = _module_roles(model, config, adamw, row_blocks or {})
        self._muon, self._adamw = make_pair(named, roles, config, ns_dtype=ns_dtype, merge=True)
        names = {parameter: name for name, parameter in named}
        groups = [group for pair in (self._muon, self._adamw) for group in pair.param_groups if group["params"]]
        for group in groups:
            group["param_names"] = [names[parameter] for parameter in group["params"]]
        self._is_ready = False
        # torch keeps these dictionaries by reference, so changes by a scheduler reach both optimizers.
        super().__init__(groups, {})
        self._is_ready = True
        self.state.update(self._muon.state)
        self.state.update(self._adamw.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise NotImplementedError after construction, because Muon's plan is made only once."""
        if self._is_ready:
            raise NotImplementedError("MuonWithAdamW: the parameters of the module are taken at construction")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._adamw.step()
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values of `state_dict` into the existing states, in their own types, and take over its options.

        Raises:
            ValueError: it belongs to other parameters, or lacks a state.
        """
        saved = state_dict["param_groups"]
        if [group["param_names"] for group in saved] != [group["param_names"] for group in self.param_groups]:
            raise ValueError("MuonWithAdamW: the state dict is of other parameters, or of others under Muon")
        for group, options in zip(self.param_groups, saved, strict=True):
            for parameter, index in zip(group["params"], options["params"], strict=True):
                states = state_dict["state"].get(index, {})
                if states.keys() != self.state[parameter].keys():
                    raise ValueError(f"MuonWithAdamW: the state dict has {sorted(states)} of parameter {index}")
                for name, state in self.state[parameter].items():
                    state.copy_(states[name])
            group.update({key: value for key, value in options.items() if key != "params"})


def _check_types(model: nn.Module) -> None:
    """Reject trainable parameters in FP16: their updates would be rounded to nearest, and small ones lost.

    Raises:
        UserError: a parameter is in FP16.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise UserError(
                f"MuonWithAdamW: {name} is float16, which loses small updates; convert the parameters to float32, and "
                "compute in float16 with torch.autocast, or convert them to bfloat16"
            )


# Modules whose weights are not matrices: embeddings are lookup tables, convolution filters have more dimensions.
_NOT_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def _module_roles(
    model: nn.Module, config: OptimizerConfig, adamw: Sequence[str], row_blocks: Mapping[str, int]
) -> tuple[list[tuple[str, Tensor]], list[Role]]:
    """Return the trainable parameters of any module by name, and their roles.

    If all parameters have rows in the parameter table, they get the roles of the table. In other modules Muon updates
    matrices and stacks of matrices, and AdamW updates embeddings, weights tied to them and convolutions, and, without
    decay, parameters with fewer than two dimensions.

    Args:
        adamw: patterns (`fnmatch`) of names of further parameters for AdamW.
        row_blocks: maps a pattern to the number of matrices that a parameter fuses along its rows.

    Raises:
        ValueError: a pattern matches no matrix, or blocks do not divide the rows.
    """
    named: list[tuple[str, Tensor]] = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    try:
        roles = assign_roles([name for name, _ in named], config, shape=getattr(model, "shape", None))
    except UserError:
        others = [module for module in model.modules() if isinstance(module, _NOT_MATRICES)]
        looked_up = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
        roles = [_role_of(parameter, id(parameter) in looked_up) for _, parameter in named]
    for pattern in (*adamw, *row_blocks):
        chosen = [
            index
            for index, (name, _) in enumerate(named)
            if fnmatchcase(name, pattern) and roles[index].optimizer == "muon"
        ]
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
