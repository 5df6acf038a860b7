"""Exchange of tokens between experts by DeepEP, a package of kernels that send a row to each host, and there to each
rank. It is imported on request. No GPU has run this file: a test holds its calls to DeepEP's contract.

In backward the gradient of what arrived goes back as results do, and the gradient of results arrives as tokens do.
"""

import functools
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compat import FunctionContext, uncompiled
from glm46.compute.distributed.recomputation import leaves_out, recalled, will_leave_out
from glm46.compute.model.dispatch import ArrivedRows, Copies
from glm46.compute.model.router import Routing
from glm46.compute.parallelize.two_level import copy_to_experts, place_at_experts
from glm46.config.errors import UserError
from glm46.run.plan import Plan

LEAST_CAPABILITY = (9, 0)
LEAST_NCCL = (2, 30, 4)


def open_buffer(plan: Plan, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return DeepEP's buffer for the ranks of a group, which all layers share. Collective.

    Raises:
        UserError: DeepEP cannot run here.
    """
    if (reason := why_not(device)) is not None:
        raise UserError(f'parallelism.expert_exchange = "deepep": {reason}; or use "two_level"')
    if torch.are_deterministic_algorithms_enabled():
        # Filling would run at the same time as the kernels that write into the same memory; DeepEP refuses it.
        switches: Any = torch.utils.deterministic
        switches.fill_uninitialized_memory = False
    return _open(group, plan.most_tokens, plan.shape.hidden_size, plan.shape.num_experts_per_tok)


@functools.cache
def _open(group: dist.ProcessGroup, tokens: int, width: int, chosen: int) -> Any:
    # deterministic: rows arrive in the order of their ranks and tokens, so that sums do not depend on timing.
    return _library().ElasticBuffer(
        group, num_max_tokens_per_rank=tokens, hidden=width, num_topk=chosen, deterministic=True
    )


def why_not(device: torch.device) -> str | None:
    """Return the reason why DeepEP cannot run on this device, with a remedy, if there is one."""
    if device.type != "cuda":
        return f"it needs GPUs, and the run is on {device.type}; train on GPUs"
    if (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        return f"it needs GPUs of compute capability 9.0 or more, and this one has {'.'.join(map(str, capability))}"
    if (nccl := torch.cuda.nccl.version()) < LEAST_NCCL:
        needed, installed = (".".join(map(str, version)) for version in (LEAST_NCCL, nccl))
        return f"it needs NCCL {needed} or newer, and torch has {installed}; install a newer torch"
    try:
        deep_ep = _library()
    except ModuleNotFoundError as error:
        missing = "deep_ep" if error.name == "deep_ep" else f"{error.name}, which deep_ep imports,"
        return f"{missing} is not installed; install version 2 or newer of deep_ep and what it needs"
    except (ImportError, AssertionError, OSError) as error:  # it compares libraries and looks for nvcc
        return f"deep_ep cannot be imported ({' '.join(str(error).split()) or type(error).__name__}); repair it"
    if not hasattr(deep_ep, "ElasticBuffer"):
        return "this deep_ep has no ElasticBuffer; install version 2 or newer"
    if deep_ep.topk_idx_t != torch.int64:
        return f"deep_ep was built for experts of type {deep_ep.topk_idx_t}; build it for torch.int64, its default"
    return None


def _library() -> ModuleType:
    return import_module("deep_ep")  # it compares libraries and looks for nvcc


class _Sent:
    """Results of a dispatch that the exchanges after it need, and a recomputation."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.experts_MA: Tensor | None = None
        """int64: experts of this rank, counted from its first one; -1 for experts of other ranks."""
        self.weights_MA: Tensor | None = None
        self.rows_MD: Tensor | None = None
        """Kept where a recomputation does not send them again."""


class _Trip:
    """The trip of the tokens of a layer to their experts and back. It is used once, by a forward or a recomputation."""

    def __init__(self, buffer: Any):
        self.buffer = buffer
        self.sent: _Sent = recalled(_Sent)
        self.event: Any = None
        self.returning: Any = None
        """In backward, the gradients of rows and weights in transit."""

    def dispatch(self, x_TD: Tensor, weights_TA: Tensor, experts_TA: Tensor, num_experts: int) -> Tensor:
        """Start to send tokens; a recomputation sends them by the handle of the first run, without weights."""
        sent = self.sent
        if sent.rows_MD is not None:
            return sent.rows_MD.detach()
        if sent.handle is None:
            rows_MD, sent.experts_MA, sent.weights_MA, sent.handle, self.event = self.buffer.dispatch(
                x_TD,
                topk_idx=experts_TA,
                topk_weights=weights_TA,
                num_experts=num_experts,
                async_with_compute_stream=True,
            )
            # What selective checkpointing keeps: the last rows on the way there.
            sent.rows_MD = rows_MD if will_leave_out("first hop") else None
        else:
            rows_MD, *_, self.event = self.buffer.dispatch(x_TD, handle=sent.handle, async_with_compute_stream=True)
        sent_MD: Tensor = rows_MD.detach()
        return sent_MD

    def wait(self) -> None:
        """Let kernels wait for what `dispatch` started."""
        event = self.event
        self.event = None
        if event is not None:
            event.current_stream_wait()


class _TripContext(FunctionContext, Protocol):
    trip: _Trip


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _TripContext, x_TD: Tensor, weights_TA: Tensor, experts_TA: Tensor, num_experts: int, trip: _Trip
    ) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        rows_MD = trip.dispatch(x_TD.contiguous(), weights_TA.contiguous(), experts_TA, num_experts)
        weights_MA = trip.sent.weights_MA
        assert weights_MA is not None, "a dispatch has received them"
        return rows_MD, weights_MA.detach()

    @staticmethod
    def backward(ctx: _TripContext, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_TD, grad_TA, event = ctx.trip.returning
        ctx.trip.returning = None
        event.current_stream_wait()
        return grad_TD, grad_TA, None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _TripContext, rows_MD: Tensor, weights_MA: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        trip.wait()
        return rows_MD.view_as(rows_MD), weights_MA.view_as(weights_MA)

    @staticmethod
    def backward(ctx: _TripContext, grad_MD: Tensor, grad_MA: Tensor) -> tuple[Tensor | None, ...]:
        trip = ctx.trip
        trip.returning = trip.buffer.combine(
            grad_MD.contiguous(), trip.sent.handle, topk_weights=grad_MA.contiguous(), async_with_compute_stream=True
        )
        return grad_MD, grad_MA, None  # reach only `_Start`; autograd requires the shapes of what arrived


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _TripContext, y_MD: Tensor, trip: _Trip, tokens: int) -> Tensor:
        ctx.trip = trip
        if leaves_out("back"):
            return y_MD.new_empty(tokens, y_MD.shape[1])
        sums_TD: Tensor = trip.buffer.combine(y_MD.contiguous(), trip.sent.handle)[0]
        return sums_TD

    @staticmethod
    def backward(ctx: _TripContext, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.buffer.dispatch(grad_TD.contiguous(), handle=ctx.trip.sent.handle)[0], None, None


class _SentRows(NamedTuple):
    rows_MD: Tensor
    weights_MA: Tensor
    trip: _Trip
    experts_per_rank: int
    tokens: int
    """Tokens of this rank."""


class _WayBack(NamedTuple):
    copies: Copies
    trip: _Trip
    tokens: int


class DeepEPDispatcher:
    """A `TokenDispatcher` by a buffer of DeepEP, for BF16. Experts see the rows that `AllToAllDispatcher` gives them,
    in the same order. DeepEP sums the results of a token by host, then on its rank, and rounds each sum."""

    def __init__(self, group: dist.ProcessGroup, buffer: Any):
        self._ranks = dist.get_world_size(group)
        self._buffer = buffer
        self.multiple = 1

    @uncompiled
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> _SentRows:
        """See `TokenDispatcher.start`. Collective."""
        trip = _Trip(self._buffer)
        capacity = self._buffer.num_max_tokens_per_rank
        if len(x_TD) > capacity:
            fault = f"a rank has {len(x_TD):,} tokens at once, and a micro-batch, for which its buffer is, {capacity:,}"
            raise UserError(f'parallelism.expert_exchange = "deepep": {fault}; use "two_level"')
        # Weight 0: dropped by padding or the capacity, and not sent.
        experts_TA = torch.where(routing.weights > 0, routing.experts, -1).to(torch.int64)
        rows_MD, weights_MA = _Start.apply(x_TD, routing.weights, experts_TA, num_experts, trip)
        return _SentRows(rows_MD, weights_MA, trip, num_experts // self._ranks, len(x_TD))

    @uncompiled
    def arrived(self, sent: _SentRows) -> tuple[ArrivedRows, _WayBack, None]:
        """See `TokenDispatcher.arrived`."""
        trip = sent.trip
        x_MD, weights_MA = _Finish.apply(sent.rows_MD, sent.weights_MA, trip)
        experts_MA = trip.sent.experts_MA
        assert experts_MA is not None, "a dispatch has received them"
        total = sum(trip.sent.handle.num_recv_tokens_per_expert_list)
        # One part: the rows have arrived in the order of their ranks.
        places = place_at_experts(
            key_MA=experts_MA, is_here_MA=experts_MA >= 0, experts=sent.experts_per_rank, parts=1, total=total
        )
        rows, copies = copy_to_experts(x_MD, weights_MA, *places, self.multiple)
        return rows, _WayBack(copies, trip, sent.tokens), None

    @uncompiled
    def combine(self, results: Tensor, way: _WayBack) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        sums_TD: Tensor = _Back.apply(way.copies.sum_rows(results), way.trip, way.tokens)
        return sums_TD
