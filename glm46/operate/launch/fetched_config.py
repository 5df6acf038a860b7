"""Configs with local folders and files instead of their ids of the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from glm46.config.fields import hub_keys
from glm46.config.hub_address import HubKey
from glm46.config.loader import load_config
from glm46.config.run_config import RunConfig
from glm46.config.store_address import store_url
from glm46.storage.huggingface.hub import fetched_keys
from glm46.storage.huggingface.stored_folder import CACHE, RangedKind, cache_folder

_IN_CACHE = re.compile(rf"--[^=]+=.*/(?:(?:models|datasets)--[^/]+/snapshots|{CACHE}/[0-9a-f]{{16}})/")
"""Pattern of an override with a path in the cache of the hub or of object stores, as `fetched_overrides` makes it."""


def fetched_overrides(config: RunConfig) -> list[str]:
    """Fetch the ids of the hub, and return overrides with local folders and files instead; see `fetched_keys`."""
    return [f"--{key}={path}" for key, path in fetched_keys(hub_keys(config), _read_by_range(config)).items()]


def _read_by_range(config: RunConfig) -> dict[str, RangedKind]:
    """Return the keys whose files in an object store are read by range. Frozen weights are hashed, and the servers of
    reinforcement learning read them too, so they are fetched whole."""
    kinds: dict[str, RangedKind] = {f"data.sources[{index}].path": "text" for index in range(len(config.data.sources))}
    if config.adapter is None and config.rl is None:
        kinds["checkpoint.initial_load_path"] = "weights"
    return kinds


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
            if fetched or _part_of_cache(hub_key) in paths.get(hub_key.key, "")
        }
    )


def _part_of_cache(key: HubKey) -> str:
    """Return the part of a path that shows which repository or URL a folder of a cache holds."""
    if key.repository is None:
        return str(cache_folder(store_url(key.value)))
    return f"--{key.repository.replace('/', '--')}/"
