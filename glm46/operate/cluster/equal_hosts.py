"""Checks of what must be equal on all hosts of a run: software, config, hardware, variables and clocks."""

import hashlib
import operator
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch.distributed as dist

import glm46
from glm46.compute.distributed.environment import variables_that_begin, visible_gpus
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, WARN, Defect, Result, judge
from glm46.operate.estimate.machine import detect_machine, driver_version

_PACKAGES = ("torch", "torchao", "numpy", "safetensors", "tiktoken", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_")
"""Prefixes of environment variables that change what libraries do."""
_FORGIVEN = ("kernel", "memory")
"""Facts whose difference is a WARN."""
_CLOCK_ROUNDS = 10
_CLOCK_SECONDS = 0.05


def host_facts(config: str) -> dict[str, str]:
    """Return the facts of this host.

    Args:
        config: the resolved config as text; empty if there is no config.
    """
    root = Path(glm46.__path__[0])
    source = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + path.read_bytes())
    installed = {str(package.metadata["Name"]).lower(): package.version for package in metadata.distributions()}
    machine = detect_machine(visible_gpus())
    variables = sorted(variables_that_begin(*_VARIABLES).items())
    return {
        "code": source.hexdigest()[:12],
        "config": hashlib.sha256(config.encode()).hexdigest()[:12],
        "kernel": Path("/proc/sys/kernel/osrelease").read_text().strip(),
        "driver": driver_version(),
        "devices": machine.describe(),
        "memory": f"{machine.memory_bytes / 2**30:.0f} GiB",
        "variables": " ".join(f"{name}={value}" for name, value in variables) or "none",
        **{package: installed.get(package, "missing") for package in _PACKAGES},
    }


def equal_hosts(ranks: RankGroup, facts: Mapping[str, str]) -> Result:
    """Compare facts of this host with the facts of most hosts. Collective."""
    all_facts = ranks.gather(dict(facts))
    remedy = "install or set the same on all hosts, best on storage that all see; ISOLATE a host that lacks a GPU"
    faults = []
    for name, value in facts.items():
        usual = Counter(rank_facts[name] for rank_facts in all_facts).most_common(1)[0][0]
        if value != usual:
            faults.append(Defect(WARN if name in _FORGIVEN else FAIL, f"{name}: {value}, not {usual}", remedy))
    return judge("equal hosts", faults, f"{len(facts)} facts as most hosts have them", "equal")


def clock_offset(ranks: RankGroup) -> Result:
    """Compare the clock of this host with the clock of the first, in the median of several barriers. Collective."""
    stamps = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier(ranks.gloo)
        stamps.append(time.time())
    first_stamps = ranks.gather(stamps)[0]
    offset = statistics.median(map(operator.sub, stamps, first_stamps))
    value = f"{offset * 1e3:+.1f} ms against the first host"
    fault = Defect(FAIL if abs(offset) > 1 else WARN, value, "let chrony of all hosts take the time from one server")
    is_good = abs(offset) <= _CLOCK_SECONDS
    return judge("clock offset", [] if is_good else [fault], value, f"<= {_CLOCK_SECONDS * 1e3:.0f} ms")
