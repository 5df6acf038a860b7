"""Muon for matrices and batches of matrices, plain or DTensor, with exactly the same update on every mesh.

A step overlaps what travels with what is computed: the first buckets leave for their owners, matrices that lie whole on
this rank are orthogonalised meanwhile, then each bucket in turn as it arrives. Groups and plan are made once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm46.optim.compact_state import Quantized, local_state, make_state
from glm46.optim.muon_exchange import Exchange, make_groups
from glm46.optim.muon_gram import update_by_gram
from glm46.optim.muon_layout import local_gradient, local_matrices, tensor_layout
from glm46.optim.muon_plan import LocalTask, Plan, Request, Unit, Wire, make_plan
from glm46.optim.muon_update import Piece, orthogonalizer, update_scale, update_whole
from glm46.optim.newton_schulz import stack_limit

# Buckets that travel while another one is orthogonalised; more would only hold more memory.
BUCKETS_IN_FLIGHT = 2


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, as the update of each weight matrix.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer. Each tensor is a matrix
            or, with more dimensions, a batch of matrices; plain or DTensor, on a CPU or a GPU. A group may override
            any option down to ``ns_backend`` and may hold ``row_blocks``: the rows of the matrices that its tensors
            fuse along their second to last dimension (gate and up, or heads), each orthogonalised on its own.
            ``lr``, ``momentum``, ``nesterov``, ``weight_decay``, ``adjust_lr`` and ``update_rms`` of a group may
            change between steps.
        lr: learning rate, a number or a tensor.
        momentum: decay of the momentum.
        nesterov: orthogonalise the gradient blended with the momentum instead of the momentum.
        weight_decay: decoupled decay, times ``lr``.
        ns_steps: iterations of Newton-Schulz.
        ns_coefficients: a name of glm46/optim/newton_schulz.py, or triples (a, b, c) of which the last repeats.
        eps: least Frobenius norm that a matrix is divided by; a zero gradient and momentum give a zero update.
        adjust_lr: "match_rms_adamw" makes the entries' root mean square ``update_rms`` (with lr near that of AdamW);
            "original" is sqrt(max(1, rows / columns)); "spectral" sqrt(rows / columns); None is one.
        update_rms: see ``adjust_lr``.
        ns_dtype: type of the products. float16 is as fast as bfloat16 and several times closer to float32.
        wire_dtype: type in which matrices travel between ranks. Absent: ``ns_dtype``, but bfloat16 on the way to the
            owner for float16, because gradients can be smaller than float16 holds.
        state_dtype: type of the momentum, or "8bit" for codes with a scale per block. Absent: that of the parameter.
        ns_backend: "eager"; "compile" fuses the normalisation and the iteration; "gram" iterates on X X^T.
        replicate_mode: of matrices that are both cut and replicated (HSDP): "owner" has one owner in all replicas,
            "redundant" one in each, so that nothing crosses the replicas' slower links.
        bucket_bytes: bound on the whole matrices that one rank collects at a time.
        workspace_bytes: bound on the memory of one stacked iteration.
        gram_load: a cut matrix whose cost is above this times the mean load of its ranks is not collected by an owner
            if its long side is cut and much the longer one.

    State: ``momentum_buffer`` per parameter, a tensor like the parameter (a DTensor on its mesh, with its placements),
    or two of them, ``momentum_buffer.codes`` and ``.scales``, for eight bits; there from the start, so that a
    checkpoint can be loaded before the first step. A parameter without a gradient is left alone; all ranks must agree
    on which these are. Non-finite gradients are the caller's to catch.
    Construction and ``step`` are collectives of the ranks that share a parameter.

    Raises:
        ValueError: an option out of range, or a parameter that has no rows and columns.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon; Moonlight (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 2.5e-4,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[Sequence[float]] = "keller",
        eps: float = 1e-7,
        adjust_lr: str | None = "match_rms_adamw",
        update_rms: float = 0.2,
        ns_dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str | None = None,
        ns_backend: str = "eager",
        replicate_mode: str = "owner",
        bucket_bytes: int = 256 << 20,
        workspace_bytes: int = 1 << 30,
        gram_load: float = 2.0,
    ):
        if replicate_mode not in ("owner", "redundant"):
            raise ValueError(f"replicate_mode must be 'owner' or 'redundant', not {replicate_mode!r}")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            eps=eps,
            adjust_lr=adjust_lr,
            update_rms=update_rms,
            ns_dtype=ns_dtype,
            wire_dtype=wire_dtype,
            state_dtype=state_dtype,
            ns_backend=ns_backend,
            row_blocks=None,
        )
        self._limits = {"bucket_bytes": bucket_bytes, "gram_load": gram_load}
        self._workspace_bytes, self._owner_of_replicas = workspace_bytes, replicate_mode == "owner"
        self._ready, self._groups = False, {}
        params = list(params)
        # A pipeline stage may hold no matrix, which torch refuses.
        super().__init__(params or [{"params": []}], defaults)
        self._prepare()

    def add_param_group(self, param_group: dict) -> None:
        """Add a group after construction; a collective like construction."""
        super().add_param_group(param_group)
        if self._ready:
            self._prepare()

    def plan(self) -> Plan:
        """Who orthogonalises what, and what travels; ``str()`` of it is readable."""
        return self._plan

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._views = [self._parameter_views(group, index) for group, index in self._entries]
        exchanges, chunks = self._exchanges, iter(self._chunks)
        for exchange in exchanges[:BUCKETS_IN_FLIGHT]:
            exchange.gather(self._unit_piece)
        for number, exchange in enumerate(exchanges):
            # Spread over the buckets, so that each one has something to travel behind.
            for _ in range(len(self._chunks) // len(exchanges)):
                self._update_chunk(next(chunks))
            exchange.orthogonalize()
            if number:
                exchanges[number - 1].finish()
            if number + BUCKETS_IN_FLIGHT < len(exchanges):
                exchanges[number + BUCKETS_IN_FLIGHT].gather(self._unit_piece)
        for chunk in chunks:
            self._update_chunk(chunk)
        if exchanges:
            exchanges[-1].finish()
        for ranks, unit in self._plan.gram:
            self._update_gram(ranks, unit)
        self._views = []
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load into the live states: their type, mesh and placements stay, whatever those of ``state_dict`` are."""
        live = dict(self.state)
        # torch would cast the loaded states to the parameters' type first, which a wider state must not go through.
        packed = [index for group in state_dict["param_groups"] for index in group["params"]]
        loaded = dict(state_dict["state"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for index, parameter in zip(packed, parameters, strict=True):
                for key, buffer in live[parameter].items() if index in loaded else ():
                    source = loaded[index][key]
                    if isinstance(buffer, DTensor) and isinstance(source, DTensor):
                        source = source.redistribute(buffer.device_mesh, buffer.placements)
                    buffer.copy_(source)
                self.state[parameter] = live[parameter]
        self._prepare()

    def _prepare(self) -> None:
        """Make the missing states, the plan and what it needs; a collective."""
        self._entries = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        for group, index in self._entries:
            parameter = group["params"][index]
            if not self.state[parameter]:
                tensors = make_state(self._name(group, index), parameter, group["state_dtype"] or parameter.dtype, True)
                self.state[parameter] = {f"momentum_buffer{end}": tensor for end, tensor in tensors.items()}
        self._requests = [self._request(group, index) for group, index in self._entries]
        self._plan = make_plan(self._requests, **self._limits)
        self._chunks = self._stack_local_tasks()
        rank_sets = [bucket.ranks for bucket in self._plan.buckets] + [ranks for ranks, _ in self._plan.gram]
        meshes = {p.device_mesh for p in self._parameters() if isinstance(p, DTensor)} if rank_sets else ()
        known = list(self._groups.values())
        known += [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        self._groups = make_groups(rank_sets, known)
        settings = [request.settings for request in self._requests]
        self._exchanges = [
            Exchange(bucket, self._groups[bucket.ranks], settings, self._device(bucket.units[0].parameter))
            for bucket in self._plan.buckets
        ]
        self._ready = True

    def _parameters(self) -> list[Tensor]:
        return [group["params"][index] for group, index in self._entries]

    def _device(self, parameter: int) -> torch.device:
        group, index = self._entries[parameter]
        return group["params"][index].device

    @staticmethod
    def _name(group: dict, index: int) -> str:
        return group["param_names"][index] if "param_names" in group else f"parameter {index}"

    def _request(self, group: dict, index: int) -> Request:
        name = self._name(group, index)
        layout = tensor_layout(group["params"][index])
        blocks = tuple(group["row_blocks"] or (layout.shape[1],))
        if sum(blocks) != layout.shape[1] or min(blocks) < 1:
            raise ValueError(f"{name}: row_blocks {blocks} must be positive and sum to its {layout.shape[1]} rows")
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must be at least 0 and below 1, not {group['momentum']}")
        # Raises for an unknown rule here rather than in the first step.
        update_scale(group["adjust_lr"], group["update_rms"], 1, 1)
        dtype, wire = group["ns_dtype"], group["wire_dtype"]
        if wire is None:
            gather = torch.bfloat16 if dtype == torch.float16 else dtype
            return Request(name, layout, blocks, Wire(gather, dtype), orthogonalizer(group), self._owner_of_replicas)
        return Request(name, layout, blocks, Wire(wire, wire), orthogonalizer(group), self._owner_of_replicas)

    def _stack_local_tasks(self) -> list[list[LocalTask]]:
        """Tasks of one canonical shape and one setting, cut where their iteration exceeds the workspace."""
        alike: dict[tuple, list[LocalTask]] = {}
        for task in self._plan.local:
            request, rows = self._requests[task.parameter], task.rows[1] - task.rows[0]
            shape = min(rows, task.columns), max(rows, task.columns)
            key = (*shape, request.settings, request.wire, self._device(task.parameter))
            alike.setdefault(key, []).append(task)
        chunks: list[list[LocalTask]] = []
        for (short, long, settings, wire, device), tasks in alike.items():
            # The stack, its normalised copy and two results in turn; two short x short products.
            width = max(wire.gather.itemsize, settings.dtype.itemsize)
            limit = max(1, self._workspace_bytes // (width * (4 * short * long + 2 * short * short)))
            if device.type == "cpu":
                limit = min(limit, stack_limit(short, long, settings.dtype))
            room = 0
            for task in tasks:
                first, stop = task.matrices
                while first < stop:
                    if not room:
                        chunks.append([])
                        room = limit
                    last = min(stop, first + room)
                    chunks[-1].append(replace(task, matrices=(first, last)))
                    first, room = last, room - (last - first)
        return chunks

    def _parameter_views(self, group: dict, index: int) -> tuple[Tensor, Tensor | None, Tensor | Quantized]:
        """This rank's parts of a parameter, its gradient and its momentum as [matrices, rows, columns]."""
        parameter = group["params"][index]
        views = local_matrices(parameter)
        gradient = local_gradient(parameter)
        gradient = None if gradient is None else gradient.reshape(views.shape)
        tensors = {key.removeprefix("momentum_buffer"): tensor for key, tensor in self.state[parameter].items()}
        return views, gradient, local_state(tensors, True, local_matrices)

    def _piece(self, number: int, matrices: tuple, rows: tuple, shape: tuple[int, int]) -> Piece:
        """The views of some local matrices and local rows of a parameter."""
        select = slice(*matrices), slice(*rows)
        parameter, gradient, momentum = (None if view is None else view[select] for view in self._views[number])
        return Piece(self._entries[number][0], parameter, gradient, momentum, *shape)

    def _update_chunk(self, chunk: list[LocalTask]) -> None:
        with_gradient = [task for task in chunk if self._views[task.parameter][1] is not None]
        if with_gradient:
            request = self._requests[chunk[0].parameter]
            pieces = [
                self._piece(task.parameter, task.matrices, task.rows, (task.rows[1] - task.rows[0], task.columns))
                for task in with_gradient
            ]
            update_whole(pieces, request.wire.gather, request.wire.back, request.settings)

    def _unit_piece(self, unit: Unit) -> Piece:
        """The views of this rank's part of a cut matrix."""
        mine = self._requests[unit.parameter].layout.mine
        first, last = max(unit.rows[0], mine.rows[0]), min(unit.rows[1], mine.rows[1])
        rows = (first - mine.rows[0], last - mine.rows[0])
        return self._piece(unit.parameter, (unit.matrix, unit.matrix + 1), rows, unit.shape)

    def _update_gram(self, ranks: tuple[int, ...], unit: Unit) -> None:
        holds = unit.parts[ranks.index(dist.get_rank())] is not None
        piece = self._unit_piece(unit) if holds else None
        settings = self._requests[unit.parameter].settings
        update_by_gram(piece, min(unit.shape), settings, self._groups[ranks], self._device(unit.parameter))
