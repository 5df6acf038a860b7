"""Kernels of one MoE layer and the bytes that they move, forward and backward in BF16, counted on the meta device.

    python scripts/measure/count_kernels.py --flavor GLM-4.5-Air --tokens 4096

*Eager*: each operator reads its inputs from memory and writes its results. *Chained*: the graphs that `torch.compile`
makes, in which a chain of operations is one kernel (see `_chains`). A kernel reads a tensor once, however often it
needs its rows; caches, FSDP2 and the optimizer are left out. TorchTitan's MoE layer is counted too where it is
installed.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.block import TransformerBlock
from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import RoutingOptions
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from glm46.compute.parallelize.two_level import TwoLevelDispatcher
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.run.plan import places_of_token
from scripts.measure.titan import TitanMoE

KINDS = {
    "experts": "grouped_mm grouped_outer _grouped_mm",
    "products": "mm addmm bmm",
    "attention": "_varlen_attn _varlen_attn_backward",
    "rows by index": "index index_select index_put index_put_ gather _embedding_bag _embedding_bag_forward_only "
    "deterministic_scatter_add",
    "copies and casts": "_to_copy convert_element_type clone copy_ cat",
    "reductions": "sum mean",
    "exchange": "all_to_all_single alltoall_base_",
}
"""Operators by kind, without namespace and overload."""
REST = "element by element"
"""The kind of all other operators, and of chains of several operations."""
_KIND = {operator: kind for kind, operators in KINDS.items() for operator in operators.split()}
_CHAINED = {"index", "index_select", "gather", "cat", "clone", "copy", "slice_scatter"}
"""Operators without torch's tag "pointwise" that are computed element by element."""
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "wait_tensor"}


@dataclass
class Count:
    """What a layer does in forward and backward."""

    kernels: int = 0
    bytes: Counter = field(default_factory=Counter)
    """By kind."""
    largest: int = 0
    """Bytes of the largest tensor, but for the gradients of the experts' weights."""
    host_copies: int = 0
    """Copies from the device to the host, which waits for each."""

    def add(self, names: list[str], read: Iterable[int], written: Iterable[int]) -> None:
        """One kernel of these operators, with the bytes of the tensors that it reads and writes."""
        self.kernels += 1
        self.bytes[_KIND.get(names[0], REST) if len(names) == 1 else REST] += sum(read) + sum(written)
        if names != ["grouped_outer"]:
            self.largest = max([self.largest, *written])


def _bytes(x: Tensor) -> int:
    """Of the elements in memory: an expanded tensor has each once."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * x.element_size()


def _name(target: object, result: object = None) -> str:
    """Of an operator. The weight gradient of torch's grouped product has the name of ours."""
    name = getattr(target, "__name__", "").split(".")[0]
    return "grouped_outer" if name == "_grouped_mm" and isinstance(result, Tensor) and result.dim() == 3 else name


class EagerCount(TorchDispatchMode):
    """Counts operators as they are called."""

    def __init__(self):
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        outputs = {argument.name for argument in function._schema.arguments if argument.is_out}
        inputs = {name: value for name, value in keywords.items() if name not in outputs}
        read = [x for x in tree_leaves((arguments, inputs)) if isinstance(x, Tensor)]
        if _name(function) == "copy_":  # it only writes what it copies to
            read = read[1:]
        if _name(function).startswith("new_") or _name(function).endswith("s_like"):  # zeros or ones
            read = []
        if _name(function) == "_to_copy" and str(keywords.get("device")) == "cpu" and read[0].is_meta:
            self.count.host_copies += 1
            return self.on_host(read[0])
        result = function(*arguments, **keywords)
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_meta]
        if _name(function) == "alltoall_base_":  # it returns no tensor
            written, read = read[:1], read[1:]
        storages = {x.untyped_storage()._cdata for x in read}
        is_view = not function._schema.is_mutable and any(x.untyped_storage()._cdata in storages for x in written)
        if written and not is_view and _name(function) not in _NO_KERNEL:
            self.count.add([_name(function, result)], map(_bytes, read), [*map(_bytes, written)])
        return result

    def on_host(self, values: Tensor) -> Tensor:
        """What the host reads of a tensor without values."""
        raise RuntimeError(f"a tensor {tuple(values.shape)} is copied to the host")


