"""Calls of math-verify, which must be installed. It takes seconds to import, with sympy."""

import math
from dataclasses import replace
from typing import TypeAlias

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, I, MatrixBase

from glm46.storage.judge.expression_digits import deciding_digits

Parsed: TypeAlias = Basic | MatrixBase | str
"""A part of a result that math-verify reads: an expression, or text."""

_MAX_DIGITS = 20_000
"""Limit of digits for a numerical comparison; expressions that need more are equal only if they are identical."""


class MathVerify:
    """Reads and compares expressions in LaTeX.

    Time limits are in seconds; None is no limit. They use SIGALRM, so they work only in the main thread.
    """

    def __init__(self) -> None:
        # With units math-verify would remove letters at the end of an expression that could be units, such as the t of
        # 3t.
        config = LatexExtractionConfig()
        self._config = replace(config, normalization_config=replace(config.normalization_config, units=False))

    def parse(self, text: str, seconds: int | None) -> list[Parsed]:
        """Return what math-verify reads in an expression."""
        parsed: list[Parsed] = parse(f"\\boxed{{{text}}}", [self._config], parsing_timeout=seconds)
        return parsed

    def are_equal(self, result: str, other: str, seconds: int | None) -> bool | None:
        """Return True if two expressions are equal; None if one of them cannot be read."""
        first = [_with_imaginary(part) for part in self.parse(result, seconds)]
        second = [_with_imaginary(part) for part in self.parse(other, seconds)]
        if not first or not second:
            return None
        digits = deciding_digits([*first, *second])
        if digits > _MAX_DIGITS:
            return first == second
        return bool(verify(second, first, numeric_precision=math.ceil(digits), timeout_seconds=seconds))


def _with_imaginary(part: Parsed) -> Parsed:
    """Replace a free symbol i by the imaginary unit."""
    if not isinstance(part, Expr):
        return part
    letters = {symbol: I for symbol in part.free_symbols if str(symbol) == "i"}
    return part.subs(letters) if letters else part
