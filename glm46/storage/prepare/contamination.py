"""Search for evaluation text in documents, by runs of words that occur in both.

Source: GPT-3, arXiv 2005.14165, appendix C. Words are compared in lower case and without punctuation, in runs of 13. An
evaluation text of 8 to 12 words is one run.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.storage.prepare.documents import normalize
from glm46.storage.prepare.duplicates import ngram_hashes
from glm46.storage.prepare.input_files import find_files
from glm46.storage.prepare.readers import parts_of, read_part, with_line
from glm46.storage.prepare.rows import EMPTY, Document, Fields

MAX_RUN_WORDS = 13
"""Texts that share a run of this length are copies: chance does not explain it."""
MIN_RUN_WORDS = 8
"""Shorter texts would match by chance. A text of 8 to 12 words is one run."""
TOO_SHORT = f"evaluation texts too short to be looked for (fewer than {MIN_RUN_WORDS} words)"
"""Text under which a preparation counts `EvaluationText.short`."""

_WITHOUT_BLANKS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Ranges of Chinese characters and kana: scripts without blanks between words."""
_CHARACTER = re.compile(f"[{_WITHOUT_BLANKS}]")
_WORD = re.compile(f"[{_WITHOUT_BLANKS}]|[^\\W_{_WITHOUT_BLANKS}]+")
"""A word, or one character of a script without blanks."""


@dataclass(frozen=True)
class EvaluationText:
    """The runs of words of all evaluation text, and the texts that are too short to be searched for."""

    runs: dict[int, np.ndarray]
    """Length of the runs in words -> their sorted hashes, uint64 [n]."""
    short: list[str] = field(default_factory=list)
    """Places of texts that have too few words."""

    def is_in(self, text: str) -> bool:
        """Return whether a text shares a run of words with evaluation text."""
        if not self.runs:
            return False
        words = word_hashes(text)
        for length, runs in self.runs.items():
            if len(words) < length:
                continue
            hashes = ngram_hashes(words, length)
            positions = np.minimum(np.searchsorted(runs, hashes), len(runs) - 1)
            if (runs[positions] == hashes).any():
                return True
        return False


def word_hashes(text: str) -> np.ndarray:
    """Return a hash of each word of a text, uint32 [words]. Case, punctuation and white space do not matter."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    return np.array([crc32(word.encode(errors="replace")) for word in words], np.uint32)


def evaluation_text(texts: Sequence[tuple[str, str]]) -> EvaluationText:
    """Return the runs of words of evaluation texts.

    Args:
        texts: pairs of a place, such as "file:line", and the text there.
    """
    hashes: dict[int, list[np.ndarray]] = {}
    short = []
    for place, text in texts:
        words = word_hashes(text)
        length = min(len(words), MAX_RUN_WORDS)
        # Eight characters match by chance more often than eight words.
        min_length = MAX_RUN_WORDS if _CHARACTER.search(text) else MIN_RUN_WORDS
        if length < min_length:
            short.append(place)
        else:
            hashes.setdefault(length, []).append(ngram_hashes(words, length))
    runs = {length: np.unique(np.concatenate(parts)) for length, parts in hashes.items()}
    return EvaluationText(runs, short)


def read_evaluation(recipe: TextRecipe) -> EvaluationText:
    """Read the evaluation text that a recipe names.

    Raises:
        UserError: a text cannot be read.
    """
    if not recipe.decontaminate:
        return EvaluationText({})
    fields = Fields(recipe.text_key)
    texts = []
    for part in parts_of(find_files(recipe.decontaminate, "decontaminate"), fields):
        for document in read_part(part, fields):
            if isinstance(document, Document):
                texts.append((document.place, normalize(document.text, recipe.normalize)))
                continue
            # The document is a `BadDocument`.
            reason, place = document.args
            if reason != EMPTY:
                raise UserError(
                    f"decontaminate: {with_line(place)}: {reason}, so that no document would be compared with it; "
                    f"correct or remove it (text_key = '{recipe.text_key}' names the field of evaluation text, too)"
                )
    return evaluation_text(texts)
