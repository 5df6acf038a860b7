"""Keys of a ``config.json`` that say which layers of sparse attention have an indexer."""

from collections.abc import Sequence
from typing import Any

from glm46.config.presets import indexer_types

INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk", "indexer_types")
"""Keys of `ModelShape` that only a model with indexers has."""
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
"""Keys that say the same as ``indexer_types`` where it is absent."""
_KINDS = {"F": "full", "S": "shared"}


def complete_indexer(raw: dict[str, Any]) -> list[str]:
    """Replace the keys that say which layers have an indexer by ``indexer_types``, in place: None if all have. Returns
    faults."""
    faults = [f"{key} = None: must be a number; correct it" for key in INDEXER_KEYS[:3] if raw.get(key, 0) is None]
    types = raw.get("indexer_types")
    layers = raw.get("num_hidden_layers")
    pattern = raw.get("index_topk_pattern")
    if types is None and isinstance(pattern, str):
        if set(pattern) - _KINDS.keys():
            return [*faults, f"index_topk_pattern = {pattern!r}: must consist of F and S, one per layer; correct it"]
        types = [_KINDS[letter] for letter in pattern]
    elif types is None and isinstance(layers, int):
        frequency = raw.get("index_topk_freq", 1)
        offset = raw.get("index_skip_topk_offset", 2)  # the default of transformers
        if type(frequency) is not int or type(offset) is not int or frequency < 1:
            keys = f"index_topk_freq = {frequency!r}, index_skip_topk_offset = {offset!r}"
            return [*faults, f"{keys}: must be integers, the first at least 1; correct them"]
        types = list(indexer_types(layers, frequency, offset))
    raw["indexer_types"] = None if types == ["full"] * len(types or ()) else types
    return faults


def put_indexer_types(config: dict[str, Any], types: Sequence[str] | None) -> None:
    """Write which layers have an indexer into a config, instead of what it says about them. None: all layers, which is
    what transformers takes without any of these keys."""
    for key in (*_SCHEDULE, "indexer_types"):
        config.pop(key, None)
    if types is not None:
        config["indexer_types"] = list(types)
