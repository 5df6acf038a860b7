"""Four gloo ranks read and write one Hugging Face folder on many meshes: equal bytes, and no byte read needlessly."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from glm46 import compat
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process, join, leave
from glm46.compute.distributed.ranks import CheckpointError
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.pipeline import Pipeline
from glm46.compute.parallelize.plan import parallelize
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.run.plan import resolve_plan
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter
from glm46.storage.huggingface.peft_import import import_adapter
from tests.harness import run_ranks

WORLD = 4
# Uneven on purpose: 5 dense rows of heads, 6 experts, 50 vocabulary rows on 4 ranks.
TINY = dict(
    vocab_size=50, hidden_size=28, num_hidden_layers=4, first_k_dense_replace=1, intermediate_size=36,
    moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
SMALL_FILES = 30_000
MESHES_AT_ONCE = 6
"""After this many meshes new processes start: each process group has threads that wake up a hundred times a second."""


@dataclass(frozen=True)
class Kind:
    """A small model with the distinguishing features of a release."""

    shape: ModelShape
    repeat_shared: bool

    @classmethod
    def of(cls, release: str, *, repeat_shared: bool, **changes: int) -> "Kind":
        return cls(PRESETS[release].model_copy(update=TINY | changes), repeat_shared)

    @property
    def config(self) -> dict:
        return config_of(self.shape, None, eos_ids=[1, 2], dtype="bfloat16")

    def published(self, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for entry in HFNames(self.shape, repeat_shared=self.repeat_shared).entries.values():
            whole = torch.randn(entry.shape, generator=generator)
            tensors |= {part.hf_name: whole[part.index()].contiguous().clone() for part in entry.parts}
            if not entry.is_fp32:
                tensors |= {part.hf_name: tensors[part.hf_name].bfloat16() for part in entry.parts}
        return tensors

    def publish(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# 4.5: QK-norm, repeats. 4.6: several dense layers, no repeats, longer. Air: no QK-norm, its scaling, two more experts.
GLM_45 = Kind.of("GLM-4.5", repeat_shared=True)
OTHERS = {
    "4.6-like": Kind.of("GLM-4.6", repeat_shared=False, first_k_dense_replace=2, max_position_embeddings=202752),
    "Air-like": Kind.of("GLM-4.5-Air", repeat_shared=True, n_routed_experts=8),
}


def blank(shape: ModelShape) -> dict[str, torch.Tensor]:
    model = Transformer(shape)
    return {n: t.detach().fill_(torch.nan) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def on_mesh(shape: ModelShape, size: tuple[int, ...], dense, experts=None) -> dict[str, torch.Tensor]:
    """Parameters with the given placements (replicated where a vector lacks the dimension), buffers plain."""
    mesh = init_device_mesh("cpu", size)
    tensors = {}
    for name, tensor in blank(shape).items():
        placements = experts if experts is not None and tensor.ndim == 3 else dense
        if name.endswith("_bias"):
            tensors[name] = tensor
            continue
        fitting = [p if not isinstance(p, Shard) or p.dim < tensor.ndim else Replicate() for p in placements]
        tensors[name] = distribute_tensor(tensor, mesh, fitting)
    return tensors


def of_training(shape: ModelShape, **degrees: int | str) -> dict[str, torch.Tensor]:
    """The tensors of a training run: the transforms of compute/parallelize/plan.py, expert axis included."""
    config = RunConfig.model_validate({"model": {"flavor": "debug"}, "parallelism": degrees})
    plan = replace(resolve_plan(config, WORLD), shape=shape)
    cluster = build_cluster(plan, Process(dist.get_rank(), WORLD, torch.device("cpu")))
    if cluster.meshes.pipeline is None:
        with torch.device("meta"):
            models = [Transformer(shape)]
    else:
        models = [stage.model for stage in Pipeline(plan, cluster.meshes.pipeline).stages]
    tensors: dict[str, torch.Tensor] = {}
    for model in models:
        parallelize(model, plan, cluster)
        tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors.items()}


MESHES = {
    "all plain": lambda shape: on_mesh(shape, (4,), [Replicate()]),
    "rows": lambda shape: on_mesh(shape, (4,), [Shard(0)]),
    "columns": lambda shape: on_mesh(shape, (4,), [Shard(1)]),
    "rows of experts": lambda shape: on_mesh(shape, (4,), [Shard(0)], experts=[Shard(1)]),
    "two replicas": lambda shape: on_mesh(shape, (2, 2), [Replicate(), Shard(0)]),
    "rows and columns": lambda shape: on_mesh(shape, (2, 2), [Shard(0), Shard(1)]),
    "rows twice": lambda shape: on_mesh(shape, (2, 2), [Shard(0), Shard(0)]),
    "experts and their rows": lambda shape: on_mesh(
        shape, (2, 2), [Shard(0), Replicate()], experts=[Shard(1), Shard(0)]
    ),
    "experts' columns": lambda shape: on_mesh(shape, (2, 2), [Replicate(), Shard(1)], experts=[Shard(0), Shard(2)]),
    "training, FSDP": of_training,
    "training, HSDP": lambda shape: of_training(shape, data_parallel_replicate_degree=2),
    "training, expert parallel": lambda shape: of_training(shape, expert_parallel_degree=2),
    "training, expert parallel with replicas": lambda shape: of_training(
        shape, expert_parallel_degree=2, data_parallel_replicate_degree=2
    ),
    "training, context parallel": lambda shape: of_training(shape, context_parallel_degree=2),
    "training, tensor parallel": lambda shape: of_training(shape, tensor_parallel_degree=2),
    "training, tensor parallel beyond the key heads": lambda shape: of_training(shape, tensor_parallel_degree=4),
    "training, tensor and expert parallel": lambda shape: of_training(
        shape, tensor_parallel_degree=2, expert_parallel_degree=2
    ),
    "training, tensor and context parallel": lambda shape: of_training(
        shape, tensor_parallel_degree=2, context_parallel_degree=2
    ),
    "training, pipeline": lambda shape: of_training(shape, pipeline_parallel_degree=2),
    "training, pipeline of four": lambda shape: of_training(shape, pipeline_parallel_degree=4),
    # A rank holds the first and the last layers, the other those between.
    "training, V-shaped pipeline": lambda shape: of_training(
        shape, pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble"
    ),
    "training, pipeline and tensor parallel": lambda shape: of_training(
        shape, pipeline_parallel_degree=2, tensor_parallel_degree=2
    ),
    "training, V-shaped pipeline and expert parallel": lambda shape: of_training(
        shape, pipeline_parallel_degree=2, expert_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"
    ),
}


class _Unreadable:
    """A tensor whose shape cannot be read."""

    shape = property(lambda self: 1 / 0)


FOR_OTHERS = (
    "rows", "experts' columns", "training, tensor parallel", "training, HSDP", "training, expert parallel",
    "training, context parallel", "training, tensor and expert parallel", "training, pipeline and tensor parallel",
    "training, V-shaped pipeline and expert parallel",
)  # fmt: skip
"""Meshes for the kinds that differ only in names and shapes."""
FOR_ADAPTERS = (
    "all plain", "rows of experts", "two replicas", "training, tensor parallel", "training, tensor and expert parallel",
    "training, V-shaped pipeline and expert parallel",
)  # fmt: skip
RANK = 3
SHARDED_EVENLY = ("rows", "rows twice", "columns")


def check_bytes_read(case: str, read: int, of_ranks: list[int], total: int) -> None:
    """A layout without replicas reads each byte once over all ranks, a layout with n replicas n times."""
    times = {"all plain": 4, "two replicas": 2}.get(case)
    if case in SHARDED_EVENLY:
        # Norms and selection biases are on all ranks; uneven rows give one rank a little more of the others.
        assert sum(of_ranks) < 1.06 * total and read < 0.4 * total, (of_ranks, total)
    elif times is not None:
        assert abs(sum(of_ranks) / (times * total) - 1) < 0.01, (of_ranks, total)  # selection biases are on all ranks


def round_trips(folder: Path, first: int) -> None:
    """Round trips on `MESHES_AT_ONCE` meshes, starting with this one."""
    source = folder / "published"
    expected = GLM_45.published()
    total = sum(t.nbytes for t in expected.values())
    names = HFNames(GLM_45.shape, repeat_shared=True)
    for number, (case, make) in list(enumerate(MESHES.items()))[first : first + MESHES_AT_ONCE]:
        tensors = make(GLM_45.shape)
        read = import_weights(source, GLM_45.shape, tensors)
        of_ranks: list[int] = [0] * WORLD
        dist.all_gather_object(of_ranks, read)
        check_bytes_read(case, read, of_ranks, total)
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for part in names.entries[name].parts:
                assert torch.equal(whole[part.index()], expected[part.hf_name].float()), (case, part.hf_name)
        check_export(folder / f"out{number}", GLM_45, tensors, expected, case)


def check_export(folder: Path, kind: Kind, tensors: dict, expected: dict, case: str) -> None:
    """Export from all ranks equals the imported folder byte for byte; the config too."""
    options = ExportOptions(repeat_shared=kind.repeat_shared, max_file_bytes=SMALL_FILES)
    written = export_weights(folder, kind.shape, kind.config, tensors, options=options)
    of_ranks: list[int] = [0] * WORLD
    dist.all_gather_object(of_ranks, written)
    assert sum(of_ranks) == sum(t.nbytes for t in expected.values()), (case, of_ranks)
    files = sorted(folder.glob("*.safetensors"))
    again = {
        name: t for file in files[dist.get_rank() :: WORLD] for name, t in safetensors.torch.load_file(file).items()
    }
    for name, t in again.items():
        assert t.dtype == expected[name].dtype and torch.equal(t, expected[name]), (case, name)
    counts: list[int] = [0] * WORLD
    dist.all_gather_object(counts, len(again))
    assert sum(counts) == len(expected), case
    assert json.loads((folder / "config.json").read_text()) == kind.config


def other_kinds(folder: Path) -> None:
    for name, kind in OTHERS.items():
        expected = kind.published()
        if dist.get_rank() == 0:
            kind.publish(folder / name, expected)
        dist.barrier()
        for number, case in enumerate(FOR_OTHERS):
            tensors = MESHES[case](kind.shape)
            import_weights(folder / name, kind.shape, tensors)
            check_export(folder / f"{name} {number}", kind, tensors, expected, f"{name}, {case}")


def adapters_on(case: str) -> dict[str, torch.Tensor]:
    """Adapters with random values that are equal on all meshes, sharded like the weights of a mesh.

    B and magnitudes have the rows of their weight, A its columns; a dimension that they lack is replicated.
    """
    tensors = {}
    for name, weight in MESHES[case](GLM_45.shape).items():
        if "_proj.weight" not in name and ".experts." not in name or name.startswith("mtp."):
            continue
        stem = name.removesuffix("weight") if name.endswith("weight") else name + "_"
        *experts, rows, columns = weight.shape
        lacks = {"lora_A": weight.ndim - 2, "lora_B": weight.ndim - 1, "magnitude": weight.ndim - 1}
        sizes = {"lora_A": (RANK, columns), "lora_B": (rows, RANK), "magnitude": (rows,)}
        for kind, size in sizes.items():
            generator = torch.Generator().manual_seed(zlib.crc32((stem + kind).encode()))
            whole = torch.randn(*experts, *size, generator=generator)
            if not hasattr(weight, "placements"):
                tensors[stem + kind] = whole
                continue
            placements = [
                Replicate() if isinstance(p, (Shard, compat.StridedShard)) and p.dim == lacks[kind] else p
                for p in weight.placements
            ]
            plain = [Shard(p.dim) if isinstance(p, compat.StridedShard) else p for p in placements]
            tensors[stem + kind] = distribute_tensor(whole, weight.device_mesh, plain)
    return tensors


def adapters_round_trip(folder: Path) -> None:
    """Adapters of every mesh become the same bytes, and are filled from them again."""
    for number, case in enumerate(FOR_ADAPTERS):
        tensors = adapters_on(case)
        out = folder / f"adapter{number}"
        export_adapter(out, GLM_45.shape, tensors, scale=1.5, base="base")
        again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        import_adapter(out, GLM_45.shape, again, scale=1.5)
        for name, tensor in tensors.items():
            assert torch.equal(local_tensor(again[name]), local_tensor(tensor)), (case, name)


def merge_on_all_ranks(folder: Path) -> None:
    """Ranks that each write some files give the folder that one writes."""
    if dist.get_rank() == 0:
        GLM_45.publish(folder / "single", GLM_45.published())
    dist.barrier()
    tensors = MESHES["rows"](GLM_45.shape)
    import_weights(folder / "single", GLM_45.shape, tensors)
    options = ExportOptions(repeat_shared=True, max_file_bytes=SMALL_FILES)
    export_weights(folder / "base", GLM_45.shape, GLM_45.config, tensors, options=options)
    errors = merge_adapter(folder / "base", folder / "adapter0", folder / "merged")
    assert len(errors) == len(json.loads((folder / "merged/merge_errors.json").read_text())) > 50
    # A value of the adapter is not finite: the rank that merges it fails, and so do all.
    bad = adapters_on("rows")
    if dist.get_rank() == 0:
        file = folder / "adapter1/adapter_model.safetensors"
        saved = safetensors.torch.load_file(file)
        saved["base_model.model.model.layers.2.mlp.experts.5.up_proj.lora_B.weight"][3, 1] = torch.inf
        safetensors.torch.save_file(saved, file, {"format": "pt"})
    dist.barrier()
    for action in (
        lambda: merge_adapter(folder / "base", folder / "adapter1", folder / "never"),
        lambda: import_adapter(folder / "adapter1", GLM_45.shape, bad, scale=1.5),
    ):
        assert "experts.5.up_proj.lora_B" in str(error_of(action))
    assert not list(folder.glob("never*"))


def error_of(action) -> Exception:
    try:
        action()
    except (CheckpointError, UserError) as error:
        return error
    raise AssertionError("nothing was refused")


def faults_reach_every_rank(folder: Path) -> None:
    source, rank = folder / "published", dist.get_rank()
    # A repeat differs in a row that only the last rank reads.
    if rank == 0:
        changed = GLM_45.published()
        changed["model.layers.4.embed_tokens.weight"][49, 3] += 1
        GLM_45.publish(folder / "changed", changed)
    dist.barrier()
    shape, config = GLM_45.shape, GLM_45.config
    tensors = MESHES["rows"](shape)
    error = error_of(lambda: import_weights(folder / "changed", shape, tensors))
    assert isinstance(error, UserError) and "model.layers.4.embed_tokens.weight differs" in str(error)
    # One rank cannot read a tensor's shape; then one rank lacks a tensor that it should hold.
    import_weights(source, shape, tensors)
    broken = dict(tensors) | ({"norm.weight": tensors["norm.weight"].to_local()} if rank == 2 else {})
    broken |= {"norm.weight": _Unreadable()} if rank == 1 else {}
    error = error_of(lambda: export_weights(folder / "broken", shape, config, broken))
    assert isinstance(error, CheckpointError) and "rank 1" in str(error) and "ZeroDivisionError" in str(error)
    missing = {name: t for name, t in tensors.items() if not (rank == 3 and name == "lm_head.weight")}
    error = error_of(lambda: export_weights(folder / "broken", shape, config, missing))
    assert isinstance(error, CheckpointError) and "lm_head.weight: " in str(error)
    dist.barrier()
    assert not list(folder.glob("broken*"))


def on_rank(part: Callable[..., None], folder: Path, *arguments: int) -> None:
    """One of the functions above."""
    join(300)
    part(folder, *arguments)
    leave()


def test_every_mesh_writes_and_reads_the_same_adapters_and_merges_them(tmp_path):
    for part in (adapters_round_trip, merge_on_all_ranks):
        run_ranks(on_rank, WORLD, part, tmp_path)
    files = sorted(tmp_path.glob("adapter*/adapter_model.safetensors"))
    written = {number: safetensors.torch.load_file(file) for number, file in enumerate(files)}
    assert len(written) == len(FOR_ADAPTERS)
    for number, tensors in written.items():
        same = {name: torch.equal(tensor, written[0][name]) for name, tensor in tensors.items() if name in written[0]}
        different = [name for name, is_same in same.items() if not is_same]
        damaged = ["base_model.model.model.layers.2.mlp.experts.5.up_proj.lora_B.weight"] if number == 1 else []
        assert different == damaged and len(same) == len(tensors)
    alone = merge_adapter(tmp_path / "base", tmp_path / "adapter0", tmp_path / "alone")
    assert alone == json.loads((tmp_path / "merged/merge_errors.json").read_text())
    for file in sorted((tmp_path / "alone").iterdir()):
        if file.suffix == ".safetensors":
            assert file.read_bytes() == (tmp_path / "merged" / file.name).read_bytes(), file.name


def test_every_mesh_reads_and_writes_the_same_folder(tmp_path):
    GLM_45.publish(tmp_path / "published", GLM_45.published())
    for first in range(0, len(MESHES), MESHES_AT_ONCE):
        run_ranks(on_rank, WORLD, round_trips, tmp_path, first)
    for part in (other_kinds, faults_reach_every_rank):
        run_ranks(on_rank, WORLD, part, tmp_path)
    assert len(list(tmp_path.glob("out*"))) == len(MESHES) == 23
    for name, kind in {"out": GLM_45, **OTHERS}.items():
        exports = sorted(tmp_path.glob(f"{name}?*"))
        assert len(exports) >= 8
        transformers_opens(exports[-1], kind)


@torch.no_grad()
def transformers_opens(folder: Path, kind: Kind) -> None:
    """The logits of `transformers` from the export of the last mesh equal ours from the published tensors."""
    from transformers import AutoModelForCausalLM  # not for the ranks, which import this file too

    ours, whole = Transformer(kind.shape), kind.published()
    own = dict(ours.named_parameters()) | dict(ours.named_buffers())
    for hf_name, (entry, part) in HFNames(kind.shape, repeat_shared=kind.repeat_shared).places.items():
        own[entry.name][part.index()] = whole[hf_name]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(24).view(2, 12)
    expected = ours(tokens)
    # FP32 sums in another order, relative to the largest logit: weights of N(0, 1) make large ones.
    assert (theirs(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
