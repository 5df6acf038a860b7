r"""Results that differ by very little, absolutely or relative to a large value.

mpmath and `fractions` say which are equal. By default math-verify takes all results for equal that differ by
less than 1e-15.
"""

import time
from fractions import Fraction
from math import factorial

import mpmath
import pytest

from glm46.storage.judge.equal_results import same_answer

_DIGITS = 4_000
_VALUES = {"Q": Fraction, "F": factorial, "sqrt": mpmath.sqrt, "e": mpmath.e, "pi": mpmath.pi, "log": mpmath.log}

DIFFERENT = [
    (r"\frac{1}{2^{98}}", "Q(1, 2**98)", r"\frac{1}{2^{99}}", "Q(1, 2**99)"),
    (r"1-\frac{1}{2^{99}}", "1 - Q(1, 2**99)", r"1-\frac{1}{2^{100}}", "1 - Q(1, 2**100)"),
    (r"2-\frac{1}{2^{99}}", "2 - Q(1, 2**99)", r"2-\frac{1}{2^{100}}", "2 - Q(1, 2**100)"),
    (r"\frac{1}{2}-\frac{1}{2\cdot 3^{100}}", "Q(1, 2) - Q(1, 2 * 3**100)",
     r"\frac{1}{2}-\frac{1}{2\cdot 3^{99}}", "Q(1, 2) - Q(1, 2 * 3**99)"),
    (r"\frac{1}{4}\left(1-\frac{1}{3^{99}}\right)", "(1 - Q(1, 3**99)) / 4",
     r"\frac{1}{4}\left(1+\frac{1}{3^{99}}\right)", "(1 + Q(1, 3**99)) / 4"),
    (r"-\frac{1}{2^{99}}", "-Q(1, 2**99)", r"\frac{1}{2^{99}}", "Q(1, 2**99)"),
    (r"\frac{2}{3^{50}}", "Q(2, 3**50)", r"\frac{1}{3^{50}}", "Q(1, 3**50)"),
    (r"\left(\frac{5}{6}\right)^{200}", "Q(5, 6)**200", r"\left(\frac{5}{6}\right)^{201}", "Q(5, 6)**201"),
    (r"\frac{1}{100!}", "Q(1, F(100))", r"\frac{1}{101!}", "Q(1, F(101))"),
    (r"e^{-100}", "e**-100", r"e^{-101}", "e**-101"),
    (r"\frac{\pi}{10^{20}}", "pi / 10**20", r"\frac{2\pi}{10^{20}}", "2 * pi / 10**20"),
    (r"\frac{\sqrt{2}}{10^{16}}", "sqrt(2) / 10**16", r"\frac{\sqrt{3}}{10^{16}}", "sqrt(3) / 10**16"),
    (r"1-\left(\frac{2}{3}\right)^{100}", "1 - Q(2, 3)**100", r"1-\left(\frac{2}{3}\right)^{99}", "1 - Q(2, 3)**99"),
    (r"\frac{3^{100}-1}{3^{100}}", "Q(3**100 - 1, 3**100)", r"\frac{3^{100}-2}{3^{100}}", "Q(3**100 - 2, 3**100)"),
    (r"1-\frac{365!}{365^{300}\cdot 65!}", "1 - Q(F(365), 365**300 * F(65))",
     r"1-\frac{364!}{365^{300}\cdot 64!}", "1 - Q(F(364), 365**300 * F(64))"),
    (r"\frac{1}{2^{30}}", "Q(1, 2**30)", r"\frac{1}{2^{31}}", "Q(1, 2**31)"),
    (r"1-\frac{1}{2^{20}}", "1 - Q(1, 2**20)", r"1-\frac{1}{2^{21}}", "1 - Q(1, 2**21)"),
    (r"1-\frac{1}{2^{300}}", "1 - Q(1, 2**300)", r"1-\frac{1}{2^{301}}", "1 - Q(1, 2**301)"),
    (r"1-\frac{1}{7^{999}}", "1 - Q(1, 7**999)", r"1+\frac{1}{7^{999}}", "1 + Q(1, 7**999)"),
    (r"\frac{1}{500!}+\frac{1}{3}", "Q(1, F(500)) + Q(1, 3)", r"\frac{1}{501!}+\frac{1}{3}", "Q(1, F(501)) + Q(1, 3)"),
    (r"\pi-\frac{1}{2^{120}}", "pi - Q(1, 2**120)", r"\pi-\frac{1}{2^{121}}", "pi - Q(1, 2**121)"),
    (r"\sqrt{2}+e^{-200}", "sqrt(2) + e**-200", r"\sqrt{2}+e^{-201}", "sqrt(2) + e**-201"),
    (r"e^{-500}", "e**-500", r"2e^{-500}", "2 * e**-500"),
    (r"\ln(1+\frac{1}{2^{90}})", "log(1 + mpf(2)**-90)", r"\frac{1}{2^{90}}", "Q(1, 2**90)"),
    (r"\sqrt{10^{40}+1}", "sqrt(10**40 + 1)", r"10^{20}", "10**20"),
    (r"2^{200}", "2**200", r"2^{200}+1", "2**200 + 1"),
    (r"100!", "F(100)", r"100!+1", "F(100) + 1"),
    (r"\sqrt{2}\cdot 10^{50}", "sqrt(2) * 10**50", r"\sqrt{2}\cdot 10^{50}+1", "sqrt(2) * 10**50 + 1"),
    (r"\frac{3^{200}-1}{2}", "Q(3**200 - 1, 2)", r"\frac{3^{200}+1}{2}", "Q(3**200 + 1, 2)"),
    (r"\sum_{k=1}^{200} \frac{1}{3^k}", "sum(Q(1, 3**k) for k in range(1, 201))", r"\frac{1}{2}", "Q(1, 2)"),
]  # fmt: skip
"""LaTeX and Python of a result, then of one that is not equal. The first 17 are typical mistakes of recurrences and
probabilities, by one in an exponent or in a sign."""

