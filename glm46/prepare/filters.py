"""Reasons to leave a document out: it is no running text, not in its language, or ends in a wrong result."""

import ast
import json
import warnings
from collections.abc import Callable
from functools import partial

from glm46.config.text_recipe import Recipe
from glm46.prepare.compilers import COMPILERS, compile_fault
from glm46.prepare.maths import maths_fault

# Gopher's quality rules. Source: arXiv 2112.11446, table A1 and section A.1.1.
_WORDS = (50, 100_000)
_MEAN_WORD_LENGTH = (3.0, 10.0)
_MOST_SYMBOLS_PER_WORD = 0.1
_MOST_BULLET_LINES = 0.9
_MOST_ELLIPSIS_LINES = 0.3
_FEWEST_ALPHABETIC_WORDS = 0.8
_STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
_FEWEST_STOP_WORDS = 2
_MOST_REPEATED_LINES = 0.3

# Below that many lines a repeated one says nothing.
_LINES_TO_JUDGE = 4


def prose_fault(text: str) -> str | None:
    """Why a text is not running prose by Gopher's rules; None if it is. The first rule broken is told."""
    words = text.split()
    if not _WORDS[0] <= len(words) <= _WORDS[1]:
        return f"under {_WORDS[0]} words" if len(words) < _WORDS[0] else f"over {_WORDS[1]} words"
    mean = sum(map(len, words)) / len(words)
    if not _MEAN_WORD_LENGTH[0] <= mean <= _MEAN_WORD_LENGTH[1]:
        return "mean word length"
    ellipses = text.count("...") + text.count("…")
    if max(text.count("#"), ellipses) / len(words) > _MOST_SYMBOLS_PER_WORD:
        return "symbols instead of words"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if sum(line.startswith(("•", "-", "*")) for line in lines) > _MOST_BULLET_LINES * len(lines):
        return "bullets"
    if sum(line.endswith(("...", "…")) for line in lines) > _MOST_ELLIPSIS_LINES * len(lines):
        return "lines that break off"
    if sum(any(map(str.isalpha, word)) for word in words) < _FEWEST_ALPHABETIC_WORDS * len(words):
        return "words without letters"
    if len(_STOP_WORDS.intersection(map(str.lower, words))) < _FEWEST_STOP_WORDS:
        return "no English stop words"
    if len(lines) >= _LINES_TO_JUDGE and 1 - len(set(lines)) / len(lines) > _MOST_REPEATED_LINES:
        return "repeated lines"
    return None


def python_fault(text: str) -> str | None:
    """Why a text is not a Python file."""
    try:
        with warnings.catch_warnings():
            # Old string escapes are no reason; the parser warns about them on the console.
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse as Python"
    return None


def json_fault(text: str) -> str | None:
    """Why a text is not one JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "does not parse as JSON"
    return None


VERIFIERS: dict[str, Callable[[str], str | None]] = {
    "python": python_fault,
    "json": json_fault,
    **{language: partial(compile_fault, language=language) for language in COMPILERS},
}


def document_fault(text: str, answer: str | None, recipe: Recipe) -> str | None:
    """Why a recipe leaves a document out; None if it is kept. ``answer`` is the known result that stands beside the
    text, where a recipe verifies maths."""
    if recipe.filter == "prose" and (fault := prose_fault(text)):
        return fault
    if recipe.verify == "maths":
        return maths_fault(text, answer)
    return VERIFIERS[recipe.verify](text) if recipe.verify in VERIFIERS else None
