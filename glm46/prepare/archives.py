"""Compressed files as streams of bytes, and the formats that files have by their first bytes."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from glm46.config.errors import UserError

HEAD_BYTES = 512
"""Bytes that tell the format of a file."""

_ZSTD_INPUT_BYTES = 4096
"""Read at once: a byte of zstd can stand for 32 KB of text."""
_ZSTD_WINDOW_BYTES = 2**31
"""Largest window, that of ``zstd --long=31``. The program and other readers stop at 128 MiB unless asked."""


class Format(NamedTuple):
    """A format that is not UTF-8 text."""

    name: str
    offset: int
    magic: bytes
    remedy: str | None
    """What makes a file of it readable, with {file} for its name; None if it holds no text to read."""


_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_RENAME, _ROWS = "give it the ending {}", "write its rows as Parquet or .jsonl"
_FORMATS = (
    Format("gzip", 0, b"\x1f\x8b", _RENAME.format(".gz")),
    Format("zstd", 0, b"\x28\xb5\x2f\xfd", _RENAME.format(".zst")),
    *(Format("zstd", 0, bytes([first]) + b"\x2a\x4d\x18", _RENAME.format(".zst")) for first in range(0x50, 0x60)),
    Format("bzip2", 0, b"BZh", _RENAME.format(".bz2")),
    Format("xz", 0, b"\xfd7zXZ\x00", _RENAME.format(".xz")),
    Format("Parquet", 0, b"PAR1", _RENAME.format(".parquet")),
    Format("encrypted Parquet", 0, b"PARE", "write it without encryption"),
    Format("a tar archive", 257, b"ustar", "unpack it (tar -xf '{file}' -C FOLDER) and give the folder"),
    Format("a zip archive", 0, b"PK\x03\x04", "unpack it (unzip '{file}' -d FOLDER) and give the folder"),
    Format("a 7z archive", 0, b"7z\xbc\xaf\x27\x1c", "unpack it (7z x '{file}' -oFOLDER) and give the folder"),
    Format("a RAR archive", 0, b"Rar!\x1a\x07", "unpack it (unrar x '{file}' FOLDER/) and give the folder"),
    Format("lz4", 0, b"\x04\x22\x4d\x18", "compress it anew (lz4 -dc '{file}' | zstd -o FILE.zst)"),
    Format("an Arrow file", 0, b"ARROW1", _ROWS),
    Format("ORC", 0, b"ORC", _ROWS),
    Format("Avro", 0, b"Obj\x01", _ROWS),
    Format("HDF5", 0, b"\x89HDF\r\n\x1a\n", _ROWS),
    Format("a pointer of Git LFS", 0, b"version https://git-lfs.github.com/spec/", "fetch the file (git lfs pull)"),
    Format("PDF", 0, b"%PDF-", None),
    Format("PNG", 0, b"\x89PNG\r\n", None),
    Format("JPEG", 0, b"\xff\xd8\xff", None),
    Format("UTF-16", 0, b"\xff\xfe", None),
    Format("UTF-16", 0, b"\xfe\xff", None),
)


def format_of(head: bytes) -> Format | None:
    """The format that a file has by its first `HEAD_BYTES`; None if it may be text."""
    return next((one for one in _FORMATS if head.startswith(one.magic, one.offset)), None)


def suffix_in(file: Path) -> str:
    """The ending of a file in lower case, without that of its compression."""
    return (Path(file.stem) if is_compressed(file) else file).suffix.lower()


def is_compressed(file: Path) -> bool:
    """Whether a file has the ending of a compression that is read."""
    return file.suffix.lower() in _SUFFIXES


def refuse_other_format(file: Path, head: bytes, expected: str) -> None:
    """Check that a file does not begin as a format that it should not have.

    Raises:
        UserError: with the format, and what makes the file readable.
    """
    found = format_of(head)
    if found is not None and found.name != expected:
        remedy = (found.remedy or f"write it as {expected}, or leave it out of the input").format(file=file)
        inside = f" inside {_SUFFIXES[file.suffix.lower()]}" if is_compressed(file) and expected != "Parquet" else ""
        raise UserError(f"{file}: holds {found.name}{inside}, not {expected}; {remedy}")


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed by its ending.

    Raises:
        UserError: the file is not compressed in this way, is cut off, is damaged, or goes on behind its end. It is
            raised where the stream is read.
    """
    suffix = file.suffix.lower()
    if suffix not in _SUFFIXES:
        with file.open("rb") as raw:
            yield raw
        return
    with file.open("rb") as raw:
        head = raw.read(HEAD_BYTES)
        raw.seek(0)
        found = format_of(head)
        if found is None or found.name != _SUFFIXES[suffix]:
            begin = f"begins as {found.name}" if found else f"begins with {head[:16]!r}" if head else "is empty"
            raise UserError(
                f"{file}: damaged archive, or another format: it {begin}, not as {_SUFFIXES[suffix]}; download it "
                "again, or give it the ending of what it is"
            )
        stream = _decompressed(raw, suffix)
        try:
            yield stream
        except _decoder_errors(suffix) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            if isinstance(error, gzip.BadGzipFile) and stream.tell() and "Not a gzipped" in str(error):
                raise UserError(
                    f"{file}: whole, with bytes behind its end that are not gzip; remove them "
                    f"(gzip -dc '{file}' 2>/dev/null | gzip > FILE.gz)"
                ) from error
            if isinstance(error, MemoryError) or "llocation" in str(error):
                raise UserError(f"{file}: no memory for its window of up to 2 GiB; lower processes") from error
            what = "cut off" if isinstance(error, EOFError) else "damaged"
            size = file.stat().st_size
            raise UserError(
                f"{file}: damaged archive ({what} near byte {raw.tell():,} of {size:,}: {error}); remove it, or "
                "download it again"
            ) from error


def _decompressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".zst":
        return io.BufferedReader(_Zstd(raw), 1 << 20)
    return {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix](raw)


def _decoder_errors(suffix: str) -> tuple[type[Exception], ...]:
    if suffix == ".zst":
        import zstandard

        return (zstandard.ZstdError, EOFError, MemoryError)
    # bz2 raises a plain OSError, gzip one of its own.
    return (OSError, EOFError, zlib.error, lzma.LZMAError)


class _Zstd(io.RawIOBase):
    """The text of zstd frames, one behind the other. The reader of zstandard takes a file that is cut off for whole."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._frame = None
        self._given, self._text = b"", memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer) -> int:
        """Fill a buffer; 0 at the end."""
        while not self._text:
            self._given = self._given or self._raw.read(_ZSTD_INPUT_BYTES)
            if not self._given:
                if self._frame is not None:
                    raise EOFError("ends inside a frame")
                return 0
            self._frame = self._frame or self._decoder.decompressobj()
            self._text, self._given = memoryview(self._frame.decompress(self._given)), b""
            if self._frame.eof:
                self._given, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._text))
        buffer[:size] = self._text[:size]
        self._text = self._text[size:]
        return size
