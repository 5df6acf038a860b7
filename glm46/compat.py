"""The only file that touches private parts of torch, or differences between torch 2.11 and 2.15."""

import logging
import threading
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""Placement of a dimension that FSDP2 shards below tensor parallelism. It is private, and in 2.13 no subclass of Shard:
code that only knows Shard takes the wrong rows without an error."""


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which torch 2.11 may only have under its private name.

    Args:
        x: [N, I] rows sorted by group, or [I, N] columns sorted by group.
        weight: [E, I, O], or [N, O] when `x` is [I, N].
        offsets: int32 [E], running sum of group sizes.
    """
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weight, offs=offsets)
    return torch._grouped_mm(x, weight, offs=offsets)


def let_backward_run_twice() -> None:
    """Keep what compiled layers save for backward until it is freed; torch would otherwise write into it in the first
    pass, and refuses a second one. A backward in two halves, as some pipeline schedules have it, is two passes."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def gather_rows(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate the parts of all ranks of a group along the first dimension into `out`; renamed in torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def scatter_row_sums(out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part, along the first dimension, of the sum of `whole` over a group; renamed in torch 2.13."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, whole, group=group)


def start_exchange(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows that arrive while other work goes on; nobody may read them before `wait_for_exchange`.

    An operator of torch's compiler back end, private by its name: unlike `torch.distributed.all_to_all_single`, which
    writes into a buffer, its result can be kept by activation checkpointing.
    """
    return torch.ops._c10d_functional.all_to_all_single(rows, receive, send, group.group_name)


def wait_for_exchange(rows: Tensor) -> Tensor:
    """The same tensor once it has arrived; on a GPU the stream waits, not the host."""
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(rows)
    began = time.perf_counter()
    arrived = torch.ops._c10d_functional.wait_tensor(rows)
    _waited.seconds += time.perf_counter() - began
    return arrived


EXCHANGE_OPERATOR = torch.ops._c10d_functional.all_to_all_single.default
"""What `start_exchange` is to a dispatch mode."""


def wrap_local(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """A DTensor over ``local`` with the mesh and placements of ``like``, wherever ``local`` lies.

    `DTensor.from_local` would move a host tensor to the mesh's GPU; FSDP2's own offload calls the constructor too.

    Args:
        shape: of the whole tensor, which is contiguous.
    """
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


class _Waited(threading.local):
    """What a thread has waited for other ranks."""

    seconds = 0.0


_waited = _Waited()
_wait = dist.Work.wait


def _timed_wait(work: dist.Work, *arguments, **named) -> bool:
    began = time.perf_counter()
    try:
        return _wait(work, *arguments, **named)
    finally:
        _waited.seconds += time.perf_counter() - began


WAITING = _timed_wait.__code__
"""Of the innermost frame of a thread that waits for a collective."""


def own_clock() -> float:
    """A clock, in seconds, that stands still while this thread waits for other ranks in a collective of the host.

    Torch has no such figure. FSDP and all functions of torch.distributed wait in one method, which is timed from the
    first call on. Collectives of a GPU make its stream wait, not the host: to this clock they take no time.
    """
    if dist.Work.wait is not _timed_wait:
        dist.Work.wait = _timed_wait
    return time.perf_counter() - _waited.seconds


def clone_store() -> dist.Store:
    """A second connection to the store of the default process group, for a thread beside the one that uses the first.
    The store of a group has no public name."""
    return dist.distributed_c10d._get_default_store().clone()


def flight_recorder_json() -> str:
    """The collectives that this process has started, as JSON; empty where torch has no flight recorder. It is reached
    through a private module only; TORCH_FR_BUFFER_SIZE switches it on."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    found = dump()
    return found.decode() if isinstance(found, bytes) else found


def can_pack() -> bool:
    """Whether this torch has oneDNN, which `pack_weight` needs."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_weight(weight: Tensor) -> Tensor:
    """A copy of a contiguous FP32 weight [O, I] on the CPU, blocked as oneDNN reads it fastest.

    Private operators of torch's compiler back end. The public `torch.utils.mkldnn` also wants its inputs converted.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight of `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


_LOGGED_NOISE = {
    # Its compiled kernels fit some torch and CUDA releases only; glm46 uses what is written in Python.
    "torchao": ("Failed to load ",),
    # torchao registers its enums in a way that torch 2.13 deprecates.
    "torch.utils._pytree": ("Calling register_constant() on Enum subclasses is deprecated",),
}
"""Parts of messages by the logger that writes them."""

_WARNED_NOISE = (
    # torchdata 0.11 calls it; it is without effect and deprecated since torch 2.12.
    "'set_vital' is deprecated",
    # torchdata says it twice for each loader. More workers than cores may be meant: they wait for files.
    r"This DataLoader will create \d+ worker processes in total",
)
"""Beginnings of warnings, as regular expressions."""


def quiet_libraries() -> None:
    """Drop the messages of other libraries that a user of glm46 can do nothing about, and no others.

    To be called before a library that prints one is imported or used; calling it again changes nothing.
    """
    for name in _LOGGED_NOISE:
        logging.getLogger(name).addFilter(_is_news)
    for message in _WARNED_NOISE:
        warnings.filterwarnings("ignore", message=message)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _LOGGED_NOISE[record.name])
