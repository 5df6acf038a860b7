"""Results of worked answers: found where solutions put them, equal where they say the same, never evaluated."""

import pytest

from glm46.storage.judge.maths import _marked, last_box, maths_fault, same_answer, steps_fault


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
