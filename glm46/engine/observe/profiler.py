"""Profiles of selected steps on selected ranks: a trace, the FLOPs by kind of module, memory snapshots.

Training never depends on profiles: if the disk fails, one message reports it and training continues.
"""

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from glm46 import compat
from glm46.config.errors import UserError
from glm46.config.profiling import ProfilingConfig, snapshot_fault
from glm46.engine.observe.module_flops import flops_rows, format_flops
from glm46.files.threads import start_daemon

REQUEST_FILE = "profile"
"""File in the dump folder that requests a profile of the next steps; it is removed on detection."""
_POLL_SECONDS = 1.0


class _Request:
    """Watcher for `REQUEST_FILE` in a thread: storage that does not answer delays no step."""

    def __init__(self, path: Path):
        self._path = path
        self._is_seen = threading.Event()
        self._is_over = threading.Event()
        start_daemon(self._run, "profile request")

    def _run(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):  # usually the file does not exist
                self._path.unlink()
                self._is_seen.set()
            self._is_over.wait(_POLL_SECONDS)

    def take(self) -> bool:
        """True once for each file."""
        is_seen = self._is_seen.is_set()
        if is_seen:
            self._is_seen.clear()
        return is_seen

    def close(self) -> None:
        self._is_over.set()


WARMUP_STEPS = 3
"""Steps before a recorded step in which the profiler already runs and discards its records, because its first steps are
slow."""


@dataclass(frozen=True)
class Profiled:
    """Facts about the run on this rank that a profiler needs."""

    rank: int
    device: torch.device
    flops: Callable[[float, float], dict[str, float]]
    """FLOPs of a step on this rank by kind of module, from the tokens and pairs over all ranks; see `batch_flops`."""
    wait_for_all: Callable[[], object]
    """Wait until all ranks have called it."""