# ------------------------------------------------------------------------------------------ graphs of torch.compile


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False) or (_name(node.target) == "getitem" and _is_view(node.args[0]))


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while _is_view(node):
        node = node.args[0]
    return node


def _operation(node: fx.Node) -> fx.Node | None:
    """The operation that computes a node; None for an input and a constant."""
    node = _memory(node)
    if _name(node.target) == "getitem":
        node = node.args[0]
    is_kernel = node.op == "call_function" and node.all_input_nodes and _name(node.target) not in _NO_KERNEL
    return node if is_kernel else None


def _is_chained(node: fx.Node) -> bool:
    """Whether an operation is computed element by element or row by row, so that the compiler joins it with others."""
    name = _name(node.target)
    if name in ("sum", "mean", "amax", "amin"):
        sizes = node.args[0].meta["val"].shape
        reduced = node.args[1] if len(node.args) > 1 and node.args[1] else range(len(sizes))
        rows = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        return rows not in {dim % max(len(sizes), 1) for dim in reduced}  # a sum over rows needs all of them first
    return name in _CHAINED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _region(node: fx.Node) -> tuple[fx.Node, int, int]:
    """The memory that a node shows: whose, from which element, and how many bytes."""
    return _memory(node), int(node.meta["val"].storage_offset()), _bytes(node.meta["val"])


def _joins(node: fx.Node, x: fx.Node) -> bool:
    """Whether a kernel can compute an operation together with the one whose result `x` it reads."""
    is_source = _KIND.get(_name(node.target)) == "rows by index" and x is node.args[0]
    return _is_chained(node) and _is_chained(_operation(x)) and not is_source


def _chains(graph: fx.Graph) -> list[set[fx.Node]]:
    """The kernels of a graph of operations without side effects.

    Two operations that work element by element or row by row are in one chain if one uses the result of the other, or
    if both read the same memory and have equally many elements; a source of rows must be in memory before. No kernel
    can wait for a part of a chain, so both must have the same depth too: the number of kernels before them on the
    longest way. An operation comes as late as those that use it allow, as the compiler computes it where it is used.
    """
    operations = [node for node in graph.nodes if _operation(node) is node]
    uses = [(node, x, _operation(x)) for node in operations for x in node.all_input_nodes if _operation(x)]
    depth: dict[fx.Node, int] = dict.fromkeys(operations, 0)
    for node, x, before in uses:
        depth[node] = max(depth[node], depth[before] + (not _joins(node, x)))
    for operation in reversed(operations):
        limits = [depth[node] if _joins(node, x) else 0 for node, x, before in uses if before is operation]
        depth[operation] = max([depth[operation], min(limits, default=0)])
    chain, readers = {node: {node} for node in operations}, {}

    def join(node: fx.Node, other: fx.Node) -> None:
        if depth[other] == depth[node]:
            chain[node] |= chain[other]
            chain.update(dict.fromkeys(chain[node], chain[node]))

    for node, x, before in uses:
        if _joins(node, x):
            join(node, before)
    for node in filter(_is_chained, operations):
        for x in node.all_input_nodes:
            elements = max(node.meta["val"].numel(), x.meta["val"].numel())
            join(node, readers.setdefault((_region(x), elements, depth[node]), node))
    return list({id(of): of for of in chain.values()}.values())


