"""Finds the files that a run's functions and programs depend on: their code, the modules that they import, and files
that their arguments and options name.

Imports are read from the source, without running it. Modules imported by a computed name are not found.
"""

import ast
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from glm46.compute.distributed.environment import variables_that_are_set
from glm46.config.rl import RLConfig
from glm46.config.rl_data import EnvironmentConfig
from glm46.files.durable import hash_file
from glm46.files.local_disk import real_path

_BUILT_IN = {
    "choice": "glm46.tasks.rl.rewards.choice",
    "code": "glm46.tasks.rl.rewards.code",
    "score": None,
    "model": None,
}
"""Modules of built-in rewards; None for rewards that are not computed by a function."""
_OTHER_BUILT_IN = "glm46.tasks.rl.rewards.answer"
_PACKAGE = real_path(Path(__file__)).parents[2]
_JUDGES = (_PACKAGE / "tasks" / "rl" / "rewards", _PACKAGE / "storage" / "judge")
"""Folders of glm46 that decide rewards."""
_LARGE = 2**26
"""Files of at least this many bytes are identified by size and time of change instead of a hash."""
_LARGEST_SOURCE = 2**22
"""Imports are read from Python files of at most this many bytes."""


class _Source(NamedTuple):
    """A Python file, and the package that its relative imports refer to."""

    file: Path
    package: str = ""


def source_fingerprints(config: RLConfig) -> list[str]:
    """Return the sorted fingerprints of all `source_files`. Paths do not matter."""
    return sorted(map(_fingerprint, source_files(config)))


def _fingerprint(file: Path) -> str:
    """Return the hash of a file, or size and time of change of a large one."""
    status = file.stat()
    return hash_file(file).sha256 if status.st_size < _LARGE else f"{status.st_size} {status.st_mtime_ns}"


def source_files(config: RLConfig) -> list[Path]:
    """Return the files of all functions and programs that decide what is generated, and its rewards."""
    functions = [name for reward in config.rewards if (name := _module_of_reward(reward.name))]
    options = [value for reward in config.rewards for value in reward.options.values()]
    files = set[Path]()
    if (environment := config.environment) is not None:
        if environment.function:
            functions.append(_module_of_function(environment.function))
        options += environment.options.values()
        files |= _files_of_programs(environment)
    for module in functions:
        files |= _files_of_module(module)
    files |= {Path(value) for value in options if isinstance(value, str) and _is_file(value)}
    return sorted(files)


def _module_of_reward(name: str) -> str | None:
    return _module_of_function(name) if ":" in name else _BUILT_IN.get(name, _OTHER_BUILT_IN)


def _module_of_function(name: str) -> str:
    return name.partition(":")[0]


def _is_file(word: str) -> bool:
    """Return whether an argument names a file. It need not be a valid path."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


def _files_of_programs(environment: EnvironmentConfig) -> set[Path]:
    """Return the files of the commands of an environment, with the modules that Python programs import."""
    search_path = variables_that_are_set(["PYTHONPATH"]).get("PYTHONPATH", "")
    folders = [folder for folder in search_path.split(os.pathsep) if folder]
    files = set[Path]()
    for command in (environment.command, environment.score_command):
        for previous, word in zip(("", *command), command, strict=False):
            if previous == "-m":
                files |= _files_of_module(word, folders) | _files_of_module(f"{word}.__main__", folders)
            elif _is_file(word):
                file = Path(word)
                files |= _with_imports(_Source(file), [str(real_path(file).parent), *folders], ())
            elif _is_file(value := word.partition("=")[2]):
                files.add(Path(value))
    return files


def _files_of_module(module: str, folders: Sequence[str] | None = None) -> set[Path]:
    """Return the files of a module, of the packages that it is in, and of the modules that these import."""
    package = _find_spec(module.partition(".")[0], folders)
    if package is None:
        return set()
    places = package.submodule_search_locations or [package.origin or ""]
    files = set[Path]()
    for source in _sources(module, folders):
        if _is_followed(source.file, places):
            files |= _with_imports(source, folders, places)
    return files


def _with_imports(start: _Source, folders: Sequence[str] | None, places: Sequence[str]) -> set[Path]:
    """Return a file and the files of all modules that it imports, directly or indirectly.

    Args:
        folders: search path of modules; None for the path of this Python.
        places: folders whose modules are followed although they are installed.
    """
    files = {start.file}
    waiting = [start]
    while waiting:
        source = waiting.pop()
        for name in _imports(source):
            for imported in _sources(name, folders):
                if imported.file not in files and _is_followed(imported.file, places):
                    files.add(imported.file)
                    waiting.append(imported)
    return files


def _is_followed(file: Path, places: Sequence[str]) -> bool:
    """Return whether to read the imports of a file: for glm46 only in `_JUDGES`, otherwise in these places and outside
    of installed packages."""
    path = real_path(file)
    if path.is_relative_to(_PACKAGE):
        return any(path.is_relative_to(folder) for folder in _JUDGES)
    if any(file.is_relative_to(place) for place in places):
        return True
    return not any(file.absolute().is_relative_to(folder) for folder in _installed_folders())


def _imports(source: _Source) -> Iterator[str]:
    """Yield the modules that a Python file imports, and ``module.name`` for each imported name, which may be a module
    or not."""
    try:
        if source.file.stat().st_size > _LARGEST_SOURCE:
            return
        tree = ast.parse(source.file.read_bytes())
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return  # not Python, or unreadable
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = source.package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _sources(name: str, folders: Sequence[str] | None) -> list[_Source]:
    """Return the existing files of a module and of the packages that contain it."""
    sources = []
    search = folders
    parts = name.split(".")
    for end, part in enumerate(parts, 1):
        spec = _find_spec(part, search)
        if spec is None:
            break
        locations = spec.submodule_search_locations
        if spec.has_location and spec.origin and Path(spec.origin).is_file():
            package = ".".join(parts[:end] if locations is not None else parts[: end - 1])
            sources.append(_Source(Path(spec.origin), package))
        if locations is None:
            break
        search = list(locations)
    return sources


def _find_spec(module: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module by the last part of its name, without running it; None if it does not exist."""
    try:
        return importlib.util.find_spec(module) if search is None else PathFinder.find_spec(module, list(search))
    except (ImportError, ValueError):
        return None


@cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [site.getusersitepackages(), *(path for path in sys.path if path.endswith(".zip"))]
    return tuple(os.path.abspath(folder) for folder in folders)
