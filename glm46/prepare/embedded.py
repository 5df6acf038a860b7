"""Text that every machine with glm46 on it holds: the Python library, and the packages installed beside us.

It is read in place and never shipped. It is real text under permissive licences (PSF; BSD, MIT, Apache for the packages
that glm46 stands on), which makes a first run and a first mixture possible without a network.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError

# What an embedded source is called among files, folders and globs.
BUILTIN = "builtin:"


@dataclass(frozen=True)
class _Embedded:
    """Which files of this machine are a source.

    Attributes:
        root: the folder, by its name in `sysconfig.get_path`.
        endings: of the names of its files.
        most_bytes: of all files together; enough for a first run, tokenised in seconds.
    """

    root: str
    endings: tuple[str, ...]
    most_bytes: int


EMBEDDED_SOURCES = {
    "python_stdlib": _Embedded("stdlib", (".py",), 16_000_000),
    "python_packages": _Embedded("purelib", (".py",), 24_000_000),
    # Nearly all are PyTorch's and CUDA's.
    "cpp_headers": _Embedded("purelib", (".h", ".hpp", ".cuh"), 12_000_000),
    # METADATA holds the page that a package shows on an index: the only prose that is installed.
    "package_docs": _Embedded("purelib", ("METADATA", ".md", ".rst", ".txt"), 8_000_000),
}

# Tests repeat themselves and hold generated tables; installed copies of other packages would be duplicates.
_SKIPPED_FOLDERS = {
    "__pycache__", "test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "_vendor",
    "lib-dynload", "glm46",
}  # fmt: skip
# Below: empty package markers. Above: tables written by programs.
_SMALLEST_FILE, _LARGEST_FILE = 200, 400_000


def embedded_files(source: str) -> list[Path]:
    """Files of an embedded source in a fixed order, at most as many bytes as a first run wants.

    A source with more text is sampled by the hash of each file's name, so that every package is represented.

    Raises:
        UserError: no such source, or this machine has no such files.
    """
    if source not in EMBEDDED_SOURCES:
        raise UserError(f"data source '{source}': unknown; the embedded sources are {', '.join(EMBEDDED_SOURCES)}")
    embedded = EMBEDDED_SOURCES[source]
    root = Path(sysconfig.get_path(embedded.root))
    sizes = {file: file.stat().st_size for file in _walk(root, embedded.endings)}
    chosen, total = [], 0
    for file in sorted(sizes, key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest()):
        if total + sizes[file] <= embedded.most_bytes:
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
        elif _SMALLEST_FILE <= entry.stat().st_size <= _LARGEST_FILE:
            yield entry
