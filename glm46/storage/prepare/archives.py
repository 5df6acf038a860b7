"""Compressed files as streams of bytes, and the formats that files have by their first bytes."""

import bz2
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from glm46.config.errors import UserError

HEAD_BYTES = 512
"""Bytes that tell the format of a file."""

_INPUT_BYTES = 4096
"""Read at once: a byte can stand for 32 KB of text."""
_MAGIC_BYTES = 6
"""Longest magic of a compression."""
_ZSTD_WINDOW_BYTES = 2**31
"""Largest window, that of ``zstd --long=31``. The program and other readers stop at 128 MiB unless asked."""


class Format(NamedTuple):
    """A format that is not UTF-8 text."""

    name: str
    offset: int
    magic: bytes
    remedy: str | None
    """What makes a file of it readable, with {file} for its name; None if it holds no text to read."""


_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz", ".lzma": "lzma"}
"""Compressions by endings of files. Each is the name of its program, too."""
_RENAME, _ROWS = "give it the ending {}", "write its rows as Parquet or .jsonl"
_ANEW = "compress it anew ({} -dc '{{file}}' | zstd -o FILE.zst)"
_TAR = Format("a tar archive", 257, b"ustar", "unpack it (tar -xf '{file}' -C FOLDER) and give the folder")
_FORMATS = (
    Format("gzip", 0, b"\x1f\x8b", _RENAME.format(".gz")),
    Format("zstd", 0, b"\x28\xb5\x2f\xfd", _RENAME.format(".zst")),
    *(Format("zstd", 0, bytes([first]) + b"\x2a\x4d\x18", _RENAME.format(".zst")) for first in range(0x50, 0x60)),
    Format("bzip2", 0, b"BZh", _RENAME.format(".bz2")),
    Format("xz", 0, b"\xfd7zXZ\x00", _RENAME.format(".xz")),
    Format("lzma", 0, b"\x5d\x00\x00", _RENAME.format(".lzma")),
    Format("the format of compress", 0, b"\x1f\x9d", _ANEW.format("gzip")),
    Format("lzip", 0, b"LZIP\x01", _ANEW.format("lzip")),
    Format("lzop", 0, b"\x89LZO\x00", _ANEW.format("lzop")),
    Format("snappy", 0, b"\xff\x06\x00\x00sNaPpY", _ANEW.format("snzip")),
    Format("Parquet", 0, b"PAR1", _RENAME.format(".parquet")),
    Format("encrypted Parquet", 0, b"PARE", "write it without encryption"),
    Format("lz4", 0, b"\x04\x22\x4d\x18", _ANEW.format("lz4")),
    _TAR,
    Format("a zip archive", 0, b"PK\x03\x04", "unpack it (unzip '{file}' -d FOLDER) and give the folder"),
    Format("a 7z archive", 0, b"7z\xbc\xaf\x27\x1c", "unpack it (7z x '{file}' -oFOLDER) and give the folder"),
    Format("a RAR archive", 0, b"Rar!\x1a\x07", "unpack it (unrar x '{file}' FOLDER/) and give the folder"),
    Format("an Arrow file", 0, b"ARROW1", _ROWS),
    Format("an Arrow stream", 0, b"\xff\xff\xff\xff", _ROWS),
    Format("Feather", 0, b"FEA1", _ROWS),
    Format("SQLite", 0, b"SQLite format 3\x00", _ROWS),
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
    found = next((one for one in _FORMATS if head.startswith(one.magic, one.offset)), None)
    return _TAR if found is None and _is_old_tar(head) else found


def _is_old_tar(head: bytes) -> bool:
    """True if a file begins as a tar archive of before POSIX, which has no magic but a checksum."""
    try:
        return bool(tarfile.TarInfo.frombuf(head, "latin-1", "strict").name)
    except (tarfile.HeaderError, ValueError):
        return False


def suffix_in(file: Path) -> str:
    """The ending of a file in lower case, without that of its compression."""
    return (Path(file.stem) if is_compressed(file) else file).suffix.lower()


def is_compressed(file: Path) -> bool:
    """True if a file has the ending of a compression that is read."""
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
def opened(file: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed by its ending.

    Raises:
        UserError: the file is not compressed in this way, is cut off, is damaged, or goes on behind its end. It is
            raised where the stream is read.
    """
    with file.open("rb") as raw:
        if not is_compressed(file):
            yield raw
            return
        kind = _SUFFIXES[file.suffix.lower()]
        head = raw.read(HEAD_BYTES)
        raw.seek(0)
        found = format_of(head)
        if found is None or found.name != kind:
            begin = f"begins as {found.name}" if found else f"begins with {head[:16]!r}" if head else "is empty"
            raise UserError(
                f"{file}: damaged archive, or another format: it {begin}, not as {kind}; download it "
                "again, or give it the ending of what it is"
            )
        try:
            yield io.BufferedReader(_Decompressed(raw, kind), 1 << 20)
        except _ForeignEnd as error:
            raise UserError(
                f"{file}: whole, with bytes behind its end that are not {kind}; remove them, or what is cut off there "
                f"is lost ({kind} -dc '{file}' 2>/dev/null | {kind} > FILE{file.suffix})"
            ) from error
        except (_Damaged, EOFError, MemoryError) as error:
            if isinstance(error, MemoryError) or "llocation" in str(error):
                raise UserError(f"{file}: no memory for its window of up to 2 GiB; lower processes") from error
            what = "cut off" if isinstance(error, EOFError) else "damaged"
            size = file.stat().st_size
            raise UserError(
                f"{file}: damaged archive ({what} near byte {raw.tell():,} of {size:,}: {error}); remove it, or "
                "download it again"
            ) from error


class _Damaged(Exception):
    """A decoder refuses its input. The error of bz2 is a plain OSError, as those of the disk are."""


class _ForeignEnd(Exception):
    """Bytes of another format follow a whole stream."""


def _decoder(kind: str) -> tuple[Any, type[Exception]]:
    """A decoder of one stream, with ``decompress``, ``eof`` and ``unused_data``, and the class of its errors."""
    if kind == "zstd":
        import zstandard

        decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        return decoder.decompressobj(), zstandard.ZstdError
    if kind == "gzip":
        return zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error
    return (bz2.BZ2Decompressor(), OSError) if kind == "bzip2" else (lzma.LZMADecompressor(), lzma.LZMAError)


class _Decompressed(io.RawIOBase):
    """The text of streams of one compression, one behind the other, with zeros between and behind them as padding.

    The readers of the libraries take a zstd file that is cut off for whole, and leave out what follows a damaged
    begin of a second stream of bzip2 or xz.
    """

    def __init__(self, raw: BinaryIO, kind: str) -> None:
        self._raw, self._kind = raw, kind
        self._decoder: Any = None
        self._error = Exception
        self._given, self._text = b"", memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer) -> int:
        """Fill a buffer; 0 at the end."""
        while not self._text:
            if self._decoder is None and not self._begins():
                return 0
            self._given = self._given or self._raw.read(_INPUT_BYTES)
            if not self._given:
                raise EOFError("ends inside a stream")
            try:
                text = self._decoder.decompress(self._given)
            except self._error as error:
                raise _Damaged(str(error)) from error
            self._text, self._given = memoryview(text), b""
            if self._decoder.eof:
                self._given, self._decoder = self._decoder.unused_data, None
        size = min(len(buffer), len(self._text))
        buffer[:size] = self._text[:size]
        self._text = self._text[size:]
        return size

    def _begins(self) -> bool:
        """Begin the next stream; whether there is one."""
        is_padded = self._given.startswith(b"\0")
        self._given = self._given.lstrip(b"\0")
        while len(self._given) < _MAGIC_BYTES and (more := self._raw.read(_INPUT_BYTES)):
            is_padded |= not self._given and more.startswith(b"\0")
            self._given = (self._given + more).lstrip(b"\0")
        if self._given:
            found = format_of(self._given[:HEAD_BYTES])
            if found is None or found.name != self._kind:
                # Zeros and then no stream are a block of the disk that was never written.
                raise _Damaged("zeros in place of the begin of a stream") if is_padded else _ForeignEnd()
            self._decoder, self._error = _decoder(self._kind)
        return bool(self._given)
