"""The kind of a file that a reader of weights or JSON cannot read: reason and remedy in place of "damaged"."""

import json
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError

_HEADS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"version https://git-lfs",),
     "is a pointer of git-lfs in place of the file; run `git lfs pull` in its folder, or download the file"),
    ((b"<!doctype", b"<html", b"<?xml", b'{"error', b"invalid username", b"access to model", b"repository not found"),
     "is the answer of a web server in place of the file; download it again, logged in where the model asks for it"),
    ((b"gguf",), "is a GGUF file, which glm46 does not read; take the safetensors files of the model"),
    ((b"pk\x03\x04",), "is a zip archive, as torch.save writes; convert it to safetensors"),
    ((b"\x80\x02", b"\x80\x04", b"\x80\x05"), "is a pickle, which can run any code; convert it to safetensors"),
)  # fmt: skip
"""Begins of files, in lower case, and what such a file is."""


def read_json_object(file: Path, remedy: str) -> dict[str, Any]:
    """The JSON object that a file of another program holds.

    Args:
        remedy: what to do if it is missing or damaged.

    Raises:
        UserError: with one line, that the file cannot be read, is not JSON, or holds another value.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except (ValueError, RecursionError, OSError) as error:
        fault = known_fault(file, error) or f"damaged ({type(error).__name__}: {error}); {remedy}"
        raise UserError(f"{file}: {fault}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: damaged (holds {json.dumps(content):.40}, not a JSON object); {remedy}")
    return content


def known_fault(path: Path, error: Exception | None = None, allowed: bytes | tuple[bytes, ...] = ()) -> str | None:
    """The reason for which a file cannot be read, and the remedy; None if it is none of the known ones.

    Args:
        error: that a reader has raised.
        allowed: begin of the files that the reader takes.
    """
    if isinstance(error, FileNotFoundError):
        return None
    reason = error.strerror if isinstance(error, OSError) else None
    if not reason:
        try:
            with path.open("rb") as file:
                head = file.read(256).lstrip().lower()
        except OSError as failed:
            reason = failed.strerror
    if reason:
        return f"cannot be read: {reason}; let this user read it, or mount its disk anew"
    if head.startswith(allowed):
        return None
    return next((text for heads, text in _HEADS if head.startswith(heads)), None)
