"""Commands that messages show, such as the command that started this process with changed values."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import tomli

import glm46
from glm46.config.overrides import ALTERNATIVES

ROOT = Path(glm46.__path__[0]).parent
"""The checkout that contains this package; if the package is installed, the folder of packages."""


def module_command() -> str:
    """Return ``python -m glm46`` with the interpreter and the PYTHONPATH that it needs in the current folder."""
    interpreter = Path(sys.executable)
    python = shutil.which("python")
    is_on_path = python is not None and Path(python).parent == interpreter.parent
    prefix = "" if Path.cwd() == ROOT or _is_installed() else f"PYTHONPATH={shlex.quote(str(ROOT))} "
    return f"{prefix}{'python' if is_on_path else shlex.quote(short(interpreter))} -m glm46"


def short(path: Path) -> str:
    """Return a path, relative if it is in the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@dataclass(frozen=True)
class Start:
    """The command that started a run."""

    config: Path
    overrides: tuple[str, ...]
    verb: str = "launch"
    options: tuple[str, ...] = ()
    """Options of the verb, such as ``--max-restarts 3``."""
    processes: int | None = None
    script: str | None = None
    """``CONFIG_FILE=... NGPU=... ./run_train.sh`` if the script called the launcher, see `SCRIPT_VARIABLE`."""

    def command(self, values: Mapping[str, str]) -> str:
        """Return the command that starts the run with other values of some keys."""
        overrides = replace_overrides(self.overrides, values)
        has_count = self.processes is None or (self.script is not None and "NGPU=" in self.script)
        processes = [] if has_count else ["--nproc", str(self.processes)]
        if self.script is None:
            return self._module(self.verb, [*processes, *self.options], overrides)
        return f"{self.script} {shlex.join([*processes, *self.options, *overrides])}"

    def plan_command(self, nodes: int) -> str:
        """Return the command that plans the run on this many nodes."""
        options = [] if self.processes is None else ["--nproc", str(nodes * self.processes)]
        return self._module("plan", options, self.overrides)

    def small_command(self) -> str:
        """Return the command that trains the debug config."""
        file = Path("train_configs/debug.toml")
        init = ""
        if self.script is None and (ROOT / file).is_file():
            file = ROOT / file
        elif self.script is None:
            init = f"{module_command()} init && "
        return init + self._other(file)

    def command_that_makes(self, path: Path) -> str | None:
        """Return the command that trains the first config in the same folder whose dump folder contains a path; None if
        there is no such config."""
        for file in sorted(self.config.parent.glob("*.toml")):
            with suppress(OSError, ValueError, LookupError, TypeError):  # any file may lie there
                folder = Path(tomli.loads(file.read_text(encoding="utf-8"))["job"]["dump_folder"])
                if path.absolute().is_relative_to(folder.absolute()) and not file.samefile(self.config):
                    return self._other(file)
        return None

    def _other(self, file: Path) -> str:
        """Return the command that trains another config without overrides."""
        if self.script is not None:
            return f"CONFIG_FILE={shlex.quote(str(file))} {shlex.split(self.script)[-1]}"
        return f"{module_command()} launch --config {shlex.quote(short(file))}"

    def _module(self, verb: str, options: Sequence[str], overrides: Sequence[str]) -> str:
        return f"{module_command()} {shlex.join([verb, '--config', str(self.config), *options, *overrides])}"


def replace_overrides(overrides: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the tokens of a command line with other values; a budget also replaces the budget in the other unit."""
    stale = {*values, *(ALTERNATIVES[key] for key in values if key in ALTERNATIVES)}
    kept = []
    remaining = list(overrides)
    while remaining:
        token = remaining.pop(0)
        has_value = "=" not in token and bool(remaining)
        tokens = [token, remaining.pop(0)] if has_value else [token]
        if token.removeprefix("--").partition("=")[0] not in stale:
            kept += tokens
    return [*kept, *(token for key, value in values.items() for token in (f"--{key}", value))]


def _is_installed() -> bool:
    try:
        return bool(distribution("glm46"))
    except PackageNotFoundError:
        return False
