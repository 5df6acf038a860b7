"""Muon on every mesh equals one process, moves the bytes it plans and no more, and resumes on another mesh."""

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46.compat import StridedShard
from glm46.compute.optim import muon_plan, muon_step
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.state_file import StateFile
from tests.harness import run_ranks
from tests.unit.compute.optim.muon_reference import entries_per_rank

STEPS = 3
MATRICES = [(64, 256), (256, 64), (128, 128), (64, 96)]
UNEVEN = [(65, 256), (257, 64), (3, 256), (1, 256), (9, 32), (2, 40)]


@dataclass(frozen=True)
class Case:
    """Parameters on one mesh. ``cuts`` are (mesh axis, dimension), the outermost cut first."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple
    cuts: tuple[tuple[int, int], ...]
    shapes: tuple
    row_blocks: tuple[int, ...] | None = None
    # Bytes that all ranks receive together, over the bytes of all matrices; None where shards are uneven.
    traffic: float | None = None


def cases(world: int) -> list[Case]:
    """All cases of a world size."""
    even, uneven = tuple(MATRICES), tuple(UNEVEN)
    found = [
        Case("fsdp", (world,), (Shard(0),), ((0, 0),), even, traffic=2 * (world - 1) / world),
        Case("fsdp uneven", (world,), (Shard(0),), ((0, 0),), uneven),
        Case("columns", (world,), (Shard(1),), ((0, 1),), even, traffic=2 * (world - 1) / world),
        Case("whole experts", (world,), (Shard(0),), ((0, 0),), ((8, 24, 40), (8, 40, 24)), traffic=0.0),
        Case("replicated", (world,), (Replicate(),), (), even, traffic=0.0),
        Case("cut experts", (world,), (Shard(1),), ((0, 1),), ((3, 64, 40),), (32, 32)),
    ]  # fmt: skip
    if world != 4:
        return found
    two = (2, 2)
    column, row = (StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1))
    inside = (Shard(1), Shard(0))
    return found + [
        Case("fsdp x tp column", two, column, ((1, 0), (0, 0)), even, traffic=1.5),
        Case("fsdp x tp column uneven", two, column, ((1, 0), (0, 0)), uneven),
        Case("fsdp x tp column heads", two, column, ((1, 0), (0, 0)), ((96, 64),), (8,) * 12, traffic=0.0),
        # Blocks that no cut respects: whoever mistakes a rank's rows mixes two matrices.
        Case("fsdp x tp column blocks", two, column, ((1, 0), (0, 0)), ((96, 64),), (40, 56)),
        Case("fsdp x tp row", two, row, ((1, 1), (0, 0)), even, traffic=1.5),
        Case("fsdp x tp row uneven", two, row, ((1, 1), (0, 0)), uneven),
        Case("fsdp, tp replicated", two, (Shard(0), Replicate()), ((0, 0),), even, traffic=2.0),
        Case("hsdp", two, (Replicate(), Shard(0)), ((1, 0),), even, traffic=2.0),
        Case("hsdp uneven", two, (Replicate(), Shard(0)), ((1, 0),), uneven),
        Case("ep x efsdp whole", two, column, ((1, 0), (0, 0)), ((8, 24, 40), (8, 40, 24)), traffic=0.0),
        Case("ep x efsdp whole uneven", two, column, ((1, 0), (0, 0)), ((6, 24, 40), (3, 40, 24)), traffic=0.0),
        Case("ep x efsdp inside", two, inside, ((1, 0), (0, 1)), ((6, 24, 40), (6, 40, 24)), traffic=1.0),
        Case("ep x efsdp inside fused", two, inside, ((1, 0), (0, 1)), ((6, 48, 40),), (24, 24), traffic=0.0),
    ]


def case_names(world: int) -> list[str]:
    """Names of all rows that `run_case` gives for a world size."""
    return [case.name for case in cases(world)]


def cut(full: Tensor, case: Case, mesh: DeviceMesh) -> Tensor:
    """This rank's shard, by ``torch.chunk`` along the cuts in turn."""
    coordinate = mesh.get_coordinate()
    for axis, dim in case.cuts:
        chunks = full.chunk(mesh.size(axis), dim)
        empty = full.narrow(dim, 0, 0)
        full = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else empty
    return full.contiguous()


