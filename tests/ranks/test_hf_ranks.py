"""Four gloo ranks read and write one Hugging Face folder on many meshes: every byte again, no byte read in vain."""

import json
import socket
from datetime import timedelta
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from glm46 import compat
from glm46.checkpoint.agreement import CheckpointError
from glm46.checkpoint.hf_config import config_of
from glm46.checkpoint.hf_export import Layout, export_weights
from glm46.checkpoint.hf_import import import_weights
from glm46.checkpoint.hf_names import HFNames
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.config.run import Run
from glm46.distributed.mesh import build_meshes
from glm46.distributed.placement import global_indices
from glm46.model.transformer import Transformer
from glm46.parallelize.pipeline import split_model
from glm46.parallelize.plan import parallelize
from glm46.planner.layout import resolve_layout

WORLD = 4
# Uneven on purpose: 5 dense rows of heads, 6 experts, 50 vocabulary rows on 4 ranks.
SHAPE = PRESETS["GLM-4.5"].model_copy(
    update=dict(
        vocab_size=50, hidden_size=28, num_hidden_layers=4, first_k_dense_replace=1, intermediate_size=36,
        moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )
)  # fmt: skip
CONFIG = config_of(SHAPE, None, eos_ids=[1, 2], dtype="bfloat16")
SMALL_FILES = 30_000


