"""The data of a run, ready to be read: sources that can be made are made, all others must fit the run."""

from collections.abc import Callable
from pathlib import Path

from glm46.config.run import Run
from glm46.data.manifest import Manifest
from glm46.data.prepare import prepare_source
from glm46.training.text import load_text


def prepare_run(run: Run, *, report: Callable[[str], None]) -> dict[str, Manifest]:
    """Make the missing sources of a run and verify the others.

    Args:
        report: takes lines of text for the user.

    Returns:
        The manifest of each source, by its name.

    Raises:
        UserError: with every fault of tokenizer and sources. What can be told before the long work is told before it.
    """
    missing = [source for source in run.data.sources if source.prepare is not None and not Path(source.path).exists()]
    present = tuple(source for source in run.data.sources if source not in missing)
    data = run.data.model_copy(update={"sources": present})
    tokenizer, manifests = load_text(run.model_copy(update={"data": data}))
    if not missing:
        return manifests
    for source in missing:
        prepare_source(source.prepare, Path(source.path), tokenizer, report=report)
    return load_text(run)[1]