def distribute(full: Tensor, case: Case, mesh: DeviceMesh) -> DTensor:
    """The tensor on its mesh."""
    local = cut(full, case, mesh).clone()
    return DTensor.from_local(local, mesh, case.placements, run_check=False, shape=full.shape, stride=full.stride())


def random_tensors(case: Case, dtype: torch.dtype, number: int) -> list[Tensor]:
    """The same tensors on every rank; small, so that the rounding of weights does not hide that of updates."""
    generator = torch.Generator().manual_seed(number)
    return [0.02 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in case.shapes]


@contextmanager
def counted_bytes():
    """Bytes of matrix parts that this rank receives through any collective."""
    received = [0]
    real = dist.all_to_all_single

    def counting(output, input, output_sizes, input_sizes, **options):
        me = dist.get_group_rank(options["group"], dist.get_rank())
        received[0] += (sum(output_sizes) - output_sizes[me]) * output.element_size()
        assert sum(output_sizes) == output.numel() and sum(input_sizes) == input.numel()
        return real(output, input, output_sizes, input_sizes, **options)

    refused = {name: mock.Mock(side_effect=AssertionError(name)) for name in ("all_gather", "all_gather_into_tensor")}
    with mock.patch.multiple(dist, all_to_all_single=counting, **refused):
        yield received


def summed(value: float, operation=dist.ReduceOp.SUM) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.item()


