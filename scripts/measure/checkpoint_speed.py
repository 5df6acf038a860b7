"""Speed of checkpoints: the stall of training against a plain copy, and the time to save, verify and load."""

import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.save import SaveOutcome
from scripts.measure.rounds import timed_rounds

_PIECES_PER_GIB = 64


def checkpoint_speed(
    folder: Path, gib: float, rounds: int | None, device: torch.device, report: Callable[[str], None]
) -> str:
    """Measure background saves, verification and load of one rank's state.

    Args:
        folder: on the disk to measure; all files written there are removed.
        gib: size of the state, in GiB.
        rounds: timed saves, after one that allocates the buffers; see `timed_rounds`.

    Returns:
        A report: medians, and the stall as the median ratio to a plain copy to host memory timed before each save.
    """
    pieces = max(1, round(gib * _PIECES_PER_GIB))
    state = {f"piece{number}": torch.randn(1024, 4096, device=device) for number in range(pieces)}
    size = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory(dir=folder) as name:
        manager = CheckpointManager(Path(name), keep_latest_k=1)
        copies, saves = _race(manager, state, rounds, report)
        verify, load = _verify_and_load(Path(name), state)
        manager.close()
    stall = statistics.median(save.stall_seconds / copy for save, copy in zip(saves, copies, strict=True))
    saved = statistics.median(save.save_seconds for save in saves)
    return "\n".join(
        [
            f"state of {size / 2**30:.2f} GiB in {pieces} tensors on {device}, written under {folder}; "
            f"{len(saves)} saves",
            f"plain copy to host memory   {statistics.median(copies) * 1e3:10.1f} ms",
            f"stall of a background save  {statistics.median(s.stall_seconds for s in saves) * 1e3:10.1f} ms, "
            f"{stall:.2f} of the copy",
            f"save, synced and published  {saved * 1e3:10.1f} ms, {size / saved / 1e9:.2f} GB/s",
            f"verify, files just written  {verify * 1e3:10.1f} ms, {size / verify / 1e9:.2f} GB/s",
            f"load after verification     {load * 1e3:10.1f} ms, {size / load / 1e9:.2f} GB/s",
            f"SHA-256, one core           {_hash_speed():10.2f} GB/s",
            f"bytes saved                 {saves[-1].bytes / size:10.4f} of the state",
        ]
    )


def _race(
    manager: CheckpointManager, state: dict[str, Tensor], rounds: int | None, report: Callable[[str], None]
) -> tuple[list[float], list[SaveOutcome]]:
    is_cuda = any(tensor.is_cuda for tensor in state.values())
    host = {key: torch.empty(t.shape, dtype=t.dtype, pin_memory=is_cuda) for key, t in state.items()}
    copies, saves = [], []
    # The first round allocates the memory and is not counted.
    for step in itertools.chain([0], (1 + number for number in timed_rounds(rounds, report))):
        started = time.perf_counter()
        for key, tensor in state.items():
            host[key].copy_(tensor, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        copies.append(time.perf_counter() - started)
        manager.save_in_background(step, state, {})
        while not (ended := manager.poll()):
            time.sleep(0.005)
        saves += ended
    return copies[1:], saves[1:]


def _verify_and_load(folder: Path, state: dict[str, Tensor]) -> tuple[float, float]:
    manager = CheckpointManager(folder, keep_latest_k=0)
    started = time.perf_counter()
    step = manager.newest()
    verified = time.perf_counter()
    assert step is not None
    manager.load(step, state)
    loaded = time.perf_counter()
    manager.close()
    return verified - started, loaded - verified


def _hash_speed() -> float:
    block = bytes(1 << 28)
    started = time.perf_counter()
    hashlib.sha256(block)
    return len(block) / (time.perf_counter() - started) / 1e9
