"""Every layout, with every pipeline schedule, computes what one process does: loss, gradients, counts, steps."""

import functools
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.torch_version import TorchVersion

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import join, leave
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.engine.training.network import build_network
from glm46.operate.estimate.requirement import INTEGERS_TORCH, SPLIT_BACKWARD_TORCH
from glm46.run import context_keys
from glm46.run.plan import resolve_plan
from tests.builders import with_shape
from tests.harness import differences, run_ranks
from tests.ranks.sharded_layouts import (
    LAYOUTS,
    LAYOUTS_AT_ONCE,
    Layout,
    base_of,
    compare,
    make_config,
    run_layout,
    run_reference,
)

SPLIT_BACKWARD = pytest.mark.skipif(
    TorchVersion(torch.__version__) < SPLIT_BACKWARD_TORCH, reason="the launcher refuses this schedule on this torch"
)
INTEGERS = pytest.mark.skipif(
    TorchVersion(torch.__version__) < INTEGERS_TORCH, reason="the launcher refuses a quantised base on this torch"
)
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine, which inductor needs"
)
BOUNDS = {
    # FP32 sums in another order: some units of 2**-24 over sums of some hundred terms.
    "loss_error": 1e-6,
    "norm_error": 1e-6,
    "gradient_error": 1e-5,
    "token_error": 1e-6,
    "token_gradient_error": 1e-5,
    # The weights of norms are near 1 and move by 1e-3, so that half a unit of FP32, 6e-8, is 6e-5 of their update.
    "update_error": 3e-4,
    # Of the weights themselves, without biases: these start at zero and are nothing but their update. 1e-7 is seen.
    "weight_error": 1e-6,
}

GRAPHS = {
    "fsdp-full_ac-compiled-inductor": (0, 3),
    "pp2-ZBVZeroBubble-micro4-compiled": (0, 3),
    "pp2-DualPipeV-micro4-compiled": (0, 3),
    "ep2-compiled-inductor": (10, 11),
    "ep2-compiled-shared": (10, 11),
    "ep2-compiled-routes": (11, 12),  # prediction layers take no routes, so they share less code with MoE layers
    "cp2-compiled-ring": (5, 9),
    "tp2-keys1-compiled": (5, 10),
    "cp2-tp2-ep4-experts12-selective_ac-compiled": (15, 17),
    "ep2-selective_ac-compiled-lora-in_float8": (8, 8),
    "tp2-ep2-selective_ac-compiled-lora-in_int4": (9, 9),
    "cp2-tp2-ep4-experts12-compiled-lora": (17, 18),
    "cp2-tp2-ep4-experts12-compiled-dora": (17, 18),
    "fsdp-full_ac-compiled-latent": (0, 3),
    "cp2-tp2-ep4-experts12-compiled-routes-latent": (18, 21),
    "fsdp-compiled-sparse-index_joint": (0, 4),
    "fsdp-full_ac-compiled-sparse": (0, 4),  # a layer with an indexer, and one that shares its choice
    "ep2-compiled-hosts_of_2": (10, 11),
    "tp2-ep4-experts12-selective_ac-compiled-dora-hosts_of_2": (11, 10),
    "tp2-ep8-experts16-selective_ac-compiled-hosts_of_2": (12, 12),
    "ep2-compiled-chunks2": (10, 16),
    "tp2-ep4-experts12-full_ac-compiled-hosts_of_2-chunks2": (11, 21),
    "ep2-full_ac-every2-compiled": (10, 11),
    "ep2-selective_ac-on_host-compiled": (11, 11),
    "cp2-ep2-selective_ac-every2-compiled": (15, 16),
    "cp2-ep4-experts12-selective_ac-no_experts-no_exchange-compiled-hosts_of_2": (13, 14),
}
"""Graph breaks and graphs of compiled layouts on a rank. A layer is one graph of its kind, dense, MoE or prediction;
each exchange with other ranks is a break, and so is the call of experts, which are compiled by themselves for any
number of rows and for each chunk. Lower them after an improvement."""


BASIC = {
    1: [*LAYOUTS[1]],
    2: [
        "fsdp",
        "hsdp2",
        "ep2",
        "cp2",
        "tp2",
        "tp2-ep2",
        "pp2-1F1B",
        "tp2-latent",
        "cp2-latent",
        "ep2-latent",
        "tp2-shared",
    ],
}
"""Layouts to find a fault in that larger ones show."""
COMBINATIONS = 4677
"""What all layouts prove, by `combinations_of`: raise it with a new layout, and lower it with none."""


def combinations_of(ranks: int, layout: Layout) -> set[tuple]:
    """Of the values that make a layout, also those of its mesh: each two, and each three that are not the default."""
    shards = ranks // (layout.replicate * layout.pipeline)
    values = layout._asdict() | {"shards": shards}
    values["num_experts"] = values["num_experts"] % shards == 0 if layout.experts_over > 1 else None  # whole ones
    values["schedule"] = values["schedule"] if layout.pipeline > 1 else None
    usual = Layout()._asdict() | {"num_experts": None, "schedule": None}
    chosen = [item for item in values.items() if item not in usual.items()]
    return {some for size in (1, 2) for some in combinations(values.items(), size)} | {*combinations(chosen, 3)}


