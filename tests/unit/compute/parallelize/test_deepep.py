"""Reasons why DeepEP cannot run, each said with a remedy before the first step; and the buffer that layers share."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import Routing
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import deepep, expert
from glm46.compute.parallelize.plan import parallelize
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.run.plan import resolve_plan

CUDA = torch.device("cuda", 0)
SHAPE = PRESETS["debug"].model_copy(update={"num_hidden_layers": 2, "n_routed_experts": 8})


@pytest.fixture
def machine(monkeypatch):
    """A machine on which DeepEP runs, and which a test damages."""
    package = ModuleType("deep_ep")
    opened: list[tuple] = []
    package.topk_idx_t = torch.int64
    package.ElasticBuffer = lambda *args, **keywords: opened.append((args, keywords)) or SimpleNamespace(**keywords)
    found = SimpleNamespace(capability=(9, 0), nccl=(2, 30, 7), package=package, opened=opened)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: found.nccl)
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    deepep._open.cache_clear()
    return found


def plan_of(**training):
    tables = {
        "model": {"flavor": "GLM-4.5-Air"},
        "parallelism": {"expert_parallel_degree": 8, "expert_exchange": "deepep"},
        "training": {"seq_len": 512, "local_batch_size": 2} | training,
    }
    return resolve_plan(RunConfig.model_validate(tables), 8)


@pytest.mark.parametrize(
    ("device", "damage", "rule", "remedy"),
    [
        ("cpu", {}, "it needs GPUs, and the run is on cpu", "train on GPUs"),
        ("cuda", {"capability": (8, 0)}, "compute capability 9.0 or more, and this one has 8.0", "two_level"),
        ("cuda", {"nccl": (2, 27, 3)}, "it needs NCCL 2.30.4 or newer, and torch has 2.27.3", "install a newer torch"),
        ("cuda", {"package": None}, "deep_ep is not installed", "install version 2 or newer of deep_ep"),
        ("cuda", {"package": "import nothing_of_this_name"}, "nothing_of_this_name, which deep_ep imports", "install"),
        ("cuda", {"package": "assert False, 'Invalid NCCL versions:\\n a v.s. b'"}, "Invalid NCCL versions: a v.s. b",
         "repair it"),
        ("cuda", {"package": "raise ImportError('libcudart.so.13: cannot open')"}, "libcudart.so.13", "repair it"),
        ("cuda", {"package": "class Buffer: pass"}, "no ElasticBuffer", "install version 2 or newer"),
        ("cuda", {"package": "import torch; ElasticBuffer, topk_idx_t = object, torch.int32"}, "torch.int32",
         "build it for torch.int64"),
    ],
)  # fmt: skip
def test_a_machine_without_deepep_is_refused(machine, monkeypatch, tmp_path, device, damage, rule, remedy):
    package = damage.pop("package", ...)
    if package is not ...:
        monkeypatch.delitem(sys.modules, "deep_ep")
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        if package is not None:
            (tmp_path / "deep_ep.py").write_text(package)
    vars(machine).update(damage)
    with pytest.raises(UserError) as refused:
        deepep.open_buffer(plan_of(), None, torch.device(device))
    text = str(refused.value)
    assert text.startswith('parallelism.expert_exchange = "deepep": ') and "\n" not in text
    assert rule in text and remedy in text and text.endswith('or use "two_level"') and not machine.opened


@pytest.fixture
def eight_ranks():
    """A process group of eight ranks whose collectives do nothing; this process is rank 0."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_run_takes_the_buffer_or_ends_before_its_first_step(machine, monkeypatch, eight_ranks):
    plan, process = plan_of(), SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=8)
    cluster = build_cluster(plan, process)
    assert cluster.meshes.expert_hosts is None  # no groups that nobody uses

    def model() -> Transformer:
        with torch.device("meta"):
            return Transformer(SHAPE)

    with pytest.raises(UserError, match="the run is on cpu"):
        parallelize(model(), plan, cluster)
    layers = model()
    expert.apply(layers, cluster.meshes.expert, None, 1, machine.package.ElasticBuffer(num_max_tokens_per_rank=1))
    found = [module.dispatcher for module in layers.modules() if isinstance(module, MoE)]
    assert found and all(isinstance(each, deepep.DeepEPDispatcher) for each in found)


def test_more_tokens_than_a_micro_batch_are_refused_before_they_are_sent(eight_ranks):
    dispatcher = deepep.DeepEPDispatcher(dist.group.WORLD, SimpleNamespace(num_max_tokens_per_rank=4))
    routing = Routing(torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int64), None)
    with pytest.raises(UserError, match=r'"deepep": a rank has 5 tokens at once, .* is, 4; use "two_level"'):
        dispatcher.start(torch.zeros(5, 32), routing, 8)


def test_layers_of_a_group_share_one_buffer_for_the_largest_micro_batch(machine):
    group = object()
    buffer = deepep.open_buffer(plan_of(), group, CUDA)
    assert deepep.open_buffer(plan_of(), group, CUDA) is buffer
    assert deepep.open_buffer(plan_of(local_batch_size=4), group, CUDA) is not buffer
    sizes = [keywords["num_max_tokens_per_rank"] for _, keywords in machine.opened]
    assert sizes == [1024, 2048] and machine.opened[0][0] == (group,)
    assert machine.opened[0][1] == {
        "num_max_tokens_per_rank": 1024, "hidden": 4096, "num_topk": 8, "deterministic": True,
    }  # fmt: skip


def test_deterministic_kernels_do_not_fill_memory_of_others(machine, monkeypatch):
    """DeepEP asserts it."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    deepep.open_buffer(plan_of(), object(), CUDA)
    assert not torch.utils.deterministic.fill_uninitialized_memory
