"""Environment variables of this process. The only file that reads them; it needs no torch."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RANK_MARK = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that torchrun sets for each of its processes, to any value. Job systems also set others, such as RANK."""

_TEMPORARY_LOCK = threading.Lock()


def visible_gpus() -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def launched_world_size() -> int | None:
    """Return the number of processes that torchrun started; None if it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if RANK_MARK in os.environ else None


def ranks_of_another_launcher() -> dict[str, str]:
    """Return the variables by which a launcher other than torchrun made this process one of several; empty if there is
    no such launcher. Job systems set them for each pod or task, whatever runs there."""
    if RANK_MARK in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return {}
    return variables_that_are_set(("WORLD_SIZE", "RANK", "LOCAL_RANK"))


def forget_other_local_rank() -> None:
    """Unset LOCAL_RANK unless torchrun set it: torch would use it as device index, and lm-eval would print nothing."""
    if RANK_MARK not in os.environ:
        os.environ.pop("LOCAL_RANK", None)


def variables_that_are_set(names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables among `names` that are set, with their values."""
    return {name: os.environ[name] for name in names if name in os.environ}


def variables_that_begin(*names: str) -> dict[str, str]:
    """Return the environment variables whose names begin with one of `names`, with their values."""
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def environment_without_ranks() -> dict[str, str]:
    """Return all variables except the ones with which torchrun sets ranks, for child processes that are not ranks."""
    rank_prefixes = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_",
        "ROLE_",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_",
        "TORCHELASTIC_",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(rank_prefixes)}


def launched_rank() -> int:
    """Return the rank of this process among the processes of torchrun; 0 if it did not start this one."""
    return _number_from_torchrun("RANK", 0)


def launched_local_rank() -> int:
    """Return the local rank of this process among the processes of torchrun on its node; 0 if it did not start this
    one."""
    return _number_from_torchrun("LOCAL_RANK", 0)


def launched_local_world_size() -> int:
    """Return the number of processes that torchrun started on this node; 1 if it did not start this one."""
    return _number_from_torchrun("LOCAL_WORLD_SIZE", 1)


def _number_from_torchrun(name: str, default: int) -> int:
    return int(os.environ.get(name, default)) if RANK_MARK in os.environ else default


def set_default(name: str, value: str) -> None:
    """Set a variable for this process and its children, unless the user has set it."""
    os.environ.setdefault(name, value)


def let_memory_segments_grow() -> None:
    """Let torch's GPU allocator use expandable segments, unless the user has configured it. To be called before torch
    is imported. With expert parallelism each layer and micro-batch receives a different number of rows, which fragments
    segments of fixed sizes."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its name before torch 2.9
        set_default("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def set_variable(name: str, value: str) -> None:
    """Set a variable for this process and its children."""
    os.environ[name] = value


@contextmanager
def temporary_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable inside this context, for a constructor that reads it; other threads that call this wait."""
    with _TEMPORARY_LOCK:
        previous = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]
            if previous is not None:
                os.environ[name] = previous


def share_cores(cores: int, processes: int) -> None:
    """Set OMP_NUM_THREADS for child processes to their share of the cores, unless the user has set it. torchrun would
    otherwise set one thread for each process."""
    set_default("OMP_NUM_THREADS", str(max(cores // processes, 1)))
