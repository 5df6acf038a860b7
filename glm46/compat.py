"""All uses of private torch APIs, and of APIs that differ between torch 2.11 and 2.15."""

import contextlib
import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.distributed._functional_collectives as _functional_collectives
import torch.nn.functional as F
from torch import Tensor
from torch._C import _distributed_c10d
from torch.autograd import profiler
from torch.distributed import _symmetric_memory
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention.varlen import varlen_attn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton

set_group_timeout = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
"""Set the timeout of all later operations of a process group, on all its backends. Public since torch 2.14.

Arguments: timeout, group.
"""


def sum_over_named_group(x: Tensor, group_name: str) -> Tensor:
    """Return the sum of a tensor over the ranks of a process group, given by its name, as custom operators take it.
    Collective."""
    arriving = torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
    total: Tensor = torch.ops._c10d_functional.wait_tensor(arriving)
    return total


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a process group, for which torch has no public name; None for torch's fake group."""
    options = group._get_backend(torch.device("cpu")).options
    return None if options is None else options._timeout


flatten_tree = _pytree.tree_flatten
"""Return the leaves of nested dicts, lists and tuples, and their structure. Torch has no public name for it."""
unflatten_tree = _pytree.tree_unflatten
"""Invert `flatten_tree`."""
map_tree = _pytree.tree_map
"""Call a function with each leaf, and return the results in the same structure."""

Store = _distributed_c10d.Store
"""The types of the stores that ranks meet at. `torch.distributed` has them without exporting them."""
HashStore = _distributed_c10d.HashStore
PrefixStore = _distributed_c10d.PrefixStore
TCPStore = _distributed_c10d.TCPStore
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class FunctionContext(Protocol):
    """The argument ``ctx`` of a `torch.autograd.Function`, whose class torch does not name. A subclass of this protocol
    states the attributes that forward sets for backward."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """See `torch.autograd.function.FunctionCtx`."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """See `torch.autograd.function.FunctionCtx`."""

    def set_materialize_grads(self, value: bool) -> None:
        """See `torch.autograd.function.FunctionCtx`."""


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
    """Return True for each group without rows, bool [E, 1, 1]; ``offsets`` [E] is the running sum of the sizes."""
    return (offsets.diff(prepend=offsets.new_zeros(1)) == 0).view(-1, 1, 1)


def uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return `torch.compiler.disable` of a function, with its types, which torch drops."""
    disabled: Callable[_Arguments, _Result] = torch.compiler.disable(function)
    return disabled