def count_graph(graph: fx.Graph, count: Count) -> None:
    """Add the kernels of a graph that `torch.compile` makes."""
    users = defaultdict(set)
    for node in graph.nodes:
        if node.op == "output" or _operation(node) is node:
            for x in node.all_input_nodes:
                users[_memory(x)].add(node)
    for chain in _chains(graph):
        inputs = [x for node in chain for x in node.all_input_nodes if _operation(x) not in chain]
        written = [x for x, by in users.items() if _operation(x) in chain and by - chain]
        read = Counter()
        for memory, _, size in {_region(x) for x in inputs if _operation(x) or _memory(x).op == "placeholder"}:
            read[memory] = min(read[memory] + size, _bytes(memory.meta["val"]))  # views can overlap
        names = [_name(node.target, node.meta["val"]) for node in chain]
        count.add(names, read.values(), [_bytes(x.meta["val"]) for x in written])


# ----------------------------------------------------------------------------------------------------------- layers


def layer_inputs(shape: ModelShape, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """Hidden states, rotations and attention layout of one row of four documents on the meta device."""
    with torch.device("meta"):
        x = torch.empty(1, tokens, shape.hidden_size, dtype=dtype, requires_grad=True)
        rope = rotary_tables(torch.arange(tokens).unsqueeze(0), shape, dtype)
    documents = torch.arange(tokens).div(tokens // 4, rounding_mode="floor").unsqueeze(0)
    return x, rope, attention_layout(documents, (1, tokens), None).to(torch.device("meta"))


def layer(
    shape: ModelShape, tokens: int, whole: bool, is_dense: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[TransformerBlock, Callable[[], Tensor]]:
    """A decoder layer, and its forward on `layer_inputs`: all of it, or only its feed-forward network."""
    with torch.device("meta"):
        block = TransformerBlock(shape, is_dense=is_dense)
    for parameter in block.parameters():
        parameter.data = parameter.data.to(dtype)
    x, rope, layout = layer_inputs(shape, tokens, dtype)
    options = RoutingOptions()
    if whole:
        return block, lambda: block(x, rope, layout, None, options)[0]
    return block, lambda: block.mlp(x, None, options)[0]


def count_eager(
    shape: ModelShape,
    tokens: int,
    *,
    whole: bool = False,
    ranks: int = 1,
    two_level: bool = False,
    chunks: int = 1,
    **form,
) -> Count:
    """Operators of one layer as they are called; with several ranks, of one of those that share the experts, on one
    host.

    Args:
        two_level: a token travels once to each rank, not once to each of its experts.
        form: `is_dense` and `dtype` of the layer; default: with experts, BF16.
    """
    block, run = layer(shape, tokens, whole, **form)
    mode = EagerCount()
    with _process_group(ranks) as group, mode:
        if group is not None:
            block.mlp.dispatcher = (
                TwoLevelDispatcher(group, None, group, chunks) if two_level else AllToAllDispatcher(group, chunks)
            )
            for name, weight in block.mlp.experts.named_parameters():
                setattr(block.mlp.experts, name, nn.Parameter(weight.detach()[: len(weight) // ranks]))
            # An even load.
            rows = tokens * shape.num_experts_per_tok // ranks // chunks
            sent = [tokens // chunks, *[round(tokens * places_of_token(shape, ranks) / ranks / chunks)] * ranks]
            numbers = torch.tensor([*sent, *[rows] * ranks] if two_level else [rows])
            mode.on_host = lambda sizes: numbers.expand(sizes.shape)
        y = run()
        y.backward(torch.empty_like(y))
    return mode.count


def count_titan(shape: ModelShape, tokens: int) -> tuple[Count, Count]:
    """Operators as they are called, and kernels in the graphs of `torch.compile`, of TorchTitan's MoE layer.

    Raises:
        UserError: torchtitan cannot be imported.
    """
    block, run = layer(shape, tokens, whole=False)
    with torch.device("meta"):
        block.mlp = TitanMoE(shape)
    for parameter in block.mlp.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    gate = block.mlp.moe.router.gate
    gate.forward = lambda x: F.linear(x.float(), gate.weight.float())  # as under autocast, which rejects "meta"
    mode = EagerCount()
    with mock.patch("torch.autocast", lambda **_: nullcontext()):
        with mode:
            y = run()
            y.backward(torch.empty_like(y))
        return mode.count, _count_graphs(run)


@contextmanager
def _process_group(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """A group of ranks of which only this one exists; None for one rank."""
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def count_chained(shape: ModelShape, tokens: int, *, whole: bool = False, **form) -> Count:
    """Kernels of one layer in the graphs that `torch.compile` makes; ``form`` as in `count_eager`."""
    return _count_graphs(layer(shape, tokens, whole, **form)[1])


def _count_graphs(run: Callable[[], Tensor]) -> Count:
    count = Count()

    def look(module: fx.GraphModule, _):
        count_graph(module.graph, count)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=look,
        bw_compiler=look,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()  # another shape would compile for any size
    with torch.compiler.config.patch(dynamic_sources=""):  # `compute/parallelize/compile.py` lets some integers vary
        y = torch.compile(run, backend=backend, fullgraph=True)()
        y.backward(torch.empty_like(y))
    return count


def floor(shape: ModelShape, tokens: int, *, whole: bool = False, ranks: int = 1) -> int:
    """Bytes that the products of a layer move at least: each weight is read twice and its gradient written, and each of
    the three products reads its activations once and writes its result. Router and attention are left out."""
    D, F, heads = shape.hidden_size, shape.moe_intermediate_size, shape.num_attention_heads * shape.head_dim
    keys, shared = shape.num_key_value_heads * shape.head_dim, F * shape.n_shared_experts
    rows = tokens * shape.num_experts_per_tok
    products = [(shape.n_routed_experts // ranks, D, 2 * F, rows), (shape.n_routed_experts // ranks, F, D, rows)]
    products += [(1, D, shared, tokens)] * 2 + [(1, shared, D, tokens)]
    if whole:
        products += [(1, D, heads, tokens), (1, D, keys, tokens), (1, D, keys, tokens), (1, heads, D, tokens)]
    return sum(3 * 2 * (n * i * o + rows * (i + o)) for n, i, o, rows in products)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--flavor", default="GLM-4.5-Air", choices=list(PRESETS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share the experts in the last column")
    arguments = parser.parse_args()
    shape, tokens = PRESETS[arguments.flavor], arguments.tokens
    columns = {
        "MoE eager": (count_eager(shape, tokens), floor(shape, tokens)),
        "MoE chained": (count_chained(shape, tokens), floor(shape, tokens)),
        "layer eager": (count_eager(shape, tokens, whole=True), floor(shape, tokens, whole=True)),
        "layer chained": (count_chained(shape, tokens, whole=True), floor(shape, tokens, whole=True)),
        f"MoE eager, {arguments.ranks} ranks": (
            count_eager(shape, tokens, ranks=arguments.ranks),
            floor(shape, tokens, ranks=arguments.ranks),
        ),
    }
    if find_spec("torchtitan"):
        for name, count in zip(("eager", "chained"), count_titan(shape, tokens), strict=True):
            columns[f"torchtitan {version('torchtitan')} MoE {name}"] = (count, floor(shape, tokens))
    kib = 1024 * tokens
    print(f"{arguments.flavor}, {tokens} tokens, BF16, KB per token, forward and backward\n")
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for kind in (*KINDS, REST):
        print(f"| {kind} | " + " | ".join(f"{c.bytes[kind] / kib:,.0f}" for c, _ in columns.values()) + " |")
    for row, value in {
        "together": lambda c, least: f"{c.bytes.total() / kib:,.0f}",
        "floor": lambda c, least: f"{least / kib:,.0f}",
        "kernels": lambda c, least: str(c.kernels),
        "largest tensor, MB": lambda c, least: f"{c.largest / 2**20:,.0f}",
        "copies to the host": lambda c, least: str(c.host_copies),
    }.items():
        print(f"| {row} | " + " | ".join(value(*column) for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
