"""The judge of mathematical results on pairs, with math-verify, mpmath and fractions as judges of the judge."""

import logging
import time
from fractions import Fraction
from math import factorial
from pathlib import Path

import mpmath
import pytest
import tomli

from glm46.storage.judge.equal_results import same_answer
from glm46.storage.judge.maths import _marked, last_box, maths_fault, steps_fault

RESULTS = tomli.loads(Path(__file__).with_name("results.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text, answer", [
    (r"so $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
    (r"first \boxed{3}, then \boxed{x^{2^{3}}} is it", "x^{2^{3}}"),
    ("48/2 = 24\n48 + 24 = 72\n#### 72", "72"),
    ("The answer is 5 apples.\nNo, the answer is 6.", "6."),
    ("Final answer: 1,000", "1,000"),
    (r"\boxed{never closed #### 4", "4"),
    ("nothing here", None),
])  # fmt: skip
def test_the_last_result_is_found(text, answer):
    assert (last_box(text)[0] or _marked(text)[0]) == answer


@pytest.mark.parametrize("one, other", [
    ("0.5", r"\frac{1}{2}"), ("1,000", "1000"), ("1{,}000", "1000"), (r"\dfrac12", "1/2"), ("$42$", "42."), ("+7", "7"),
    (r"\left( 1, 2 \right)", "(1,2)"), (r"5\text{ cm}", "5"), (r"\text{Monday}", "monday"), ("50\\%", "50"),
    (r"90^\circ", "90"), ("-.25", r"-\frac{1}{4}"), (r"2\sqrt{3}", r"2 \sqrt{3}"), ("0.50", "0.5"), ("7" * 9_000,) * 2,
])  # fmt: skip
def test_results_that_say_the_same_are_equal(one, other):
    assert same_answer(one, other) and same_answer(other, one)


@pytest.mark.parametrize("one, other", [
    ("12", "1,2"), ("(1,200)", "(1200)"), ("1/0", "1"), ("0.33", "1/3"), ("x+1", "1-x"), ("-1", "1"), ("10", "1"),
    ("7" * 9_000, "7" * 9_001), ("__import__('os')", "0"),
])  # fmt: skip
def test_other_results_are_not(one, other):
    assert not same_answer(one, other)


def test_the_reason_is_told():
    assert maths_fault(r"Half of it is \boxed{0.5}", "so much:\n#### 1/2") is None
    assert maths_fault(r"\boxed{3}", "4") == "wrong answer"
    assert maths_fault("It is three.", "3") == "states no final answer"
    assert maths_fault(r"\boxed{3}", None) == maths_fault(r"\boxed{3}", " ") == "no answer to check against"


@pytest.mark.parametrize("text, answer, fault", [
    ("2 + 2 + 1?\nStep 1: 2 + 2 = 4\nStep 2: 4 + 1 = 5\n#### 5", "5", None),
    ("**Step 1:** two\n1. of it\n2. and it\n\n### Step 2 - four\nThe answer is 1,000.", "1000", None),
    ("Given:\n1. a\n2. b\nSo:\n1) x = 3.5\n2) y = 2\n3) \\boxed{7}", None, None),
    ("Step 1: 4\nStep 2: 5\n#### 5", "6", "wrong answer"),
    ("Step 1: 4\nStep 2: 5", None, "states no final answer behind its steps"),
    ("\\boxed{5}\nStep 1: 4\nStep 2: 5", None, "states no final answer behind its steps"),
    ("Step 1: 4\nStep 3: 5\n#### 5", None, "steps out of order"),
    ("Step 1: 4\nStep 2: 5\nStep 2: 6\n#### 5", None, "steps out of order"),
    ("Step 1:\nStep 2: 5\n#### 5", None, "an empty step"),
    ("Step 1: 5\n#### 5", None, "a single step"),
    ("In step 1 and step 2 we see\n3.5 and 2.5\n#### 6", None, "no steps"),
    ("Step 2: 5\n#### 5", None, "no steps"),
    ("", None, "no steps"),
])  # fmt: skip
def test_reasoning_in_steps(text, answer, fault):
    assert steps_fault(text, answer) == fault


def judged(one: str, other: str) -> tuple[bool, bool]:
    return same_answer(one, other), same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), RESULTS["equal"] + RESULTS["equal_by_our_rules"])
