"""Speed of Muon beside alternatives, interleaved in one process: separate runs differ by a quarter on a busy machine.

    python scripts/measure/muon_speed.py                                          # one process: torch.optim.Muon
    torchrun --nproc-per-node 4 scripts/measure/muon_speed.py                     # several: gathering everywhere

Prints the least and the median time of a step, in milliseconds, and their ratios.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.compute.optim.muon import Muon
from glm46.compute.optim.muon_update import Orthogonalizer

ROUNDS = 9
# Four layers of GLM-4.6 at a sixteenth of its size: experts, attention, shared expert, router.
SHAPES = (
    [(96, 320)] * 128 + [(320, 96)] * 64 + [(768, 320), (320, 768), (64, 320), (64, 320)] * 4 + [(96, 320)] * 8
    + [(320, 96)] * 4 + [(10, 320)] * 4
)  # fmt: skip
DISTRIBUTED_SHAPES = [(192, 512)] * 16


def parameters(shapes: list) -> list[nn.Parameter]:
    """Random parameters with gradients, the same on every rank."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def interleave(candidates: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Milliseconds per round of each candidate; one unmeasured round first."""
    # Alone, the time on the processor: what else runs on the machine does not count. Together, waiting counts too.
    clock = time.perf_counter if dist.is_initialized() else time.process_time
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS + 1):
        for name, run in candidates.items():
            if dist.is_initialized():
                dist.barrier()
            start = clock()
            run()
            if dist.is_initialized():
                dist.barrier()
            times[name].append(1e3 * (clock() - start))
    return {name: values[1:] for name, values in times.items()}


def one_process() -> dict[str, Callable[[], None]]:
    """Muon and torch.optim.Muon on the shapes that both take."""
    made = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        made[f"glm46 {name}"] = Muon(parameters(SHAPES), ns_dtype=dtype).step
    made["torch bfloat16"] = torch.optim.Muon(parameters(SHAPES), adjust_lr_fn="match_rms_adamw").step
    return made


def several_processes() -> dict[str, Callable[[], None]]:
    """Muon with one owner per matrix, and every rank gathering and orthogonalising every matrix."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard() -> list[nn.Parameter]:
        sharded = []
        for parameter in parameters(DISTRIBUTED_SHAPES):
            sharded.append(nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            sharded[-1].grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
        return sharded

    optimizer = Muon(shard(), ns_dtype=torch.float32)
    everywhere = shard()
    momenta = [torch.zeros_like(parameter) for parameter in everywhere]
    settings = Orthogonalizer(5, torch.float32)

    @torch.no_grad()
    def gather() -> None:
        for parameter, momentum in zip(everywhere, momenta, strict=True):
            momentum.lerp_(parameter.grad, 0.05)
            whole = parameter.grad.lerp(momentum, 0.95).full_tensor()
            update = settings(whole[None])[0]
            parameter.sub_(distribute_tensor(update, mesh, [Shard(0)], src_data_rank=None), alpha=1e-3)

    return {"owner": optimizer.step, "gather everywhere": gather}


def main() -> None:
    """Print the figures of rank 0."""
    torch.set_num_threads(1)
    distributed = dist.is_torchelastic_launched()
    if distributed:
        dist.init_process_group("gloo")
    times = interleave(several_processes() if distributed else one_process())
    if not distributed or dist.get_rank() == 0:
        reference = list(times)[-1]
        for name, values in times.items():
            least, median = min(values), statistics.median(values)
            ratios = least / min(times[reference]), median / statistics.median(times[reference])
            print(
                f"{name:20} least {least:8.1f}  median {median:8.1f}  of {reference}: {ratios[0]:.2f} {ratios[1]:.2f}"
            )
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