class Profiler:
    """Recorder of the steps that [profiling] selects, and of steps after a request, on rank 0.

    Args:
        folder: job.dump_folder.
        say: prints a message.

    Raises:
        UserError: memory snapshots without a GPU.
    """

    def __init__(self, config: ProfilingConfig, folder: Path, run: Profiled, say: Callable[[str], None]):
        if fault := snapshot_fault(config, has_gpu=run.device.type == "cuda"):
            raise UserError(fault)
        self._config = config
        self._folder = folder
        self._run = run
        self._say = say
        self._is_on = config.enable_profiling or config.enable_memory_snapshot
        self._is_chosen = run.rank == 0
        self._on_gpu = run.device.type == "cuda"
        self._request: _Request | None = None
        self._requested = range(0)  # steps of the last request, its warm-up included
        self._has_snapshots = config.enable_memory_snapshot and self._is_chosen
        self._has_failed = False
        self._profile: profile | None = None

    def covers(self, step: int) -> bool:
        """True if rank 0 runs the profiler in this step; equal on all ranks."""
        return self._recorded(step) is not None

    def is_requested(self) -> bool:
        """True once, on the main rank, after `REQUEST_FILE` was created."""
        return self._request is not None and self._request.take()

    def record_after(self, step: int) -> None:
        """Record the steps after this one, with a memory snapshot on a GPU. If a profile by ``profile_freq`` is due in
        these steps, it answers the request instead. All ranks call it with the same step."""
        steps = range(step + 1, step + 2 + WARMUP_STEPS)
        if not any(self.covers(candidate) for candidate in steps):
            self._requested = steps
        if self._request is not None:
            recorded = next(filter(None, map(self._recorded, steps)))
            self._say(f"a profile was requested: step {recorded} is recorded on rank 0")

    def step_begins(self, step: int) -> None:
        """Start the profiler if this step belongs to a profile."""
        recorded = self._recorded(step)
        if not self._is_chosen or recorded is None:
            return
        if self._profile is None:
            if step in self._requested and self._on_gpu and not self._has_snapshots:
                compat.record_allocations(True)
            actions = [ProfilerAction.WARMUP] * (recorded - step)
            actions += [ProfilerAction.RECORD_AND_SAVE, ProfilerAction.NONE]
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities, schedule=actions.__getitem__)
            self._profile.start()

    def step_ends(self, step: int, tokens: int, half_pairs: int) -> None:
        """End a step of this many tokens and pairs, see `batch_flops`. After a recorded step write the profile, and
        wait for the ranks that write one. Collective."""
        if self._profile is not None:
            self._profile.step()
            if step == self._recorded(step):
                recorded = self._profile
                self.drop()
                folder = self._folder / "profile_traces" / f"step-{step:06d}"
                path = folder / f"rank{self._run.rank}_trace.json"
                self._write(path, lambda: self._report_profile(recorded, path, step, tokens, half_pairs))
        is_periodic = self._is_on and step % self._config.profile_freq == 0
        ends_request = len(self._requested) > 0 and step == self._requested[-1]
        if is_periodic or ends_request:
            if self._has_snapshots or (ends_request and self._is_chosen and self._on_gpu):
                self._write_snapshot(f"step-{step:06d}")
                if not self._has_snapshots:
                    compat.record_allocations(False)
            # Wait here, where the watchdog is suspended: writing a large trace would look like a hang.
            self._run.wait_for_all()

    def drop(self) -> None:
        """Stop a profile that is not complete, without writing it."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = None

    def __enter__(self) -> "Profiler":
        if self._run.rank == 0:
            self._request = _Request(self._folder / REQUEST_FILE)
        if self._has_snapshots:
            compat.record_allocations(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop a profile that is not complete. After a lack of memory, write a snapshot."""
        if self._request is not None:
            self._request.close()
        self.drop()
        if self._has_snapshots and kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._write_snapshot("out-of-memory")
        if self._has_snapshots or (self._requested and self._on_gpu):
            compat.record_allocations(False)

    def _recorded(self, step: int) -> int | None:
        """Return the recorded step of the profile that a step belongs to, warm-up included; None without a profile."""
        config = self._config
        if step in self._requested:
            return self._requested[-1]
        recorded = -(-step // config.profile_freq) * config.profile_freq  # rounded up: the next step that is recorded
        return recorded if config.enable_profiling and step >= recorded - WARMUP_STEPS else None

    def _write_snapshot(self, name: str) -> None:
        folder = self._folder / "memory_snapshot" / name
        path = folder / f"rank{self._run.rank}_memory_snapshot.pickle"
        self._write(path, lambda: compat.write_memory_snapshot(path))

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Write a file that training can do without. If the disk fails, report it once, and remove the partial file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if not self._has_failed:
                self._has_failed = True
                self._say(
                    f"{path}: cannot be written ({error.strerror}); training continues without it, and without later "
                    "profiles that cannot be written"
                )

    def _report_profile(self, recorded: profile, trace: Path, step: int, tokens: int, half_pairs: int) -> None:
        _export(recorded, trace)
        run = self._run
        rows = flops_rows(run.flops(tokens, half_pairs))
        device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU"
        about = {"step": step, "rank": run.rank, "device": device, "torch": torch.__version__}
        table = trace.with_name(f"rank{run.rank}_flops.json")
        table.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        self._say(
            f"profile of step {step}, rank {run.rank} ({device}):\n{format_flops(rows)}\n"
            f"  {trace}, {trace.stat().st_size / 1e6:.1f} MB, for ui.perfetto.dev; {table.name} next to it"
        )


def _export(recorded: profile, path: Path) -> None:
    """Write a trace.

    Raises:
        OSError: the disk failed. torch itself writes as much as fits, and raises no error.
    """
    path.write_bytes(b"")  # raises the error of a folder that cannot be written, which torch would not
    recorded.export_chrome_trace(str(path))
    content = path.read_bytes()
    try:
        json.loads(content, strict=False)
    except ValueError as error:
        is_complete = content.rstrip().endswith(b"}")
        reason = f"torch wrote invalid JSON: {error}" if is_complete else os.strerror(errno.ENOSPC)
        raise OSError(errno.EIO if is_complete else errno.ENOSPC, reason, str(path)) from error
