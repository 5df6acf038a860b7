"""What there is to read, cut into parts of bounded size, and the documents of one part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Text per part: the unit of parallel work, of memory per process, and of what a killed run loses.
PART_BYTES = 4_000_000


class BadDocument(Exception):
    """A document that cannot be used; the message is the reason under which it is counted."""


@dataclass(frozen=True)
class Part:
    """Some whole files, each of them one document."""

    files: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    text: str
    place: str


def parts_of_files(files: Sequence[Path]) -> list[Part]:
    """Consecutive files in parts of about `PART_BYTES`."""
    parts, batch, size = [], [], 0
    for file in files:
        batch.append(str(file))
        size += file.stat().st_size
        if size >= PART_BYTES:
            parts.append(Part(tuple(batch), size))
            batch, size = [], 0
    return [*parts, Part(tuple(batch), size)] if batch else parts


def read_part(part: Part) -> Iterator[Document | BadDocument]:
    """The documents of a part in order; a bad one is given as the exception that says why."""
    for file in part.files:
        try:
            text = Path(file).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield BadDocument("not UTF-8", f"{file} byte {error.start}")
            continue
        yield Document(text, file) if text.strip() else BadDocument("empty", file)