def references(names: list[str], ranks: int, folder: Path) -> tuple[dict[tuple, tuple], Path]:
    """What one process computes, by `Layout.reference`, and a folder of quantised bases."""
    kinds = {layout.reference: layout for layout in (LAYOUTS[ranks][name] for name in names)}
    found = {kind: run_reference(make_config(kinds[kind]), kinds[kind], base_of(folder, kinds[kind])) for kind in kinds}
    return found, folder


def compare_layouts(names: list[str], shared: tuple[dict[tuple, tuple], Path]) -> Iterator[dict]:
    """On each rank."""
    process, (expected, bases) = join(300), shared
    for name in names:
        layout = LAYOUTS[process.world_size][name]
        most = 0 if layout.ring else context_keys.MOST_GATHERED_BYTES
        compile = functools.partial(torch.compile, backend=layout.backend)
        with mock.patch.object(context_keys, "MOST_GATHERED_BYTES", most), mock.patch.object(torch, "compile", compile):
            found = run_layout(process, layout, base_of(bases, layout))
            yield compare(layout, found, expected[layout.reference])
    leave()


def test_each_layout_proves_what_no_other_one_does():
    assert {ranks: len(layouts) for ranks, layouts in LAYOUTS.items()} == {1: 11, 2: 89, 4: 42, 8: 15}  # names differ
    proven = {
        (ranks, name): combinations_of(ranks, layout)
        for ranks, layouts in LAYOUTS.items()
        for name, layout in layouts.items()
    }
    layouts_of = Counter(chain.from_iterable(proven.values()))
    assert len(layouts_of) >= COMBINATIONS
    in_vain = [case for case, found in proven.items() if all(layouts_of[one] > 1 for one in found)]
    assert [(ranks, name) for ranks, name in in_vain if name not in BASIC.get(ranks, [])] == []


def layout_case(ranks: int, name: str, layout: Layout):
    marks = [SPLIT_BACKWARD] if layout.pipeline > 1 and PIPELINE_SCHEDULES[layout.schedule].splits_backward else []
    marks += [INTEGERS] if layout.base else []
    marks += [NEEDS_COMPILER] if layout.backend == "inductor" else []
    return pytest.param(ranks, name, id=f"{ranks}ranks-{name}", marks=marks)


@pytest.mark.parametrize(
    ("ranks", "case"), [layout_case(ranks, *row) for ranks, layouts in LAYOUTS.items() for row in layouts.items()]
)
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row(compare_layouts, ranks, case=case, prepare=references, at_once=LAYOUTS_AT_ONCE)
    assert not row["initial_weights_different"]
    assert not row["steps_of_different_counts"]  # tokens per expert
    assert differences(row, BOUNDS) == []
    if TorchVersion(torch.__version__) < (2, 13):
        return  # older releases break more often
    breaks, graphs = GRAPHS.get(case, (0, 0))
    assert row["graph_breaks"] <= breaks and row["graphs"] <= graphs


def requested_groups(key_heads: int) -> tuple[list[bool], list]:
    """On each rank: which blocks are dense, and the process groups that it asks for.

    Two stages, two shards and tensor parallelism over two ranks, with this many key heads.
    """
    process = join(300)
    requests = []
    make_group = distributed_c10d._new_group_with_tag

    def record(ranks, *arguments, **options):
        requests.append(["members" if options.get("use_local_synchronization") else "all", list(ranks)])
        return make_group(ranks, *arguments, **options)

    config = make_config(Layout(pipeline=2, tensor=2, key_heads=key_heads), layers=2)
    plan = resolve_plan(with_shape(config, num_nextn_predict_layers=0), process.world_size)
    cluster = build_cluster(plan, process)
    with mock.patch.object(distributed_c10d, "_new_group_with_tag", record):
        network = build_network(plan, cluster)
    leave()
    is_dense = [block.is_dense for model in network.models for block in model.layers.values()]
    return is_dense, requests


@pytest.mark.parametrize("key_heads", [4, 1])
def test_ranks_of_unequal_stages_ask_for_the_same_groups_in_one_order(key_heads):
    """With NCCL torch splits each group off the communicator of all ranks, and waits for a rank that does not ask. Gloo
    does not wait, so the requests are compared."""
    dense, requests = zip(*run_ranks(requested_groups, 8, key_heads), strict=True)
    assert [*dense] == [[True]] * 4 + [[False]] * 4
    assert [*requests] == [requests[0]] * 8
    # Muon's for the matrices of the dense stage, which its four ranks share; then those that share a key head.
    assert ["all", [0, 1, 2, 3]] in requests[0] and (["all", [6, 7]] in requests[0]) == (key_heads == 1)
