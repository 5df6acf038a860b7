"""Input files of a recipe: names, folders, globs, and embedded sources.

An embedded source is text that every machine with glm46 has: the Python library, and the packages installed next to
glm46. It is read in place, is never shipped, and needs no network. Licences: PSF for the library; BSD, MIT and Apache
for the packages that glm46 depends on.
"""

import errno
import glob
import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError
from glm46.files.local_disk import leads_nowhere, real_path

# Prefix of an embedded source among the input patterns.
BUILTIN = "builtin:"

_READERS = {".zst": "zstandard", ".parquet": "pyarrow"}
"""Endings of files -> package that reads them."""


@dataclass(frozen=True)
class _Embedded:
    """The files of this machine that form one embedded source.

    Attributes:
        root: the folder, by its name in `sysconfig.get_path`.
        endings: file name endings.
        max_bytes: total size of the files; enough for a first run and tokenized in seconds.
    """

    root: str
    endings: tuple[str, ...]
    max_bytes: int


EMBEDDED_SOURCES = {
    "python_stdlib": _Embedded("stdlib", (".py",), 16_000_000),
    "python_packages": _Embedded("purelib", (".py",), 24_000_000),
    # Mostly headers of PyTorch and CUDA.
    "cpp_headers": _Embedded("purelib", (".h", ".hpp", ".cuh"), 12_000_000),
    # METADATA holds the package index page, the only prose that is installed.
    "package_docs": _Embedded("purelib", ("METADATA", ".md", ".rst", ".txt"), 8_000_000),
}

# Tests repeat themselves and hold generated tables; vendored packages would be duplicates.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "test",
    "tests",
    "testing",
    "idle_test",
    "site-packages",
    "dist-packages",
    "_vendor",
    "lib-dynload",
    "glm46",
}
# Smaller files are empty package markers; larger ones are generated tables.
_MIN_FILE_BYTES = 200
_MAX_FILE_BYTES = 400_000


def find_files(patterns: Sequence[str], key: str) -> list[Path]:
    """Return the files that names, folders and globs match, each once, sorted. Links are followed; hidden files of a
    folder are skipped.

    Args:
        patterns: as the user wrote them; ``builtin:NAME`` is an embedded source.
        key: name of the setting with the patterns, for messages.

    Raises:
        UserError: a pattern matches no file, a link is broken, a folder cannot be read, or a file needs a package that
            is not installed.
    """
    by_real_path: dict[Path, Path] = {}
    faults = []
    for pattern in patterns:
        if pattern.startswith(BUILTIN):
            by_real_path.update({file: file for file in embedded_files(pattern.removeprefix(BUILTIN))})
            continue
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files = [f for name in names for f in (_visible(Path(name)) if Path(name).is_dir() else [Path(name)])]
        broken_links = [f"{key}: {file}: a link to nothing; fix or remove it" for file in files if leads_nowhere(file)]
        faults += broken_links
        files = [file for file in files if file.is_file()]
        if not files and not broken_links:
            hint = "; hidden files of a folder are skipped" if Path(pattern).is_dir() else ""
            faults.append(f"{key} = '{pattern}': matches no file; give a file, a folder or a glob{hint}")
        # Several links may lead to one file; reading it twice would only produce duplicates.
        # A file in the cache of the hub is a link to a file whose name is a hash, without a suffix.
        for file in files:
            real = real_path(file)
            by_real_path[real] = real if real.suffix or not file.suffix else file.absolute()
    faults += [f"{key}: {fault}" for fault in _saved_data_sets(by_real_path.values())]
    for suffix, package in _READERS.items():
        readable = [file for file in by_real_path.values() if file.suffix.lower() == suffix]
        if readable and importlib.util.find_spec(package) is None:
            faults.append(f"{readable[0]}: reading {suffix} needs {package}; pip install 'glm46[data]'")
    if faults:
        raise UserError(*faults)
    return sorted(by_real_path.values())


def _saved_data_sets(files: Iterable[Path]) -> list[str]:
    """Return a fault for each folder among the files that `save_to_disk` of Hugging Face's datasets wrote.

    The Arrow files alone are not the data set: the state file next to them may select some of their rows.
    """
    folders = {file.parent for file in files if file.suffix.lower() == ".arrow" or file.name == "state.json"}
    return [
        f"{folder}: was written by save_to_disk of Hugging Face's datasets; write it as Parquet (python -c 'import "
        f'datasets, sys; datasets.load_from_disk(sys.argv[1]).to_parquet(sys.argv[2])\' "{folder}" FILE.parquet) '
        "and give that file"
        for folder in sorted(folders)
        if (folder / "state.json").is_file() and any(folder.glob("*.arrow"))
    ]


def _visible(folder: Path) -> list[Path]:
    """Return the files under a folder that are not hidden. Links to folders are followed, as globs do; loops of links
    are detected."""
    visible = []
    seen = set()
    for folder_path, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        real = os.path.realpath(folder_path)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        visible += [] if real in seen else [Path(folder_path, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(visible)


def _refuse_folder(error: OSError) -> None:
    if error.errno == errno.ELOOP:  # deep inside a loop that a glob has followed
        return
    raise UserError(f"{error.filename}: cannot be read: {error.strerror}; grant access, or leave it out") from error


def embedded_files(source: str) -> list[Path]:
    """Return the files of an embedded source, sorted, up to its ``max_bytes``.

    A source with more text is sampled by the hash of each file name, so that every package is represented.

    Raises:
        UserError: the source is unknown, or this machine has no such files.
    """
    if source not in EMBEDDED_SOURCES:
        raise UserError(f"data source '{source}': unknown; the embedded sources are {', '.join(EMBEDDED_SOURCES)}")
    embedded = EMBEDDED_SOURCES[source]
    root = Path(sysconfig.get_path(embedded.root))
    sizes = {file: file.stat().st_size for file in _walk(root, embedded.endings)}
    chosen = []
    total = 0
    for file in sorted(sizes, key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest()):
        if total + sizes[file] <= embedded.max_bytes:
            chosen.append(file)
            total += sizes[file]
    if not chosen:
        kinds = ", ".join(f"*{ending}" for ending in embedded.endings)
        raise UserError(f"data source '{source}': no {kinds} under {root}; give prepared text in data.sources")
    return sorted(chosen)


def _walk(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry, endings)
        elif not entry.name.endswith(endings) or not entry.is_file():
            continue
        elif _MIN_FILE_BYTES <= entry.stat().st_size <= _MAX_FILE_BYTES:
            yield entry
