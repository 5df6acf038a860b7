"""Needle in a haystack: tests if the model repeats a sentence that it read far back, by depth and length.

A row is held-out text without document ends, with a line "The secret words of KEY are VALUE." at some depth, followed
by the same line again up to VALUE, which is two random words. The labels are the tokens of VALUE. If each of them is
the most likely token after the previous ones, greedy decoding writes exactly VALUE: one forward determines the exact
match.
"""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from glm46.config.errors import UserError
from glm46.engine.evaluation.rows import Figures, Row, held_out, one_document
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer

_KEYS = ("amber", "basil", "cedar", "coral", "ebony", "fern", "garnet", "hazel", "indigo", "jade", "maple", "pearl")
_VALUES = (
    "apple",
    "bank",
    "bell",
    "boat",
    "bread",
    "bridge",
    "chair",
    "city",
    "cloud",
    "corn",
    "desk",
    "door",
    "farm",
    "field",
    "fire",
    "fish",
    "flag",
    "flower",
    "gate",
    "glass",
    "gold",
    "hand",
    "hill",
    "horse",
    "iron",
    "king",
    "lake",
    "lamp",
    "lion",
    "map",
    "moon",
    "ocean",
    "paint",
    "piano",
    "queen",
    "rain",
    "river",
    "road",
    "snow",
    "stone",
)


class Needle:
    """A `Measure`, see the module. The figures of a row are 1.0 for an exact match or else 0.0, the number of tokens of
    the answer, and the loss summed over them in nats."""

    width = 3

    def __init__(
        self,
        manifests: Mapping[str, Manifest],
        tokenizer: Tokenizer,
        *,
        lengths: Sequence[int],
        depths: Sequence[float],
        samples: int,
        seed: int,
    ):
        """Build the rows. Raises UserError if the needle and its question are longer than the shortest length.

        Args:
            manifests: sources of the haystack, by name.
            lengths: numbers of tokens of a row.
            depths: places of the needle, as fraction of the haystack before it.
            samples: number of rows for each length and depth.
        """
        self._tokenizer = tokenizer
        self._seed = seed
        self._streams = [held_out(manifest) for manifest in manifests.values()]
        self._cells = {
            (length, depth): [f"needle/{length}/{depth:g}/{i}" for i in range(samples)]
            for length in sorted(lengths)
            for depth in sorted(depths)
        }
        self.rows = [
            Row(key, length, partial(self._row, key, length, depth))
            for (length, depth), keys in self._cells.items()
            for key in keys
        ]
        self._require_room(min(lengths))

    def _sentence(self, row_key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens of the needle before its value, of the value, and of the rest of the line."""
        rng = random.Random(f"{self._seed} {row_key}")
        name = rng.choice(_KEYS)
        value = " ".join(rng.sample(_VALUES, 2))
        # Encoded separately, so that the value has the same tokens in the needle and after the question.
        parts = (f"\nThe secret words of {name} are", f" {value}", ".\n")
        lead, answer, rest = (self._tokenizer.encode(part).astype(np.int64) for part in parts)
        return lead, answer, rest

    def _require_room(self, shortest: int) -> None:
        sentences = [self._sentence(row.key) for row in self.rows]
        needed = max(2 * (len(lead) + len(value)) + len(rest) for lead, value, rest in sentences)
        if needed > shortest:
            raise UserError(
                f"needle: a length of {shortest}: the needle and its question take {needed} tokens of this tokenizer; "
                f"take lengths of at least {2 * needed}"  # half of a row is haystack then
            )

    def _row(self, key: str, length: int, depth: float) -> Batch:
        lead, value, rest = self._sentence(key)
        # The last token of a row is a target only.
        text = self._haystack(key, length + 1 - 2 * (len(lead) + len(value)) - len(rest))
        place = round(depth * len(text))
        tokens = np.concatenate([text[:place], lead, value, rest, text[place:], lead, value])
        batch = one_document(tokens, self._tokenizer.eos_id)
        batch["labels"][:, : -len(value)] = IGNORE
        return batch

    def _haystack(self, key: str, tokens: int) -> np.ndarray:
        """Read held-out text from a place that depends on the key, without document ends; a short source is
        repeated."""
        rng = random.Random(f"{self._seed} text {key}")
        stream = rng.choice(self._streams)
        start = rng.randrange(stream.length)
        parts = [np.empty(0, np.int64)]
        missing = tokens
        while missing:
            buffer = np.empty(missing, np.int64)
            used, _ = stream.read(start, buffer)
            parts.append(buffer[:used][buffer[:used] != self._tokenizer.eos_id])
            start = (start + used) % stream.length
            missing = missing - len(parts[-1])
        return np.concatenate(parts)

    def figures(self, labels_S: np.ndarray, logprobs_S: np.ndarray, predictions_S: np.ndarray) -> list[float]:
        """Compute the figures of a row, see the class."""
        is_answer = labels_S != IGNORE
        is_exact = (predictions_S == labels_S)[is_answer].all()
        return [float(is_exact), float(is_answer.sum()), -float(logprobs_S[is_answer].sum())]

    def result(self, figures: Figures) -> dict[str, Any]:
        """Return ``cells``, with the share of ``exact`` matches and ``answer_loss`` in nats per token by length and
        depth, and ``columns``."""
        cells = []
        for (length, depth), keys in self._cells.items():
            exact, tokens, loss = (sum(column) for column in zip(*(figures[key] for key in keys), strict=True))
            cell = {"length": length, "depth": depth, "samples": len(keys)}
            cells.append(cell | {"exact": exact / len(keys), "answer_loss": loss / tokens})
        columns = {}
        for column, figure in (("needle", "exact"), ("needle_loss", "answer_loss")):
            columns[column] = fmean(cell[figure] for cell in cells)
            for length in sorted({cell["length"] for cell in cells}):
                columns[f"{column}/{length}"] = fmean(cell[figure] for cell in cells if cell["length"] == length)
        return {"cells": cells, "columns": columns}
