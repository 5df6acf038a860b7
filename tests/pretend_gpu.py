"""A device without hardware: tensors say that they are on it, and their values are in host memory.

An operator with operands on the device and on the CPU that CUDA refuses, and a constructor on the device that is given
CPU tensors, raise here too. What runs is the code for devices other than the CPU: copies, layouts of attention,
collectives of device tensors, FSDP2 with streams. Kernels are those of the CPU. Reads that make a host wait for a GPU
are counted.

`install` changes torch for the rest of the process: call it in a forked rank, before the first backward.
"""

import contextlib
import inspect
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as fsdp_collectives
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_param_group
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import glm46
from glm46.compute.distributed import process
from glm46.compute.model import attention_runs
from glm46.compute.model.attention_runs import _block_attention_backward as block_attention_backward
from glm46.compute.model.attention_runs import block_attention

NAME = "pretend"

_PACKAGE = f"{Path(glm46.__file__).parent}/"

waits: list[str] = []
"""What made the host wait: the operator, and the line of the package that called it."""

_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Take indices on the CPU, and wait for them."""
_NO_SCALARS = {"aten::stack", "aten::cat", "aten::gather", "aten::index_select", "aten::equal"}
"""Others take CPU tensors of no dimension beside tensors on a GPU."""
_SIZED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::equal"}


class PretendTensor(Tensor):
    """A tensor on the device; ``value`` is on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor) -> "PretendTensor":
        return Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            layout=value.layout, device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, value: Tensor):
        self.value = value

    def __repr__(self, **_: object) -> str:
        return f"PretendTensor({self.value})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """For constructors, which have no tensor on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # shapes alone, which DTensor asks for
        if any(kind not in (PretendTensor, Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensor comes first, and calls again with its local tensors
        return _run(func, args, kwargs or {})


def _is_on(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator on values, which it refuses if CUDA does."""
    name, device = func._schema.name, kwargs.get("device")
    if func.namespace in ("glm46", "torch_attn"):  # its code, and not what it is for the CPU
        with _Mode():
            return OPDEFS[name]._init_fn(*args, **kwargs)
    if name == "aten::is_pinned":
        return False
    if name == "aten::_pin_memory":
        return args[0]
    tensors = _tensors((args, kwargs))
    operands = [x for x in tensors if isinstance(x, PretendTensor)]
    if operands and name not in _COPIES:
        _refuse(func, args, tensors)
    goes_to_device = _is_on(device) if device is not None else bool(operands)
    if name == "aten::copy_":
        goes_to_device = isinstance(args[0], PretendTensor)
    elif name == "aten::_local_scalar_dense":
        goes_to_device = False
    _count(name, args, kwargs, bool(operands), goes_to_device)
    values, options = tree_map(lambda x: x.value if isinstance(x, PretendTensor) else x, (args, kwargs))
    options.pop("pin_memory", None)
    if _is_on(device):
        options["device"] = torch.device("cpu")
    out = _KERNELS.get(name, func)(*values, **options)
    if not goes_to_device:
        return out
    itself = {id(x.value): x for x in operands}  # what an operator changes in place is its result

    def on_device(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, PretendTensor):
            return x
        return itself[id(x)] if id(x) in itself else PretendTensor(x)

    return tree_map(on_device, out)


def _flash_attention(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, dropout, causal, *_, **options):
    """`aten::_flash_attention_forward` in FP32, of the operands that the kernel takes."""
    window, causal = _window(causal, **options)
    _require_kernel(q, k, v, cu_seq_q, cu_seq_k)
    out, log_sum = block_attention._init_fn(q.float(), k.float(), v.float(), cu_seq_q, cu_seq_k, window, causal)
    state = torch.empty(2, dtype=torch.uint64)
    return out.to(q.dtype), log_sum, state, state[:0], q[:0]


def _flash_attention_backward(
    grad, q, k, v, out, log_sum, cu_seq_q, cu_seq_k, max_q, max_k, dropout, causal, *_, **options
):
    window, causal = _window(causal, **options)
    _require_kernel(grad, q, k, v, cu_seq_q, cu_seq_k)
    wide = (x.float() for x in (grad, q, k, v, out))
    found = block_attention_backward._init_fn(*wide, log_sum, cu_seq_q, cu_seq_k, window, causal)
    return tuple(x.to(q.dtype) for x in found)


def _window(causal: bool, window_size_left: int | None = None, window_size_right: int | None = None, **_: object):
    """Keys that a query sees at most, None for all, and whether it sees no later ones."""
    left = -1 if window_size_left is None else window_size_left
    return (None if left < 0 else left + 1), causal or window_size_right == 0


def _require_kernel(*tensors: Tensor) -> None:
    for x in tensors[:-2]:
        assert x.dtype in (torch.bfloat16, torch.float16) and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    assert all(x.dtype == torch.int32 for x in tensors[-2:])


_KERNELS = {
    "aten::_flash_attention_forward": _flash_attention,
    "aten::_flash_attention_backward": _flash_attention_backward,
}


def _refuse(func: Any, args: tuple, tensors: list[Tensor]) -> None:
    """Raise RuntimeError if an operator with a tensor on the device has one on the CPU that CUDA would not take."""
    name = func._schema.name
    is_changed = (of.alias_info is not None and of.alias_info.is_write for of in func._schema.arguments)
    changed = [id(x) for value, writes in zip(args, is_changed, strict=False) if writes for x in _tensors(value)]
    counted = _tensors([args[0], *args[2:]]) if name in _INDEXED else tensors
    on_cpu = (x for x in counted if not isinstance(x, PretendTensor))
    wrong = [x for x in on_cpu if x.dim() or name in _NO_SCALARS or id(x) in changed]
    if wrong:
        raise RuntimeError(f"{func}: operands on a GPU and on the CPU, {[tuple(x.shape) for x in wrong]}")


def _count(name: str, args: tuple, kwargs: dict, on_device: bool, goes_to_device: bool) -> None:
    """Note what makes the host wait: a value that it reads, a size that depends on values, a copy from or to the host
    that is not asynchronous."""
    reads = name in _COPIES and on_device and not goes_to_device
    source = args[1] if name == "aten::copy_" else args[0] if name == "aten::_to_copy" else None
    reads |= goes_to_device and source is not None and not isinstance(source, PretendTensor)
    by_mask = name in _INDEXED and any(
        x is not None and (x.dtype == torch.bool or x.device.type == "cpu") for x in args[1]
    )
    if (reads and not (kwargs.get("non_blocking") or args[2:3] == (True,))) or (
        on_device and (name in _SIZED_BY_VALUES or by_mask)
    ):
        _note(name)


def _note(name: str) -> None:
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    waits.append(f"{name} {frame and frame.f_code.co_filename}:{frame and frame.f_lineno}")


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class _Stream:
    """All work is done when it is called."""

    def __init__(self, *_: object, **__: object):
        pass

    def wait_stream(self, other: "_Stream") -> None:
        pass

    def wait_event(self, event: "_Event") -> None:
        pass

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, *_: object, **__: object):
        self._time = time.perf_counter()

    def record(self, stream: _Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end._time - self._time) * 1e3


def _device_module() -> types.SimpleNamespace:
    """What FSDP2 and DeviceMesh call of `torch.cuda`."""
    stream = _Stream()
    return types.SimpleNamespace(
        Stream=_Stream,
        Event=_Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda device=None: stream,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: None,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )


def install() -> None:
    """Let `join` give this process the device, beside a CPU that is torch's own."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_device_module())
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes values on the CPU, and then copies them
    _replace(process, "Process", lambda real, rank, size, device: real(rank, size, torch.device(NAME, 0)))
    _replace(dist, "init_process_group", lambda real, backend, **options: real(f"cpu:gloo,{NAME}:gloo", **options))
    _replace(Tensor, "tolist", _to_list)
    _replace(Tensor, "pin_memory", lambda real, x: x)
    _replace(Tensor, "record_stream", lambda real, x, stream: None)
    for module in (fsdp_param, fsdp_param_group):  # FSDP2 frees gathered weights in their storage
        for name in ("alloc_storage", "free_storage"):
            if hasattr(module, name):
                _replace(module, name, lambda real, x: real(_value(x)))
    fsdp_collectives.record_grad_output_stream = lambda buffer, stream: None  # torch 2.15
    _replace(attention_runs, "has_flash_kernel", lambda real, device, dtype: real(torch.device("meta"), dtype))
    torch.inference_mode.__enter__ = _enter_inference
    _Mode().__enter__()


def _enter_inference(self: torch.inference_mode) -> None:
    """Without gradients, but with versions: tensors of a subclass that have none cannot be changed in place."""
    self._inference_mode_context = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)
    self._inference_mode_context.__enter__()


def _to_list(real: Callable, x: Tensor) -> Any:
    if isinstance(x, PretendTensor):
        _note("tolist")
    return real(_value(x))


def _value(x: Tensor) -> Tensor:
    return x.value if isinstance(x, PretendTensor) else x


def _replace(owner: Any, name: str, by: Any) -> None:
    real = inspect.getattr_static(owner, name)
    setattr(owner, name, lambda *args, **options: by(real, *args, **options))