def test_equal_results_are_equal_in_both_directions(one, other):
    pytest.importorskip("math_verify")
    assert judged(one, other) == (True, True)


@pytest.mark.parametrize(("one", "other"), RESULTS["unequal"] + RESULTS["unequal_by_our_rules"])
def test_near_misses_are_refused_in_both_directions(one, other):
    pytest.importorskip("math_verify")
    assert judged(one, other) == (False, False)


@pytest.mark.parametrize(("one", "other", "expected"), [
    *((*pair, True) for pair in RESULTS["equal"]), *((*pair, False) for pair in RESULTS["unequal"]),
])  # fmt: skip
def test_math_verify_says_the_same(one, other, expected, caplog):
    math_verify = pytest.importorskip("math_verify")
    caplog.set_level(logging.CRITICAL)
    first, second = (math_verify.parse(f"\\boxed{{{text}}}") for text in (one, other))
    assert math_verify.verify(first, second) == math_verify.verify(second, first) == expected


_DIGITS = 4_000
_VALUES = {"Q": Fraction, "F": factorial, "sqrt": mpmath.sqrt, "e": mpmath.e, "pi": mpmath.pi, "log": mpmath.log}


FORMS = [
    r"\{%s,\sqrt2\}", r"(%s,\sqrt2)", r"\begin{pmatrix}%s\\\sqrt2\end{pmatrix}", r"[%s,\sqrt2)", "x<%s", "x+%s", "%s x",
    "y=%s x+1", r"\sin(%s)", "%s + i", "x^2=%s", r"\frac{x}{1+%s}", r"[0,%s]\cup[\sqrt2,\sqrt3]", r"%s\sqrt2",
    "(x+%s)^2",
]  # fmt: skip
"""Results with a tiny number in them."""


def value_of(expression: str) -> mpmath.mpf:
    """The value of a Python expression, a fraction as far as it is one."""
    value = eval(expression, {**_VALUES, "mpf": mpmath.mpf})
    if isinstance(value, Fraction):
        return mpmath.mpf(value.numerator) / value.denominator
    return mpmath.mpf(value)


@pytest.mark.parametrize(("one", "value", "other", "other_value"), RESULTS["tiny_difference"])
def test_results_that_differ_by_very_little_are_not_equal(one, value, other, other_value):
    pytest.importorskip("math_verify")
    with mpmath.workdps(_DIGITS):
        assert not mpmath.almosteq(value_of(value), value_of(other_value), rel_eps=mpmath.mpf(10) ** -3_000, abs_eps=0)
    assert not same_answer(one, other) and not same_answer(other, one)


@pytest.mark.parametrize(("one", "value", "other", "other_value"), RESULTS["tiny_and_equal"])
def test_tiny_and_large_results_stay_equal_in_other_forms(one, value, other, other_value):
    pytest.importorskip("math_verify")
    with mpmath.workdps(_DIGITS):
        assert mpmath.almosteq(value_of(value), value_of(other_value), rel_eps=mpmath.mpf(10) ** -3_900, abs_eps=0)
    assert same_answer(one, other) and same_answer(other, one)


@pytest.mark.parametrize("form", FORMS)
def test_a_tiny_number_within_a_result_counts(form):
    pytest.importorskip("math_verify")
    result = form % r"\frac{1}{2^{98}}"
    assert same_answer(result, form % "2^{-98}")
    assert not same_answer(result, form % r"\frac{1}{2^{99}}")


@pytest.mark.parametrize(("one", "other"), [
    (r"\left(\left(1+\sqrt2\right)^{999}\right)^{999}", r"\left(\left(1+\sqrt2\right)^{999}\right)^{998}"),
    (r"\frac{1}{999!}+\pi", r"\frac{1}{998!}+\pi"), (r"e^{e^{e^{9}}}", r"e^{e^{e^{9}}}+1"),
])  # fmt: skip
def test_results_with_very_many_digits_are_compared_in_bounded_time(one, other):
    pytest.importorskip("math_verify")
    began = time.process_time()
    assert not same_answer(one, other)
    assert time.process_time() - began < 20.0, "three calls of math-verify have three seconds each"
