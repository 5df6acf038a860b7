"""Muon for the matrices and AdamW for the rest, behind one step, one schedule and one set of named states."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from glm46.compat import named_range
from glm46.compute.optim.adamw import AdamW
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.roles import Role, assign_roles, role_rows
from glm46.compute.optim.state_file import StateFile
from glm46.compute.optim.state_offload import StatePlace
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig


class OptimizerGroup:
    """The optimizers of one model; every parameter is in exactly one of them.

    All states exist from the start, so that a checkpoint can be read into them before the first step.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        roles: Sequence[Role],
        config: OptimizerConfig,
        device: torch.device | None,
    ):
        """``device`` as in `build_optimizers`."""
        self._parameters = [parameter for _, parameter in named_parameters]
        self.role_table = role_rows(self._parameters, roles, config)
        """That of this pipeline stage; ``roles.format_role_table`` prints it."""
        self._matrices = [
            named for named, role in zip(named_parameters, roles, strict=True) if role.optimizer == "muon"
        ]
        self.muon, self._adamw = make_pair(named_parameters, roles, config, device)
        self._peaks = [
            (group, group["lr"]) for optimizer in (self.muon, self._adamw) for group in optimizer.param_groups
        ]

    def step(self, lr_factor: float) -> None:
        """Update every parameter that has a gradient, at its peak rate times ``lr_factor``."""
        for group, peak in self._peaks:
            group["lr"] = peak * lr_factor
        with named_range("optimizer"):
            self.muon.step()
            self._adamw.step()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The live states by ``<parameter>.<state>``; writing into them loads a checkpoint."""
        momenta = {
            f"{name}.{key}": value
            for name, parameter in self._matrices
            for key, value in self.muon.state[parameter].items()
        }
        return momenta | self._adamw.state_tensors()


def build_optimizers(
    named_parameters: Sequence[tuple[str, Tensor]],
    config: OptimizerConfig,
    device: torch.device | None = None,
    b_lr_ratio: float = 1.0,
    shape: ModelShape | None = None,
) -> OptimizerGroup:
    """The optimizers that [optimizer] asks for. Collective over all ranks.

    Args:
        device: computes the updates of Muon; absent: that of the parameters. AdamW updates parameters where they are.
        b_lr_ratio, shape: see `assign_roles`.

    Raises:
        UserError: parameters without a row in the table of parameters.
    """
    roles = assign_roles([name for name, _ in named_parameters], config, b_lr_ratio, shape)
    return OptimizerGroup(named_parameters, roles, config, device)


def make_pair(
    named_parameters: Sequence[tuple[str, Tensor]],
    roles: Sequence[Role],
    config: OptimizerConfig,
    device: torch.device | None = None,
    *,
    merge: bool = False,
) -> tuple[Muon, AdamW]:
    """Muon and AdamW of [optimizer], each with the parameters of its role; arguments as of `build_optimizers`.

    Args:
        merge: one group of Muon for all matrices with the same row blocks, instead of one for each matrix.
    """
    place: StatePlace
    if config.state_offload == "nvme":
        assert config.state_offload_folder is not None
        place = StateFile(Path(config.state_offload_folder))
    else:
        place = config.state_offload
    groups: dict[object, dict] = {}
    for (name, parameter), role in zip(named_parameters, roles, strict=True):
        if role.optimizer == "muon":
            rows = parameter.shape[-2] // role.row_blocks
            blocks = role.head_rows or ((rows,) * role.row_blocks if role.row_blocks > 1 else None)
            options = {"weight_decay": config.weight_decay if role.decay else 0.0, "row_blocks": blocks}
            group = groups.setdefault(tuple(options.values()) if merge else name, {"params": [], **options})
            group["params"].append((name, parameter))
    muon = Muon(
        list(groups.values()),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr=config.adjust_lr,
        ns_dtype=getattr(torch, config.ns_dtype),
        state_offload=place,
        device=device,
        state_dtype="8bit" if config.state_dtype == "8bit" else getattr(torch, config.state_dtype),
    )
    rest = [(named, role) for named, role in zip(named_parameters, roles, strict=True) if role.optimizer == "adamw"]
    return muon, AdamW([named for named, _ in rest], [(role.decay, role.lr_ratio) for _, role in rest], config, place)
