#!/usr/bin/env python
"""How many injected faults `preflight` finds, and how often it fails without one.

    python scripts/measure/measure_preflight.py [--clean 50] [--only NAME]

Each fault is made for one run alone: limits, mounts in a namespace of its own, programs in front of PATH, damaged
files, ranks that end, or compute or add wrongly or slowly. Runs are forks: torch is imported once. Needs root.
"""

import argparse
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the launcher sets it for two ranks on two cores

import torch
import torch.distributed as dist

from glm46.config.loader import dump_config
from glm46.storage.data.tokenizer import load_tokenizer
from tests.builders import small_config, write_source
from tests.harness import end_with
from tests.ranks.forked_launch import ForkedRank, preflight
from tests.unit.operate.cluster.test_host import GPU

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS = 0x20000
PRIVATE = (1 << 18) | (1 << 14)
HOST = ("--local",)
KEPT = {"clock"}
"""Warnings that are true of a machine without NTP."""


class Fault(NamedTuple):
    """One fault: the check that must not pass, what makes it in the process of the host, and options."""

    check: str
    make: Callable[[Path], None] = lambda folder: None
    options: tuple[str, ...] = ()
    rank: Callable[[int], None] = lambda rank: None
    """Called in each rank before it starts."""
    nodes: int = 1
    """With 2, the fault is made on the second host."""


