"""Configs with local folders and files instead of their ids of the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from glm46.config.fields import hub_keys
from glm46.config.loader import load_config
from glm46.config.run_config import RunConfig
from glm46.storage.huggingface.hub import fetched_keys

_IN_CACHE = re.compile(r"--[^=]+=.*/(?:models|datasets)--[^/]+/snapshots/")
"""Pattern of an override with a path in the cache of the hub, as `fetched_overrides` makes it."""


def fetched_overrides(config: RunConfig) -> list[str]:
    """Fetch the ids of the hub, and return overrides with local folders and files instead; see `fetched_keys`."""
    return [f"--{key}={path}" for key, path in fetched_keys(hub_keys(config)).items()]


def load_fetched(path: Path, overrides: Sequence[str], *, world_size: int | None) -> RunConfig:
    """Load a config with local folders and files instead of its ids of the hub, which `RunConfig.ids` keeps. The
    launcher of several ranks has fetched them already: its overrides name paths in the cache."""
    config = load_config(path, overrides, world_size=world_size)
    config_with_ids = config
    fetched = fetched_overrides(config)
    cached = [word for word in overrides if _IN_CACHE.match(word)]
    if fetched:
        config = load_config(path, [*overrides, *fetched], world_size=world_size)
    elif cached:
        uncached = [word for word in overrides if word not in cached]
        config_with_ids = load_config(path, uncached, world_size=world_size)
    paths = dict(word[2:].split("=", 1) for word in (*cached, *fetched))
    # An override may name a folder of another repository than the id.
    return config.with_ids(
        {
            hub_key.key: hub_key.value
            for hub_key in hub_keys(config_with_ids)
            if fetched or f"--{hub_key.repository.replace('/', '--')}/" in paths.get(hub_key.key, "")
        }
    )
