"""Compile the parts of a step for an H100 on a machine without a GPU, and count kernels and bytes.

    python scripts/measure/compile_for_h100.py [--json] [PART ...]

AOTAutograd traces a part on the meta device, where the branches for GPUs are taken and backward runs. The graphs are
moved to a CUDA device of fake tensors, Inductor lowers them, and Triton compiles each variant of each kernel to a cubin
for compute capability 9.0. It ends there: nothing is run, no variant is chosen among those that Inductor would time,
and kernels of libraries (cuBLAS, flash attention, grouped products, sorts) are calls whose code is not seen.

Needs Triton and a torch that is built for CUDA. It changes torch for the rest of the process.
"""

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.compute.model.attention import Attention
from glm46.compute.model.cross_entropy import HeadOutput, summed_loss, token_logprobs
from glm46.compute.model.layers import FeedForward
from glm46.compute.model.quantised_weights import converted
from glm46.compute.optim.newton_schulz import orthogonalize
from glm46.compute.parallelize.float8 import linear_product
from glm46.config.float8 import Float8Config
from glm46.config.presets import PRESETS
from scripts.measure.count_kernels import layer, layer_inputs

AIR, TOKENS = PRESETS["GLM-4.5-Air"], 4096
GPU, TARGET = torch.device("cuda", 0), GPUTarget("cuda", 90, 32)
H100 = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_multiprocessor=233472, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20, is_integrated=False, pci_bus_id=0, gcnArchName="", uuid="",
)  # fmt: skip
"""Its properties as `torch.cuda.get_device_properties` gives them; Inductor chooses variants by them."""
_DRIVER = types.SimpleNamespace(
    get_current_target=lambda: TARGET, get_current_device=lambda: 0, is_active=lambda: True,
    get_current_stream=lambda *_: 0, get_active_torch_device=lambda: GPU,
)  # fmt: skip
_CUDA = {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H100,
    "get_device_capability": (9, 0), "set_device": None, "synchronize": None, "_lazy_init": None,
}  # fmt: skip
_INTERFACE = {"get_device_properties": H100, "get_compute_capability": 90, "is_available": True}


