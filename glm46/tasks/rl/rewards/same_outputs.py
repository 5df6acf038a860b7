"""Comparison of outputs and results in the reward for code: texts and integers exactly, decimals within a bound.

`code.py` copies the source of this module into each test of a function call, so it imports only the standard library.
"""

import math
import re
from decimal import Decimal

INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
"""A number without leading zeros: 007 is a text."""


def is_same_output(output: str, expected: str) -> bool:
    """Return whether two outputs have the same words. The amount and kind of white space do not matter."""
    words = output.split()
    expected_words = expected.split()
    if len(words) != len(expected_words):
        return False
    return all(map(is_same_word, words, expected_words))


def is_same_word(word: str, expected: str) -> bool:
    """Return whether two words are equal, or are the same number and at least one of them is a decimal."""
    if word == expected:
        return True
    if INTEGER.fullmatch(word) and INTEGER.fullmatch(expected):
        return False
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)):
        return False
    if INTEGER.fullmatch(expected):  # the word is a decimal such as 5.0
        return Decimal(word) == Decimal(expected)
    return is_close(Decimal(word), Decimal(expected))


def is_same_value(value: object, expected: object) -> bool:
    """Return whether two JSON values are equal. Where a finite float is expected, `is_close` decides."""
    if isinstance(expected, list) and isinstance(value, list):
        if len(value) != len(expected):
            return False
        return all(map(is_same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        if value.keys() != expected.keys():
            return False
        return all(is_same_value(value[key], expected[key]) for key in expected)
    if isinstance(expected, float) and math.isfinite(expected) and isinstance(value, int | float):
        # math.isfinite raises OverflowError for large integers.
        is_finite = isinstance(value, int) or math.isfinite(value)
        return is_finite and is_close(Decimal(value), Decimal(expected))
    return value == expected


def is_close(number: Decimal, expected: Decimal) -> bool:
    """Return whether a number is the expected decimal, except for a rounding error.

    * The difference may be a millionth of the expected number, but at most 0.001.
    * Where 0 is expected, the difference may be 1e-12.
    * Whole numbers below 2**53 must be equal: 1000001.0 is not 1000000.0.
    * Larger floats are all whole numbers. Their first 15 digits must agree.
    """
    if number == expected:
        return True
    size = abs(expected)
    is_whole = number == number.to_integral_value() and expected == expected.to_integral_value()
    if is_whole and size < 2**53:
        return False
    if expected == 0:
        return abs(number) <= Decimal("1e-12")
    bound = min(size * Decimal("1e-6"), Decimal("1e-3"))
    bound = max(bound, size * Decimal("1e-15"))
    return abs(number - expected) <= bound