def _constant_in_graphs(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    constant: Callable[_Arguments, _Result] = torch.compiler.assume_constant_result(function)
    return constant


@_constant_in_graphs  # a compiled layer calls it, and its graph cannot contain the check
def gradients_of_empty_groups_are_undefined(device: torch.device) -> bool:
    """Return True if the grouped product [I, N] x [N, O] writes nothing for an empty group: CUTLASS before its pull
    request 2746, on compute capability 10.x (pytorch issue 172439). Multiplies once and reads the result."""
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
        self._kernels = kernels
        self._round_transposed = kernels.triton_fp8_rowwise_3d_transpose_rhs
        if has_triton():
            self._round_transposed = kernels.float8_rowwise.triton_fp8_rowwise_3d_transpose_rhs_fused_reduction

    def forms(self, weight_EOI: Tensor, for_backward: bool) -> tuple[Tensor, ...]:
        """See `GroupedKernels.forms`."""
        kernel = self._round_transposed if for_backward else self._kernels.triton_fp8_colwise_3d_scale_and_cast
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
    """Return the grouped product that rounds its operands to MXFP8, in the dtype of the first operand, with gradients,
    for GPUs of compute capability 10.x. torchao has it only as a private function of a prototype.

    Returns:
        A function of x [N, I], rows sorted by group, in multiples of 32; weight [E, O, I]; and offsets, int32 [E], the
        running sum of the group sizes.
    """
    with _tuned_once():
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

    def multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        product: Tensor = _to_mxfp8_then_scaled_grouped_mm(
            x, weight.transpose(1, 2), offsets, out_dtype=x.dtype, pad_token_groups_for_grouped_mm=False
        )
        return product

    return multiply


class _Kernel(Protocol):
    """A function of Triton."""

    arg_names: list[str]


@contextlib.contextmanager
def _tuned_once() -> Iterator[None]:
    """Let `triton.autotune` ignore keys that the kernel does not have as arguments, as before Triton 3.9, and the
    number of rows in kernels for groups of rows: with expert parallelism this number changes each step, and each change
    would time the configurations of such a kernel again. It times four of the 36 configurations: all of them took more
    than 90 s of a first step (H100)."""
    if not has_triton():
        yield
        return
    import triton

    autotune = triton.autotune

    def tune(configs: list[object], key: list[str], **options: object) -> Callable[[_Kernel], object]:
        def tuned(kernel: _Kernel) -> object:
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
    """Return FSDP2's shard of a weight that it gathers in FP8, as torchao wraps it; None for other weights.
    `DTensor.to_local` returns another object with the same memory."""
    shard = getattr(weight, "_local_tensor", None)
    return shard if hasattr(shard, "_precomputed_scale") else None


def give_fp8_scale(shard: Any, scale: Tensor | None) -> None:
    """Set the scale [] that gathers of such a shard use; None to let each gather compute it, with a collective.

    torchao sets it only for the layers of its own class, over all ranks that share a matrix, including ranks of tensor
    parallelism (`precompute_float8_dynamic_scale_for_fsdp`).
    """
    shard._precomputed_scale = scale


def mm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply BF16 matrices with a result in FP32. A GPU needs no FP32 copies of them; other devices do not have the
    operator, and torch does not have its derivative."""
    if a.device.type in ("cuda", "meta"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_mm_in_fp32(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of matrices to FP32 ``total``, in place; without a total, return the product. A GPU sums BF16
    products in FP32: no result in BF16 is written, read and rounded."""
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
"""Argument for fewer key heads than query heads, which torch 2.11 does not need. A constant, because compiled layers
read it."""


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, window: tuple[int, int]
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`."""
    out: Tensor = _varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window, **_GROUPED_HEADS)
    return out


class DispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` receives each operator in its context, including operators of compiled
    code."""

    # These two only state the types, which torch lacks. mypy does not see that `super()` leads to torch.
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __exit__(self, *error: object) -> None:
        TorchDispatchMode.__exit__(self, *error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions stay compiled in this mode: `torch.compile` calls this, and by default runs them uncompiled."""
        return True


VARLEN_OPERATOR = torch.ops.torch_attn._varlen_attn.default
"""The operator that `varlen_attn` calls; selective activation checkpointing saves its result."""


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp [heads, queries] of the flash kernel that `varlen_attn` calls, whose own gradient
    does not account for a log-sum-exp over further keys."""
    sizes = cu_seq_q, cu_seq_k, max_q, max_k, 0.0, causal
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, False)
    return out, log_sum


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `flash_attention`."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        log_sum,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        causal,
        no_dropout,
        torch.empty(0, dtype=torch.uint64, device=q.device),
    )
    return gradients


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `plain_attention` by torch's CPU kernel.

    Calls the operator directly: `F.scaled_dot_product_attention` would keep the mask of every call for backward.
    """
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=added_mask(mask, q.dtype).unsqueeze(1)
    )
    return out, log_sum


def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `plain_attention_backward` by torch's CPU kernel."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sum, 0.0, False, attn_mask=added_mask(mask, q.dtype).unsqueeze(1)
    )
    return gradients


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that attention adds to the scores: 0 where the mask is true, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def let_backward_run_twice() -> None:
    """Allow two backward passes through compiled layers, for pipeline schedules that split backward. By default torch
    overwrites saved tensors in the first pass and rejects a second one."""
    torch._functorch.config.donated_buffer = False


def publish_compiled_files_whole() -> None:
    """Let Inductor's C++ builds appear in its cache only when they are complete.

    By itself the compiler writes to the final name: a process that is killed leaves half a file there, which every
    later process takes. Precompiled headers get a folder of their own, because half a header cannot be recognized.
    """
    from torch._inductor import codecache, cpp_builder

    if hasattr(cpp_builder.CppBuilder.build, "__wrapped__"):
        return  # it is replaced already
    build = cpp_builder.CppBuilder.build

    @functools.wraps(build)
    def build_whole(builder: cpp_builder.CppBuilder) -> None:
        target = builder.get_target_file_path()
        output = builder._output
        if target not in output:
            build(builder)
            return
        partial = f"{target}.{os.getpid()}.{threading.get_ident()}.partial"
        builder._output = output.replace(target, partial)
        try:
            build(builder)
            Path(partial).replace(target)
        finally:
            builder._output = output
            Path(partial).unlink(missing_ok=True)

    cpp_builder.CppBuilder.build = build_whole  # type: ignore[method-assign, assignment]  # replaced on purpose
    headers = f"{codecache._HEADER_DIR}_glm46"
    codecache._HEADER_DIR = headers
    codecache._HEADER_LOCK_DIR = f"{headers}/locks"


def compiled_code_folders() -> set[Path]:
    """Return the folders of Inductor's cache on this machine."""
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return {Path(cache_dir()), Path(codecache._HEADER_DIR)}


