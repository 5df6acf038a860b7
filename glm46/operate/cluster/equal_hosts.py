"""Facts that must be equal on all hosts of a run, and the hosts that differ from most others."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import glm46
from glm46.operate.cluster.host import addresses_of
from glm46.operate.cluster.results import FAIL, PASS, WARN, Result, Subject
from glm46.operate.estimate.machine import driver_version

_PACKAGES = ("torch", "torchao", "numpy", "safetensors", "tiktoken", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_REMEDIES = {
    "code": "the same checkout on all hosts, best on storage that all of them see",
    "config": "put the file on storage that all hosts see, or copy it",
    "GPUs": "ISOLATE the host, or take it out of the hostfile",
    "ranks": "state one number of ranks with --nproc, or slots=N in the hostfile",
    "address of the first node": "the same entry in DNS or /etc/hosts of all hosts",
}
_FORGIVEN = ("kernel", "memory")
"""Facts whose difference is a WARN."""


def host_facts(subject: Subject, config: str) -> dict[str, str]:
    """Return the facts of this host.

    Args:
        config: the resolved config as text; empty if there is no config.
    """
    gpus = Counter(gpu.name for gpu in subject.machine.gpus)
    installed = {str(package.metadata["Name"]).lower(): package.version for package in metadata.distributions()}
    facts = {
        "code": _source_digest(),
        "config": hashlib.sha256(config.encode()).hexdigest()[:12] if config else "none",
        "kernel": subject.read("proc/sys/kernel/osrelease") or "unknown",
        "driver": driver_version(subject.root),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())) or "none",
        "cores": str(subject.machine.cores),
        "memory": f"{subject.machine.memory_bytes / 2**30:.0f} GiB",
        "ranks": str(subject.processes),
        "variables": " ".join(f"{name}={value}" for name, value in sorted(subject.variables.items())) or "none",
        **{package: installed.get(package, "missing") for package in _PACKAGES},
    }
    if subject.nodes > 1:
        facts["address of the first node"] = ", ".join(addresses_of(subject.address)) or "unknown"
    return facts


def _source_digest() -> str:
    root = Path(glm46.__path__[0])
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compare_hosts(facts: Mapping[str, Mapping[str, str]]) -> list[Result]:
    """Return a result for each fact in which a host differs from most others, or a PASS of a host without any.

    Args:
        facts: facts of each host, by its name.
    """
    names = list(next(iter(facts.values())))
    usual = {name: Counter(values[name] for values in facts.values()).most_common(1)[0][0] for name in names}
    results = []
    for host, values in facts.items():
        different = [name for name in names if values[name] != usual[name]]
        for name in different:
            verdict = WARN if name in _FORGIVEN else FAIL
            remedy = _REMEDIES.get(name, "install or set the same on all hosts")
            results.append(Result(f"equal {name}", verdict, values[name], usual[name], remedy, host))
        if not different:
            value = f"{len(names)} facts as most hosts have them"
            results.append(Result("equal hosts", PASS, value, "equal", host=host))
    return results
