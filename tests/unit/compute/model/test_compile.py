"""torch.compile of a block: the same numbers, one graph, and no second compilation.

The code that Inductor and Triton make of a step for an H100, on a machine that has none.
"""

import json
import shutil
import subprocess
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.block import TransformerBlock
from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import compile as layer_compile
from glm46.config.model import RopeScalingConfig

# Inductor needs a C++ compiler for CPU code; without one the graph is still captured and its derivative traced.
BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


LINEAR = RopeScalingConfig(rope_type="linear", factor=2.0)
YARN = RopeScalingConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)


def inputs(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 24, shape.hidden_size, generator=generator, requires_grad=True)
    lengths = [[12, 8, 4], [3, 5, 6, 3, 7], [10, 10, 4], [2] * 12][seed]  # runs of other numbers and lengths
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, 24)
    positions = torch.arange(24).expand(2, 24)
    rope = rotary_tables(positions, shape, torch.float32)
    layout = attention_layout(documents, (2, 24), shape.sliding_window)
    temperature = torch.tensor(1.0 + seed)  # a warm-up changes it every step
    options = RoutingOptions(temperature=temperature, capacity_factor=1.2, balance_loss=True, z_loss=True)
    return x, rope, layout, documents < len(lengths) - 1, options


def run(block, arguments):
    """Output, statistics and all gradients."""
    block.zero_grad()
    y, statistics, *_ = block(*arguments)
    total = y.square().sum()
    if statistics is not None:
        total = total + statistics.aux_losses.sum()
    total.backward()
    grads = {name: p.grad.clone() for name, p in block.named_parameters()}
    return y.detach(), statistics, grads | {"x": arguments[0].grad}


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "experts"])
@pytest.mark.slow
def test_compiled_block_equals_eager_without_break_or_recompilation(
    is_dense, tiny_shape, random_model, relative_error, monkeypatch
):
    # Inductor's dense layers are in the layout fsdp-full_ac-compiled-inductor.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager" if is_dense else BACKEND))
    shape = tiny_shape(num_hidden_layers=2, first_k_dense_replace=1)
    model, with_compiled = random_model(shape), random_model(shape)
    torch._dynamo.reset()
    layer_compile.apply(with_compiled, whole_graphs=True)  # a graph break is an error
    block, compiled = (one.layers["0" if is_dense else "1"] for one in (model, with_compiled))
    assert isinstance(block, TransformerBlock) and block.is_dense == is_dense
    for call in range(4):
        y, statistics, grads = run(block, inputs(shape, call))
        with torch.compiler.set_stance("default" if call == 0 else "fail_on_recompile"):
            got_y, got_statistics, got_grads = run(compiled, inputs(shape, call))
        # FP32; fused kernels sum in another order.
        assert relative_error(got_y, y) < 1e-6
        if not is_dense:
            assert torch.equal(got_statistics.tokens_per_expert, statistics.tokens_per_expert)
            assert got_statistics.overflow == statistics.overflow > 0
            assert relative_error(got_statistics.aux_losses, statistics.aux_losses) < 1e-6
        whole = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
        for name in grads:
            assert relative_error(got_grads[name], grads[name], 1e-4 * whole) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dense_layers", "sizes"), [
    ("eager", 0, [(1, 72), (1, 96), (1, 48)]),  # guards of the code, without those of its derivative
    ("aot_eager", 1, [(1, 72), (1, 96), (1, 48), (1, 120)]), ("aot_eager", 1, [(3, 24), (5, 24), (2, 24), (4, 24)]),
])  # fmt: skip
def test_rollouts_compile_no_layer_again(
    backend, dense_layers, sizes, tiny_shape, random_model, relative_error, monkeypatch
):
    """Each has other numbers of tokens or rows, documents and shared prompts, which `[rl]` first computes without
    gradient."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    shape = tiny_shape(
        num_hidden_layers=dense_layers + 1, first_k_dense_replace=dense_layers, num_nextn_predict_layers=0
    )
    model, compiled = random_model(shape), random_model(shape)
    torch._dynamo.reset()
    layer_compile.apply(compiled, whole_graphs=True, sizes_vary=True)
    for call, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(call)
        ids = torch.randint(shape.vocab_size, size, generator=generator)
        documents = torch.randint(3, 6, size, generator=generator).sort(1).values - 3
        documents[0] = torch.arange(3).repeat_interleave(size[1] // 3)
        layout = attention_layout(documents, size, None, prefix_ids=torch.where(documents > 0, 0, -1))
        given = {"input_ids": ids, "labels": ids, "layout": layout, "is_real": documents < 2}
        with torch.compiler.set_stance("default" if call == 0 else "fail_on_recompile"):
            with torch.no_grad():
                got = compiled(**given).loss
            compiled(**given).loss.backward()
        want = model(**given).loss
        want.backward()
        assert relative_error(got, want.detach()) < 1e-6
    for (name, one), other in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert one.grad is None or relative_error(other.grad, one.grad) < 1e-4, name


@pytest.mark.slow
def test_documents_of_other_lengths_compile_no_layer_of_a_gpu_again(tiny_shape, monkeypatch):
    """On the meta device in BF16, where layers call the flash kernel. It takes the length of the longest document as an
    integer, which the core of a CPU does not need."""
    counted = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Transformer(
            tiny_shape(num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=0)
        ).bfloat16()
        ids = torch.zeros(1, 512, dtype=torch.int64)
    layer_compile.apply(model, whole_graphs=True)
    for lengths in ([128] * 4, [129, 383], [100, 156, 256], [512], [1] * 512, [320, 192]):
        documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
        layout = attention_layout(documents, (1, 512), None).to(torch.device("meta"))
        model(input_ids=ids, labels=ids, layout=layout).loss.backward()
        assert counted.frame_count == 2, lengths  # a dense layer and one with experts


@pytest.mark.slow
def test_a_stage_of_text_compiles_no_layer_again_for_its_rope_scaling(tiny_shape, random_model, relative_error):
    """A RoPE scaling is only other tables. A window is compiled twice: when it comes, and with another value."""
    shape = tiny_shape(num_hidden_layers=2, first_k_dense_replace=1)
    block = random_model(shape).layers["0"]
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    stages = [(None, None), (None, LINEAR), (None, YARN), (5, None), (7, YARN), (9, LINEAR), (None, YARN), (3, None)]
    for stage, (window, scaling) in enumerate(stages):
        of_stage = shape.model_copy(update={"sliding_window": window, "rope_scaling": scaling})
        may_compile = stage < 2 or window in (5, 7)  # the second stage has other numbers of documents
        with torch.compiler.set_stance("default" if may_compile else "fail_on_recompile"):
            got, *_ = compiled(*inputs(of_stage, stage % 4))
        assert relative_error(got, block(*inputs(of_stage, stage % 4))[0]) < 1e-6


ROOT = Path(__file__).resolve().parents[4]
RELEASE = "2.14."
"""The figures are of this release of torch, with its Triton; another one joins other operations in a kernel."""
# Kernels of Triton, their launches, KB per token that they move, calls of libraries and of operators without code of
# Inductor, and bytes of spilled registers. A change that lowers a number writes the lower one here; none may raise one.
# Runs compile layers; the head and Muon's products run eager there, and are compiled here to see that they can be.
MOST = {
    ("MoE layer", "forward"): (15, 15, 337, 15, 0), ("MoE layer", "backward"): (20, 23, 604, 21, 0),
    ("dense layer", "forward"): (6, 6, 188, 8, 0), ("dense layer", "backward"): (10, 13, 340, 15, 0),
    ("dense network in FP8", "forward"): (6, 7, 178, 3, 0), ("dense network in FP8", "backward"): (15, 20, 690, 6, 8),
    ("attention", "forward"): (2, 2, 52, 5, 0), ("attention", "backward"): (6, 8, 112, 9, 0),
    ("summed loss", "forward"): (4, 4, 3288, 2, 0), ("summed loss", "backward"): (2, 2, 904, 1, 0),
    ("log-probabilities", "forward"): (2, 3, 592, 2, 0), ("log-probabilities", "backward"): (9, 10, 3288, 6, 0),
    ("Newton-Schulz", "forward"): (3, 3, 66, 15, 0), ("weights in 4 bits", "forward"): (1, 1, 56.3, 0, 0),
}  # fmt: skip
PARTS = dict.fromkeys(part for part, _ in MOST)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not built for CUDA")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_step_compiles_for_an_h100(part, warm_python):
    command = [warm_python, ROOT / "scripts/measure/compile_for_h100.py", "--json", part]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.pop("part") == part and found.keys() == {of for name, of in MOST if name == part}
    for direction, code in found.items():
        # Operators that would copy a tensor, or write it row by row, where Inductor's own code joins both with others.
        assert not {call for call in code["calls"] if call.startswith(("copy_", "clone", "index_put", "_to_copy"))}
        assert code["cubins"] >= code["kernels"] > 0
        if torch.__version__.startswith(RELEASE):
            figures = code["kernels"], code["launches"], code["kilobytes"], sum(code["calls"].values()), code["spilled"]
            most = MOST[part, direction]
            assert all(one <= limit + 0.5 for one, limit in zip(figures, most, strict=True)), (direction, figures)
            assert all(one >= 0.99 * limit - 0.5 for one, limit in zip(figures, most, strict=True)), f"lower {figures}"
