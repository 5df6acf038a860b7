"""Turn files of text into a folder of shards: read, tokenize in parallel, remove duplicates, split, write, manifest.

Work happens in ``<output>.partial`` and is published by one rename, so a folder with the final name is always complete.
Each finished piece of work is a file there; a killed run continues after the last one. The result depends on text,
settings and tokenizer only, not on the number of processes or on interruptions.

The verb `prepare` calls `prepare_text`; a run calls `prepare_run` before it starts.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from glm46.config.data import SourceConfig
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.hub_address import is_hub_address
from glm46.config.text_recipe import Recipe, TextRecipe
from glm46.files.durable import sync_folder
from glm46.files.local_disk import leads_nowhere
from glm46.files.lock import FileLock
from glm46.files.progress import bytes_progress
from glm46.run.plan import Plan
from glm46.storage.chats.chat_format import FORMAT_KEY, GLM_45
from glm46.storage.chats.chat_template import find_format, raise_for_kept_thoughts, raise_for_source
from glm46.storage.data.corpus import load_text
from glm46.storage.data.manifest import Manifest, describe_targets, held_out_remedy, load_manifest
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.judge.compilers import require_compiler, verifier_version
from glm46.storage.prepare.contamination import TOO_SHORT, read_evaluation
from glm46.storage.prepare.documents import require_fim_tokens
from glm46.storage.prepare.input_files import BUILTIN, find_files
from glm46.storage.prepare.parts import DOCUMENT_BYTES, PIECE_BYTES, finished_pieces, make_part, start_worker
from glm46.storage.prepare.readers import InputPart, parts_of
from glm46.storage.prepare.rows import Fields
from glm46.storage.prepare.sharding import save_manifest, write_splits
from glm46.storage.prepare.tally import MAX_PLACES, Tally, amount, named
from glm46.storage.prepare.workers import call_in_workers

# Version of the shards' content. Raise it when the same text and settings give different bytes than before.
PIPELINE = 5

LocalInputs = Callable[[Sequence[str]], tuple[str, ...]]
"""Function that returns local names of input files, some of which may be ids of the hub. `tuple` returns them as they
are."""


def prepare_run(plan: Plan, *, report: Callable[[str], None], local_inputs: LocalInputs = tuple) -> dict[str, Manifest]:
    """Make the missing sources of a run that have a recipe, and verify all sources.

    Returns:
        The manifest of each source, by its name.

    Raises:
        UserError: all faults of the tokenizer and the sources. Faults that do not depend on missing sources are raised
            before any source is made.
    """
    sources = plan.config.data.sources
    model = plan.config.model
    missing = [source for source in sources if source.recipe is not None and not Path(source.path).exists()]
    present = [source for source in sources if source not in missing]
    tokenizer, manifests = load_text(plan, present)
    for source in present:
        raise_for_source(manifests[source.name], tokenizer)
        if source.recipe is not None:
            require_recipe(manifests[source.name], text_recipe(source, model.tokenizer_path), report)
    for source in missing:
        recipe = text_recipe(source, model.tokenizer_path)
        prepare_text(recipe, report=report, flavor=model.flavor, local_inputs=local_inputs)
    return load_text(plan)[1] if missing else manifests


def text_recipe(source: SourceConfig, tokenizer: str) -> TextRecipe:
    """Return the recipe of a source of a run, with the output, name and tokenizer that the run sets."""
    recipe = cast(Recipe, source.recipe)
    return TextRecipe(**recipe.model_dump(), output=source.path, name=source.name, tokenizer=tokenizer)


def prepare_text(
    recipe: TextRecipe, *, report: Callable[[str], None], flavor: str = "", local_inputs: LocalInputs = tuple
) -> Manifest:
    """Make the shards of a recipe unless they exist, and return their manifest.

    Two processes may call this at once for one output: one works, the other waits and uses the result.

    Args:
        report: receives lines of text for the user. On a terminal a progress bar is shown too.
        flavor: preset of the model that will read them, see `Tokenizer.flavor`.

    Raises:
        UserError: a setting or a file cannot be used, more bad documents than ``max_bad``, or ``output`` holds
            something else. Finished work is kept for the next start.
    """
    tokenizer = load_tokenizer(recipe.tokenizer, flavor)
    recipe = recipe.model_copy(update={"name": recipe.name or Path(recipe.output).name})
    require_fim_tokens(recipe, tokenizer)
    if recipe.is_chat:
        find_format(tokenizer)
        if recipe.history == "keep":
            raise_for_kept_thoughts(tokenizer, 'history = "keep"')
        if recipe.max_tokens is None:
            raise UserError(
                f'max_tokens: absent, and format = "{recipe.format}" needs it; set it to at most the shortest seq_len '
                "that will read the chats"
            )
    with _disk_errors_explained(Path(recipe.output)), _exclusive(Path(recipe.output), report):
        manifest = _existing(recipe, tokenizer)
        if manifest:
            require_recipe(manifest, recipe, report)
            raise_for_source(manifest, tokenizer)
            report(f"{recipe.output}: already prepared; remove the folder to make it again")
            return manifest
        require_compiler(recipe.verify)
        try:
            return _prepare(recipe, tokenizer, report, local_inputs)
        except UserError:
            partial = _partial_place(Path(recipe.output))
            if partial.exists():
                report(f"{partial}: holds finished work, which the next start for this output uses or removes")
            raise


def require_recipe(manifest: Manifest, recipe: TextRecipe, report: Callable[[str], None]) -> None:
    """Check that the shards were made with this recipe; report if the files of its input have changed since then.

    Raises:
        UserError: one fault per key that differs.
    """
    defaults = {key: field.default for key, field in TextRecipe.model_fields.items()}
    defaults |= {"deduplicate": recipe.duplicates, "input": list(recipe.input)}
    faults = [
        f"{manifest.folder}: made with {key} = {old!r}, the recipe says {new!r}; remove the "
        "folder, give another path, or give the recipe that value"
        for key, new in _settings(recipe).items()
        # A key that was added after the shards were made had its default.
        if (old := manifest.settings.get(key, defaults[key])) != new
    ]
    if faults:
        raise UserError(*faults)
    if "bytes" not in manifest.settings or any(
        name.startswith(BUILTIN) or is_hub_address(name) for name in recipe.input
    ):
        return  # older shards have no "bytes"
    recorded = manifest.settings["files"], manifest.settings["bytes"]
    with suppress(UserError):  # the text may be gone, or on another machine
        listing = _listing(find_files(recipe.input, "input"))
        current = len(listing), sum(size for _, size, _ in listing)
        if current != recorded:
            before = _files_and_bytes(*recorded)
            now = _files_and_bytes(*current)
            report(f"{manifest.folder}: made from {before}; input holds {now} now; remove the folder to use these")


def _files_and_bytes(files: int, size: int) -> str:
    return f"{counted(files, 'file')}, {amount(size, 'B')}"


def _settings(recipe: TextRecipe) -> dict[str, Any]:
    """Return the keys that decide the bytes of the shards. Texts are identified by name, the tokenizer by its hash."""
    without_effect = {"output", "processes", "max_bad", "tokenizer"}
    return recipe.model_dump(mode="json", exclude=without_effect) | {"deduplicate": recipe.duplicates}


def _existing(recipe: TextRecipe, tokenizer: Tokenizer) -> Manifest | None:
    output = Path(recipe.output)
    if output.is_symlink() and leads_nowhere(output):
        raise UserError(f"{output}: a link to nothing; fix or remove it, or give another path")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    manifest = load_manifest(output)
    manifest.require_tokenizer(tokenizer.fingerprint)
    if manifest.source != recipe.name:
        raise UserError(f"{output}: holds the source '{manifest.source}', not '{recipe.name}'; give another path")
    return manifest


def _prepare(
    recipe: TextRecipe, tokenizer: Tokenizer, report: Callable[[str], None], local_inputs: LocalInputs
) -> Manifest:
    started = time.monotonic()
    files = find_files(local_inputs(recipe.input), "input")
    output = Path(recipe.output)
    parts = parts_of(files, Fields.from_recipe(recipe))
    name = recipe.name or output.name
    listing = _listing(files)
    settings = _recorded_settings(recipe, tokenizer, listing)
    evaluation = _listing(find_files(recipe.decontaminate, "decontaminate"))
    # The cuts into parts and pieces do not change the shards, but unfinished work with other cuts cannot be continued.
    cuts = [PIECE_BYTES, DOCUMENT_BYTES, *((part.start, part.stop) for part in parts)]
    key = _key(settings, tokenizer.fingerprint, listing, evaluation, cuts)
    partial = _partial_folder(output, key)
    total = sum(part.size_bytes for part in parts)
    report(f"preparing {name}: {counted(len(files), 'file')}, {amount(total, 'B')}, into {output}")
    pieces, tally = _make_parts(parts, partial, key, recipe, tokenizer.flavor, report)
    _note_short_texts(tally, read_evaluation(recipe).short)
    metadata = {"source": name, "tokenizer": tokenizer.fingerprint, "eos_id": str(tokenizer.eos_id)}
    splits = write_splits(pieces, partial, recipe, metadata, tally)
    count = sum(split.documents for split in splits.values())
    if not splits["train"].documents:
        shutil.rmtree(partial)  # only the same command could continue this work, and it would be refused again
        if not count:
            reasons = "; ".join(tally.skipped()) or "all are empty"
            raise UserError(
                f"{name}: no documents remain of {counted(len(files), 'file')}; {reasons}; correct the files, or "
                f'change format = "{recipe.format}" or the keys of the recipe that filter documents'
            )
        raise UserError(
            f"{name}: held_out = {recipe.held_out} holds out {counted(count, 'document')}, which is all; "
            f"{held_out_remedy(count, recipe.held_out)}; or set held_out = 0, and validation.enable = false in its runs"
        )
    counts = {reason: number for table in (tally.bad, tally.filtered) for reason, (number, _) in table.items()}
    save_manifest(
        Manifest(
            folder=partial,
            source=name,
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            splits=splits,
            settings=settings,
            dropped=dict(sorted(counts.items())),
            noted={what: number for what, (number, _) in sorted(tally.noted.items())},
        )
    )
    _publish(partial, output)
    if summary := tally.summary():
        report(summary)
    train = splits["train"]
    held_out = splits["validation"]
    seconds = time.monotonic() - started
    report(
        f"prepared {name}: {amount(train.tokens, 'tokens')} of {counted(train.documents, 'document')} to train "
        f"on, {amount(held_out.tokens, 'tokens')} held out, {seconds:.1f} s, {amount(total / seconds, 'B')}/s"
    )
    if recipe.held_out and not held_out.documents:
        report(_nothing_held_out(recipe.held_out, count))
    if train.targets is not None:
        report(describe_targets(train))
    return load_manifest(output)


def _recorded_settings(recipe: TextRecipe, tokenizer: Tokenizer, listing: list[Any]) -> dict[str, Any]:
    """Return the settings of the manifest: the keys of the recipe, and facts on which the result depends too."""
    settings = _settings(recipe) | {
        "pipeline": PIPELINE,
        "files": len(listing),
        "bytes": sum(size for _, size, _ in listing),
    }
    if recipe.is_chat:
        chat_format = find_format(tokenizer)
        if chat_format is not GLM_45:  # shards without the key have this format
            settings[FORMAT_KEY] = chat_format.name
    if version := verifier_version(recipe.verify):
        settings["verifier"] = version
    return settings


def _note_short_texts(tally: Tally, places: Sequence[str]) -> None:
    """Count the evaluation texts that are too short to be searched for."""
    if places:
        tally.count(tally.noted, TOO_SHORT, [*places[:MAX_PLACES]], len(places))


def _nothing_held_out(share: float, documents: int) -> str:
    """Return the line about a share that holds out no document."""
    remedy = held_out_remedy(documents, share)
    return f"no document is held out with held_out = {share:g}; to validate on this source, {remedy}"


def _make_parts(
    parts: Sequence[InputPart], partial: Path, key: str, recipe: TextRecipe, flavor: str, report: Callable[[str], None]
) -> tuple[list[Path], Tally]:
    """Tokenize all parts in worker processes; return the files of their pieces in order, and the tally.

    Raises:
        UserError: more bad documents than the recipe allows.
    """
    folder = partial / "parts"
    folder.mkdir(exist_ok=True)
    stems = [folder / f"part-{number:06d}" for number in range(len(parts))]
    workers = max(1, min(recipe.processes or len(os.sched_getaffinity(0)), len(parts)))
    items = list(zip(parts, stems, strict=True))
    results = call_in_workers(workers, start_worker, (recipe, key, flavor), make_part, items)
    tallies: dict[int, Tally] = {}
    bad = 0
    total = sum(part.size_bytes for part in parts)
    # `closing` stops the workers at once on an error; finished pieces stay on disk.
    with closing(results), bytes_progress(f"tokenizing {recipe.name}", total, report) as advance:
        for number, (size, tally) in results:
            tallies[number] = tally
            advance(size)
            bad += sum(count for count, _ in tally.bad.values())
            if bad > recipe.max_bad:
                _refuse_bad(Tally.total(tallies).bad, recipe)
    return [piece.file for stem in stems for piece in finished_pieces(stem, key)], Tally.total(tallies)


def _refuse_bad(bad: dict[str, list[Any]], recipe: TextRecipe) -> None:
    number = sum(count for count, _ in bad.values())
    # Unreadable files of embedded sources are not an error: the user did not choose them.
    if not all(pattern.startswith(BUILTIN) for pattern in recipe.input):
        raise UserError(
            f"{recipe.name}: {counted(number, 'document')} cannot be read, max_bad = {recipe.max_bad}; "
            f"fix them, or raise max_bad",
            *(f"{reason}: {count}, such as {named(places)}" for reason, (count, places) in bad.items()),
        )


def _partial_place(output: Path) -> Path:
    """Return where the work for an output is done."""
    return output.with_name(output.name + ".partial")


def _partial_folder(output: Path, key: str) -> Path:
    """Return the folder of unfinished work. Pieces of an interrupted run are kept only if its key is the same."""
    partial = _partial_place(output)
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


def _key(*facts: object) -> str:
    """Hash everything that the result depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _listing(files: Sequence[Path]) -> list[Any]:
    """Return names, sizes and times of files: unfinished work on changed text is not reused."""
    stats = ((str(file), os.stat(file)) for file in files)
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ELOOP,
)


@contextmanager
def _disk_errors_explained(output: Path) -> Iterator[None]:
    """Turn errors of a full or read-only disk, or of a file at the path of a folder, into a UserError. ``output`` does
    not exist then."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        free = shutil.disk_usage(next(folder for folder in output.absolute().parents if folder.exists())).free
        raise UserError(
            f"{error.filename or output}: {error.strerror} while preparing {output} ({free / 1e6:,.0f} MB are free); "
            "free disk space, or give another path; the same command then continues after the finished work"
        ) from error


@contextmanager
def _exclusive(output: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock for making ``output``. The operating system releases it when a process dies."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    if not lock.acquire(timeout_seconds=0.0):
        report(f"{lock.holder()} is preparing {output}; waiting for it")
        lock.acquire(timeout_seconds=None)
    try:
        yield
    finally:
        lock.release(remove=True)