def let_size_vary(tensor: Tensor, dim: int) -> None:
    """Let `torch.compile` make code for any size of a dimension. By default it makes code for one size, and again for
    any size of each tensor that it sees change."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def let_longest_run_vary() -> None:
    """Let `torch.compile` make code for any `max_q` and `max_k` of an attention layout. By default it makes code for a
    first number, and again for any when it changes. Integers can be marked only by name."""
    config = torch.compiler.config
    names = r".*\.max_[qk]$"
    if names not in config.dynamic_sources.split(","):
        config.dynamic_sources = ",".join(filter(None, [config.dynamic_sources, names]))


def let_layers_compile(times: int) -> None:
    """Let `torch.compile` compile one function this many times. By default a whole graph raises after 8 times."""
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
            keeps. A recomputation finds it by the number of the call, so rows that it skips are sent by another
            operator.
    """
    if is_kept:
        return torch.ops._c10d_functional.all_to_all_single(rows, receive, send, group.group_name), None
    arriving = rows.new_empty(sum(receive), *rows.shape[1:])
    return arriving, dist.all_to_all_single(arriving, rows, receive, send, group=group, async_op=True)


def wait_for_exchange(arriving: Tensor, work: dist.Work | None) -> Tensor:
    """Wait for the rows of `start_exchange`, and return them. On a GPU the stream waits, not the host."""
    if work is None:
        rows: Tensor = torch.ops._c10d_functional.wait_tensor(arriving)
        return rows
    work.wait()
    return arriving.view_as(arriving)


def gather_in_graph(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors of all ranks along a dimension, by operators of a compiled graph. Inductor may join them
    with the product that reads them (`_micro_pipeline_tp`). Differentiable. torch has such operators in a private
    module."""
    gathered: Tensor = _functional_collectives.all_gather_tensor_autograd(x, dim, group)
    return gathered


def scatter_sum_in_graph(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and return this rank's part of the sum along a dimension; see `gather_in_graph`."""
    part: Tensor = _functional_collectives.reduce_scatter_tensor_autograd(x, "sum", dim, group)
    return part


def sum_in_graph(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, without a gradient; see `gather_in_graph`."""
    total: Tensor = _functional_collectives.all_reduce(x, "sum", group)
    return total


def overlap_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Let inductor run the collectives of a group in the products next to them, through memory that its GPUs share.

    torch has the switch as a private key only. The group is made known to symmetric memory: torch 2.11 raises without
    it, and 2.14 calls it deprecated.
    """
    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


EXCHANGE_OPERATOR = torch.ops._c10d_functional.all_to_all_single.default
"""The operator of `start_exchange`, as a dispatch mode sees it."""


def wrap_local(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """Return a DTensor over ``local`` with the mesh and placements of ``like``, on the device of ``local``.

    `DTensor.from_local` would move a host tensor to the GPU of the mesh. FSDP2's offload calls the constructor too.

    Args:
        shape: shape of the whole tensor, which is contiguous.
    """
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def norms_in_fp32(tensors: list[Tensor]) -> list[Tensor] | tuple[Tensor, ...]:
    """Return the Euclidean norm of each tensor, in few kernels on a GPU. `get_total_norm` rounds to the type of the
    tensors."""
    return torch._foreach_norm(tensors, 2, dtype=torch.float32)


def multiply_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar on the CPU, in one kernel on a GPU for each dtype. Devices may differ."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same in by_kind.values():  # a mixed list is multiplied one by one
        torch._foreach_mul_(same, factor)


def clone_store() -> Store:
    """Return a second connection to the store of the default process group, for use in another thread. The store has no
    public name, and the types of torch 2.13 do not have its method."""
    clone: Store = cast(Any, dist.distributed_c10d._get_default_store()).clone()
    return clone


def flight_recorders() -> dict[str, str]:
    """Return the collectives that this process has started, as JSON, by backend: gloo and NCCL have separate recorders,
    in a private module. TORCH_FR_BUFFER_SIZE turns them on."""
    dumps = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    recorders = {backend: getattr(torch._C._distributed_c10d, name, None) for backend, name in dumps.items()}
    traces = {backend: dump() for backend, dump in recorders.items() if dump is not None}
    return {backend: trace.decode() if isinstance(trace, bytes) else trace for backend, trace in traces.items()}


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that is a range of this name in the trace of a recording profiler, and costs nothing without
    one. torch has no public name for the state of the profiler."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()


def record_allocations(is_on: bool) -> None:
    """Keep the last 100,000 allocations and frees of GPU memory with their Python stacks, or stop it. PyTorch documents
    this function and the next one with their private names."""
    torch.cuda.memory._record_memory_history("all" if is_on else None, stacks="python", max_entries=100_000)


def write_memory_snapshot(path: Path) -> None:
    """Write the recorded allocations of GPU memory for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def can_pack() -> bool:
    """Return True if this torch has oneDNN, which `pack_weight` needs."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_weight(weight: Tensor) -> Tensor:
    """Copy a contiguous FP32 weight [O, I] on the CPU into oneDNN's blocked layout.

    Uses private operators of torch's compiler back end: the public `torch.utils.mkldnn` needs converted inputs too.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` with a weight from `pack_weight`."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


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
