"""Checks rows and packages of episodes before they run, and keeps the output of failed episodes."""

import asyncio
import os
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement

from glm46.config.errors import UserError
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.files.scratch import async_scratch_folder
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rollout.programs import ProgramOutcome, Programs
from glm46.tasks.rl.rollout.records import Episode
from glm46.tasks.rl.rollout.workers import TASK_NAME, task_text

_VERSION = "import sys, importlib.metadata; print(importlib.metadata.version(sys.argv[1]))"


def task_of(prompt: Prompt, keys: PromptsConfig) -> object:
    """Return what the program of an episode gets: the row of the prompt without its label."""
    return without(prompt.row, keys.label_key)


def without(row: Any, key: str) -> Any:
    """Return a row without the value of a key or of a path with dots."""
    if not isinstance(row, dict):
        return row
    if key in row:
        return {name: value for name, value in row.items() if name != key}
    head, _, rest = key.partition(".")
    return row | {head: without(row[head], rest)} if rest and head in row else row


def require_episodes(table: EnvironmentConfig, keys: PromptsConfig, prompts: Sequence[Prompt]) -> None:
    """Check for faults that would end each episode of a row, or all episodes: rows that are too large for an
    environment variable, and packages that a script declares but its Python, in the sandbox of episodes, does not have.

    Raises:
        UserError: if there is such a fault.
    """
    limit = 32 * os.sysconf("SC_PAGE_SIZE") - len(f"{TASK_NAME}=") - 1  # MAX_ARG_STRLEN, with a zero at the end
    sizes = [(prompt.place, len(task_text(task_of(prompt, keys)))) for prompt in prompts if table.kind == "command"]
    if large := [entry for entry in sizes if entry[1] > limit]:
        place, size = large[0]
        count = f"{len(large):,} of {len(prompts):,} rows are so large"
        raise UserError(
            f"{place}: the row has {size:,} bytes as {TASK_NAME}, and Linux starts no program with more than {limit:,} "
            f"in a variable ({count}); leave large values out of the row, and have the program read them from a file "
            "that the row names (rl.environment.allow)"
        )
    programs = Programs(table.variables, table.allow)
    for command in (table.command, table.score_command):
        words = found_program(command)
        script_index = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
        interpreter = words[:script_index]  # with its options; empty without a script, or if the script is a program
        runs_script = interpreter and Path(words[0]).name.startswith("python") and not {"-c", "-m"} & {*interpreter}
        for package in declared_packages(Path(words[script_index])) if runs_script else ():
            question = [*interpreter, "-c", _VERSION, package.name]
            is_judge = command is table.score_command
            outcome = asyncio.run(_run_in_empty_folder(programs, question, table.seconds, is_judge=is_judge))
            version = outcome.fault or outcome.output.strip()
            if outcome.fault or not package.specifier.contains(version, prereleases=True):
                raise UserError(
                    f"rl.environment: {words[script_index]} declares '{package}', and {words[0]} was asked for its "
                    f"version: {version}; install it for that Python, or correct the command"
                )


async def _run_in_empty_folder(
    programs: Programs, command: Sequence[str], seconds: float, *, is_judge: bool
) -> ProgramOutcome:
    async with async_scratch_folder() as folder:
        return await programs.run(command, folder, {}, seconds, is_judge=is_judge)


def kept_failure(folder: Path, number: int, attempt: str, prompt: Prompt, end: Episode) -> str:
    """Write the output of a failed episode into a file; returns a line for the log.

    Args:
        number: number of the failure in this run, from 1.
        attempt: number of the try, as text for the line.
    """
    file = folder / f"failure_{number:06d}.txt"
    failure = f"{attempt}; failure {number}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        head = f"{prompt.place}: {end.fault} ({failure}). The end of the output:"
        file.write_text(f"{head}\n\n{end.output}", encoding="utf-8")
    except OSError as error:
        return f"{end.fault} ({failure}; its output cannot be written: {error})"
    return f"{end.fault} ({failure}; its output is in {file})"


def declared_packages(script: Path) -> list[Requirement]:
    """Read the packages that the head of a Python script declares for all platforms (PEP 723).

    Raises:
        UserError: if the head cannot be parsed.
    """
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    block = [*takewhile(lambda line: line != "# ///", dropwhile(lambda line: line != "# /// script", lines))][1:]
    try:
        names = tomli.loads("\n".join(line[2:] for line in block)).get("dependencies", [])
        return [requirement for requirement in map(Requirement, names) if requirement.marker is None]
    except ValueError as error:
        why = " ".join(str(error).split())
        raise UserError(f"rl.environment: {script}: {why} (in '# /// script', PEP 723); correct it") from error
