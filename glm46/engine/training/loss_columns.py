"""Mean loss and bits per byte, from sums over held-out text."""

import math
from collections.abc import Mapping

SUMS = ("loss", "targets", "text_bytes")
Sums = Mapping[str, float]
"""Sums over targets: ``loss`` in nats, the number of ``targets``, and their ``text_bytes``."""


def loss_columns(sums_by_source: Mapping[str, Sums]) -> dict[str, float]:
    """Compute mean loss and bits per byte over all sources, and for each source as ``loss/<source>``."""
    columns = {}
    total = {name: sum(sums[name] for sums in sums_by_source.values()) for name in SUMS}
    sums_by_suffix = {"": total} | {f"/{name}": sums for name, sums in sums_by_source.items()}
    for suffix, sums in sums_by_suffix.items():
        columns[f"loss{suffix}"] = sums["loss"] / max(sums["targets"], 1)
        columns[f"bits_per_byte{suffix}"] = sums["loss"] / math.log(2.0) / max(sums["text_bytes"], 1)
    return columns
