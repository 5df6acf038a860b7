"""Muon for matrices and batches of matrices, plain or DTensor, with exactly the same update on every mesh.

This file makes options, states, groups and the plan, once. glm46/compute/optim/muon_step.py runs a step with them.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from glm46.compute.optim.compact_state import StateType, local_state, make_state
from glm46.compute.optim.muon_exchange import make_groups
from glm46.compute.optim.muon_layout import local_matrices, tensor_layout
from glm46.compute.optim.muon_plan import MuonPlan, PlannedParameter, TensorLayout, make_plan
from glm46.compute.optim.muon_step import MuonStep
from glm46.compute.optim.muon_update import Orthogonalizer, update_scale
from glm46.compute.optim.state_file import StateFile
from glm46.compute.optim.state_offload import StatePlace, zeros_at
from glm46.run.flops import newton_schulz_flops


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, as the update of each weight matrix.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer. Each tensor is a matrix
            or, with more dimensions, a batch of matrices; plain or DTensor, on a CPU or a GPU. A group may override
            ``lr``, ``momentum``, ``nesterov``, ``weight_decay`` and ``adjust_lr``, which may change between steps, and
            may hold ``row_blocks``: the rows of the matrices that its tensors fuse along their second to last
            dimension (gate and up, or heads); each is orthogonalised alone.
        lr: learning rate.
        momentum: decay of the momentum.
        nesterov: orthogonalise the gradient blended with the momentum instead of the momentum.
        weight_decay: decoupled decay, times ``lr``.
        ns_steps: iterations of Newton-Schulz.
        adjust_lr: "match_rms_adamw" gives updates whose entries have a root mean square of 0.2, with lr near that of
            AdamW; "original" scales by sqrt(max(1, rows / columns)).
        ns_dtype: type of the products. float16 is as fast as bfloat16 and several times closer to float32. Matrices
            travel between ranks in this type, but in bfloat16 to their owner for float16, because gradients can be
            smaller than float16 holds.
        state_dtype: type of the momentum, or "8bit" for codes with a scale per block. Absent: that of the parameter.
        state_offload: "cpu" keeps the momentum in host memory, a `StateFile` in that file; a step copies it in and out.
        device: computes the updates; absent: that of the parameters. Parameters and gradients on another device, such
            as the host, need ``state_offload``.

    State: ``momentum_buffer`` per parameter, a tensor like the parameter (a DTensor on its mesh, with its placements),
    or two, ``momentum_buffer.codes`` and ``.scales``, for 8 bits. They exist from the start, so that a checkpoint can
    be read into them before the first step. A parameter without a gradient is skipped; all ranks must agree on which
    these are. A zero gradient and momentum give a zero update. Non-finite gradients are the caller's to catch.
    ``step`` is collective over the ranks that share a parameter, construction over all ranks, also those without one.

    Raises:
        ValueError: an option out of range, or a parameter that has no rows and columns.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon; Moonlight (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 2.5e-4,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        ns_dtype: torch.dtype = torch.bfloat16,
        state_dtype: StateType | None = None,
        state_offload: StatePlace = "none",
        device: torch.device | None = None,
    ):
        if state_offload not in ("none", "cpu") and not isinstance(state_offload, StateFile):
            raise ValueError(f"state_offload must be 'none', 'cpu' or a StateFile, not {state_offload!r}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        if ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, not {ns_steps}")
        update_scale(adjust_lr, 1, 1)  # an unknown rule fails here instead of in the first step
        self._settings = Orthogonalizer(ns_steps, ns_dtype)
        defaults = dict(
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, adjust_lr=adjust_lr, row_blocks=None
        )
        self._is_ready = False
        params = list(params)
        # A pipeline stage may hold no matrix, which torch refuses.
        super().__init__(params or [{"params": []}], defaults)
        self._prepare(state_dtype, state_offload, device)
        self._is_ready = True

    def add_param_group(self, param_group: dict) -> None:
        """Refused after construction, because the plan is made once."""
        if self._is_ready:
            raise NotImplementedError("Muon: pass all parameter groups at construction")
        super().add_param_group(param_group)

    def plan(self) -> MuonPlan:
        """The owner of each matrix and the transfers between ranks."""
        return self._plan

    def flops(self) -> int:
        """FLOPs of the orthogonalisation of a step on this rank."""
        steps, flops = self._settings.steps, 0
        for task in self._plan.local:
            matrices, rows = task.matrices[1] - task.matrices[0], task.rows[1] - task.rows[0]
            flops += matrices * newton_schulz_flops(rows, task.columns, steps)
        for bucket in self._plan.buckets:
            flops += sum(unit.flops for unit in bucket.units if bucket.ranks[unit.owner] == dist.get_rank())
        return flops

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient. Collective."""
        self._work.run()

    def load_state_dict(self, state_dict: dict) -> None:
        """Refused, because torch replaces the live states and casts them; copy into the tensors of ``state``."""
        raise NotImplementedError("Muon: copy the saved values into the tensors of optimizer.state")

    def _prepare(self, state_dtype: StateType | None, place: StatePlace, device: torch.device | None) -> None:
        """Make the states, the plan and the process groups. Collective."""
        entries = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        parameters, requests, momenta = [group["params"][index] for group, index in entries], [], []
        layouts: dict[tuple, TensorLayout] = {}  # that of a tensor on thousands of ranks takes a tenth of a second
        for parameter, (group, index) in zip(parameters, entries, strict=True):
            name = group["param_names"][index] if "param_names" in group else f"parameter {index}"
            mesh = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            key = parameter.shape, mesh
            if key not in layouts:
                layouts[key] = tensor_layout(parameter)
            requests.append(_request(name, layouts[key], group["row_blocks"]))
            tensors = make_state(name, parameter, state_dtype or parameter.dtype, True, zeros_at(place))
            self.state[parameter] = {f"momentum_buffer{end}": tensor for end, tensor in tensors.items()}
            momenta.append(local_state(tensors, True, local_matrices))
        self._plan = make_plan(requests, self._settings.steps, self._settings.dtype.itemsize)
        rank_sets = [bucket.ranks for bucket in self._plan.buckets]
        # In the order of the parameters, not of a set: of two groups with the same ranks all must take the same one.
        meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)) if rank_sets else ()
        groups = make_groups(rank_sets, [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)])
        self._work = MuonStep(entries, requests, self._plan, self._settings, groups, momenta, place, device)


def _request(name: str, layout: TensorLayout, row_blocks: tuple[int, ...] | None) -> PlannedParameter:
    blocks = tuple(row_blocks or (layout.shape[1],))
    if sum(blocks) != layout.shape[1] or min(blocks) < 1:
        raise ValueError(f"{name}: row_blocks {blocks} must be positive and sum to its {layout.shape[1]} rows")
    return PlannedParameter(name, layout, blocks)
