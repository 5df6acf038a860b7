"""Rows and packages of episodes, checked before one runs, and the output of those that failed."""

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement

from glm46.config.errors import UserError
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rollout.programs import Programs
from glm46.tasks.rl.rollout.records import EpisodeEnd

TASK_NAME = "GLM46_TASK"
"""The variable with the row of an episode."""
_VERSION = "import sys, importlib.metadata as of; print(of.version(sys.argv[1]))"


def task_of(prompt: Prompt, keys: PromptsConfig) -> str:
    """The row of a prompt without its label, as JSON, for its program."""
    return json.dumps(without(prompt.row, keys.label_key), default=str)


def without(row: Any, key: str) -> Any:
    """A row without what a key, or a path with dots, leads to."""
    if not isinstance(row, dict):
        return row
    if key in row:
        return {name: value for name, value in row.items() if name != key}
    head, _, rest = key.partition(".")
    return row | {head: without(row[head], rest)} if rest and head in row else row


def require_episodes(table: EnvironmentConfig, keys: PromptsConfig, prompts: Sequence[Prompt]) -> None:
    """Check what would end each episode: rows that are too large for a variable, and packages that a script declares
    and its Python has not, in the sandbox of episodes.

    Raises:
        UserError: there is one.
    """
    most = 32 * os.sysconf("SC_PAGE_SIZE") - len(f"{TASK_NAME}=") - 1  # MAX_ARG_STRLEN, with a zero at the end
    sizes = [(prompt.place, len(task_of(prompt, keys))) for prompt in prompts if table.kind == "command"]
    if large := [one for one in sizes if one[1] > most]:
        (place, size), count = large[0], f"{len(large):,} of {len(prompts):,} rows are so large"
        raise UserError(
            f"{place}: the row has {size:,} bytes as {TASK_NAME}, and Linux starts no program with more than {most:,} "
            f"in a variable ({count}); leave large values out of the row, and have the program read them from a file "
            "that the row names (rl.environment.allow)"
        )
    for words in map(found_program, (table.command, table.score_command)):
        at = next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
        is_python = at and Path(words[0]).name.startswith("python") and not {"-c", "-m"} & {*words[:at]}
        for package in declared_packages(Path(words[at])) if is_python else ():
            asked, programs = [*words[:at], "-c", _VERSION, package.name], Programs(table.variables, table.allow)
            with tempfile.TemporaryDirectory() as folder:
                ended = asyncio.run(programs.run(asked, folder, {}, table.seconds, b""))
            found = ended.fault or ended.output.strip()
            if ended.fault or not package.specifier.contains(found, prereleases=True):
                raise UserError(
                    f"rl.environment: {words[at]} declares '{package}', and {words[0]} was asked for its version: "
                    f"{found}; install it for that Python, or correct the command"
                )


def kept_failure(folder: Path, number: int, which: str, prompt: Prompt, end: EpisodeEnd) -> str:
    """A line on a failed episode, whose output is written into a file."""
    file, which = folder / f"failure_{number:06d}.txt", f"{which}; failure {number}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        head = f"{prompt.place}: {end.fault} ({which}). The end of the output:"
        file.write_text(f"{head}\n\n{end.output}", encoding="utf-8")
    except OSError as error:
        return f"{end.fault} ({which}; its output cannot be written: {error})"
    return f"{end.fault} ({which}; its output is in {file})"


def declared_packages(script: Path) -> list[Requirement]:
    """The packages of any platform that the head of a Python script declares (PEP 723).

    Raises:
        UserError: it cannot be read.
    """
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    block = [*takewhile(lambda line: line != "# ///", dropwhile(lambda line: line != "# /// script", lines))][1:]
    try:
        names = tomli.loads("\n".join(line[2:] for line in block)).get("dependencies", [])
        return [one for one in map(Requirement, names) if one.marker is None]
    except ValueError as error:
        why = " ".join(str(error).split())
        raise UserError(f"rl.environment: {script}: {why} (in '# /// script', PEP 723); correct it") from error
