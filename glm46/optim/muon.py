"""Muon for matrices and batches of matrices, plain or DTensor, with exactly the same update on every mesh."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm46.optim.muon_layout import local_matrices, tensor_layout, zeros_like_parameter
from glm46.optim.muon_plan import LocalTask, Plan, Request, make_plan
from glm46.optim.muon_update import Orthogonalizer, Piece, orthogonalizer, update_whole

ADJUST_LR = ("match_rms_adamw", "original", "spectral", None)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, as the update of each weight matrix.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer. Each tensor is a matrix
            or, with more dimensions, a batch of matrices; plain or DTensor, on a CPU or a GPU. A group may override
            any option below and may hold ``row_blocks``: the rows of the matrices that its tensors fuse along their
            second to last dimension (gate and up, or heads), each of which is orthogonalised on its own.
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
        state_dtype: type of the momentum. Absent: that of the parameter.
        ns_backend: "eager", or "gram" to iterate on X X^T.
        workspace_bytes: bound on the matrices that are stacked into one iteration.

    State: ``momentum_buffer`` per parameter, a tensor like the parameter (a DTensor on its mesh, with its placements),
    there from the start, so that a checkpoint can be loaded before the first step. A parameter without a gradient is
    left alone. Non-finite gradients are the caller's to catch.

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
        state_dtype: torch.dtype | None = None,
        ns_backend: str = "eager",
        workspace_bytes: int = 1 << 30,
    ):
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
        params = list(params)
        # A pipeline stage may hold no matrix, which torch refuses.
        super().__init__(params or [{"params": []}], defaults)
        self._workspace_bytes = workspace_bytes
        self._entries = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        self._requests = [self._request(group, index) for group, index in self._entries]
        for group, index in self._entries:
            parameter = group["params"][index]
            dtype = group["state_dtype"] or parameter.dtype
            self.state[parameter]["momentum_buffer"] = zeros_like_parameter(parameter, dtype)
        self._plan = make_plan(self._requests, bucket_bytes=1 << 28, gram_load=2.0)
        self._chunks = self._stack_local_tasks()

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
        gradients = [self._local_gradient(group["params"][index]) for group, index in self._entries]
        for chunk in self._chunks:
            pieces = [self._piece(task, gradients[task.parameter]) for task in chunk if _has(gradients, task)]
            if pieces:
                request = self._requests[chunk[0].parameter]
                update_whole(pieces, request.wire, request.settings)
        return loss

    def _request(self, group: dict, index: int) -> Request:
        parameter = group["params"][index]
        name = group["param_names"][index] if "param_names" in group else f"parameter {index}"
        layout = tensor_layout(parameter)
        blocks = tuple(group["row_blocks"] or (layout.shape[1],))
        if sum(blocks) != layout.shape[1] or min(blocks) < 1:
            raise ValueError(f"{name}: row_blocks {blocks} must be positive and sum to its {layout.shape[1]} rows")
        if group["adjust_lr"] not in ADJUST_LR:
            raise ValueError(f"adjust_lr {group['adjust_lr']!r} is unknown; known: {ADJUST_LR}")
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must be in [0, 1), not {group['momentum']}")
        wire = group["wire_dtype"] or (torch.bfloat16 if group["ns_dtype"] == torch.float16 else group["ns_dtype"])
        return Request(name, layout, blocks, wire, group["ns_steps"], orthogonalizer(group), False)

    def _stack_local_tasks(self) -> list[list[LocalTask]]:
        """Tasks of one canonical shape and one setting, cut where their matrices exceed the workspace."""
        alike: dict[tuple, list[LocalTask]] = defaultdict(list)
        for task in self._plan.local:
            request = self._requests[task.parameter]
            rows = task.rows[1] - task.rows[0]
            device = self._parameter(task.parameter).device
            alike[min(rows, task.columns), max(rows, task.columns), request.settings, request.wire, device].append(task)
        chunks: list[list[LocalTask]] = []
        for (short, long, settings, wire, _), tasks in alike.items():
            # The stack, its normalised copy, two results in turn, and two short x short products.
            matrix_bytes = short * long * wire.itemsize + (3 * short * long + 2 * short * short) * settings.dtype.itemsize
            limit, held = max(1, self._workspace_bytes // matrix_bytes), 0
            chunks.append([])
            for task in tasks:
                for part in task.parts(limit):
                    if held and held + part.matrices > limit:
                        chunks.append([])
                        held = 0
                    chunks[-1].append(part)
                    held += part.matrices
        return chunks