EQUAL = [
    (r"\frac{1}{2^{99}}", "Q(1, 2**99)", r"2^{-99}", "Q(1, 2**99)"),
    (r"1-\frac{1}{2^{99}}", "1 - Q(1, 2**99)", r"\frac{2^{99}-1}{2^{99}}", "Q(2**99 - 1, 2**99)"),
    (r"\frac{\sqrt{2}}{10^{16}}", "sqrt(2) / 10**16", r"10^{-16}\sqrt{2}", "sqrt(2) / 10**16"),
    (r"\frac{1}{4}\left(1-\frac{1}{3^{99}}\right)", "(1 - Q(1, 3**99)) / 4",
     r"\frac{3^{99}-1}{4\cdot 3^{99}}", "Q(3**99 - 1, 4 * 3**99)"),
    (r"\left(\frac{5}{6}\right)^{200}", "Q(5, 6)**200", r"\frac{5^{200}}{6^{200}}", "Q(5**200, 6**200)"),
    (r"\frac{1}{100!}", "Q(1, F(100))", r"\frac{101}{101!}", "Q(101, F(101))"),
    (r"e^{-100}", "e**-100", r"\frac{1}{e^{100}}", "1 / e**100"),
    (r"1-\frac{1}{7^{999}}", "1 - Q(1, 7**999)", r"\frac{7^{999}-1}{7^{999}}", "Q(7**999 - 1, 7**999)"),
    (r"\frac{365!}{365^{300}\cdot 65!}", "Q(F(365), 365**300 * F(65))",
     r"\frac{364!}{365^{299}\cdot 65!}", "Q(F(364), 365**299 * F(65))"),
    (r"\frac{\sqrt{6}}{2^{100}}", "sqrt(6) / 2**100",
     r"\frac{\sqrt{2}\cdot\sqrt{3}}{2^{100}}", "sqrt(2) * sqrt(3) / 2**100"),
    (r"\sqrt{3+2\sqrt{2}}", "sqrt(3 + 2 * sqrt(2))", r"1+\sqrt{2}", "1 + sqrt(2)"),
    (r"10^{40}\sqrt{3+2\sqrt{2}}", "10**40 * sqrt(3 + 2 * sqrt(2))", r"10^{40}(1+\sqrt{2})", "10**40 * (1 + sqrt(2))"),
    (r"\frac{1}{\sqrt{2}-1}", "1 / (sqrt(2) - 1)", r"\sqrt{2}+1", "sqrt(2) + 1"),
    (r"\ln 8", "log(8)", r"3\ln 2", "3 * log(2)"),
    (r"\frac{2^{200}+2}{2}", "Q(2**200 + 2, 2)", r"2^{199}+1", "2**199 + 1"),
    (r"\sum_{k=1}^{20} \frac{1}{3^k}", "sum(Q(1, 3**k) for k in range(1, 21))",
     r"\frac{1}{2}-\frac{1}{2\cdot 3^{20}}", "Q(1, 2) - Q(1, 2 * 3**20)"),
]  # fmt: skip

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


@pytest.mark.parametrize(("one", "value", "other", "other_value"), DIFFERENT)
def test_results_that_differ_by_very_little_are_not_equal(one, value, other, other_value):
    pytest.importorskip("math_verify")
    with mpmath.workdps(_DIGITS):
        assert not mpmath.almosteq(value_of(value), value_of(other_value), rel_eps=mpmath.mpf(10) ** -3_000, abs_eps=0)
    assert not same_answer(one, other) and not same_answer(other, one)


@pytest.mark.parametrize(("one", "value", "other", "other_value"), EQUAL)
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
