"""Tensor parallelism in compiled layers: inductor finds each collective beside its product."""

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import tensor
from glm46.compute.parallelize.plan import initialise
from glm46.config.presets import PRESETS

RANKS = 2
NAMES = "all_gather_into_tensor", "reduce_scatter_tensor"
SHAPE = PRESETS["debug"].model_copy(
    update=dict(num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=0, num_key_value_heads=RANKS)
)


@pytest.fixture
def layers():
    """A dense layer and one with experts of the first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with torch.device("meta"):
        model = Transformer(SHAPE)
    tensor.apply(model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
    model.to_empty(device="cpu")
    initialise(model, 0)
    yield list(model.layers.values())
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", [0, 1], ids=["dense", "experts"])
def test_inductor_finds_each_collective_beside_its_product(layers, kind, rows):
    """Attention gathers before q, k and v and sums after the output projection, a feed-forward network likewise; in
    backward gathers and sums change places. Judged by inductor's own pass."""
    found = []

    def count(graph: torch.fx.GraphModule, _inputs: list) -> object:
        gathers = micro_pipeline_tp.find_all_gather_patterns(graph.graph)
        sums = micro_pipeline_tp.find_reduce_scatter_patterns(graph.graph)
        targets = [str(node.target) for node in graph.graph.nodes]
        found.append((len(gathers), len(sums), *(sum(name in target for target in targets) for name in NAMES)))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    layer = torch.compile(layers[kind].forward, backend=aot_autograd(fw_compiler=count), fullgraph=True)
    hidden = torch.randn(rows, 16 // RANKS, SHAPE.hidden_size, requires_grad=True)
    positions = torch.arange(16).expand(rows, -1)
    output, _ = layer(hidden, rotary_tables(positions, SHAPE, torch.float32), None, None, RoutingOptions())
    output.sum().backward()
    # No collective is left without a product.
    assert found == [(2, 2, 2, 2), (2, 2, 2, 2)]
