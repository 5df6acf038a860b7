"""From files of text to a folder of shards: read, tokenise in parallel, drop duplicates, split, shard, manifest.

Work happens in ``<output>.partial`` and is published by one rename, so a folder with the final name is always whole.
Every finished part of the work is a file there; a run that was killed goes on behind the last one. The result depends
on text, settings and tokenizer only, not on the number of processes or on interruptions.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from glm46.config.errors import UserError
from glm46.data.manifest import Manifest, load_manifest, save_manifest
from glm46.data.parts import make_part, start_worker
from glm46.data.progress import bytes_progress
from glm46.data.readers import Part, parts_of_files
from glm46.data.sharding import write_splits
from glm46.data.shards import map_tensors, sync_folder
from glm46.data.sources import embedded_files
from glm46.data.tokenizer import Tokenizer

# Raised when the same text and settings would give other bytes than before.
PIPELINE = 1

# Documents held out for validation, of every ten thousand.
_HELD_OUT = 200


def prepare_source(source: str, output: Path, tokenizer: Tokenizer, *, report: Callable[[str], None]) -> Manifest:
    """Make the shards of an embedded source unless they are there, and return their manifest.

    Two processes may call this at once: one works, the other waits and takes the result.

    Args:
        source: "python_stdlib" or "python_packages".
        output: folder to make. Unfinished work lies beside it under the same name with ``.partial``.
        tokenizer: from `load_tokenizer`; worker processes load it again from its path.
        report: takes lines of text for the user. On a terminal a progress bar is drawn besides.

    Raises:
        UserError: unknown source, or ``output`` holds something else.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(output, report):
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            manifest = load_manifest(output)
            manifest.require_tokenizer(tokenizer.fingerprint)
            if manifest.source != source:
                raise UserError(f"{output}: holds the source '{manifest.source}', not '{source}'; choose another path")
            return manifest
        files = embedded_files(source)
        settings = {"pipeline": PIPELINE, "held_out_per_10000": _HELD_OUT, "files": len(files)}
        return _prepare(source, parts_of_files(files), output, tokenizer, settings, report)


def _prepare(
    source: str, parts: Sequence[Part], output: Path, tokenizer: Tokenizer, settings: dict,
    report: Callable[[str], None],
) -> Manifest:  # fmt: skip
    started = time.monotonic()
    key = _key(settings, source, tokenizer.fingerprint, [_listing(part) for part in parts])
    partial = _partial_folder(output, key)
    total = sum(part.size_bytes for part in parts)
    report(f"preparing {source}: {total / 1e6:.1f} MB of text into {output}")
    part_files = _make_parts(parts, partial, key, tokenizer, report)
    dropped = Counter()
    for file in part_files:
        reasons = json.loads(map_tensors(file)[1]["dropped"])
        dropped.update({reason: count for reason, (count, _) in reasons.items()})
    metadata = {"source": source, "tokenizer": tokenizer.fingerprint, "eos_id": str(tokenizer.eos_id)}
    splits = write_splits(part_files, partial, settings["held_out_per_10000"], metadata, dropped)
    save_manifest(
        Manifest(
            folder=partial, source=source, tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id, splits=splits, settings=settings, dropped=dict(sorted(dropped.items())),
        )
    )  # fmt: skip
    _publish(partial, output)
    report(
        f"prepared {source}: {splits['train'].tokens / 1e6:.2f} M tokens of {splits['train'].documents} documents to "
        f"train on, {splits['validation'].tokens / 1e6:.2f} M held out, {sum(dropped.values())} documents dropped, "
        f"{time.monotonic() - started:.1f} s"
    )
    return load_manifest(output)


def _make_parts(
    parts: Sequence[Part], partial: Path, key: str, tokenizer: Tokenizer, report: Callable[[str], None]
) -> list[Path]:
    """Tokenise all parts, each in a process of a pool; returns their files in order."""
    folder = partial / "parts"
    folder.mkdir(exist_ok=True)
    files = [folder / f"part-{number:06d}.safetensors" for number in range(len(parts))]
    workers = min(len(os.sched_getaffinity(0)), len(parts))
    # Spawned, because a fork of a process that runs threads (torch, a progress bar) may hang.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(tokenizer.path,)
    )
    total = sum(part.size_bytes for part in parts)
    with pool, bytes_progress("tokenising", total, report) as advance:
        try:
            jobs = [pool.submit(make_part, part, file, key) for part, file in zip(parts, files, strict=True)]
            for job in as_completed(jobs):
                advance(job.result())
        except BaseException:
            # Leave at once on an error or Ctrl-C: what is done is kept, what waits is not started.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return files


def _partial_folder(output: Path, key: str) -> Path:
    """The folder of unfinished work, with what an interrupted run of the same work left in it."""
    partial = output.with_name(output.name + ".partial")
    key_file = partial / "key"
    if partial.exists() and not (key_file.is_file() and key_file.read_text() == key):
        shutil.rmtree(partial)
    partial.mkdir(exist_ok=True)
    key_file.write_text(key)
    return partial


def _publish(partial: Path, output: Path) -> None:
    shutil.rmtree(partial / "parts")
    (partial / "key").unlink()
    sync_folder(partial)
    partial.rename(output)
    sync_folder(output.parent)


def _key(*facts) -> str:
    """One name for everything that the result depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _listing(part: Part) -> list:
    """Names, sizes and times of a part's files: work on text that has changed since is not reused."""
    stats = ((file, os.stat(file)) for file in part.files)
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


@contextmanager
def _only_one(output: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock on the making of ``output``; the system frees it when a process dies."""
    lock = output.with_name(f".{output.name}.lock")
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is preparing {output}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        # Whoever waited for this file finds the result; whoever comes later makes a lock of its own and finds it too.
        lock.unlink(missing_ok=True)
