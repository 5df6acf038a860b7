"""Peak main memory of a contestant: a fresh process each, because torch counts no allocations on a CPU."""

import torch

from glm46.benchmark.model_speed import Workload, build_contestant, build_ours
from glm46.observe.hardware import process_bytes
from glm46.prepare.workers import call_in_workers

_STEPS = 2


def peak_bytes(name: str, work: Workload, threads: int) -> int | None:
    """Peak resident memory of a process that takes some steps, the program itself included; None without /proc."""
    ((_, peak),) = call_in_workers(1, torch.set_num_threads, (threads,), _measure, [(name, work)])
    return peak


def _measure(name: str, work: Workload) -> int | None:
    ours = build_ours(work)
    contestant = build_contestant(name, work, ours)
    if contestant.model is not ours:
        ours.to("meta")  # its weights were copied and would count twice
    for _ in range(_STEPS):
        contestant.step()
    # Not getrusage: its peak is inherited from the parent, which holds all contestants.
    return process_bytes("VmHWM")
