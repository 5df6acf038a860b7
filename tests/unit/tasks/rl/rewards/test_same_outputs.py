"""Numbers in outputs and results of calls, compared as the judges of data sets do, without their false positives.

LiveCodeBench compares as Decimal, APPS and TACO by numpy.allclose.
"""

import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.code import code
from glm46.tasks.rl.rewards.label_tests import code_label_faults
from glm46.tasks.rl.rewards.same_outputs import is_same_output, is_same_value

SAME = [
    ("89.6", "89.600000"), ("1e-09", "0.000000001"), ("0.333333", "0.333333333333"), ("0.30000000000000004", "0.3"),
    ("5.0", "5"), ("5", "5.0"), ("1e+16", "10000000000000000"), (".5", "0.50"), ("-0.0", "0.0"), ("0.0", "0"),
    ("2.9999999999999996", "3.0"), ("5.551115123125783e-17", "0.0"), ("+1.5", "1.5"), ("1E3", "1000.0"),
    ("1234.568", "1234.56789"), ("Case 1: 0.5", "Case 1: 0.50"), ("1 2.50\n3", "1\n2.5 3\n"),
    ("1e-300", "1.0000001e-300"),
    ("123456789012.34567", "123456789012.34568"), ("1.0000000000000002e+22", "1e+22"),
]  # fmt: skip
DIFFERENT = [
    ("0.3334", "0.333333333333"), ("0.3", "0.333333333333"), ("1000001", "1000000"), ("1000001.0", "1000000.0"),
    ("1000000.0", "1000000.5"), ("1234567", "1234567.5"), ("0", "1e-9"), ("0.0", "0.000000001"), ("1e-9", "0"),
    ("1e-9", "0.0"), ("0.000000000001", "0.000000000002"), ("-0.5", "0.5"), ("-1e-9", "1e-9"), ("0.50001", "0.5"),
    ("1", "01"), ("7", "007"), ("7.0", "007"), ("01.5", "1.5"), ("2.9999999999999996", "3"), ("1.5", "1.5.0"),
    ("nan", "0.0"), ("inf", "1e9999"), ("1", "1."), ("1,000.0", "1000.0"), ("0x10", "16"), ("1_0.0", "10.0"),
    ("1.0000000000000001e+16", "10000000000000000"), ("100000000000000000000001", "100000000000000000000000"),
    ("9007199254740993", "9007199254740992"), ("9007199254740993.0", "9007199254740992"), ("0.5", "0.5 0.5"),
    ("abc", "abd"), ("Yes", "yes"), ("1/2", "0.5"), ("50%", "0.5"), ("\u0661.5", "1.5"), ("1e5", "100001"),
]  # fmt: skip


@pytest.mark.parametrize(("output", "expected"), SAME)
def test_other_spellings_and_roundings_of_decimals_are_the_same(output, expected):
    words = zip(output.split(), expected.split(), strict=True)
    numbers = [(float(word), float(other)) for word, other in words if word not in ("Case", "1:")]
    assert np.allclose(*zip(*numbers, strict=True))
    assert is_same_output(output, expected)


@pytest.mark.parametrize(("output", "expected"), DIFFERENT)
def test_near_misses_are_different(output, expected):
    assert not is_same_output(output, expected)


@pytest.mark.parametrize("value", [5, 5.0, -1e300, 10**400])
def test_no_finite_number_is_infinite_or_nan(value):
    for expected in (float("inf"), float("-inf"), float("nan")):
        assert not is_same_value(value, expected)
    assert is_same_value(float("inf"), float("inf"))
    assert not is_same_value(float("-inf"), float("inf"))


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(-2e-6, 2e-6))
def test_a_decimal_passes_only_where_the_judge_of_apps_passes_it(expected, error):
    number = expected * (1 + error) if abs(expected) < 1e300 else expected
    is_same = is_same_output(repr(number), repr(expected))
    assert np.allclose(number, expected) or not is_same
    assert is_same == is_same_value(number, expected)
    if Decimal(repr(number)) == Decimal(repr(expected)):
        assert is_same, "as for LiveCodeBench"


@given(st.integers(), st.integers(-2, 2).filter(bool))
def test_integers_are_exact(expected, error):
    assert not is_same_output(str(expected + error), str(expected)) and not is_same_value(expected + error, expected)
    assert is_same_output(str(expected), str(expected))


@pytest.mark.parametrize(("value", "expected", "is_same"), [
    (0.1 + 0.2, 0.3, True), ([0.1 + 0.2, 1], [0.3, 1], True), ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True), (3, 3.0, True),
    (3.0, 3, True), (3.0000000000000004, 3, False), (4, 3, False), ([0.3], [0.3, 0.3], False),
    ({"b": 1.5}, {"a": 1.5}, False),
    ("0.30000000000000004", "0.3", False), (float("nan"), 0.5, False), (float("inf"), 1e308, False), (None, 0.0, False),
    (0, 1e-9, False), (1e-9, 0.0, False), (10**400, 1e308, False), ("", 0.5, False), ([0.5], 0.5, False),
    (2**53 + 1, 2**53, False),
])  # fmt: skip
def test_floats_in_results_of_calls_may_differ_by_rounding(value, expected, is_same):
    assert is_same_value(value, expected) == is_same


def judged(program: str, label) -> float:
    return code(Answer("", f"```python\n{program}\n```", json.dumps(label), False, 9, True), {})


@pytest.mark.parametrize(("program", "expected"), [
    ("def f(x): return [x + 0.2, 10 ** 5000, {'a': x * 3}]", 1.0),
    ("def f(x): return [x + 0.2001, 10 ** 5000, {'a': x * 3}]", 0.0),
    ("def f(x): return [x + 0.2, 10 ** 5000 + 1, {'a': x * 3}]", 0.0),
    ("def f(x): return [x + 0.2, 1e400, {'a': x * 3}]", 0.0),
])  # fmt: skip
def test_calls_are_compared_by_the_rule(program, expected):
    text = f'[[0.3, 1{"0" * 5000}, {{"a": 0.3}}]]'
    label = {"fn_name": "f", "inputs": ["0.1"], "outputs": [text]}
    assert code_label_faults([label]) == [""]
    assert judged(program, label) == expected


@pytest.mark.parametrize(("program", "expected"), [
    ("print(10 ** 5000, 0.1 + 0.2)", 1.0), ("print(10 ** 5000 + 1, 0.1 + 0.2)", 0.0), ("print(10 ** 5000, 0.31)", 0.0),
    ("print(int(input()) * 10 ** 5000, 0.3)", 1.0),
])  # fmt: skip
def test_outputs_are_compared_by_the_rule(program, expected):
    assert judged(program, {"inputs": ["1"], "outputs": [f"1{'0' * 5000} 0.30"]}) == expected
