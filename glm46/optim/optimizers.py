"""Muon for the matrices and AdamW for the rest, behind one step, one schedule and one set of named states."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glm46.config.optimizer import Optimizer
from glm46.optim.muon import Muon
from glm46.optim.muon_layout import zeros_like_parameter
from glm46.optim.roles import assign_roles


class OptimizerGroup:
    """The optimizers of one model; every parameter is in exactly one of them.

    All states exist from the start, so that a checkpoint can be read into them before the first step.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], names: dict[nn.Parameter, str]):
        self._optimizers, self._names = optimizers, names
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self, lr_factor: float) -> None:
        """Update every parameter, at its peak rate times `lr_factor`."""
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_factor
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live states by ``<parameter>.<state>``; writing into them loads a checkpoint."""
        return {
            f"{self._names[parameter]}.{key}": value
            for optimizer in self._optimizers
            for parameter, states in optimizer.state.items()
            for key, value in states.items()
        }


def build_optimizers(named_parameters: Sequence[tuple[str, nn.Parameter]], config: Optimizer) -> OptimizerGroup:
    """The optimizers that [optimizer] asks for.

    Raises:
        UserError: a parameter that no rule, or more than one, covers.
    """
    roles = assign_roles([name for name, _ in named_parameters], config)
    by_kind: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for (name, parameter), role in zip(named_parameters, roles, strict=True):
        by_kind.setdefault((role.optimizer, role.decay, role.row_blocks), []).append((name, parameter))
    muon = [_muon_group(kind, entries, config) for kind, entries in by_kind.items() if kind[0] == "muon"]
    adamw = [
        {"params": [p for _, p in entries], "weight_decay": config.weight_decay if decay else 0.0}
        for (optimizer, decay, _), entries in by_kind.items()
        if optimizer == "adamw"
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        optimizers.append(
            Muon(
                muon,
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                ns_coefficients=config.ns_coefficients,
                adjust_lr=config.adjust_lr,
                ns_dtype=getattr(torch, config.ns_dtype),
            )
        )
    if adamw:
        optimizers.append(_adamw(adamw, config))
    return OptimizerGroup(optimizers, {parameter: name for name, parameter in named_parameters})


def _muon_group(kind: tuple, entries: list[tuple[str, nn.Parameter]], config: Optimizer) -> dict:
    _, decay, blocks = kind
    rows = entries[0][1].shape[-2]
    return {
        "params": [p for _, p in entries],
        "param_names": [name for name, _ in entries],
        "weight_decay": config.weight_decay if decay else 0.0,
        "row_blocks": None if blocks == 1 else (rows // blocks,) * blocks,
    }


def _adamw(groups: list[dict], config: Optimizer) -> torch.optim.AdamW:
    adamw = torch.optim.AdamW(
        groups,
        lr=config.adamw_lr or config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": zeros_like_parameter(parameter, parameter.dtype),
                "exp_avg_sq": zeros_like_parameter(parameter, parameter.dtype),
            }
    return adamw
