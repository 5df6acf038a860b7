"""The lengths of the documents of prepared sources, as one number that a plan takes."""

from pathlib import Path

import numpy as np

from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.run.flops import attention_flops, pair_flops
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.packing import open_tokens

_ROUNDS = 50


def prepared_document_tokens(config: RunConfig) -> int:
    """Mean of exponential lengths with which a query of a row attends to as many keys as in the prepared sources,
    weighted as the run reads them.

    Raises:
        UserError: a source is not prepared, or its text ends documents nowhere.
    """
    if missing := [each for each in config.data.sources if not Path(each.path).is_dir()]:
        named = ", ".join(str(each.path) for each in missing)
        raise UserError(f"command line: --document-tokens prepared: not prepared yet: {named}; prepare it, or give N")
    seq_len, keys, weights = config.training.seq_len, 0.0, sum(each.weight for each in config.data.sources)
    for source in config.data.sources:
        lengths = np.diff(open_tokens(load_manifest(Path(source.path)), "train").doc_ends(), prepend=0)
        packed = source.packing == "best_fit"
        keys += source.weight / weights * _keys(lengths.astype(np.float64), seq_len, packed) / lengths.sum()
    shape = resolve_shape(config.model).model_copy(update={"sliding_window": None})
    low, high = 1.0, 64.0 * seq_len
    for _ in range(_ROUNDS):
        middle = (low * high) ** 0.5
        fewer = attention_flops(shape, seq_len, middle) < keys * pair_flops(shape)
        low, high = (middle, high) if fewer else (low, middle)
    return max(round(low), 1)


def _keys(lengths: np.ndarray, seq_len: int, packed: bool) -> float:
    """Sum over all tokens of the keys that they attend to, float64 [documents] of lengths.

    Documents that are packed are cut every ``seq_len`` tokens; of others the start of a row, which is anywhere, cuts
    the way back of a token to min(way, x), x equally likely in a row.
    """
    if packed:
        rest = lengths % seq_len
        return float((lengths // seq_len * seq_len**2 + rest**2).sum() / 2)
    inside = np.minimum(lengths, seq_len)
    return float((inside**2 / 2 - inside**3 / (6 * seq_len) + (lengths - inside) * seq_len / 2).sum())
