"""Muon for matrices and batches of matrices, plain or DTensor, with exactly the same update on every mesh.

This file creates options, states, groups and the plan, once. `compute/optim/muon_step.py` runs a step with them.
`compute/optim/optimizers.py` makes the optimizer of a network.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from glm46.compute.optim.compact_state import StateType, local_state, make_state
from glm46.compute.optim.muon_exchange import make_groups
from glm46.compute.optim.muon_layout import local_matrices, tensor_layout
from glm46.compute.optim.muon_plan import MuonPlan, PlannedParameter, TensorLayout, make_plan
from glm46.compute.optim.muon_step import MuonStep
from glm46.compute.optim.muon_update import Orthogonalizer, update_scale
from glm46.compute.optim.state_file import StateFile
from glm46.compute.optim.state_offload import StatePlace, zeros_at
from glm46.run.flops import newton_schulz_flops

_LayoutKey = tuple[torch.Size, tuple[DeviceMesh, tuple[Placement, ...]] | None]
"""Shape of a parameter; mesh and placements of a DTensor."""


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, as the update of each weight matrix.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer. Each tensor is a matrix
            or, with more dimensions, a batch of matrices; plain or DTensor, on a CPU or a GPU. A group may override
            ``lr``, ``momentum``, ``weight_decay`` and ``adjust_lr``, which may change between steps. If its tensors
            fuse several matrices along their second to last dimension (gate and up, or heads), it has ``row_blocks``:
            the number of rows of each matrix. Each is orthogonalised separately. ``updates`` of a group counts its
            updates. It is the seed of the random bits that round parameters and momenta in fewer bits than FP32.
        lr: learning rate.
        momentum: decay of the momentum. The gradient blended with the momentum is orthogonalised (Nesterov).
        weight_decay: decoupled decay, times ``lr``.
        ns_steps: iterations of Newton-Schulz.
        adjust_lr: "match_rms_adamw" gives updates whose entries have a root mean square of 0.2, with lr similar to
            AdamW's; "original" scales by sqrt(max(1, rows / columns)).
        ns_dtype: dtype of the products, bfloat16 or float32, and of the matrices that ranks send each other.
        state_dtype: dtype of the momentum, or "8bit" for codes with a scale per block. None: dtype of the parameter.
        state_offload: "cpu" keeps the momentum in host memory, a `StateFile` on disk. Each step copies it to the device
            and back.
        device: device that computes the updates; None: device of the parameters. Parameters and gradients on another
            device, such as the host, need ``state_offload``.

    State: ``momentum_buffer`` per parameter, a tensor like the parameter (a DTensor on its mesh, with its placements),
    or two, ``momentum_buffer.codes`` and ``.scales``, for 8 bits. They exist from the start, so that a checkpoint can
    be read into them before the first step. A parameter without a gradient is skipped; all ranks must agree on these
    parameters. A zero gradient and momentum give a zero update. The caller must catch non-finite gradients. ``step`` is
    collective over the ranks that share a parameter; construction is collective over all ranks, including ranks without
    a parameter.

    Raises:
        ValueError: an option out of range, or a parameter with fewer than two dimensions.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon; Moonlight (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.5e-4,
        *,
        momentum: float = 0.95,
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
        self._orthogonalizer = Orthogonalizer(ns_steps, ns_dtype)
        defaults = dict(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr=adjust_lr,
            row_blocks=None,
            updates=0,
        )
        self._is_ready = False
        params = list(params)
        # A pipeline stage may have no matrix; torch rejects an empty list.
        super().__init__(params or [{"params": []}], defaults)
        self._prepare(state_dtype, state_offload, device)
        self._is_ready = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise after construction, because the plan is made once."""
        if self._is_ready:
            raise NotImplementedError("Muon: pass all parameter groups at construction")
        super().add_param_group(param_group)

    def plan(self) -> MuonPlan:
        """Return the plan, for tests: the owner of each matrix and the transfers between ranks."""
        return self._plan

    def flops(self) -> int:
        """Count the FLOPs of the orthogonalisation of a step on this rank."""
        flops = 0
        for task in self._plan.local:
            matrix_flops = newton_schulz_flops(task.row_count, task.columns, self._orthogonalizer.steps)
            flops += task.matrix_count * matrix_flops
        for bucket in self._plan.buckets:
            flops += sum(unit.flops for unit in bucket.units if bucket.owner_rank(unit) == dist.get_rank())
        return flops

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient. Collective."""
        self._step_runner.run()
        for group in self.param_groups:
            group["updates"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise, because torch would replace the live states and cast them; copy into the tensors of ``state``
        instead."""
        raise NotImplementedError("Muon: copy the saved values into the tensors of optimizer.state")

    def _prepare(self, state_dtype: StateType | None, place: StatePlace, device: torch.device | None) -> None:
        """Create the states, the plan and the process groups. Collective."""
        groups_and_indices = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        parameters = [group["params"][index] for group, index in groups_and_indices]
        requests = []
        momenta = []
        # Cached: for a tensor on thousands of ranks, a layout takes a tenth of a second.
        layouts: dict[_LayoutKey, TensorLayout] = {}
        for parameter, (group, index) in zip(parameters, groups_and_indices, strict=True):
            name = group["param_names"][index] if "param_names" in group else f"parameter {index}"
            is_distributed = isinstance(parameter, DTensor)
            mesh_and_placements = (parameter.device_mesh, parameter.placements) if is_distributed else None
            key = (parameter.shape, mesh_and_placements)
            if key not in layouts:
                layouts[key] = tensor_layout(parameter)
            requests.append(_request(name, layouts[key], group["row_blocks"]))
            tensors = make_state(name, parameter, state_dtype or parameter.dtype, signed=True, zeros=zeros_at(place))
            self.state[parameter] = {f"momentum_buffer{suffix}": tensor for suffix, tensor in tensors.items()}
            momenta.append(local_state(tensors, signed=True, view=local_matrices))
        self._plan = make_plan(requests, self._orthogonalizer.steps, self._orthogonalizer.dtype.itemsize)
        rank_sets = [bucket.ranks for bucket in self._plan.buckets]
        # Two meshes may have groups of the same ranks, and all ranks must reuse the same one. So the meshes are in the
        # order of the parameters: a set's order differs by process.
        meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)) if rank_sets else ()
        groups = make_groups(rank_sets, [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)])
        self._step_runner = MuonStep(
            groups_and_indices, requests, self._plan, self._orthogonalizer, groups, momenta, place, device
        )


def _request(name: str, layout: TensorLayout, row_blocks: tuple[int, ...] | None) -> PlannedParameter:
    blocks = tuple(row_blocks or (layout.shape[1],))
    if sum(blocks) != layout.shape[1] or min(blocks) < 1:
        raise ValueError(f"{name}: row_blocks {blocks} must be positive and sum to its {layout.shape[1]} rows")
    return PlannedParameter(name, layout, blocks)
