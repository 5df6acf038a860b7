"""Muon for matrices and batches of matrices, plain or DTensor, with exactly the same update on every mesh.

Options, states, groups and plan are made here, once; what a step does with them is in glm46/optim/muon_step.py.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm46.optim.compact_state import Quantized, local_state, make_state
from glm46.optim.muon_exchange import make_groups
from glm46.optim.muon_layout import local_matrices, tensor_layout
from glm46.optim.muon_plan import Plan, Request, Wire, make_plan
from glm46.optim.muon_step import MuonStep
from glm46.optim.muon_update import orthogonalizer, update_scale


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, as the update of each weight matrix.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer. Each tensor is a matrix
            or, with more dimensions, a batch of matrices; plain or DTensor, on a CPU or a GPU. A group may override
            any option down to ``idle_expert``, and may hold ``row_blocks``: the rows of the matrices that its
            tensors fuse along their second to last dimension (gate and up, or heads), each orthogonalised on its own.
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
        ns_backend: "eager"; "compile" fuses the normalisation and the iteration.
        mesh_invariant: one matrix per product, so that every mesh gives the same bits in half
            precision too; slower for small matrices, above all on a GPU.
        idle_expert: of a matrix whose whole gradient is zero, as that of an expert that saw no token: "decay" goes on
            with the decaying momentum, at full size as always; "skip" changes neither momentum nor weights.
        replicate_mode: of matrices that are both cut and replicated (HSDP): "owner" has one owner in all replicas,
            "redundant" one in each, so that nothing crosses the replicas' slower links.
        state_offload: "cpu" keeps the momentum in host memory and copies it in and out while others are at work.
        bucket_bytes: bound on the whole matrices that one rank collects at a time.
        workspace_bytes: bound on the memory of one stacked iteration.

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
        mesh_invariant: bool = False,
        idle_expert: str = "decay",
        replicate_mode: str = "owner",
        state_offload: str | None = None,
        bucket_bytes: int = 256 << 20,
        workspace_bytes: int = 1 << 30,
    ):
        if replicate_mode not in ("owner", "redundant"):
            raise ValueError(f"replicate_mode must be 'owner' or 'redundant', not {replicate_mode!r}")
        if state_offload not in (None, "cpu"):
            raise ValueError(f"state_offload must be None or 'cpu', not {state_offload!r}")
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
            mesh_invariant=mesh_invariant,
            idle_expert=idle_expert,
            row_blocks=None,
        )
        self._bucket_bytes, self._workspace_bytes, self._owner_of_replicas = (
            bucket_bytes,
            workspace_bytes,
            replicate_mode == "owner",
        )
        self._is_offloaded = state_offload == "cpu"
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
        self._work.run()
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
                name, dtype = self._name(group, index), group["state_dtype"] or parameter.dtype
                tensors = make_state(name, parameter, dtype, True, on_host=self._is_offloaded)
                self.state[parameter] = {f"momentum_buffer{end}": tensor for end, tensor in tensors.items()}
        self._requests = [self._request(group, index) for group, index in self._entries]
        self._plan = make_plan(self._requests, bucket_bytes=self._bucket_bytes)
        rank_sets = [bucket.ranks for bucket in self._plan.buckets]
        # In the order of the parameters, not of a set: of two groups with the same ranks all must take the same one.
        meshes = dict.fromkeys(p.device_mesh for p in self._parameters() if isinstance(p, DTensor)) if rank_sets else ()
        known = list(self._groups.values())
        known += [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        self._groups = make_groups(rank_sets, known)
        momenta = [self._local_momentum(parameter) for parameter in self._parameters()]
        self._work = MuonStep(
            self._entries,
            self._requests,
            self._plan,
            self._groups,
            momenta,
            workspace_bytes=self._workspace_bytes,
            is_offloaded=self._is_offloaded,
        )
        self._ready = True

    def _local_momentum(self, parameter: Tensor) -> Tensor | Quantized:
        """This rank's part of the momentum as [matrices, rows, columns]."""
        tensors = {key.removeprefix("momentum_buffer"): value for key, value in self.state[parameter].items()}
        return local_state(tensors, True, local_matrices)

    def _parameters(self) -> list[Tensor]:
        return [group["params"][index] for group, index in self._entries]

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
        travels = Wire(wire or (torch.bfloat16 if dtype == torch.float16 else dtype), wire or dtype)
        if group["idle_expert"] not in ("decay", "skip"):
            raise ValueError(f"idle_expert must be 'decay' or 'skip', not {group['idle_expert']!r}")
        skips = group["idle_expert"] == "skip"
        return Request(name, layout, blocks, travels, orthogonalizer(group), self._owner_of_replicas, skips)
