"""A calculator environment, an example of a tool: ``"glm46.tasks.rl.rewards.calculator:calculate"``."""

import ast
import operator
import re
from fractions import Fraction

from glm46.tasks.rl.rewards.answer import Answer

_CALL = re.compile(
    r"<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>(.*?)</arg_value>\n</tool_call>", re.DOTALL
)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200


def calculate(answer: Answer) -> str | None:
    """Evaluate the expression, of numbers, + - * / and brackets, in the last call of "calculator" in a turn, calls in
    its thought excluded. Return an integer or a fraction, or an error message that the policy can read; None for a turn
    without a call."""
    if not (calls := _CALL.findall(answer.spoken)):
        return None
    try:
        return str(_value(ast.parse(calls[-1].strip()[:_LONGEST], mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: Fraction = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError("not an expression of numbers, + - * / and brackets")
