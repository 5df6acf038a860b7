"""A real vLLM on a CPU as a child process."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from glm46.tasks.rl.rollout.http_calls import CallError
from tests.unit.tasks.rl.rollout.waiting import call

PYTHON = "GLM46_VLLM_PYTHON"
SCRIPT = Path(__file__).parents[2] / "deploy/vllm/serve_cpu.sh"
EMPTY: Mapping[str, str] = MappingProxyType({})
_START_SECONDS = 180


def reason_to_skip() -> str | None:
    """Why no server can be started here."""
    python = os.environ.get(PYTHON)
    if python is None:
        return f"{PYTHON} is not set; deploy/vllm/install_cpu.sh makes what it names"
    tried = subprocess.run(
        [python, "-c", "import importlib.util as u; assert u.find_spec('vllm')"], capture_output=True
    )
    return None if tried.returncode == 0 else f"{PYTHON} = {python}: has no vLLM"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class VllmProcess:
    """Starts at once; `wait` returns when it answers. It ends with the thread that makes it."""

    def __init__(self, command: Sequence[str | Path], port: int, log: Path, variables: Mapping[str, str] = EMPTY):
        self.url, self._log = f"http://127.0.0.1:{port}", log
        cache = {"VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(log.parent / "cache"))}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env=os.environ | cache | dict(variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (of programs of one thread)
            )

    def wait(self) -> float:
        """Seconds until it was healthy."""
        began = time.monotonic()
        while time.monotonic() - began < _START_SECONDS:
            try:
                call(self.url, "/health", seconds=2)
                return time.monotonic() - began
            except CallError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.2)
        raise AssertionError(f"vLLM did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """End it and its children at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
