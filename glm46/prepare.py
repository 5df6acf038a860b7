"""The data of a run, ready to be read: sources that can be made are made, all others must fit the run."""

from collections.abc import Callable
from pathlib import Path

from glm46.config.data import Source
from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.config.run import Run
from glm46.data.manifest import Manifest, load_manifest
from glm46.data.prepare import prepare_source
from glm46.data.tokenizer import Tokenizer, load_tokenizer


def prepare_run(run: Run, *, report: Callable[[str], None]) -> list[Manifest]:
    """Make the missing sources of a run and verify the others.

    Args:
        report: takes lines of text for the user.

    Returns:
        The manifest of each source, in the order of the file.

    Raises:
        UserError: with every fault of tokenizer and sources. What can be told before the long work is told before it.
    """
    tokenizer = load_tokenizer(run.model.tokenizer_path)
    faults = _vocabulary_faults(run, tokenizer)
    manifests: dict[int, Manifest] = {}
    makeable = []
    for index, source in enumerate(run.data.sources):
        if source.prepare is not None and not Path(source.path).exists():
            makeable.append(index)
            continue
        try:
            manifests[index] = _verified(source, tokenizer, report)
        except UserError as error:
            faults += [f"data.sources[{index}] {source.name}: {fault}" for fault in error.faults]
    if faults:
        raise UserError(*faults)
    for index in makeable:
        manifests[index] = _verified(run.data.sources[index], tokenizer, report)
    return [manifests[index] for index in sorted(manifests)]


def _verified(source: Source, tokenizer: Tokenizer, report: Callable[[str], None]) -> Manifest:
    if source.prepare is not None:
        return prepare_source(source.prepare, Path(source.path), tokenizer, report=report)
    manifest = load_manifest(Path(source.path))
    manifest.require_tokenizer(tokenizer.fingerprint)
    return manifest


def _vocabulary_faults(run: Run, tokenizer: Tokenizer) -> list[str]:
    rows = resolve_shape(run.model).vocab_size
    if rows >= tokenizer.vocab_size:
        return []
    return [
        f"model.vocab_size = {rows}: the tokenizer {run.model.tokenizer_path} needs at least {tokenizer.vocab_size}; "
        "raise it (a multiple of 128 is fast), or choose another tokenizer"
    ]