def _loss(form: Callable[..., HeadOutput]) -> Callable[[], Tensor]:
    with torch.device("meta"):
        hidden = torch.empty(TOKENS, AIR.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(AIR.vocab_size, AIR.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(TOKENS, dtype=torch.int64)

    def run() -> Tensor:
        output = form(hidden, weight, labels)
        return output.loss if output.logprobs is None else output.logprobs.sum() + output.entropy.sum()

    return run


def _of(module: Callable[[], nn.Module], inputs: int) -> Callable[[], Tensor]:
    """A module on the meta device, applied to the first of `layer_inputs`."""
    with torch.device("meta"):
        made = module()
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    given = layer_inputs(AIR, TOKENS)[:inputs]
    return lambda: made(*given)


def _in_fp8() -> nn.Module:
    network = FeedForward(AIR.hidden_size, AIR.intermediate_size)
    for linear in network.children():
        linear.product = linear_product(Float8Config(recipe_name="rowwise"))
    return network


def _conversion() -> Callable[[], Tensor]:
    """Of eight experts' gate and up matrices in INT4."""
    groups = 8 * 2 * AIR.moe_intermediate_size * AIR.hidden_size // 32
    with torch.device("meta"):
        packed, scales = torch.empty(groups, 16, dtype=torch.uint8), torch.empty(groups, dtype=torch.int16)
        levels, shifts = torch.empty(16), torch.empty(2, dtype=torch.uint8)
    return lambda: converted(packed, scales, levels, shifts, torch.bfloat16)


def _updates() -> Callable[[], Tensor]:
    gradients = torch.empty(8, AIR.moe_intermediate_size, AIR.hidden_size, dtype=torch.bfloat16, device="meta")
    return lambda: orthogonalize(gradients, 5, torch.bfloat16)


PARTS: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "MoE layer": lambda: layer(AIR, TOKENS, True)[1],
    "dense layer": lambda: layer(AIR, TOKENS, True, is_dense=True)[1],
    "dense network in FP8": lambda: _of(_in_fp8, 1),
    "attention": lambda: _of(lambda: Attention(AIR), 3),
    "summed loss": lambda: _loss(summed_loss),
    "log-probabilities": lambda: _loss(partial(token_logprobs, entropy=True)),
    "Newton-Schulz": _updates,
    "weights in 4 bits": _conversion,
}
"""Parts of a step of GLM-4.5-Air in BF16, each with what makes a function of it, of tensors on the meta device: layers
and attention of 4,096 tokens in four documents, both forms of the head, Muon's products of eight experts, and the
conversion of a frozen base of eight."""


@dataclass
class Compiled:
    """The code of one graph."""

    kernels: int
    """Different kernels of Triton."""
    launches: int
    """Of these kernels, in one pass."""
    cubins: int
    """Variants of the kernels, all of them compiled."""
    registers: int
    """Most of a thread."""
    spilled: int
    """Bytes of stack and local memory of all variants: registers that did not suffice."""
    kilobytes: float
    """Read and written, per token, in kernels of Triton."""
    calls: dict[str, int]
    """Of libraries and of operators that Inductor does not compile."""


def compile_part(name: str) -> dict[str, Compiled]:
    """Forward and, of a part with gradients, backward."""
    graphs: dict[str, tuple[fx.GraphModule, list]] = {}

    def keep(direction: str) -> Callable:
        def compiler(module: fx.GraphModule, inputs: list) -> Callable:
            graphs[direction] = copy.deepcopy(module), inputs
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with mock.patch("torch.cuda.is_available", lambda: False):  # Dynamo would ask the driver
        y = torch.compile(PARTS[name](), backend=backend, fullgraph=True)()
        if y.requires_grad:
            y.backward(torch.empty_like(y))
    with _h100():
        return {direction: _lower(*graph, direction == "backward") for direction, graph in graphs.items()}


@contextmanager
def _h100() -> Iterator[None]:
    """What Inductor and Triton ask about the device has the answers of an H100."""
    interface = device_interface.CudaInterface
    answers = [(torch.cuda, name, value) for name, value in _CUDA.items()]
    answers += [(interface, name, value) for name, value in _INTERFACE.items()]
    answers += [(interface.Worker, "get_device_properties", H100)]
    triton.runtime.driver.set_active(_DRIVER)
    torch.utils._triton.has_triton.cache_clear()
    with ExitStack() as changes, config.patch(compile_threads=1):
        for owner, name, value in answers:
            changes.enter_context(mock.patch.object(owner, name, staticmethod(lambda *_, value=value: value)))
        changes.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        yield


def _lower(module: fx.GraphModule, traced: list, is_backward: bool) -> Compiled:
    """The code of a graph that was traced on the meta device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in module.graph.nodes:
        node.args, node.kwargs = tree_map(_on_gpu, (node.args, node.kwargs))
    with mode:
        inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU) if isinstance(x, Tensor) else x
            for x in traced
        ]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.no_grad():
        post_grad_passes(module, is_inference=False)
        lowering = GraphLowering(module, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            source = lowering.codegen()[0].value
            own = [node for node in lowering.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
            moved = sum(node.get_read_write_buffers_sizes() for node in own)
    kernels = re.findall(r"^(triton_\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", source, re.M | re.S)
    called = source[source.rindex("def call(") :]
    with tempfile.TemporaryDirectory() as folder:
        usage = [used for name, text in kernels for used in _compile_kernel(name, text, Path(folder))]
    return Compiled(
        kernels=len(kernels),
        launches=called.count(".run("),
        cubins=len(usage),
        registers=max((registers for registers, _ in usage), default=0),
        spilled=sum(spilled for _, spilled in usage),
        kilobytes=moved / 1024 / TOKENS,
        calls=dict(Counter(re.findall(r"(?:extern_kernels|torch\.ops\.\w+|aten)\.([\w.]+)\(", called))),
    )


def _on_gpu(x: object) -> object:
    return GPU if x == torch.device("meta") else x


def _compile_kernel(name: str, source: str, folder: Path) -> list[tuple[int, int]]:
    """Registers, and bytes of stack and local memory, of each variant of a kernel."""
    file = folder / f"{name}.py"
    file.write_text(source)  # Triton reads the source of a function from its file
    space: dict = {"__name__": name, "__file__": str(file)}
    exec(compile(source, str(file), "exec"), space)
    tuner, usage = space[name], []
    for variant in tuner.configs:
        about = tuner._create_compile_meta(variant)
        code = triton.compiler.ASTSource(tuner.fn, about["signature"], about["constants"], about["configs"][0])
        made = triton.compile(code, target=TARGET, options=tuner._create_compile_options(variant, about))
        cubin = folder / f"{name}-{len(usage)}.cubin"
        cubin.write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout + said.stderr)}
        usage.append((used["REG"], used["STACK"] + used["LOCAL"]))
    return usage


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; absent: all")
    parser.add_argument("--json", action="store_true", help="one object for each part, as it is done")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"{unknown[0]}: no such part; there are {', '.join(PARTS)}")
    if not arguments.json:
        print("| part | kernels | launches | cubins | registers | spilled bytes | KB per token | calls |")
        print("|---|---|---|---|---|---|---|---|")
    for name in arguments.parts or PARTS:
        found = compile_part(name)
        if arguments.json:
            print(json.dumps({"part": name} | {key: asdict(value) for key, value in found.items()}), flush=True)
            continue
        for direction, code in found.items():
            figures = code.kernels, code.launches, code.cubins, code.registers, code.spilled, f"{code.kilobytes:,.0f}"
            calls = ", ".join(f"{call} {count}" for call, count in code.calls.items())
            print("| " + " | ".join(map(str, (f"{name}, {direction}", *figures, calls))) + " |", flush=True)


if __name__ == "__main__":
    main()
