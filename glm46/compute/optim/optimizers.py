"""Muon for matrices and AdamW for other parameters, with one step, one schedule and one set of named states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compat import named_range
from glm46.compute.optim.adamw import AdamW
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.roles import Role, assign_roles
from glm46.compute.optim.state_file import StateFile
from glm46.compute.optim.state_offload import StatePlace
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig


class OptimizerGroup:
    """Optimizers of one model; every parameter is in exactly one of them.

    All states exist from the start, so that a checkpoint can be read into them before the first step.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        roles: Sequence[Role],
        config: OptimizerConfig,
        device: torch.device | None,
        ns_dtype: torch.dtype,
    ):
        """``device`` and ``ns_dtype`` as in `build_optimizers`."""
        self._parameters = [parameter for _, parameter in named_parameters]
        self.roles = roles
        """Role of each parameter."""
        self._muon_parameters = [
            named for named, role in zip(named_parameters, roles, strict=True) if role.optimizer == "muon"
        ]
        self.muon, self._adamw = make_pair(named_parameters, roles, config, device, ns_dtype)
        self._peak_rates = [
            (group, group["lr"]) for optimizer in (self.muon, self._adamw) for group in optimizer.param_groups
        ]

    def step(self, lr_factor: float, number: int | None = None) -> None:
        """Update every parameter that has a gradient, at its peak rate times ``lr_factor``.

        Args:
            number: number of the update, different for each; stochastic rounding depends on it. None: the previous
                number plus one; a new object starts at 0.
        """
        for group, peak in self._peak_rates:
            group["lr"] = peak * lr_factor
            if number is not None:
                group["updates"] = number
        with named_range("optimizer"):
            self.muon.step()
            self._adamw.step()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live states by ``<parameter>.<state>``; writing into them loads a checkpoint."""
        momenta = {
            f"{name}.{key}": value
            for name, parameter in self._muon_parameters
            for key, value in self.muon.state[parameter].items()
        }
        return momenta | self._adamw.state_tensors()


def build_optimizers(
    named_parameters: Sequence[tuple[str, Tensor]],
    config: OptimizerConfig,
    device: torch.device | None = None,
    shape: ModelShape | None = None,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> OptimizerGroup:
    """Build the optimizers configured in [optimizer]. Collective over all ranks.

    Args:
        device: device that computes Muon's updates; None: device of the parameters. AdamW updates parameters in place.
        shape: shape of the model, see `assign_roles`.
        ns_dtype: dtype of Muon's products.

    Raises:
        UserError: parameters without a row in the table of parameters.
    """
    roles = assign_roles([name for name, _ in named_parameters], config, shape)
    return OptimizerGroup(named_parameters, roles, config, device, ns_dtype)


def make_pair(
    named_parameters: Sequence[tuple[str, Tensor]],
    roles: Sequence[Role],
    config: OptimizerConfig,
    device: torch.device | None = None,
    ns_dtype: torch.dtype = torch.bfloat16,
    *,
    merge: bool = False,
) -> tuple[Muon, AdamW]:
    """Create Muon and AdamW, each with the parameters of its role; further arguments as in `build_optimizers`.

    Args:
        merge: one Muon group for all matrices with the same options, instead of a group for each matrix.
    """
    place: StatePlace
    if config.state_offload == "nvme":
        assert config.state_offload_folder is not None
        place = StateFile(Path(config.state_offload_folder))
    else:
        place = config.state_offload
    groups: dict[object, dict[str, Any]] = {}
    for (name, parameter), role in zip(named_parameters, roles, strict=True):
        if role.optimizer == "muon":
            blocks: tuple[int, ...] | None = None  # one matrix
            if role.head_rows:
                blocks = role.head_rows
            elif role.row_blocks > 1:
                blocks = (parameter.shape[-2] // role.row_blocks,) * role.row_blocks
            options = {"weight_decay": config.weight_decay if role.decay else 0.0, "row_blocks": blocks}
            key = tuple(options.values()) if merge else name
            group = groups.setdefault(key, {"params": [], **options})
            group["params"].append((name, parameter))
    muon = Muon(
        list(groups.values()),
        lr=config.lr,
        momentum=config.momentum,
        ns_steps=config.ns_steps,
        adjust_lr=config.adjust_lr,
        ns_dtype=ns_dtype,
        state_offload=place,
        device=device,
        state_dtype="8bit" if config.state_dtype == "8bit" else getattr(torch, config.state_dtype),
    )
    adamw_entries = [
        (named, role) for named, role in zip(named_parameters, roles, strict=True) if role.optimizer == "adamw"
    ]
    adamw = AdamW([named for named, _ in adamw_entries], [role.decay for _, role in adamw_entries], config, place)
    return muon, adamw