def limit(kind: int, value: int) -> Callable[[Path], None]:
    return lambda folder: resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def mounted(place: str, options: str, flags: int = 0) -> Callable[[Path], None]:
    """A memory file system over a folder, for this process and its children."""

    def make(folder: Path) -> None:
        target = bytes(folder / place)
        os.makedirs(target, exist_ok=True)
        if LIBC.unshare(NEW_MOUNTS) or LIBC.mount(b"none", b"/", None, PRIVATE, None):
            raise OSError(ctypes.get_errno(), "unshare")
        if LIBC.mount(b"none", target, b"tmpfs", flags, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")

    return make


def program(name: str, text: str) -> Callable[[Path], None]:
    """A program in front of PATH."""

    def make(folder: Path) -> None:
        (folder / "bin").mkdir(exist_ok=True)
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        os.environ["PATH"] = f"{path.parent}:{os.environ['PATH']}"

    return make


def gpus(good: str, bad: str, count: int = 2) -> Callable[[Path], None]:
    """nvidia-smi with two GPUs, the first of which has a fault."""
    xml = f"<nvidia_smi_log>{GPU.replace(good, bad)}{GPU * (count - 1)}</nvidia_smi_log>"
    return program("nvidia-smi", f'[ "$1" = -q ] || exit 1\ncat <<END\n{xml}\nEND')


def variable(name: str, value: str) -> Callable[[Path], None]:
    return lambda folder: os.environ.update({name: value})


def change_shard(change: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: change(next((folder / "source").glob("train*")))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def take_port(folder: Path) -> None:
    global taken
    taken = socket.create_server(("", 29877))


def late_clock(folder: Path) -> None:
    now = time.time
    time.time = lambda: now() + 2.0


def end_soon(number: int) -> Callable[[int], None]:
    """Rank 1 gets a signal half a second after its start."""

    def make(rank: int) -> None:
        if rank == 1 and os.fork() == 0:
            target = os.getppid()
            time.sleep(0.5)
            os.kill(target, number)
            os._exit(0)

    return make


def on_rank_1(owner: object, name: str, changed: Callable) -> Callable[[int], None]:
    """Rank 1 calls ``changed(original, ...)`` in place of a function."""

    def make(rank: int) -> None:
        if rank == 1:
            original = getattr(owner, name)
            setattr(owner, name, lambda *args, **options: changed(original, *args, **options))

    return make


def wrong_sum(original, tensor, *args, **options):
    work = original(tensor, *args, **options)
    if tensor.numel() > 10_000:
        tensor.view(-1)[7] += 1
    return work


def wrong_product(original, left, right):
    out = original(left, right)
    if out.ndim == 2:
        out[3, 5] += 1
    return out


def slow_product(original, left, right):
    original(left, right), original(left, right)
    return original(left, right)


FAULTS = {
    "ulimit -n": Fault("limits", limit(resource.RLIMIT_NOFILE, 500), HOST),
    "ulimit -u": Fault("limits", limit(resource.RLIMIT_NPROC, 1000), HOST),
    "small /dev/shm": Fault("limits", mounted("/dev/shm", "size=1m"), HOST),
    "full disk": Fault("storage", mounted("out", "size=1m")),
    "read-only disk": Fault("storage", mounted("out", "size=64m", flags=1)),
    "small disk": Fault(
        "storage",
        mounted("out", "size=48m"),
        ("--model.shape.hidden_size", "1024", "--checkpoint.interval", "2"),
    ),
    "damaged shard": Fault("inputs", change_shard(flip)),
    "missing shard": Fault("inputs", change_shard(Path.unlink)),
    "no tokenizer": Fault("inputs", options=("--model.tokenizer_path", "nowhere.tiktoken")),
    "incomplete checkpoint": Fault(
        "inputs", lambda folder: (folder / "out/checkpoint/step-000002").mkdir(parents=True)
    ),
    "port taken": Fault("ports", take_port, (*HOST, "--metrics.prometheus_port", "29877")),
    "NCCL_ALGO": Fault("NCCL variables", variable("NCCL_ALGO", "Tree"), HOST),
    "NCCL_IB_HCA": Fault("NCCL variables", variable("NCCL_IB_HCA", "mlx5_0"), HOST),
    "nvidia-smi fails": Fault("GPUs", program("nvidia-smi", "echo 'Unable to determine the device'; exit 15"), HOST),
    "nvidia-smi hangs": Fault("GPUs", program("nvidia-smi", "exec sleep 60"), HOST),
    "GPU missing": Fault("GPUs", gpus("", "", count=1), HOST),
    "GPU remap": Fault("GPUs", gpus("row_pending>No", "row_pending>Yes"), HOST),
    "GPU throttled": Fault("GPUs", gpus("hw_slowdown>Not Active", "hw_slowdown>Active"), HOST),
    "rank killed": Fault("ranks", rank=end_soon(signal.SIGKILL)),
    "wrong sums": Fault("collectives", rank=on_rank_1(dist, "all_reduce", wrong_sum)),
    "wrong products": Fault("products", rank=on_rank_1(torch.Tensor, "__matmul__", wrong_product)),
    "slow rank": Fault("products", rank=on_rank_1(torch.Tensor, "__matmul__", slow_product)),
    "clock off": Fault("clock offset", late_clock, ("--nproc", "1"), nodes=2),
    "folder not shared": Fault("shared folder", mounted("out", "size=64m"), ("--nproc", "1"), nodes=2),
}


def start(folder: Path, node: int, fault: Fault | None, ports: int) -> int:
    """Fork one host; returns the process id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    output = os.open(folder / f"output-{node}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    nodes = fault.nodes if fault else 1
    if nodes > 1:
        os.environ |= {
            "NNODES": str(nodes),
            "NODE_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports),
        }
    if fault and node == nodes - 1:
        fault.make(folder)
    options = fault.options if fault else ()
    argv = [*options, "--config", str(folder / "run.toml"), "--json", str(folder / "found.json")]
    argv += [] if "--nproc" in options else ["--nproc", "2"]
    end_with(lambda: preflight(*argv, prepare=fault.rank if fault else ForkedRank.prepare))


def run(fault: Fault | None, tokenizer, number: int) -> tuple[set[str], float]:
    """The checks that warn or fail in one run, and its seconds."""
    with tempfile.TemporaryDirectory(prefix="measure-preflight-") as name:
        folder = Path(name)
        (folder / "out").mkdir()
        (folder / "source").mkdir()
        write_source(folder / "source", tokenizer)
        (folder / "run.toml").write_text(dump_config(small_config(folder / "source", folder / "out")))
        began = time.monotonic()
        hosts = [start(folder, node, fault, 31000 + 2 * (number % 500)) for node in range(fault.nodes if fault else 1)]
        for host in hosts:
            os.waitpid(host, 0)
        seconds = time.monotonic() - began
        if not (folder / "found.json").is_file():
            print((folder / "output-0").read_text()[-2000:])
            return set(), seconds
        results = json.loads((folder / "found.json").read_text())["results"]
        return {result["name"] for result in results if result["status"] in ("WARN", "FAIL")} - KEPT, seconds


def main() -> None:
    """Print a line for each fault, then the count of faults found and of clean runs without an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clean", type=int, default=50, metavar="N", help="runs without a fault")
    parser.add_argument("--only", action="append", choices=FAULTS, help="this fault; again for more")
    arguments = parser.parse_args()
    tokenizer, missed = load_tokenizer("builtin"), []
    faults = {name: FAULTS[name] for name in arguments.only or FAULTS}
    for number, (name, fault) in enumerate(faults.items()):
        bad, seconds = run(fault, tokenizer, number)
        missed += [] if fault.check in bad else [name]
        others = ", ".join(sorted(bad - {fault.check})) or "nothing"
        print(
            f"{name}: {'found' if fault.check in bad else 'MISSED'} in {seconds:.1f} s, beside it {others}", flush=True
        )
    print(f"{len(faults) - len(missed)} of {len(faults)} found; missed: {', '.join(missed) or 'none'}", flush=True)
    alarms, times = [], []
    for number in range(arguments.clean):
        bad, seconds = run(None, tokenizer, number)
        times.append(seconds)
        if bad:
            alarms.append(f"run {number}: {', '.join(sorted(bad))}")
    slowest = f"; {sorted(times)[len(times) // 2]:.1f} s in the median, {max(times):.1f} at most" if times else ""
    print(f"{len(alarms)} alarms in {arguments.clean} clean runs{slowest}", *alarms, sep="\n", flush=True)


if __name__ == "__main__":
    main()
