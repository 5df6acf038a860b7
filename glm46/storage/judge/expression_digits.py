"""Number of decimal digits that decide whether the numerical values of two expressions are equal.

math-verify treats expressions as equal if their difference, rounded to this many digits after the point, is 0. With a
fixed number all tiny results would be equal, such as ``2**-98`` and ``2**-99``.
"""

import math
from collections.abc import Iterable

from sympy import Basic, Float, MatrixBase, Pow, Rational, exp, factorial
from sympy.concrete.expr_with_limits import ExprWithLimits

_RELATIVE_DIGITS = 50
"""Number of digits of irrational values that must agree."""
_LOG10_2 = math.log10(2)


def deciding_digits(expressions: Iterable[Basic | MatrixBase | str]) -> float:
    """Return how many digits after the point decide whether these expressions are equal.

    This is the number of digits of all their integers, with powers and factorials written out, plus 50. Two different
    fractions differ by at least 1 over the product of their denominators, so that the comparison of rational numbers is
    exact. The values of other expressions have to agree in 50 digits relative to the smaller one.
    """
    return _RELATIVE_DIGITS + sum(_size(expression) for expression in expressions if not isinstance(expression, str))


def _size(expression: Basic | MatrixBase) -> float:
    """Return an upper bound on the decimal digits of the numerator and the denominator of an expression."""
    if isinstance(expression, MatrixBase):
        return sum(_size(entry) for entry in expression.flat())
    if isinstance(expression, Rational):
        return _integer_digits(expression.p) + _integer_digits(expression.q)
    if isinstance(expression, Float):
        return _RELATIVE_DIGITS
    sizes = sum(_size(part) for part in expression.args if hasattr(part, "args"))
    if isinstance(expression, exp):
        return 1 + sizes + _magnitude(expression.args[0])
    if isinstance(expression, Pow):
        base, exponent = expression.args
        return _size(exponent) + max(1.0, _magnitude(exponent)) * max(1.0, _size(base))
    if isinstance(expression, factorial):
        count = _magnitude(expression.args[0])
        return sizes + (math.lgamma(count + 1) / math.log(10) if math.isfinite(count) else math.inf)
    if isinstance(expression, ExprWithLimits):
        bounds = [bound for limit in expression.limits for bound in limit[1:]]
        terms = sum(_magnitude(bound) for bound in bounds)
        return sizes + terms * max(1.0, _size(expression.function)) if math.isfinite(terms) else sizes
    if expression.is_Function and expression.is_number:
        return sizes + _order_of_magnitude(expression)
    return sizes


def _integer_digits(number: int) -> float:
    return math.ceil(int(number).bit_length() * _LOG10_2)


def _magnitude(number: Basic) -> float:
    """Return the absolute value of a constant; 1 for expressions with symbols, sums or integrals."""
    if not getattr(number, "is_number", False) or number.has(ExprWithLimits):
        return 1.0
    try:
        return abs(complex(number.evalf(15)))
    except OverflowError:
        return math.inf
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return 1.0


def _order_of_magnitude(number: Basic) -> float:
    """Return the number of digits before the point of a large value, or of zeros after the point of a small one."""
    magnitude = _magnitude(number)
    return abs(math.log10(magnitude)) if 0 < magnitude < math.inf else 0.0
