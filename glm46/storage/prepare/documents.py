"""Steps applied to each document: normalization, filters and verifiers, and fill-in-the-middle encoding."""

import ast
import json
import random
import re
import unicodedata
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

from glm46.config.errors import UserError
from glm46.config.text_recipe import Recipe, TextRecipe
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.judge.compilers import COMPILERS, compile_fault, run_fault
from glm46.storage.judge.maths import maths_fault, steps_fault

# Line ends of Windows and old Mac files. Other separators (form feed, U+2028) carry meaning in some texts and stay.
_LINE_END = re.compile(r"\r\n?")

# Gopher's quality rules. Source: arXiv 2112.11446, table A1 and section A.1.1.
_WORDS = (50, 100_000)
_MEAN_WORD_LENGTH = (3.0, 10.0)
_MAX_SYMBOLS_PER_WORD = 0.1
_MAX_BULLET_LINES = 0.9
_MAX_ELLIPSIS_LINES = 0.3
_MIN_ALPHABETIC_WORDS = 0.8
_STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
_MIN_STOP_WORDS = 2
_MAX_REPEATED_LINES = 0.3

# In shorter texts a repeated line is not evidence.
_MIN_LINES_FOR_REPEATS = 4

# Share of the rearranged documents with the suffix first, as in the joint training of arXiv 2207.14255.
_SUFFIX_FIRST = 0.5

PREFIX = "<|code_prefix|>"
MIDDLE = "<|code_middle|>"
SUFFIX = "<|code_suffix|>"


def normalize(text: str, form: str) -> str:
    """Normalize line ends and Unicode characters.

    Args:
        form: "none" returns the text unchanged; "newlines" ends every line with one line feed; "nfc" also composes
            characters (Unicode Standard Annex 15, form C), which changes neither meaning nor width.
    """
    if form == "none":
        return text
    text = _LINE_END.sub("\n", text) if "\r" in text else text
    return unicodedata.normalize("NFC", text) if form == "nfc" else text


def prose_fault(text: str) -> str | None:
    """Return the first of Gopher's rules that a text breaks; None if it is running prose."""
    words = text.split()
    if not _WORDS[0] <= len(words) <= _WORDS[1]:
        return f"under {_WORDS[0]} words" if len(words) < _WORDS[0] else f"over {_WORDS[1]} words"
    mean = sum(map(len, words)) / len(words)
    if not _MEAN_WORD_LENGTH[0] <= mean <= _MEAN_WORD_LENGTH[1]:
        return "mean word length"
    ellipses = text.count("...") + text.count("…")
    if max(text.count("#"), ellipses) / len(words) > _MAX_SYMBOLS_PER_WORD:
        return "symbols instead of words"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if sum(line.startswith(("•", "-", "*")) for line in lines) > _MAX_BULLET_LINES * len(lines):
        return "bullets"
    if sum(line.endswith(("...", "…")) for line in lines) > _MAX_ELLIPSIS_LINES * len(lines):
        return "lines that break off"
    if sum(any(map(str.isalpha, word)) for word in words) < _MIN_ALPHABETIC_WORDS * len(words):
        return "words without letters"
    if len(_STOP_WORDS.intersection(map(str.lower, words))) < _MIN_STOP_WORDS:
        return "no English stop words"
    if len(lines) >= _MIN_LINES_FOR_REPEATS and 1 - len(set(lines)) / len(lines) > _MAX_REPEATED_LINES:
        return "repeated lines"
    return None


def python_fault(text: str) -> str | None:
    """Return the reason if a text does not parse as a Python file, else None."""
    try:
        with warnings.catch_warnings():
            # The parser warns about old string escapes, which are valid.
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse as Python"
    return None


def json_fault(text: str) -> str | None:
    """Return the reason if a text does not parse as one JSON value, else None."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "does not parse as JSON"
    return None


VERIFIERS: dict[str, Callable[[str], str | None]] = {
    "python": python_fault,
    "json": json_fault,
    "execute": run_fault,
    **{language: partial(compile_fault, language=language) for language in COMPILERS},
}


def document_fault(text: str, answer: str | None, recipe: Recipe) -> str | None:
    """Return the reason why a recipe filters a document; None if it is kept.

    Args:
        answer: reference answer, where the recipe verifies maths or steps.
    """
    if recipe.filter == "prose" and (fault := prose_fault(text)):
        return fault
    if recipe.verify in ("maths", "steps"):
        return (maths_fault if recipe.verify == "maths" else steps_fault)(text, answer)
    return VERIFIERS[recipe.verify](text) if recipe.verify in VERIFIERS else None


def require_fim_tokens(recipe: TextRecipe, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer has the special tokens of fill-in-the-middle if the recipe uses it.

    Raises:
        UserError: names the missing tokens.
    """
    missing = [name for name in (PREFIX, MIDDLE, SUFFIX) if name not in tokenizer.special]
    if recipe.fim_rate and missing:
        raise UserError(
            f"fim_rate = {recipe.fim_rate}: the tokenizer '{tokenizer.path}' lacks {', '.join(missing)}; add them to "
            "its special tokens, or set fim_rate = 0"
        )


def encode_document(text: str, digest: bytes, recipe: TextRecipe, tokenizer: Tokenizer) -> np.ndarray:
    """Encode a document, rearranged for fill-in-the-middle with probability ``fim_rate``; uint32 [tokens].

    The document is cut at two places and its middle moved to the end (arXiv 2207.14255). The random choices are seeded
    with ``digest``, the hash of the document. GLM trains with its three code tokens; its rate and order are not
    published. CodeGeeX4's guide puts the suffix first.
    """
    generator = random.Random(digest)
    if not recipe.fim_rate or generator.random() >= recipe.fim_rate:
        return tokenizer.encode(text)
    suffix_first = generator.random() < _SUFFIX_FIRST
    first, second = sorted((generator.randint(0, len(text)), generator.randint(0, len(text))))
    prefix = (PREFIX, text[:first])
    suffix = (SUFFIX, text[second:])
    ordered = [*((suffix, prefix) if suffix_first else (prefix, suffix)), (MIDDLE, text[first:second])]
    return np.concatenate(
        [
            piece
            for name, part in ordered
            for piece in (np.array([tokenizer.special[name]], np.uint32), tokenizer.encode(part))
        ]
    )
