"""Text that every machine with glm46 on it holds: the Python standard library and the packages installed beside us.

Both are read in place and never shipped. They are real text under permissive licences (PSF; BSD, MIT, Apache for the
packages that glm46 stands on), which makes a first run possible without a network.
"""

import hashlib
import sysconfig
from pathlib import Path

from glm46.config.errors import UserError

EMBEDDED_SOURCES = ("python_stdlib", "python_packages")

# Together above the 20 MB that a first run needs, and tokenised in seconds.
_MOST_BYTES = {"python_stdlib": 16_000_000, "python_packages": 24_000_000}

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
        UserError: no such source, or this Python has no library sources.
    """
    if source not in EMBEDDED_SOURCES:
        raise UserError(f"data source '{source}': unknown; the embedded sources are {', '.join(EMBEDDED_SOURCES)}")
    root = Path(sysconfig.get_path("stdlib" if source == "python_stdlib" else "purelib"))
    sizes = {file: file.stat().st_size for file in _walk(root)}
    chosen, total = [], 0
    for file in sorted(sizes, key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest()):
        if total + sizes[file] <= _MOST_BYTES[source]:
            chosen.append(file)
            total += sizes[file]
    if not chosen:
        raise UserError(f"data source '{source}': no Python sources under {root}; give prepared text in data.sources")
    return sorted(chosen)


def _walk(folder: Path):
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.suffix == ".py" and entry.is_file() and _SMALLEST_FILE <= entry.stat().st_size <= _LARGEST_FILE:
            yield entry
