"""Detects why a file of weights or JSON cannot be read, and reports reason and remedy instead of "damaged"."""

import json
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.files.regular_file import NotRegularFileError, open_regular, read_regular

_HEADS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    (
        (b"version https://git-lfs",),
        "is a pointer of git-lfs in place of the file; run `git lfs pull` in its folder, or download the file",
    ),
    (
        (
            b"<!doctype",
            b"<html",
            b"<?xml",
            b'{"error',
            b"invalid username",
            b"access to model",
            b"repository not found",
        ),
        "is the answer of a web server in place of the file; download it again, logged in where the model asks for it",
    ),
    ((b"gguf",), "is a GGUF file, which glm46 does not read; take the safetensors files of the model"),
    ((b"pk\x03\x04",), "is a zip archive, as torch.save writes; convert it to safetensors"),
    ((b"\x80\x02", b"\x80\x04", b"\x80\x05"), "is a pickle, which can run any code; convert it to safetensors"),
)
"""Beginnings of files, in lower case, and a description of such a file."""


def read_json_object(file: Path, remedy: str) -> dict[str, Any]:
    """Read the JSON object in a file that another program wrote.

    Args:
        remedy: advice for a missing or damaged file.

    Raises:
        UserError: with one line: the file cannot be read, is not JSON, or holds another value.
    """
    try:
        content = json.loads(read_regular(file))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except (ValueError, RecursionError, OSError) as error:
        fault = known_fault(file, error) or f"damaged ({type(error).__name__}: {error}); {remedy}"
        raise UserError(f"{file}: {fault}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: damaged (holds {json.dumps(content):.40}, not a JSON object); {remedy}")
    return content


def known_fault(path: Path, error: Exception | None = None, allowed: bytes | tuple[bytes, ...] = ()) -> str | None:
    """Explain why a file cannot be read and how to fix it; None for an unknown cause.

    Args:
        error: the error that a reader raised.
        allowed: beginnings of the files that the reader accepts.
    """
    if isinstance(error, FileNotFoundError):
        return None
    failure = error if isinstance(error, OSError) and error.strerror else None
    head = b""
    if failure is None:
        try:
            with open_regular(path) as file:
                head = file.read(256).lstrip().lower()
        except OSError as failed:
            failure = failed
    if isinstance(failure, NotRegularFileError):
        return f"cannot be read: {failure.strerror}; remove it, and copy the file anew"
    if failure is not None:
        return f"cannot be read: {failure.strerror}; let this user read it, or mount its disk anew"
    if head.startswith(allowed):
        return None
    return next((text for heads, text in _HEADS if head.startswith(heads)), None)
