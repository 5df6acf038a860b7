"""All uses of private torch APIs, and of APIs that differ between torch 2.11 and 2.15."""

import contextlib
import functools
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as _functional_collectives
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton

set_group_timeout = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
"""(timeout, group): of all later operations of a process group, on all its backends. Public since torch 2.14."""


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a process group, which torch does not tell; None of a group that sends nothing, torch's fake."""
    options = group._get_backend(torch.device("cpu")).options
    return None if options is None else options._timeout


StridedShard = _StridedShard
"""Placement of a dimension that both FSDP2 and tensor parallelism shard. It is private, and in torch 2.13 no longer a
subclass of Shard: code that handles only Shard takes the wrong rows without an error."""


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which torch 2.11 may have only under its private name.

    Args:
        x: [N, I] rows sorted by group, or [I, N] columns sorted by group.
        weight: [E, I, O], or [N, O] when `x` is [I, N].
        offsets: int32 [E], running sum of the group sizes.

    Returns:
        [N, O], or [E, I, O] with zeros for each empty group.
    """
    if x.numel() == 0:  # kernels of GPUs refuse the strides of no rows
        return x.new_zeros(*(x.shape[:1] if weight.ndim == 3 else (len(offsets), len(x))), weight.shape[-1])
    product = _grouped_mm(x, weight, offsets)
    if weight.ndim == 2 and gradients_of_empty_groups_are_undefined(x.device):
        product.masked_fill_(empty_groups(offsets), 0.0)
    return product


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weight, offs=offsets)
    return torch._grouped_mm(x, weight, offs=offsets)


def empty_groups(offsets: Tensor) -> Tensor:
    """True for each group without rows, bool [E, 1, 1]; ``offsets`` [E] is the running sum of the sizes."""
    return (offsets.diff(prepend=offsets.new_zeros(1)) == 0).view(-1, 1, 1)


@torch.compiler.assume_constant_result  # read while a layer is compiled, whose graph cannot hold the question
def gradients_of_empty_groups_are_undefined(device: torch.device) -> bool:
    """True where the grouped product [I, N] x [N, O] writes nothing for an empty group: CUTLASS before its pull request
    2746, on compute capability 10.x (pytorch issue 172439). Multiplies once and reads the result."""
    return _leaves_empty_groups(device)


@functools.cache
def _leaves_empty_groups(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
        return False
    rows = torch.ones(128, 128, dtype=torch.bfloat16, device=device)
    torch.full((3, 128, 128), torch.nan, dtype=rows.dtype, device=device)  # freed; the result gets this memory
    offsets = torch.tensor([0, 128, 128], dtype=torch.int32, device=device)
    return bool(_grouped_mm(rows.t(), rows, offsets)[[0, 2]].any())


_E4M3 = torch.float8_e4m3fn


class RowwiseKernels:
    """torchao's kernels that round to FP8 with a scale for each row, or column of a group of rows, around torch's
    grouped product; for GPUs of compute capability 9.0 and 10.x. See `glm46.compute.parallelize.float8.GroupedKernels`.

    torchao has them only as private functions of a prototype, and their product only as a whole, which rounds the
    weight in each call. torchao 0.18 cannot be used as it is with Triton 3.9, which torch 2.15 brings: Triton now
    refuses a tuning key that the kernel does not have as an argument (of a kernel with a single configuration), and the
    kernels that transpose the experts' weights index a number as if it were a vector. torchao's fused form of these two
    gives the same values.

    Rows are sorted by group, in multiples of 16, and contiguous, as the columns of the results are.
    """

    def __init__(self) -> None:
        with _tuned_once():
            from torchao.prototype.moe_training import kernels
            from torchao.prototype.moe_training.kernels import float8_rowwise
        self._kernels = kernels
        self._round_transposed = kernels.triton_fp8_rowwise_3d_transpose_rhs
        if has_triton():
            self._round_transposed = float8_rowwise.triton_fp8_rowwise_3d_transpose_rhs_fused_reduction

    def forms(self, weight_EOI: Tensor, of_backward: bool) -> tuple[Tensor, ...]:
        """See `GroupedKernels.forms`."""
        kernel = self._round_transposed if of_backward else self._kernels.triton_fp8_colwise_3d_scale_and_cast
        values, scales = kernel(weight_EOI.transpose(1, 2), output_dtype=_E4M3, round_scales_to_power_of_2=True)
        return values, scales.squeeze(1).reciprocal()

    def multiply(self, x_NI: Tensor, forms: tuple[Tensor, ...], offsets: Tensor) -> Tensor:
        """See `GroupedKernels.multiply`."""
        values, scales = self._kernels.triton_fp8_rowwise_2d_scale_and_cast(
            x_NI, output_dtype=_E4M3, round_scales_to_power_of_2=True
        )
        return _scaled_grouped_mm(values, forms[0], scales.squeeze(-1).reciprocal(), forms[1], offsets, x_NI.dtype)

    def outer(self, grad_NO: Tensor, x_NI: Tensor, offsets: Tensor) -> Tensor:
        """See `GroupedKernels.outer`."""
        grad, grad_scales, x, x_scales = self._kernels.triton_fp8_per_group_colwise_scales_dual(
            grad_NO, x_NI, offsets, _E4M3, round_scales_to_power_of_2=True
        )
        return _scaled_grouped_mm(
            grad.t(), x, grad_scales.t().reciprocal(), x_scales.reciprocal(), offsets, grad_NO.dtype
        )


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offsets, out_dtype=dtype, use_fast_accum=True)


def mxfp8_grouped_mm() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The grouped product of operands that it rounds to MXFP8, in the dtype of the first one, with gradients, for GPUs
    of compute capability 10.x. torchao has it only as a private function of a prototype.

    Returns:
        A function of x [N, I], rows sorted by group, in multiples of 32; weight [E, O, I]; and offsets, int32 [E], the
        running sum of the group sizes.
    """
    with _tuned_once():
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

    def multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(
            x, weight.transpose(1, 2), offsets, out_dtype=x.dtype, pad_token_groups_for_grouped_mm=False
        )

    return multiply


