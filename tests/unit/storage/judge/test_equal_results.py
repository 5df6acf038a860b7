"""The judge of mathematical results on pairs, with math-verify, mpmath and fractions as judges of the judge."""

import logging
import time
from fractions import Fraction
from math import factorial

import mpmath
import pytest

from glm46.storage.judge.equal_results import same_answer
from glm46.storage.judge.maths import _marked, last_box, maths_fault, steps_fault


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


EQUAL = [
    (r"\sqrt{2gh}", r"\sqrt{2 g h}"), ("0.1x+0.2", r"\frac{x}{10}+\frac15"), ("5 kms", "5 km"), ("20 cm", "20"),
    (r"180^\circ", "180 degrees"), ("5 m/s", "5 m s^{-1}"), (r"[1,3]\setminus\{2\}", r"[1,2)\cup(2,3]"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2"),
    (r"\frac12\begin{pmatrix}2&4\\6&8\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}2&4\\6&8\end{bmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{bmatrix}1\\2\\3\end{bmatrix}", r"\begin{pmatrix}1\\2\\3\\ \end{pmatrix}"),
    (r"A=\begin{bmatrix}1&0\\0&1\end{bmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    (r"\begin{pmatrix}\frac{1}{2}&x+1\\0&1\end{pmatrix}", r"\begin{bmatrix}0.5&1+x\\0&1\end{bmatrix}"),
    (r"\left[\begin{matrix}1&2\\3&4\end{matrix}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\0\end{pmatrix}+\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
    ("1.2E-3", "0.0012"), (r"1.2\times{10}^{-3}", "0.0012"), (r"1.2\times 10^{+3}", "1200"),
    (r"1.2\times10^{-3}", r"12\times10^{-4}"), (r"-1.2\times10^{-3}", "-0.0012"), ("10^{-3}", "0.001"),
    (r"1.2\cdot{10^{3}}", "1200"), (r"(1.2\times10^{3})", "1200"), ("2^(1/2)", r"\sqrt{2}"), ("sqrt(2)", r"\sqrt{2}"),
    ("sqrt(2)/2", r"\frac{1}{\sqrt2}"), (r"\dbinom{5}{2}", "10"), ("1/3+1/6", "1/2"), ("0.1+0.2", "0.3"),
    ("3/4", "75%"), ("1:2", "2:4"), ("1:2", "1/2"), ("x=1 or x=2", "x=1, x=2"), ("{1, 2}", r"\{1,2\}"),
    ("±2", r"\{-2,2\}"), ("1,2", "(1,2)"), (r"\frac{1}{2}x^2+C", r"\frac{x^2}{2}+C"), ("y=x+1", "x-y+1=0"),
    ("2x+4y=6", "x+2y=3"), ("y=2x", "x=y/2"), (r"{5\choose 2}", "10"), (r"\frac{\sqrt[3]{2}}{2}", "2^{-2/3}"),
    (r"\log 100", "2"), ("infinity", r"\infty"), ("-infinity", r"-\infty"), (r"r=\frac12", "r=0.5"),
    ("12 apples", "12"), ("6 hours", "6"), ("3 GB", "3 GB"), ("a<b<c", "a<b<c"),
    (r"\begin{bmatrix} 1 & 2 \end{bmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (r"\left(\begin{array}{rr}1&2\\3&4\end{array}\right)", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"-\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}-1\\-2\end{pmatrix}"),
    (r"\begin{pmatrix}\sqrt{4}\\2\end{pmatrix}", r"\begin{pmatrix}2\\2\end{pmatrix}"),
    (r"\begin{vmatrix}1&2&0\\3&4&0\\0&0&1\end{vmatrix}", "-2"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{vmatrix}4&3\\2&1\end{vmatrix}"),
    (r"\begin{matrix}1&2\\3&4\end{matrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("6.022E23", r"6.022\times10^{23}"), ("1E3", "1000"), ("y = x^2", "x^2 = y"), ("x^2+y^2=4", "x^2+y^2-4=0"),
    ("2x-y=3", "y=2x-3"), ("a=b", "b=a"), ("x=3", "3=x"), ("3/8 inch", "3/8 inches"),
]  # fmt: skip
"""Results that are equal, as math-verify finds too."""

UNEQUAL = [
    (r"\frac{3}{t}", "3"), ("a d - b c", "ad-b"), ("2gh", "2g"), ("x<-2, x>2", "-2<x<2"), ("2.5e", "2.5"),
    ("5 m/s", "5 km/h"), ("5 km", "500 m"), ("1 hour", "6 minutes"), ("250 cm", "25 m"), ("1 m", "100 mm"),
    ("1 kg", "100 g"), ("1.5 hours", "150 minutes"), ("2 days", "24 hours"), ("1 foot", "10 inches"),
    ("2 L", "200 mL"), ("1 m^2", "100 cm^2"), ("1 m^3", "100 cm^3"), ("36 km/h", "36 m/s"),
    ("1 hour 30 minutes", "1.3 hours"), ("1 hour 30 minutes", "130 minutes"), ("5 ft 3 in", "53 inches"),
    ("3 hours 20 minutes", "3.2 hours"), ("3 hours 20 minutes", "200"), ("500 ms", "5 s"), ("3 kJ", "300 J"),
    ("20 cm", "0.2"), ("5 km", "5000"), ("60 minutes", "1"), ("5 km", "5000 g"), (r"\pi \text{ rad}", r"180^\circ"),
    ("25 m/s", "25 m/s^2"), ("5 kg m/s", "5 kg m/s^2"), ("5 m/s", "5 m s"), ("1 g/cm^3", "100 kg/m^3"),
    (r"5\sqrt{2}\text{ km}", r"500\sqrt{2}\text{ m}"), (r"16\pi \text{ cm}^2", r"0.16\pi\text{ m}^2"),
    ("1<x<3", "1<=x<3"), ("x<3 or x>1", "1<x<3"), ("x<3 and x>1", "1<x<=3"), ("x<3 and y>1", "1<x<3"),
    ("x>3 and x<1", "1<x<3"), ("3>x>1", "3<x<1"), (r"x\in(1,3]", "1<x<3"), ("x > 1 and x > 3", "x > 1"),
    (r"0<x<1 \text{ and } x>2", r"(0,1)\cup(2,\infty)"), ("x>=1", "x>1"), (r"n \ge 5", "n > 5"),
    (r"[1,3]\setminus\{2\}", "[1,3]"), (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "2"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\left|\begin{array}{cc}1&2\\3&4\end{array}\right|", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}2&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2&3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    (r"\begin{pmatrix}-1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)"), (r"\langle 1,2\rangle", "(1,-2)"),
    (r"\begin{vmatrix}a&b\\c&d\end{vmatrix}", "ad+bc"), ("[[1,2],[3,4]]", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"1.2\mathrm{E}{-3}", "0.012"), ("1.2E-3", "-1.8"), ("1.2 × 10⁻³", "1200"),
    (r"1.2\times10^{-3}", r"12\times10^{-3}"), (r"1.2\times10^3 \text{ m}", "12 km"), ("1.2e", "1.2"),
    ("2e^3", "2000"), ("2E", "2"), ("2⁵", "25"), ("x**2", "2x"), ("sqrt(2)", "2"), ("pi/2", r"\frac{p}{2}"),
    ("5C2", "20"), ("1:2", "2:1"), ("3:4:5", "3:4:6"), ("7 R 2", "7"), ("twenty-one", "20"), ("x=1 or x=2", "x=1"),
    ("[1,2]", r"\{1,2\}"), ("(1,2)", "[1,2]"), (r"\frac{x^2}{2}", r"\frac{x^2}{2}+C"), ("2x+4y=6", "x+2y=4"),
    (r"\sqrt[3]{2}", r"\sqrt{2}"), ("a+bi", "a+bj"), ("-i", "i"), (r"\bar{z}", "z"),
    (r"\frac{\pi}{4}+k\pi", r"\frac{\pi}{4}+2k\pi"), ("True", "yes"), (r"r=\frac12", r"c=\frac12"),
    ("5 km", "5000 meters long"), ("3 boxes", "3 cans"), ("5 m^2", "5 m^3"), ("5 sq ft", "60 sq in"),
    ("1 gallon", "8 quarts"), ("3 quarters", "3/4"), ("100 cents", "1 euro"), ("10 m/min", "10 m/s"),
    ("1 day 25 hours", "49 hours"), ("2 h 30 min", "2.30 h"), ("1 kg 500 g", "150 g"),
    ("5 pounds 4 ounces", "5.4 pounds"), ("2 dollars and 5 cents", "$2.50"), ("6 hours", "360"),
    (r"\frac{1}{2}\text{ hour}", "50 minutes"), ("half hour", "30 minutes"), (r"0.75\text{ km}^2", r"750\text{ m}^2"),
    ("365 days", "1 year"), ("20°C", "20°F"), ("20 degrees Celsius", "20 degrees Fahrenheit"), ("68°F", "20°C"),
    (r"\$1.2\text{ million}", "1.2 dollars"), ("x≥2 and x≤5", "(2,5)"), ("5 > x >= 2", "(2,5]"),
    ("x < 5 and x < 3", "x<5"), ("x < 5 or x < 3", "x<3"), ("0 < x < 1 and y > 2", "0<x<1"), ("a<b<c", "c<b<a"),
    (r"x \in (1, 3] \text{ and } x>2", "(2,3]"),
    (r"\begin{bmatrix} 1 & 2 \end{bmatrix}", r"\begin{pmatrix} 1 & 3 \end{pmatrix}"),
    (r"-\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{-1}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"3\times10^{-5}", r"3\mathrm{E}{5}"), ("6.022E23", r"6.022\times10^{22}"), ("1E3", "13"),
    (r"2\mathrm{e}^{3}", "2000"), ("x^2+y^2=4", "x^2+y^2=2"), ("2x-y=3", "y=2x+3"), ("x=3", "y=3"), ("3n+1", "3t+1"),
    (r"\frac{a}{2}b c", r"\frac{a}{2}b"), ("x + c", "x"), ("x y", "x"), ("ab", "a"), ("gt", "g"),
    (r"\frac{v^2}{2g}", r"\frac{v^2}{2}"), ("cat", "dog"), (r"3\frac12 feet", "38 inches"), ("5 ft", "5 in"),
]  # fmt: skip
"""Near misses, which math-verify refuses too."""

EQUAL_BY_OUR_RULES = [
    ("a d-b c", "ad-bc"), ("$5 per hour", "5 dollars per hour"), ("60 miles per hour", "60 mph"),
    (r"5 N\cdot m", "5 J"), (r"5\ \text{kW}\cdot\text{h}", "5 kWh"), (r"\mathrm{e}^2", "e^2"), (r"2\mathrm{i}", "2i"),
    (r"\operatorname{sin}(x)", r"\sin x"), (r"\mathrm{ln}\,2", r"\ln 2"), (r"30\text{ min}", "1800 s"),
    (r"30\text{sec}", "0.5 min"), ("5 MW", "5000 kW"), ("2^{0.5}", r"\sqrt2"), ("5 KM", "5 km"), ("5 kgs", "5000 g"),
    ("5 m/s", "18 km/h"), ("5 km", "5000 m"), ("1 hour", "60 minutes"), (r"5\text{ km}", r"5000\text{ m}"),
    (r"2.5\,\mathrm{km}", r"2500\,\mathrm{m}"), ("250 cm", "2.5 m"), ("1 m", "100 cm"), ("1 m", "1000 mm"),
    ("1 kg", "1000 g"), ("1.5 hours", "90 minutes"), ("2 days", "48 hours"), ("3 weeks", "21 days"),
    ("3 feet", "1 yard"), ("1 foot", "12 inches"), ("2 L", "2000 mL"), ("1 mile", "5280 feet"), ("1 lb", "16 oz"),
    ("1 m^2", "10000 cm^2"), ("1 square meter", "10000 square centimeters"), ("1 m^3", "1000 L"),
    ("1 m^3", "1000000 cm^3"), ("36 km/h", "10 m/s"), ("72 kilometers per hour", "20 m/s"),
    (r"36\ \text{km/h}", r"10\ \text{m/s}"), ("1 hour 30 minutes", "90 minutes"), ("1 hour 30 minutes", "1.5 hours"),
    ("1 hour and 30 minutes", "90 minutes"), ("5 ft 3 in", "63 inches"), ("5 feet 3 inches", "5 ft 3 in"),
    ("2 hours 15 min", "135 min"), (r"3\text{ hours }20\text{ minutes}", "200 minutes"), ("50 cents", "$0.50"),
    ("$2.50", "250 cents"), ("500 ms", "0.5 s"), ("1 kWh", "1000 Wh"), ("3 kJ", "3000 J"), ("5 kN", "5000 N"),
    ("1.5 MHz", "1500 kHz"), ("20 cm", "0.2 m"), ("60 seconds", "1 minute"), ("5 dozen", "60"),
    ("5 years", "60 months"), ("1 hour", "3600 s"), ("1 mph", "1 mi/h"), ("1 tonne", "1000 kg"),
    ("9.8 m/s^2", "980 cm/s^2"), ("1 g/cm^3", "1000 kg/m^3"), (r"5\sqrt{2}\text{ km}", r"5000\sqrt{2}\text{ m}"),
    (r"16\pi \text{ cm}^2", r"0.0016\pi\text{ m}^2"), ("x<3 and x>1", "1<x<3"), (r"x<3 \text{ and } x>1", "1<x<3"),
    ("x>1 and x<3", "(1,3)"), ("x<3, x>1", "1<x<3"), ("1<x and x<3", "1<x<3"), ("3>x>1", "1<x<3"),
    (r"x \ge 1 \text{ and } x \le 3", "[1,3]"), (r"x \ge 1 \land x \le 3", "[1,3]"),
    (r"x\geq1, x\leq3", r"1\le x\le3"), (r"\{x \mid x>1 \text{ and } x<3\}", "(1,3)"), (r"x \in (1,3)", "1<x<3"),
    ("x > 1 and x > 3", "x > 3"), (r"\{x: 1<x<3\}", "(1,3)"), (r"0<x<1 \text{ or } x>2", r"(0,1)\cup(2,\infty)"),
    ("x > 1/2 and x < 3/2", "(0.5,1.5)"), (r"x > -\infty", r"(-\infty,\infty)"), ("1 < a < 3", "(1,3)"),
    (r"x\in[1,\infty)", r"x \ge 1"),
    (r"\begin{Bmatrix}1&2\\3&4\end{Bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\left|\begin{matrix}1&2\\3&4\end{matrix}\right|", "-2"),
    (r"\left|\begin{array}{cc}1&2\\3&4\end{array}\right|", "-2"), (r"\langle 1,2\rangle", "(1,2)"),
    (r"\begin{vmatrix}a&b\\c&d\end{vmatrix}", "ad-bc"),
    (r"\left[\begin{array}{c|c}1&2\\3&4\end{array}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{psmallmatrix}1&2\\3&4\end{psmallmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("[[1,2],[3,4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"), (r"1.2\mathrm{E}{-3}", "0.0012"),
    (r"1.2\text{E-3}", "0.0012"), (r"1.2\text{e}{-3}", "0.0012"), ("1.2 × 10⁻³", "0.0012"), ("1.2*10^-3", "0.0012"),
    ("1.2 x 10^-3", "0.0012"), ("1.2*10**-3", "0.0012"), (r"1.2\times10^3 \text{ m}", "1.2 km"),
    (r"1.2\,\mathrm{E}\,3", "1200"), ("1.2e+3", "1200"), ("2e3", "2000"), ("x⁴", "x^4"), ("2⁵", "32"), ("x₁", "x_1"),
    ("10⁻²", "0.01"), ("√2", r"\sqrt{2}"), ("2√3", r"\sqrt{12}"), ("√(x+1)", r"\sqrt{x+1}"), ("x**2", "x^2"),
    ("pi/2", r"\frac{\pi}{2}"), ("3pi", r"3\pi"), ("ln(e)", "1"), ("exp(1)", "e"), ("log_2(8)", "3"),
    ("1e400", "10^{400}"), (r"5\choose 2", "10"), (r"\frac{1}{i}", "-i"), ("|3+4i|", "5"),
    (r"2n+1, n\in\mathbb{Z}", r"2k+1, k\in\mathbb{Z}"),
    (r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", r"\frac{\pi}{4}+n\pi, n\in\mathbb{Z}"),
    (r"\text{No real solutions}", "no real solution"), ("true", "True"), ("12 red apples", "12 apples"),
    ("5 sq ft", "720 sq in"), ("2 cubic feet", "3456 cubic inches"), ("1 gallon", "4 quarts"), ("1 gallon", "8 pints"),
    ("25 cents", "1/4 dollars"), ("100 cents", "1 dollar"), ("10 mph", "10 miles per hour"), ("10 m/min", "600 m/h"),
    ("1 day 2 hours", "26 hours"), ("2 h 30 min", "150 min"), ("1 kg 500 g", "1.5 kg"), ("1 kg 500 g", "1500 g"),
    ("5 pounds 4 ounces", "84 ounces"), ("2 dollars and 50 cents", "$2.50"),
    (r"\frac{1}{2}\text{ hour}", "30 minutes"), (r"0.75\text{ km}^2", r"750000\text{ m}^2"), ("7 days", "1 week"),
    ("1 µm", "1000 nm"), ("1 μm", "1000 nm"), ("8 bits", "1 byte"), ("20°", "20 degrees"), ("20°C", "20"),
    (r"\$1.2\text{ million}", "1200000 dollars"), ("1.2 million km", "1200000000 m"), ("x > 2, x < 5", "2<x<5"),
    ("x>2;x<5", "2<x<5"), ("2 < x, x <= 5", "(2,5]"), ("x≥2 and x≤5", "[2,5]"), ("5 > x >= 2", "[2,5)"),
    ("x < 5 and x < 3", "x<3"), (r"1 < x \leq 3", r"x \in (1, 3]"), (r"3\times10^{-5}", r"3\mathrm{E}{-5}"),
    ("6.022e+23", r"6.022\cdot10^{23}"), (r"5\text{E}2", "500"), (r"5\text{ E}2", "500"), (r"2\mathrm{e}^{3}", "2e^3"),
    ("1.2E−3", "0.0012"), ("1.2×10^−3", "0.0012"), (r"\frac{mg}{2}", r"\frac{1}{2} m g"), ("yes", "Yes."),
    ("No solutions", "no solution"), ("Tuesday", "Tuesdays"), (r"3\frac12 feet", "42 inches"),
]  # fmt: skip
"""Equal results that math-verify cannot read: quantities, bounds, other spellings."""

UNEQUAL_BY_OUR_RULES = [
    ("2c", "2"), ("3t", "3"), ("x+2c", "x+2"), ("x^2 t", "x^2"), ("5h", "5"), ("v_0 t", "v_0"),
    (r"\langle 1,2\rangle", "1.2"), ("$5 per hour", "$5"), ("60 miles", "60 mph"), ("5 MW", "5 mW"), ("2 pm", "2"),
    ("50 cents", "$50"), ("$5", "5 cents"), ("10 kg", "10 km"), (r"1.2\mathrm{E}{-3}", "1.2"),
    (r"1.2\mathrm{e}", "1.2"), ("4t", "4"), ("4s", "4"), (r"2\pi h", r"2\pi"), (r"\pi r^2 h", r"\pi r^2"),
    (r"\sqrt{3} d", r"\sqrt{3}"), ("10 t", "10"), ("2:30 pm", "2:30 am"),
]  # fmt: skip
"""Near misses that math-verify accepts: it takes the last letters for a unit, which it removes."""


def judged(one: str, other: str) -> tuple[bool, bool]:
    return same_answer(one, other), same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), EQUAL + EQUAL_BY_OUR_RULES)
def test_equal_results_are_equal_in_both_directions(one, other):
    pytest.importorskip("math_verify")
    assert judged(one, other) == (True, True)


@pytest.mark.parametrize(("one", "other"), UNEQUAL + UNEQUAL_BY_OUR_RULES)
def test_near_misses_are_refused_in_both_directions(one, other):
    pytest.importorskip("math_verify")
    assert judged(one, other) == (False, False)


@pytest.mark.parametrize(("one", "other", "expected"), [
    *((*pair, True) for pair in EQUAL), *((*pair, False) for pair in UNEQUAL),
])  # fmt: skip
def test_math_verify_says_the_same(one, other, expected, caplog):
    math_verify = pytest.importorskip("math_verify")
    caplog.set_level(logging.CRITICAL)
    first, second = (math_verify.parse(f"\\boxed{{{text}}}") for text in (one, other))
    assert math_verify.verify(first, second) == math_verify.verify(second, first) == expected


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

EQUAL_TINY = [
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


@pytest.mark.parametrize(("one", "value", "other", "other_value"), EQUAL_TINY)
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
