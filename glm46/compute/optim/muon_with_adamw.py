"""Muon and AdamW as one ordinary optimizer of torch, for any module: ``from glm46 import MuonWithAdamW``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from glm46.compute.optim.optimizers import make_pair
from glm46.compute.optim.roles import module_roles
from glm46.config.loader import config_from


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a module and AdamW for the rest, with the arithmetic of training (docs/muon.md).

    ``param_groups``: first those of Muon, one for each division into row blocks, then those of AdamW, with and without
    decay; empty ones are left out. A learning-rate scheduler changes their ``lr``. All states exist from the start.
    Parameters may be DTensors, as after ``fully_shard``; ``step`` is then collective. Construction is collective over
    all ranks of the process group, if there is one.

    Args:
        model: its trainable parameters are taken once, here. Roles: see `roles.module_roles`.
        muon_lr: learning rate of Muon, in the scale of ``adjust_lr``.
        adamw_lr: learning rate of AdamW.
        adjust_lr: "original" for rates near 0.02, "match_rms_adamw" for rates near those of AdamW.
        adamw: patterns (`fnmatch`) of names of matrices that AdamW takes too, such as ``["lm_head.*"]``.
        row_blocks: by pattern, the number of matrices that a parameter fuses along its rows, such as
            ``{"*.in_proj_weight": 3}``; each is orthogonalised alone.
        options: other keys of [optimizer], such as ``weight_decay=0.1``, ``momentum=0.95`` or ``beta2=0.95``.

    Raises:
        UserError: unknown options or values out of range.
        ValueError: a pattern that no matrix has, or a module without trainable parameters.
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
        **options: Any,
    ):
        keys = dict(name="Muon", lr=muon_lr, adamw_lr=adamw_lr, adjust_lr=adjust_lr, **options)
        config = config_from({"optimizer": keys}).optimizer
        named, roles = module_roles(model, config, adamw, row_blocks or {})
        self._muon, self._adamw = make_pair(named, roles, config, merge=True)
        names = {parameter: name for name, parameter in named}
        groups = [group for pair in (self._muon, self._adamw) for group in pair.param_groups if group["params"]]
        for group in groups:
            group["param_names"] = [names[parameter] for parameter in group["params"]]
        self._is_ready = False
        # torch keeps these very dictionaries, so what a scheduler writes reaches both optimizers.
        super().__init__(groups, {})
        self._is_ready = True
        self.state.update(self._muon.state)
        self.state.update(self._adamw.state)

    def add_param_group(self, param_group: dict) -> None:
        """Refused after construction, because Muon's plan is made once."""
        if self._is_ready:
            raise NotImplementedError("MuonWithAdamW: the parameters of the module are taken at construction")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._adamw.step()
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Copy the values of `state_dict` into the live states, in their own types, and take its options.

        Raises:
            ValueError: it is of other parameters, or lacks a state.
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