def with_names(case: Case, parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Parameters and names that are the same on every mesh; stochastic rounding depends on the names."""
    return [(f"{case.name} {number}", parameter) for number, parameter in enumerate(parameters)]


def build(case: Case, mesh: DeviceMesh, dtype: torch.dtype, **options) -> tuple[list[nn.Parameter], Muon]:
    """Parameters on the mesh and their optimizer."""
    parameters = [nn.Parameter(distribute(full, case, mesh)) for full in random_tensors(case, dtype, 0)]
    group = {"params": with_names(case, parameters), "row_blocks": case.row_blocks}
    return parameters, Muon([group], lr=0.02, ns_dtype=dtype, **options)


def one_process(case: Case, dtype: torch.dtype, steps: int = STEPS, **options) -> list[Tensor]:
    """The same steps on whole, plain tensors."""
    parameters = [nn.Parameter(full) for full in random_tensors(case, dtype, 0)]
    group = {"params": with_names(case, parameters), "row_blocks": case.row_blocks}
    optimizer = Muon([group], **(dict(lr=0.02, ns_dtype=dtype) | options))
    for step in range(1, steps + 1):
        for parameter, gradient in zip(parameters, random_tensors(case, dtype, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def torch_muon_fp64(case: Case) -> list[Tensor]:
    """The same steps by torch.optim.Muon, which knows neither batches nor blocks, matrix by matrix in FP64."""

    def plain(gradient, coefficients, steps, eps):
        x = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
        x = x / x.norm().clamp(min=eps)
        a, b, c = coefficients
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x if gradient.shape[0] <= gradient.shape[1] else x.T

    def matrices(tensors: list[Tensor]) -> list[Tensor]:
        flat = [matrix for tensor in tensors for matrix in tensor.reshape(-1, *tensor.shape[-2:])]
        return [block for matrix in flat for block in matrix.split(case.row_blocks or matrix.shape[0])]

    whole = random_tensors(case, torch.float64, 0)
    parameters = [nn.Parameter(matrix) for matrix in matrices(whole)]
    options = dict(lr=0.02, weight_decay=0.1, eps=1e-12, adjust_lr_fn="match_rms_adamw")
    optimizer = torch.optim.Muon(parameters, **options)
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", plain):
        for step in range(1, STEPS + 1):
            gradients = matrices(random_tensors(case, torch.float64, step))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    # The matrices are views of the whole tensors, updated in place.
    return whole


def set_gradients(parameters: list[nn.Parameter], case: Case, mesh: DeviceMesh, step: int) -> None:
    for parameter, gradient in zip(parameters, random_tensors(case, parameters[0].dtype, step), strict=True):
        parameter.grad = distribute(gradient, case, mesh)


def worst_error(parameters: list[nn.Parameter], expected: list[Tensor], case: Case, mesh: DeviceMesh) -> float:
    """Largest error over parameters and ranks, relative to how far the parameter moved."""
    start = random_tensors(case, expected[0].dtype, 0)
    errors = [
        ((p.to_local() - cut(e, case, mesh)).norm() / (e - s).norm()).item()
        for p, e, s in zip(parameters, expected, start, strict=True)
    ]
    return summed(max(errors), dist.ReduceOp.MAX)


def run_case(case: Case, mesh: DeviceMesh, dtype: torch.dtype, expected: list[Tensor], **options) -> dict:
    """Errors, bytes and plan of one case."""
    parameters, optimizer = build(case, mesh, dtype, **options)
    plan = optimizer.plan()
    planned = entries_per_rank(plan)[dist.get_rank()] * dtype.itemsize
    with counted_bytes() as received:
        for step in range(1, STEPS + 1):
            set_gradients(parameters, case, mesh, step)
            optimizer.step()
    states = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    matrix_bytes = sum(torch.Size(shape).numel() for shape in case.shapes) * dtype.itemsize
    owned = sum(2 * unit.shape[0] * unit.shape[1] - 2 * unit.size(unit.owner) for b in plan.buckets for unit in b.units)
    others = sum(len(b.units) for b in plan.buckets)
    holders = sum(task.matrix_count for task in plan.local)
    return {
        "case": case.name,
        "error": worst_error(parameters, expected, case, mesh),
        "state_placed": all(s.placements == p.placements for s, p in zip(states, parameters, strict=True)),
        "bytes": summed(received[0]) / STEPS,
        "bytes_equal_plan": summed(received[0] == STEPS * planned) / mesh.size(),
        "bytes_formula": owned * dtype.itemsize,
        "matrix_bytes": matrix_bytes,
        "traffic": case.traffic,
        "cut_matrices": others,
        "whole_matrices": summed(holders),
    }


def run_mixed(chosen: list[Case], meshes: dict, **extra) -> dict:
    """All cases in one optimizer, in small buckets, so that many are in flight; ``extra`` options of it."""
    groups, everything = [], []
    for case in chosen:
        mesh = meshes[case.mesh]
        parameters = [nn.Parameter(distribute(full, case, mesh)) for full in random_tensors(case, torch.float32, 0)]
        groups.append({"params": parameters, "row_blocks": case.row_blocks})
        everything.append((case, mesh, parameters))
    buckets = mock.patch.object(muon_plan, "BUCKET_BYTES", 70_000)
    with buckets, mock.patch.object(muon_step, "WORKSPACE_BYTES", 200_000):
        optimizer = Muon(groups, lr=0.02, ns_dtype=torch.float32, **extra)
    for step in range(1, STEPS + 1):
        for case, mesh, parameters in everything:
            set_gradients(parameters, case, mesh, step)
        optimizer.step()
    errors = [worst_error(p, one_process(c, torch.float32, **extra), c, m) for c, m, p in everything]
    weights = torch.cat([p.to_local().double().flatten() for *_, parameters in everything for p in parameters])
    buckets = len(optimizer.plan().buckets)
    figures = {"mixed": max(errors), "buckets": buckets, "bits": summed(weights.sum().item())}
    return figures | {key: str(value) for key, value in extra.items()}


def run_stages(world: int) -> dict:
    """Two pipeline stages, of which only the first has a matrix."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    case = Case("stage", (world // 2,), (Shard(0),), ((0, 0),), tuple(MATRICES))
    if mesh.get_local_rank("pp") == 0:
        parameters, optimizer = build(case, mesh["dp"], torch.float32)
    else:
        parameters, optimizer = [], Muon([])
    for step in range(1, STEPS + 1):
        if parameters:
            set_gradients(parameters, case, mesh["dp"], step)
        optimizer.step()
    expected = one_process(case, torch.float32)
    errors = [0.0]
    for p, e, s in zip(parameters, expected, random_tensors(case, torch.float32, 0), strict=False):
        errors.append(((p.to_local() - cut(e, case, mesh["dp"])).norm() / (e - s).norm()).item())
    return {"stages": summed(max(errors), dist.ReduceOp.MAX)}


def in_a_file() -> dict[str, StateFile]:
    """Options of an optimizer with states in a file of this rank."""
    return {"state_offload": StateFile(Path(tempfile.gettempdir()))}


def run_resume(world: int) -> dict:
    """Save on one mesh, load on another, three more steps, against six uninterrupted ones."""
    shapes = tuple(MATRICES + [(8, 24, 40)])
    column = (StridedShard(0, split_factor=2), Shard(0))
    kinds = {
        "fsdp": Case("r", (4,), (Shard(0),), ((0, 0),), shapes),
        "tp": Case("r", (2, 2), column, ((1, 0), (0, 0)), shapes),
        "row": Case("r", (2, 2), (Shard(0), Shard(1)), ((1, 1), (0, 0)), shapes),
        "hsdp": Case("r", (2, 2), (Replicate(), Shard(0)), ((1, 0),), shapes),
    }
    small, offloaded, filed = {"state_dtype": "8bit"}, {"state_offload": "cpu"}, in_a_file()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    figures = {}
    pairs = [("fsdp", "tp", {}, {}), ("tp", "hsdp", {}, {}), ("hsdp", "row", {}, {}), ("row", "fsdp", {}, {})]
    pairs += [("fsdp", "tp", small, small), ("tp", "hsdp", small, small)]
    # A checkpoint does not tell where states lie.
    pairs += [("hsdp", "tp", {}, offloaded), ("tp", "fsdp", offloaded, filed), ("fsdp", "tp", filed, {})]
    for number, (first, second, options, other_options) in enumerate(pairs):
        meshes = {kind: init_device_mesh("cpu", kinds[kind].mesh) for kind in (first, second)}
        parameters, optimizer = build(kinds[first], meshes[first], torch.float32, **options)
        for step in range(1, STEPS + 1):
            set_gradients(parameters, kinds[first], meshes[first], step)
            optimizer.step()
        path = os.path.join(folder[0], str(number))
        dcp.save(tensors_of(parameters, optimizer), checkpoint_id=path)
        parameters, optimizer = build(kinds[second], meshes[second], torch.float32, **other_options)
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        dcp.load(tensors_of(parameters, optimizer), checkpoint_id=path)
        # The trainer sets this too when it resumes; stochastic rounding depends on it.
        for group in optimizer.param_groups:
            group["updates"] = STEPS
        for step in range(STEPS + 1, 2 * STEPS + 1):
            set_gradients(parameters, kinds[second], meshes[second], step)
            optimizer.step()
        expected = one_process(kinds["fsdp"], torch.float32, 2 * STEPS, **options)
        error = worst_error(parameters, expected, kinds[second], meshes[second])
        figures[f"{first} {options} to {second} {other_options}"] = error
    return {"resume": figures}


def tensors_of(parameters: list[nn.Parameter], optimizer: Muon) -> dict[str, Tensor]:
    """Weights and states by name, as live tensors."""
    weights = {f"p{number}": parameter.detach() for number, parameter in enumerate(parameters)}
    return weights | {f"{key}{n}": value for n, p in enumerate(parameters) for key, value in optimizer.state[p].items()}


def run_all() -> list[dict]:
    """On each rank: all cases of this world size."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    chosen = cases(world)
    meshes = {shape: init_device_mesh("cpu", shape) for shape in {case.mesh for case in chosen}}
    results = []
    for case in chosen:
        mesh = meshes[case.mesh]
        expected = one_process(case, torch.float32)
        row = run_case(case, mesh, torch.float32, expected)
        row["oracle_error"] = run_case(case, mesh, torch.float64, torch_muon_fp64(case))["error"]
        results.append(row)
    for extra in ({}, {"state_offload": "cpu"}, in_a_file()):
        results.append(run_mixed(chosen, meshes, **extra))
    results += [run_stages(world)]
    if world == 4:
        results += [run_resume(world)]
    dist.destroy_process_group()
    return results


# The specification's bound. Most cases give 0.0: the same kernels see the same matrices; where many matrices share a
# stack, a batched product may sum in another order.
EXACT = 1e-6


@pytest.fixture(scope="module")
def computed() -> dict[int, list[dict]]:
    """Rows by world size: each is computed once, in whatever order the tests come."""
    return {}


FOUR = pytest.param(4, marks=pytest.mark.thorough)


@pytest.fixture(params=[2, FOUR])
def figures(request, computed) -> list[dict]:
    """The rows of a world size."""
    if request.param not in computed:
        computed[request.param] = run_ranks(run_all, request.param)[0]
    assert len(computed[request.param]) == {2: 10, 4: 24}[request.param]
    return computed[request.param]


BY_CASE = pytest.mark.parametrize(
    ("figures", "case"),
    [
        pytest.param(world, name, id=f"{world}ranks-{name}", marks=FOUR.marks if world == 4 else ())
        for world in (2, 4)
        for name in case_names(world)
    ],
    indirect=["figures"],
)
ON_FOUR = pytest.mark.parametrize("figures", [FOUR], indirect=True)


def row_of(figures: list[dict], case: str) -> dict:
    """The one row of a case."""
    (row,) = (row for row in figures if row.get("case") == case)
    return row


def select(figures: list[dict], key: str) -> list[dict]:
    return [row for row in figures if key in row]


@BY_CASE
def test_a_mesh_equals_one_process(figures, case):
    row = row_of(figures, case)
    assert row["error"] <= EXACT
    assert row["oracle_error"] <= 1e-12  # torch.optim.Muon, in FP64
    assert row["state_placed"]


@BY_CASE
def test_bytes_equal_the_plan_and_the_bound(figures, case):
    row = row_of(figures, case)
    assert row["bytes_equal_plan"] == 1.0
    if row["traffic"] is not None:
        assert row["bytes"] == row["traffic"] * row["matrix_bytes"]
    elif "hsdp" not in case:
        # Each matrix but what its owner holds anyway, there and back.
        assert row["bytes"] == row["bytes_formula"]


@pytest.mark.parametrize("key", ["mixed", "stages"])
def test_many_cases_at_once_equal_one_process(figures, key):
    assert select(figures, key)
    for row in select(figures, key):
        assert row[key] <= EXACT, row


def test_many_buckets_were_in_flight(figures):
    assert select(figures, "mixed")[0]["buckets"] >= 5


def test_offloaded_states_give_the_same_bits(figures):
    plain, offloaded, filed = select(figures, "mixed")[:3]
    assert offloaded["state_offload"] == "cpu" and "StateFile" in filed["state_offload"]
    # The sum over all weights in FP64: equal bits for certain, as any other weight would change it.
    assert offloaded["bits"] == filed["bits"] == plain["bits"]


@ON_FOUR
def test_states_move_between_meshes(figures):
    (row,) = select(figures, "resume")
    assert len(row["resume"]) == 9
    assert max(row["resume"].values()) <= EXACT, row
