"""The manifest of a checkpoint folder: every file with its length and hash, and the checks against it.

``manifest.json`` is one canonical JSON text: ``{"body": {...}, "sha256": hash of the canonical body}``. A file whose
bytes are not exactly the canonical text of its content is refused, so no byte of it can change unseen.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm46.files.durable import FileRecord, create_durably, hash_file

MANIFEST = "manifest.json"
META = "meta.json"
FORMAT = 1


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def write_manifest(folder: Path, step: int, files: dict[str, FileRecord], facts: dict[str, Any]) -> None:
    """Write ``manifest.json``, the last file of a checkpoint. ``facts`` are JSON values for people and tools."""
    body = {**facts, "format": FORMAT, "step": step, "files": {name: asdict(record) for name, record in files.items()}}
    seal = hashlib.sha256(_canonical(body)).hexdigest()
    create_durably(folder / MANIFEST, [_canonical({"body": body, "sha256": seal})])


def read_manifest(folder: Path, step: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The body of a folder's manifest, or None, and what is wrong with it.

    Args:
        folder: a published checkpoint.
        step: the step that the folder's name claims; None asks for no particular one.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, [f"{path}: missing, so the checkpoint is incomplete"]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    try:
        sealed = json.loads(content)
        body, seal = sealed["body"], sealed["sha256"]
        found = hashlib.sha256(_canonical(body)).hexdigest()
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, [f"{path}: damaged ({type(error).__name__}: {error})"]
    if found != seal or content != _canonical(sealed):
        return None, [f"{path}: damaged: its content hashes to {found}, its seal says {seal}"]
    if body["format"] != FORMAT:
        return None, [f"{path}: format {body['format']}, but this version of glm46 reads format {FORMAT}"]
    if step is not None and body["step"] != step:
        return None, [f"{path}: of step {body['step']}, in the folder of step {step}"]
    outside = [name for name in files if Path(name).name != name]
    if outside:
        return None, [f"{path}: names a file outside its folder: {name!r}" for name in outside]
    return body, []


def records_of(body: dict[str, Any]) -> dict[str, FileRecord]:
    """The files that a manifest lists."""
    return {name: FileRecord(**record) for name, record in body["files"].items()}


def check_files(folder: Path, body: dict[str, Any]) -> list[str]:
    """The cheap half of verification: exactly the listed files, ordinary files, of the listed length."""
    records = records_of(body)
    present = {entry.name: entry for entry in os.scandir(folder)}
    faults = [f"{folder / name}: not in the manifest" for name in sorted(set(present) - set(records) - {MANIFEST})]
    for name, record in sorted(records.items()):
        entry = present.get(name)
        if entry is None:
            faults.append(f"{folder / name}: missing")
        elif not entry.is_file(follow_symlinks=False):
            faults.append(f"{folder / name}: not an ordinary file")
        elif entry.stat().st_size != record.bytes:
            faults.append(f"{folder / name}: {entry.stat().st_size} bytes, expected {record.bytes}")
    return faults


def check_hash(path: Path, record: FileRecord) -> list[str]:
    """The thorough half, for one file: its content."""
    try:
        found = hash_file(path)
    except OSError as error:
        return [f"{path}: cannot be read: {error.strerror}"]
    if found != record:
        return [f"{path}: SHA-256 {found.sha256}, expected {record.sha256}"]
    return []