def published(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = HFNames(SHAPE, with_copies=True)
    tensors = {}
    for entry in names.entries.values():
        whole = torch.randn(entry.shape, generator=generator)
        tensors |= {part.hf_name: whole[part.index()].contiguous().clone() for part in entry.parts}
        if not entry.is_fp32:
            tensors |= {part.hf_name: tensors[part.hf_name].bfloat16() for part in entry.parts}
    return tensors


def blank() -> dict[str, torch.Tensor]:
    model = Transformer(SHAPE)
    return {n: t.detach().fill_(torch.nan) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def on_mesh(size: tuple[int, ...], dense, experts=None) -> dict[str, torch.Tensor]:
    """Parameters with the given placements (a shorter list for vectors that have too few dimensions), buffers plain."""
    mesh = init_device_mesh("cpu", size)
    tensors = {}
    for name, tensor in blank().items():
        placements = experts if experts is not None and tensor.ndim == 3 else dense
        if name.endswith("_bias"):
            tensors[name] = tensor
            continue
        fitting = [p if not isinstance(p, Shard) or p.dim < tensor.ndim else Replicate() for p in placements]
        tensors[name] = distribute_tensor(tensor, mesh, fitting)
    return tensors


def on_stages() -> dict[str, torch.Tensor]:
    """Pipeline: two stages with different layers, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    first = mesh["stage"].get_local_rank() == 0
    tensors = {}
    for name, tensor in blank().items():
        if name.startswith(("embed_tokens", "layers.0", "layers.1")) == first:
            plain = name.endswith("_bias")
            tensors[name] = tensor if plain else distribute_tensor(tensor, mesh["shard"], [Shard(0)])
    return tensors


def on_fsdp_over_tensor_parallel() -> dict[str, torch.Tensor]:
    """What training makes: FSDP2 over column- and row-parallel matrices, so some shards are strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = Transformer(SHAPE)
    for layer in model.layers.values():
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert any(
        isinstance(p, compat.StridedShard) for t in tensors.values() if hasattr(t, "placements") for p in t.placements
    )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def of_training(**degrees: int | str) -> dict[str, torch.Tensor]:
    """Exactly what a run has: the transforms of parallelize/plan.py, the expert axis included."""
    run = Run.model_validate({"model": {"flavor": "debug"}, "parallelism": degrees})
    meshes = build_meshes(resolve_layout(run.parallelism, WORLD), "cpu")
    if meshes.pipeline is None:
        with torch.device("meta"):
            models = [Transformer(SHAPE)]
    else:
        models = [stage.model for stage in split_model(SHAPE, run, meshes.pipeline)]
    tensors: dict[str, torch.Tensor] = {}
    for model in models:
        parallelize(model, meshes, run, torch.device("cpu"))
        tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors.items()}


MESHES = {
    "all plain": lambda: on_mesh((4,), [Replicate()]),
    "rows": lambda: on_mesh((4,), [Shard(0)]),
    "columns": lambda: on_mesh((4,), [Shard(1)]),
    "rows of experts": lambda: on_mesh((4,), [Shard(0)], experts=[Shard(1)]),
    "two copies": lambda: on_mesh((2, 2), [Replicate(), Shard(0)]),
    "rows and columns": lambda: on_mesh((2, 2), [Shard(0), Shard(1)]),
    "rows twice": lambda: on_mesh((2, 2), [Shard(0), Shard(0)]),
    "experts and their rows": lambda: on_mesh((2, 2), [Shard(0), Replicate()], experts=[Shard(1), Shard(0)]),
    "experts' columns": lambda: on_mesh((2, 2), [Replicate(), Shard(1)], experts=[Shard(0), Shard(2)]),
    "pipeline": on_stages,
    "fsdp over tensor parallel": on_fsdp_over_tensor_parallel,
    "training, FSDP": lambda: of_training(),
    "training, HSDP": lambda: of_training(data_parallel_replicate_degree=2),
    "training, expert parallel": lambda: of_training(expert_parallel_degree=2),
    "training, expert parallel with copies": lambda: of_training(
        expert_parallel_degree=2, data_parallel_replicate_degree=2
    ),
    "training, context parallel": lambda: of_training(context_parallel_degree=2),
    "training, tensor parallel": lambda: of_training(tensor_parallel_degree=2),
    "training, tensor and expert parallel": lambda: of_training(tensor_parallel_degree=2, expert_parallel_degree=2),
    "training, tensor and context parallel": lambda: of_training(tensor_parallel_degree=2, context_parallel_degree=2),
    "training, pipeline": lambda: of_training(pipeline_parallel_degree=2),
    "training, pipeline of four": lambda: of_training(pipeline_parallel_degree=4),
    # A rank holds the first and the last layers, the other those between.
    "training, V-shaped pipeline": lambda: of_training(
        pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble"
    ),
    "training, pipeline and tensor parallel": lambda: of_training(pipeline_parallel_degree=2, tensor_parallel_degree=2),
    "training, V-shaped pipeline and expert parallel": lambda: of_training(
        pipeline_parallel_degree=2, expert_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"
    ),
}
SHARDED_EVENLY = ("rows", "rows twice", "columns")


def check_bytes_read(case: str, read: int, of_ranks: list[int], total: int) -> None:
    """A layout without replicas reads each byte once over all ranks, a layout with n replicas n times."""
    times = {"all plain": 4, "two copies": 2}.get(case)
    if case in SHARDED_EVENLY:
        # Norms and selection biases are on all ranks; of the rest, uneven rows give one rank a little more.
        assert sum(of_ranks) < 1.06 * total and read < 0.4 * total, (of_ranks, total)
    elif times is not None:
        assert abs(sum(of_ranks) / (times * total) - 1) < 0.01, (of_ranks, total)  # selection biases are on all ranks


def round_trips(folder: Path, rank: int) -> None:
    source = folder / "published"
    expected = published()
    if rank == 0:
        source.mkdir()
        (source / "config.json").write_text(json.dumps(CONFIG))
        safetensors.torch.save_file(expected, source / "model.safetensors", {"format": "pt"})
    dist.barrier()
    total = sum(t.nbytes for t in expected.values())
    names = HFNames(SHAPE, with_copies=True)
    for number, (case, make) in enumerate(MESHES.items()):
        tensors = make()
        read = import_weights(source, SHAPE, tensors, global_indices)
        of_ranks: list[int] = [0] * WORLD
        dist.all_gather_object(of_ranks, read)
        check_bytes_read(case, read, of_ranks, total)
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for hf_name, part in names.to_hf(name, whole):
                assert torch.equal(part, expected[hf_name].float()), (case, hf_name)
        target = folder / f"out{number}"
        layout = Layout(with_copies=True, max_file_bytes=SMALL_FILES)
        written = export_weights(target, SHAPE, CONFIG, tensors, global_indices, layout=layout)
        dist.all_gather_object(of_ranks, written)
        assert sum(of_ranks) == total, (case, of_ranks, total)
        files = sorted(target.glob("*.safetensors"))
        again = {name: t for file in files[rank::WORLD] for name, t in safetensors.torch.load_file(file).items()}
        for name, t in again.items():
            assert t.dtype == expected[name].dtype and torch.equal(t, expected[name]), (case, name)
        counts: list[int] = [0] * WORLD
        dist.all_gather_object(counts, len(again))
        assert sum(counts) == len(expected), case


def error_of(action) -> Exception:
    try:
        action()
    except (CheckpointError, UserError) as error:
        return error
    raise AssertionError("nothing was refused")


def faults_reach_every_rank(folder: Path, rank: int) -> None:
    source = folder / "published"
    # A copy differs in a row that only the last rank reads.
    if rank == 0:
        changed = published()
        changed["model.layers.4.embed_tokens.weight"][49, 3] += 1
        (folder / "changed").mkdir()
        (folder / "changed/config.json").write_text(json.dumps(CONFIG))
        safetensors.torch.save_file(changed, folder / "changed/model.safetensors", {"format": "pt"})
    dist.barrier()
    tensors = MESHES["rows"]()
    error = error_of(lambda: import_weights(folder / "changed", SHAPE, tensors, global_indices))
    assert isinstance(error, UserError) and "model.layers.4.embed_tokens.weight differs" in str(error)
    # One rank's memory is of another shape; one rank lacks a tensor that it should hold.
    import_weights(source, SHAPE, tensors, global_indices)
    broken = dict(tensors) | ({"norm.weight": tensors["norm.weight"].to_local()} if rank == 2 else {})
    error = error_of(
        lambda: export_weights(
            folder / "broken", SHAPE, CONFIG, broken, lambda t: 1 / 0 if rank == 1 else global_indices(t)
        )
    )
    assert isinstance(error, CheckpointError) and "rank 1" in str(error) and "ZeroDivisionError" in str(error)
    missing = {name: t for name, t in tensors.items() if not (rank == 3 and name == "lm_head.weight")}
    error = error_of(lambda: export_weights(folder / "broken", SHAPE, CONFIG, missing, global_indices))
    assert isinstance(error, CheckpointError) and "lm_head.weight: " in str(error)
    dist.barrier()
    assert not list(folder.glob("broken*"))


def worker(rank: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    try:
        round_trips(folder, rank)
        faults_reach_every_rank(folder, rank)
    finally:
        dist.destroy_process_group()


def test_every_mesh_reads_and_writes_the_same_folder(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, tmp_path), nprocs=WORLD)
    assert len(list(tmp_path.glob("out*"))) == len(MESHES) == 24
