"""Compressed files as streams of bytes."""

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from glm46.config.errors import UserError

if TYPE_CHECKING:  # only in the stubs of type checkers
    from _typeshed import WriteableBuffer

with suppress(ImportError):  # optional: the extra [data]; `input_files` refuses such a file without it
    import zstandard

_NAMES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz", ".lzma": "lzma"}
"""Endings of files -> compression."""
COMPRESSED_SUFFIXES = tuple(_NAMES)

_INPUT_BYTES = 4096
"""Compressed bytes of one call of a decoder: each can expand to 32 KB, so a chunk has at most 128 MB."""
_ZSTD_WINDOW_BYTES = 2**31
"""Largest window, as with ``zstd --long=31``. The program and other readers stop at 128 MiB by default."""


def is_compressed(file: Path) -> bool:
    """Return True if a file has the ending of a supported compression."""
    return file.suffix.lower() in COMPRESSED_SUFFIXES


def inner_suffix(file: Path) -> str:
    """Return the ending of a file in lower case, without the ending of its compression."""
    return (Path(file.stem) if is_compressed(file) else file).suffix.lower()


@contextmanager
def opened(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file as a stream of bytes, decompressed according to its ending.

    Raises:
        UserError: the file cannot be decompressed; raised inside the context, by the read that meets the damage.
    """
    with file.open("rb") as raw:
        if not is_compressed(file):
            yield raw
            return
        try:
            yield io.BufferedReader(_Decompressed(raw, file.suffix.lower()), 1 << 20)
        except _NeedsDictionaryError as error:
            raise UserError(
                f"{file}: was compressed with a dictionary in another file; compress it again without one "
                f"(zstd -D DICTIONARY -dc '{file}' | zstd -o FILE.zst)"
            ) from error
        except _DamagedError as error:
            name = _NAMES[file.suffix.lower()]
            raise UserError(
                f"{file}: damaged archive, or not {name} that can be read without further files (near byte "
                f"{raw.tell():,} of {file.stat().st_size:,}: {error}); download it again, compress its text anew, or "
                "give it the ending of its format"
            ) from error


class _DamagedError(Exception):
    """A decoder refuses its input, or the input ends inside a stream."""


class _NeedsDictionaryError(Exception):
    """A zstd stream can only be read with its dictionary."""


class _Decompressed(io.RawIOBase):
    """Text of a compressed file as a raw stream.

    The readers of the libraries lose text without an error: zstandard takes a truncated file for a complete one, and
    bz2 and lzma end before a second stream that is damaged or follows padding.
    """

    def __init__(self, raw: BinaryIO, suffix: str) -> None:
        self._chunks = _decompressed_chunks(raw, suffix)
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill a buffer; return the number of bytes, 0 at the end."""
        if not self._chunk:
            self._chunk = memoryview(next(self._chunks, b""))
        room = memoryview(buffer)
        size = min(len(room), len(self._chunk))
        room[:size] = self._chunk[:size]
        self._chunk = self._chunk[size:]
        return size


def _decompressed_chunks(raw: BinaryIO, suffix: str) -> Iterator[bytes]:
    """Decompress concatenated streams; skip zero padding between and after them. No chunk is empty."""
    data = raw.read(_INPUT_BYTES)
    if not data:
        raise _DamagedError("the file is empty")
    while data:
        decoder, decoder_error = _new_decoder(suffix)
        while not decoder.eof:
            if not data:
                raise _DamagedError("cut off")
            try:
                chunk = decoder.decompress(data)
            except decoder_error as error:
                if suffix == ".zst" and "Dictionary mismatch" in str(error):  # libzstd's name of this error
                    raise _NeedsDictionaryError from error
                raise _DamagedError(str(error)) from error
            if chunk:
                yield chunk
            data = decoder.unused_data if decoder.eof else raw.read(_INPUT_BYTES)
        data = _skip_zeros(raw, data)


def _skip_zeros(raw: BinaryIO, data: bytes) -> bytes:
    """Return input without the zeros at its beginning; empty at the end of the file."""
    data = data.lstrip(b"\0")
    while not data:
        block = raw.read(_INPUT_BYTES)
        if not block:
            return b""
        data = block.lstrip(b"\0")
    return data


def _new_decoder(suffix: str) -> tuple[Any, type[Exception]]:
    """Return a decoder of one stream, with ``decompress``, ``eof`` and ``unused_data``, and the class of its errors."""
    if suffix == ".zst":
        decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        return decoder.decompressobj(), zstandard.ZstdError
    if suffix == ".gz":
        return zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error
    # bz2 raises a plain OSError. It is caught at the decoder; further out it would look like an error of the disk.
    return (bz2.BZ2Decompressor(), OSError) if suffix == ".bz2" else (lzma.LZMADecompressor(), lzma.LZMAError)
