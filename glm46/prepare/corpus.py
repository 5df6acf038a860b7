"""The data of a run, ready to be read: sources that can be made are made, all others must fit the run."""

from collections.abc import Callable
from pathlib import Path

from glm46.config.data import Source
from glm46.config.run_config import RunConfig
from glm46.config.text_recipe import TextRecipe
from glm46.data.corpus import load_text
from glm46.data.manifest import Manifest
from glm46.prepare.pipeline import prepare_source, prepare_text, require_recipe


def prepare_run(config: RunConfig, *, report: Callable[[str], None]) -> dict[str, Manifest]:
    """Make the missing sources of a run and verify the others.

    Returns:
        The manifest of each source, by its name.

    Raises:
        UserError: with every fault of tokenizer and sources. What can be told before the long work is told before it.
    """
    can_be_made = [source for source in config.data.sources if source.prepare is not None or source.recipe is not None]
    missing = [source for source in can_be_made if not Path(source.path).exists()]
    present = tuple(source for source in config.data.sources if source not in missing)
    data = config.data.model_copy(update={"sources": present})
    tokenizer, manifests = load_text(config.model_copy(update={"data": data}))
    for source in present:
        if source.recipe is not None:
            require_recipe(manifests[source.name], _whole_recipe(source, config))
    if not missing:
        return manifests
    for source in missing:
        if source.recipe is not None:
            prepare_text(_whole_recipe(source, config), report=report)
        else:
            prepare_source(source.prepare, Path(source.path), tokenizer, report=report)
    return load_text(config)[1]


def _whole_recipe(source: Source, config: RunConfig) -> TextRecipe:
    """The recipe of a source with what the run says besides."""
    return TextRecipe(
        **source.recipe.model_dump(), output=source.path, name=source.name, tokenizer=config.model.tokenizer_path
    )
