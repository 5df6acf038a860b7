"""Digests of the blocks of an object, stored next to it, so that a range of it can be verified without the rest.

The digests of ``folder/name`` are the object ``folder/blocks/name``: the SHA-256 of the whole object, 8 bytes of the
SHA-256 of each block of 16 KiB, then the SHA-256 of all bytes before. That is 0.05 % of the object.
"""

import hashlib

from glm46.files.durable import FileRecord

BLOCK_BYTES = 1 << 14
"""Bytes per digest, and the smallest range that is read."""
LEAST_BYTES = 1 << 20
"""Smaller objects have no digests of blocks: they are read whole."""
DIGEST_BYTES = 8
_SEAL_BYTES = 32
BLOCKS = "blocks"


def blocks_name(name: str) -> str:
    """Return the name of the object with the digests of an object."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}{BLOCKS}/{file}"


def digest_of(block: bytes | memoryview) -> bytes:
    """Return the digest of one block."""
    return hashlib.sha256(block).digest()[:DIGEST_BYTES]


class BlockDigests:
    """Hashes content, piece by piece: the whole and its blocks."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._length = 0
        self._rest = bytearray()
        self._digests = bytearray()

    def update(self, piece: bytes) -> None:
        """Hash the next piece, of any length."""
        self._whole.update(piece)
        self._length += len(piece)
        self._rest += piece
        complete = len(self._rest) - len(self._rest) % BLOCK_BYTES
        view = memoryview(bytes(self._rest[:complete]))
        del self._rest[:complete]
        for start in range(0, complete, BLOCK_BYTES):
            self._digests += digest_of(view[start : start + BLOCK_BYTES])

    def record(self) -> FileRecord:
        """Return length and SHA-256 of the content so far."""
        return FileRecord(bytes=self._length, sha256=self._whole.hexdigest())

    def encoded(self) -> bytes:
        """Return the object with the digests."""
        last = digest_of(bytes(self._rest)) if self._rest else b""
        content = self._whole.digest() + self._digests + last
        return content + hashlib.sha256(content).digest()


def decoded(content: bytes, length: int, sha256: str | None) -> bytes | None:
    """Return the digests of all blocks of an object of this length; None if the bytes are damaged, or belong to an
    object of another length or SHA-256."""
    body = content[:-_SEAL_BYTES]
    if hashlib.sha256(body).digest() != content[-_SEAL_BYTES:] or sha256 not in (None, body[:_SEAL_BYTES].hex()):
        return None
    digests = body[_SEAL_BYTES:]
    return digests if len(digests) == DIGEST_BYTES * -(-length // BLOCK_BYTES) else None


def first_other_block(data: bytes, digests: bytes) -> int | None:
    """Return the number of the first block that does not have its digest, counted from the first byte of the data;
    None if all have it."""
    view = memoryview(data)
    for number, start in enumerate(range(0, len(view), BLOCK_BYTES)):
        expected = digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
        if digest_of(view[start : start + BLOCK_BYTES]) != expected:
            return number
    return None