@contextlib.contextmanager
def _tuned_once() -> Iterator[None]:
    """Inside of it, `triton.autotune` ignores keys that the kernel does not have as arguments, as before Triton 3.9,
    and the number of rows of kernels for groups of rows: each step has another one with expert parallelism, and would
    time the forms of such a kernel again. It times four of the 36: all took more than 90 s of a first step (H100)."""
    if not has_triton():
        yield
        return
    import triton

    autotune = triton.autotune

    def tune(configs: list, key: list[str], **options: Any) -> Callable:
        def tuned(kernel: Any) -> Any:
            names = ["N_GROUPS", "N", "N1", "N2"] if "offsets_ptr" in kernel.arg_names else key
            few = configs[:: -(-len(configs) // 4)]
            return autotune(few, [name for name in names if name in kernel.arg_names], **options)(kernel)

        return tuned

    triton.autotune = tune
    try:
        yield
    finally:
        triton.autotune = autotune


def shard_gathered_in_fp8(weight: Tensor) -> Tensor | None:
    """The tensor that FSDP2 holds of a weight that it gathers in FP8, as torchao wraps it; None of other weights.
    `DTensor.to_local` gives another object with its memory."""
    shard = getattr(weight, "_local_tensor", None)
    return shard if hasattr(shard, "_precomputed_scale") else None


def give_fp8_scale(shard: Any, scale: Tensor | None) -> None:
    """The scale [] that gathers of such a shard use; None: each gather computes it, with a collective.

    torchao sets it only for the layers of its own class, over all ranks that share a matrix, those of tensor
    parallelism too (`precompute_float8_dynamic_scale_for_fsdp`).
    """
    shard._precomputed_scale = scale


def mm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """FP32 product of BF16 matrices. A GPU makes it without FP32 copies of them; no other device has the operator, and
    its derivative is not in torch."""
    if a.device.type in ("cuda", "meta"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_mm_in_fp32(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """FP32 ``total``, in place, plus the product of matrices; without a total, the product. A GPU sums BF16 products in
    FP32 itself: no result in BF16 is written, read and rounded."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    if a.device.type not in ("cuda", "meta"):
        return (a @ b).float() if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    if torch.compiler.is_compiling():  # Inductor of 2.14 has no code for `addmm` with a dtype
        return total.add_(torch.mm(a, b, out_dtype=torch.float32))
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


_varlen_attn: Any = varlen_attn  # with arguments that are new in 2.12
_GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Asks for fewer key heads than query heads; torch 2.11 takes them unasked. Here, because compiled layers call it."""


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, window: tuple[int, int]
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`."""
    return _varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window, **_GROUPED_HEADS)


class DispatchMode(TorchDispatchMode):
    """Its ``__torch_dispatch__`` sees each operator in its context, also those of code that stays compiled there."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by `torch.compile`, which else runs a function in its context uncompiled."""
        return True


VARLEN_OPERATOR = torch.ops.torch_attn._varlen_attn.default
"""The operator behind `varlen_attn`; its result is saved by selective activation checkpointing."""


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp [heads, queries] of the flash kernel behind `varlen_attn`, which gives no gradient that
    follows from the log-sum-exp over other keys too."""
    sizes = cu_seq_q, cu_seq_k, max_q, max_k, 0.0, causal
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, False)
    return out, log_sum


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v of `flash_attention`."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, log_sum, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, causal, no_dropout,
        torch.empty(0, dtype=torch.uint64, device=q.device),
    )  # fmt: skip


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`plain_attention` by torch's CPU kernel.

    An operator behind `F.scaled_dot_product_attention`, which keeps the mask of every call for backward.
    """
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=added_mask(mask, q.dtype).unsqueeze(1)
    )
    return out, log_sum


def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_attention_backward` by torch's CPU kernel."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sum, 0.0, False, attn_mask=added_mask(mask, q.dtype).unsqueeze(1)
    )


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that attention adds to the scores: 0 where the mask is true, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def let_backward_run_twice() -> None:
    """Allow two backward passes through compiled layers, for pipeline schedules that split backward. By default torch
    overwrites saved tensors in the first pass and rejects a second one."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def let_size_vary(tensor: Tensor, dim: int) -> None:
    """Let `torch.compile` make code for any size of a dimension. By default it makes code for one size, and again for
    any size of each tensor that it sees change."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def let_longest_run_vary() -> None:
    """Let `torch.compile` make code for any `max_q` and `max_k` of an attention layout. By default it makes code for a
    first number, and again for any when it changes. Integers can be marked only by name."""
    import torch.compiler.config

    config, names = torch.compiler.config, r".*\.max_[qk]$"
    if names not in config.dynamic_sources.split(","):
        config.dynamic_sources = ",".join(filter(None, [config.dynamic_sources, names]))


def let_layers_compile(times: int) -> None:
    """Let `torch.compile` make code for one function so many times. Beyond 8, torch's number, a whole graph raises."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, times)


def gather_rows(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate the parts of all ranks of a group along dimension 0 into `out`. Renamed in torch 2.13. Collective."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def scatter_row_sums(out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's part, along dimension 0, of the sum of `whole` over a group into `out`. Renamed in torch 2.13.
    Collective."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, whole, group=group)


Arriving = tuple[Tensor, dist.Work | None]
"""Rows on their way, see `start_exchange`."""


def start_exchange(
    rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup, is_kept: bool = True
) -> Arriving:
    """Start an all-to-all of rows; they must not be read before `wait_for_exchange`. Collective.

    Args:
        is_kept: True sends by a private operator of torch's compiler back end, whose result selective checkpointing
            keeps. A recomputation finds it by the number of the call, so rows that it leaves out take another operator.
    """
    if is_kept:
        return torch.ops._c10d_functional.all_to_all_single(rows, receive, send, group.group_name), None
    arriving = rows.new_empty(sum(receive), *rows.shape[1:])
    return arriving, dist.all_to_all_single(arriving, rows, receive, send, group=group, async_op=True)


def wait_for_exchange(arriving: Tensor, work: dist.Work | None) -> Tensor:
    """Wait for what `start_exchange` returned. On a GPU the stream waits, not the host."""
    began = time.perf_counter()
    if work is None:
        arrived = torch.ops._c10d_functional.wait_tensor(arriving)
    else:
        work.wait()
        arrived = arriving.view_as(arriving)
    _waited.seconds += time.perf_counter() - began
    return arrived


def gather_in_graph(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks along a dimension, as operators of a compiled graph. Inductor may join them with the
    product that reads them (`_micro_pipeline_tp`). Differentiable. torch has such operators in a private module."""
    return _functional_collectives.all_gather_tensor_autograd(x, dim, group)


def scatter_sum_in_graph(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, of which each gets its part along a dimension; see `gather_in_graph`."""
    return _functional_collectives.reduce_scatter_tensor_autograd(x, "sum", dim, group)


def sum_in_graph(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, without a gradient; see `gather_in_graph`."""
    return _functional_collectives.all_reduce(x, "sum", group)


def overlap_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Let inductor run the collectives of a group in the products next to them, through memory that its GPUs share.

    torch has the switch as a private key only. The group is made known to symmetric memory: torch 2.11 raises without
    it, and 2.14 calls it deprecated.
    """
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


EXCHANGE_OPERATOR = torch.ops._c10d_functional.all_to_all_single.default
"""The operator of `start_exchange`, as a dispatch mode sees it."""


def wrap_local(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """A DTensor over ``local`` with the mesh and placements of ``like``, on the device of ``local``.

    `DTensor.from_local` would move a host tensor to the GPU of the mesh. FSDP2's offload calls the constructor too.

    Args:
        shape: shape of the whole tensor, which is contiguous.
    """
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def norms_in_fp32(tensors: list[Tensor]) -> list[Tensor] | tuple[Tensor, ...]:
    """Euclidean norm of each tensor, in few kernels on a GPU. `get_total_norm` rounds to the type of the tensors."""
    return torch._foreach_norm(tensors, 2, dtype=torch.float32)


def multiply_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar on the CPU, in one kernel on a GPU for each dtype. Devices may differ."""
    alike: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same in alike.values():  # a mixed list is multiplied one by one
        torch._foreach_mul_(same, factor)


class _Waited(threading.local):
    """Time in seconds that a thread has waited for other ranks."""

    seconds = 0.0


_waited = _Waited()
_Work: Any = dist.Work
_wait = dist.Work.wait


def _timed_wait(work: dist.Work, *arguments, **named) -> bool:
    began = time.perf_counter()
    try:
        return _wait(work, *arguments, **named)
    finally:
        _waited.seconds += time.perf_counter() - began


WAITING = _timed_wait.__code__
"""Code of the innermost Python frame of a thread that waits for a collective."""


def own_clock() -> float:
    """Seconds of a clock that stops while this thread waits on the host for a collective.

    Torch offers no such clock. FSDP and torch.distributed wait in one method, `Work.wait`; the first call patches it.
    Collectives on a GPU block its stream, not the host, and do not stop this clock.
    """
    if _Work.wait is not _timed_wait:
        _Work.wait = _timed_wait
    return time.perf_counter() - _waited.seconds


def clone_store() -> dist.Store:
    """A second connection to the store of the default process group, for use in another thread. The store has no public
    name, and the types of torch 2.13 do not know its method."""
    return cast(Any, dist.distributed_c10d._get_default_store()).clone()


@contextlib.contextmanager
def torchrun_starts(start: Callable[[tuple[str, ...], dict[str, str]], Any]) -> Iterator[None]:
    """Let torchrun start processes by this function, which takes a command and all variables and returns what has
    `pid`, `poll` and `wait` of `subprocess.Popen`. Torchrun has no public way to fork commands.

    Such a process may have another parent, which has waited for it before `poll` says so: torchrun's signal to it would
    end torchrun.
    """
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    handler: Any = subprocess_handler.SubprocessHandler
    before = handler._popen, handler.close

    def close(self: Any, *arguments: Any, **named: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            before[1](self, *arguments, **named)

    handler._popen, handler.close = lambda _, command, variables: start(command, variables), close
    try:
        yield
    finally:
        handler._popen, handler.close = before


def flight_recorders() -> dict[str, str]:
    """Collectives that this process has started, as JSON, by backend: gloo and NCCL write into recorders of their own.
    They are only in a private module; TORCH_FR_BUFFER_SIZE turns them on."""
    dumps = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    found = {backend: getattr(torch._C._distributed_c10d, name, None) for backend, name in dumps.items()}
    traces = {backend: dump() for backend, dump in found.items() if dump is not None}
    return {backend: trace.decode() if isinstance(trace, bytes) else trace for backend, trace in traces.items()}


def named_range(name: str) -> contextlib.AbstractContextManager:
    """A range of this name in the trace of a profiler that is recording now; else nothing, at no cost. Whether one is
    recording has no public name."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()


def record_allocations(is_on: bool) -> None:
    """Keep the last 100,000 allocations and frees of GPU memory with their Python stacks, or stop it. PyTorch documents
    this function and the next one with their private names."""
    torch.cuda.memory._record_memory_history("all" if is_on else None, stacks="python", max_entries=100_000)


def write_memory_snapshot(path: Path) -> None:
    """Write the recorded allocations of GPU memory for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def can_pack() -> bool:
    """True if this torch has oneDNN, which `pack_weight` needs."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_weight(weight: Tensor) -> Tensor:
    """Copy a contiguous FP32 weight [O, I] on the CPU into oneDNN's blocked layout.

    Uses private operators of torch's compiler back end: the public `torch.utils.mkldnn` needs converted inputs too.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight from `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


_LOGGED_NOISE = {
    # Its compiled kernels need certain torch and CUDA releases; glm46 uses only its Python code.
    "torchao": ("Failed to load ",),
    # torchao registers enums in a way that torch 2.13 deprecates.
    "torch.utils._pytree": ("Calling register_constant() on Enum subclasses is deprecated",),
}
"""Parts of messages to drop, by logger."""

_WARNED_NOISE = (
    # torchdata 0.11 calls it; it has no effect and is deprecated since torch 2.12.
    "'set_vital' is deprecated",
    # torchdata warns twice for each loader. More workers than cores can be intended: they wait for files.
    r"This DataLoader will create \d+ worker processes in total",
)
"""Beginnings of warnings, as regular expressions."""


def quiet_libraries() -> None:
    """Drop messages of other libraries that a user of glm46 cannot act on.

    Call it before such a library is imported or used. Idempotent.
    """
    for name in _LOGGED_NOISE:
        logging.getLogger(name).addFilter(_is_wanted)
    for message in _WARNED_NOISE:
        warnings.filterwarnings("ignore", message=message)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _LOGGED_NOISE[record.name])
