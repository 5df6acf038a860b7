"""The judge of mathematical results, on answers as models write them: both directions, equal forms and near misses."""

import json
import re
import sys
import threading
from pathlib import Path

import pytest

from glm46.storage.judge.equal_results import result_fault, same_answer
from glm46.storage.judge.maths import concluded_result, maths_fault, stated_result
from glm46.tasks.rl.rewards.answer import Answer, maths

VERDICTS = Path(__file__).with_name("maths_verdicts.jsonl")
"""Answers, labels and verdicts of ours, one rule in each line. Each verdict is a decision of a person."""
RIGHT = [
    ("The answer is **42**.", "42"), ("The answer is 42 apples.", "42"),
    ("Final Answer: The final answer is $42$. I hope it is correct.", "42"), (r"\boxed{x=5}", "5"),
    (r"\boxed{−7}", "-7"), (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}"), (r"Answer: \frac{3}{4}", "3/4"),
    (r"Answer: \frac{3}{4}", r"\frac{3}{4}"), (r"**Answer:** $\frac{3}{4}$", "0.75"),
    ("The answer is:\n\n$$\\frac{3}{4}$$", "0.75"), ("## Answer\n42", "42"),
    (r"Thus the final answer is \(42\).", "42"), ("So the answer is $x = 3$ or $x = 5$.", r"\{3,5\}"),
    ("The answer is 3 and 5.", "3, 5"), (r"The answer is 2\frac{1}{3}.", "7/3"), ("The answer is 1,234.", "1234"),
    ("The answer is 1,234,567 dollars.", "1234567"), ("The answer is $1,234.50", "1234.5"),
    ("The answer is $18.", "18"), ("The answer is 25%.", "25"), ("The answer is 3.5.", "3.5"),
    ("The answer is 5 because 2+3=5", "5"), ("The answer is: 5", "5"), ("answer is 5", "5"),
    ("The correct answer is therefore 5.", "5"), (r"\boxed{12 \text{ cm}}", r"12\text{ centimeters}"),
    (r"\boxed{12\,\mathrm{cm}^2}", "12"), (r"\boxed{12 square meters}", "12 m^2"),
    (r"\boxed{5 \text{ and } 7}", r"\{5,7\}"), (r"\boxed{5, 7}", "7, 5"), (r"\boxed{x=5, y=7}", "(5,7)"),
    (r"\boxed{(5, 7)}", "x=5, y=7"), (r"\boxed{1\pm\sqrt{2}}", r"\{1+\sqrt2, 1-\sqrt2\}"),
    (r"\boxed{\pm\sqrt{2}}", r"\sqrt{2}, -\sqrt{2}"),
    (r"\boxed{(-\infty, 2) \cup (3, \infty)}", r"(-\infty,2)\cup(3,\infty)"), (r"\boxed{2 < x \leq 5}", "(2,5]"),
    (r"\boxed{x \in [1,2]}", "[1,2]"), (r"\boxed{x \geq 3}", r"[3,\infty)"), (r"\boxed{\frac{\pi}{6}}", r"\pi/6"),
    (r"\boxed{e^{2}}", "e^2"), (r"\boxed{\ln 2}", r"\ln(2)"), (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{\sqrt{12}}", r"2\sqrt3"), (r"\boxed{\sin x}", r"\sin(x)"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{\text{Yes}}", "yes"), (r"\boxed{\textbf{(C)}}", "C"), (r"\boxed{C}", r"\text{C}"),
    (r"\boxed{No solution}", "no solution"), (r"\boxed{\emptyset}", r"\{\}"), (r"\boxed{\varnothing}", r"\emptyset"),
    (r"\boxed{f(x)=x^2}", "x^2"), (r"\boxed{y = 2x+1}", "2x+1"), (r"\boxed{2x + 3}", "3+2x"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"), (r"\boxed{3 + 2i}", "2i+3"), (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{50\%}", "0.5"), (r"\boxed{0.5}", r"50\%"), (r"\boxed{1/2}", r"\frac{1}{2}"),
    (r"\boxed{-\frac12}", "-0.5"), (r"\boxed{100^\circ}", "100"), (r"\boxed{100 degrees}", r"100^\circ"),
    (r"\boxed{\$5}", "5 dollars"), (r"\boxed{10:30}", "10:30"), (r"\boxed{2^{3}}", "8"), (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{1e-3}", "0.001"), (r"\boxed{\frac{10}{4}}", "2.5"), (r"\boxed{$42$}", "42"), (r"\boxed{42.}", "42"),
    (r"\boxed{\mathbf{42}}", "42"), (r"\boxed{{42}}", "42"), (r"\boxed{42}\boxed{43}", "43"), (r"\boxed{１２}", "12"),
    (r"\boxed{1\frac12}", "1.5"), (r"\boxed{1 \frac{1}{2}}", "3/2"), (r"\boxed{-2½}", "-5/2"),
    (r"\boxed{\frac{-1}{2}}", "-1/2"), (r"\boxed{x=\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{x = 1 \text{ or } x = 2}", "1, 2"), (r"\boxed{x_1 = 1, x_2 = 2}", "1, 2"), (r"\boxed{a=3}", "a = 3"),
    (r"\boxed{8!}", "40320"), (r"\boxed{\log_2 8}", "3"), (r"\boxed{|x|}", "|x|"), (r"\boxed{\approx 3.14}", "3.14"),
    (r"\boxed{3 \times 10^5}", "300000"), (r"\boxed{3 \times 10^5}", "300,000"),
    (r"\boxed{3.0\times10^{5}\text{ J}}", "3e5"), (r"\boxed{7}", "7."), (r"\boxed{007}", "7"),
    ("Answer: 42\n\nExplanation: 6*7.", "42"), ("The answer is **x = 5**", "5"), ("The answer is `42`.", "42"),
    ('The answer is "yes".', "yes"), ("**The answer is 42**", "42"),
    (r"The final answer is: $\boxed{42}$. I hope it is correct.", "42"), ("3 and 4 make 1,007.", "1007"),
    ("So Tom has 42 apples.", "42"), ("Therefore, x = 5.", "5"), ("42", "42"), ("$42$", "42"), (r"\(x=5\)", "5"),
    ("5/6", r"\frac56"), (r"\sqrt{2}", r"\sqrt2"), ("2√11", r"2\sqrt{11}"), (r"\boxed{√1.5}", r"\sqrt{1.5}"),
    (r"\boxed{√2x}", r"\sqrt{2}x"), (r"\boxed{\sqrt11}", r"\sqrt{1}1"),
    (r"**Final Answer:** \(\frac{3}{4}\)", "3/4"), (r"Final Answer: $\boxed{5}$", "5"),
    ("### Final Answer\n\n**42**", "42"), ("### Answer: 42", "42"), ("Answer: 42 (since 6*7=42)", "42"),
    ("The answer is 42 (forty-two).", "42"), ("The answer is 42, as required.", "42"),
    ("The answer is $42.00.", "42"), ("The answer is 1,234 and that is final.", "1234"),
    ("The answer is x = 42.", "42"), (r"The answer is therefore $\dfrac{1}{2}$ of the cake.", "1/2"),
    ("The answer is 12 cm^2.", "12"), ("The answer is 3:4.", "3:4"), (r"The answer is \[ \frac{1}{2} \]", "0.5"),
    ("The answer is\n\\[\n\\frac{1}{2}\n\\]", "0.5"), ("The answer is (3, 4).", "(3,4)"),
    ("The answer is [1, 2).", "[1,2)"), (r"The answer is $(-\infty, 2]$.", r"x \le 2"), ("The answer is 50%.", "50"),
    ("The answer is about 3.14.", "3.14"), ("The answer is −5.", "-5"), ("The final answer is 42!", "42"),
    ("The answer is: **$42$**.", "42"), (r"Thus, the answer is \( 42 \).", "42"), ("The answers are 3 and 5.", "3,5"),
    (r"So the final answer is \fbox{42}", "42"), ("The total is 42.", "42"), ("She has 42 apples left.", "42"),
    ("Therefore, the total cost is $42.", "42"), ("Hence x equals 5.", "5"), (r"The sum is \(42\).", "42"),
    ("The value of x is 5.", "5"), ("Answer = 42", "42"), ("Ans: 42", "42"), ("The result is 42.", "42"),
    ("The answer is Tuesday.", "Tuesday"), (r"The answer is $\text{Tuesday}$", "Tuesday"),
    ("The answer is: no solution", "no solution"), (r"\boxed{42\text{ dollars}}", r"\$42"),
    (r"\boxed{ \frac{ 1 }{ 2 } }", "1/2"), (r"\boxed{\sqrt{2}/2}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{0.5x}", r"\frac{x}{2}"),
    (r"\boxed{x = \frac{-1 \pm \sqrt{5}}{2}}", r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"),
    (r"\boxed{2\pi r}", r"2 r \pi"), (r"\boxed{1{,}000{,}000}", "10^6"), (r"\boxed{\text{A}}", "A"),
    (r"\boxed{(A)}", "A"), (r"\boxed{A, B}", "B, A"), (r"\boxed{\frac{\pi}{2}}", r"0.5\pi"),
    (r"\boxed{n(n+1)/2}", r"\frac{n(n+1)}{2}"), (r"\boxed{\{x \mid x > 2\}}", r"(2,\infty)"),
    (r"\boxed{5:30 \text{ PM}}", "5:30 PM"), (r"\boxed{-1, 0, 1}", r"\{0, \pm 1\}"),
    (r"\boxed{6\frac{1}{2}\text{ hours}}", "6.5"), (r"\boxed{3^{-1}}", "1/3"), (r"\boxed{1 : 2}", "1:2"),
    (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)"), (r"\boxed{\frac{5}{6} \text{ of the pie}}", "5/6"),
    (r"\boxed{5 \%}", r"5\%"), (r"\boxed{\$1{,}250}", "1250"), (r"\boxed{$1,250}", "1250"),
    (r"\boxed{120^{\circ}}", "120"), (r"\boxed{16\pi\text{ cm}^2}", r"16\pi"),
    (r"\boxed{\frac{4}{3}\pi}", r"\frac{4\pi}{3}"), (r"\boxed{y=2x+1}", "y = 1+2x"),
    (r"\boxed{x^2+y^2=1}", "y^2+x^2=1"),
    (r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", r"\begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}"),
    (r"\boxed{\tan^{-1}(2)}", r"\arctan 2"), (r"\boxed{2e}", "2e"), (r"\boxed{\log 2}", r"\log(2)"),
    ("The answer is 5 million.", "5000000"), ("The answer is 5 million", "5,000,000"),
    (r"\boxed{5 million}", "5000000"), (r"\boxed{2.5\text{ billion}}", "2500000000"),
    ("The answer is $5 million.", "5000000"), (r"\boxed{\$3.2\text{ million}}", "3200000"),
    (r"\boxed{2 dozen}", "24"), (r"\boxed{3 thousand}", "3000"), (r"\boxed{3 thousandths}", "0.003"),
    ("The answer is 5 million dollars.", "5000000"), (r"\boxed{5 m}", "5 m"), (r"\boxed{5\text{ m}}", "5"),
    (r"\boxed{5 m}", r"5\text{ m}"), (r"\boxed{5 m}", "5 meters"), (r"\boxed{101_2}", "101_2"),
    (r"\boxed{101_{2}}", "101_2"), (r"\boxed{AB_{16}}", "AB_{16}"), (r"\boxed{5 squared}", "25"),
    ("The answer is 5. Wait, it is 6.", "6"), ("x=7, y=8", "(7,8)"), ("The answer is x = 7, y = 8.", "(7, 8)"),
    (r"\boxed{5} or \boxed{6}", "5, 6"), (r"$x=\boxed{5}$ or $x=\boxed{6}$", r"\{5,6\}"),
    (r"\boxed{e^{i\pi}}", "-1"), (r"\boxed{-1}", r"e^{i\pi}"), (r"\boxed{e^{i\pi/2}}", "i"), (r"\boxed{i^2}", "-1"),
    (r"\boxed{\cos\pi}", "-1"), (r"\boxed{e^{2\pi i/3}}", r"-\frac12+\frac{\sqrt3}{2}i"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\boxed{\begin{bmatrix} \frac12 & 0 \\ 0 & 1\end{bmatrix}}", r"\begin{pmatrix} 0.5 & 0 \\ 0 & 1\end{pmatrix}"),
    (r"\boxed{\left[\begin{array}{cc}1&2\\3&4\end{array}\right]}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\boxed{x>2 \text{ or } x<-2}", r"(-\infty,-2)\cup(2,\infty)"),
    (r"\boxed{x<-2 or x>2}", r"(-\infty,-2)\cup(2,\infty)"),
    (r"\boxed{(2,\infty)\cup(-\infty,-2)}", r"(-\infty,-2)\cup(2,\infty)"),
    (r"\boxed{x \in (-\infty,-2)\cup(2,\infty)}", r"x<-2 \text{ or } x>2"),
    (r"\boxed{x\le 0 \text{ or } 1 < x \le 2}", r"(-\infty,0]\cup(1,2]"),
    (r"\boxed{x \in \mathbb{R}}", r"(-\infty,\infty)"), (r"\boxed{\mathbb{R}}", r"(-\infty,\infty)"),
    (r"\boxed{x\neq 2}", r"(-\infty,2)\cup(2,\infty)"),
    (r"\boxed{\mathbb{R}\setminus\{2\}}", r"(-\infty,2)\cup(2,\infty)"), ("**Answer: 42**", "42"),
    (r"Final Answer: The final answer is $\boxed{42}$", "42"), ("1 234", "1234"), (r"\boxed{1,234.5}", "1234.5"),
    (r"\boxed{12{,}345}", "12345"), (r"\boxed{25\%}", "0.25"), (r"\boxed{\frac{25}{100}}", r"25\%"),
    (r"\boxed{2 \pm \sqrt{3}}", r"2+\sqrt3, 2-\sqrt3"), (r"\boxed{x = 2 \pm \sqrt{3}}", r"\{2+\sqrt3, 2-\sqrt3\}"),
    (r"\boxed{\pm5}", "-5, 5"), (r"\boxed{45^\circ}", "45"), (r"\boxed{45^\circ}", "45 degrees"),
    (r"\boxed{9.8\,\mathrm{m/s^2}}", "9.8"), (r"\boxed{9.8\ \text{m/s}^2}", r"9.8\text{ m/s}^2"),
    (r"\boxed{60 \text{ km/h}}", "60 km/h"), (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"), (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{6.02\times10^{23}}", "6.02e23"), (r"\boxed{6.02 \cdot 10^{23}}", r"6.02\times 10^{23}"),
    ("The answer is x=5.", "5"), (r"\boxed{\left(\frac12, 3\right)}", "(0.5, 3)"),
    (r"\boxed{(1,2)\text{ and }(3,4)}", "(1,2),(3,4)"), (r"\boxed{\frac{1}{2} = 0.5}", "0.5"),
    (r"\boxed{\frac{1}{3} \approx 0.333}", "1/3"), ("The answer is 1/2 or 0.5.", "1/2"),
    (r"\boxed{y = 3x - 2}", "3x-2"), (r"\boxed{2^{10} = 1024}", "1024"), (r"\boxed{\sqrt{16}}", "4"),
    (r"\boxed{10\sqrt{2}\text{ cm}}", r"10\sqrt2"), ("So, **the answer is 42**.", "42"),
    (r"Answer: $\frac{7}{3}$", r"2\frac13"), ("The final answer is 7/3 hours.", "7/3"), ("#### 1,234", "1234"),
    ("#### $42", "42"), (r"\boxed{3!}", "6"), (r"\boxed{\binom{5}{2}}", "10"), (r"\boxed{\log_{10} 100}", "2"),
    (r"\boxed{1.\overline{3}}", r"\frac43"), (r"\boxed{0.\overline{3}}", "1/3"), (r"\boxed{0.\dot{3}}", "1/3"),
    (r"\boxed{\lfloor 3.7 \rfloor}", "3"), (r"\boxed{|{-5}|}", "5"), (r"\boxed{\sim 5}", "5"),
    (r"\boxed{5 \pmod{7}}", r"5 \pmod 7"), ("She is 5 years old.", "5"), ("There are 5 ways.", "5"),
    ("The answer is about 5.", "5"), ("The answer is 5 percent", "5"), ("The answer is negative 5", "-5"),
    ("**Answer:** 1,234.50", "1234.5"), (r"Thus $x=\boxed{5}$.", "5"),
    (r"\boxed{5 \times 10^{-3}\ \text{m}}", "0.005"), (r"\boxed{\left(-3,\,4\right)}", "(-3,4)"),
    (r"\boxed{(x,y)=(1,2)}", "(1,2)"), (r"\boxed{x=1,\ y=2}", "(1,2)"),
    (r"\boxed{\{-1\}\cup[2,\infty)}", r"[2,\infty)\cup\{-1\}"), (r"\boxed{[-2,2]}", r"-2\le x\le 2"),
    (r"\boxed{7\text{ or }-7}", r"\pm 7"), (r"\boxed{7,-7}", r"\pm7"),
    (r"\boxed{\frac{1}{2}\text{ million}}", "500000"), (r"\boxed{1.5 million}", "1,500,000"),
    ("The answer is 3 dozen eggs.", "36"), (r"\boxed{4\%}", "0.04"), (r"\boxed{0.04}", r"4\%"),
    (r"\boxed{5\text{ feet}}", "5 ft"), (r"\boxed{5 kg}", "5"), (r"\boxed{x^2 + C}", "x^2+C"),
    (r"\boxed{\frac{x^2}{2}+C}", "x^2/2+C"), ("The answer is 5 per cent", "5"),
    ("Answer: 5 (approximately 5.02)", "5"), ("The answer is ≈ 5", "5"),
    (r"The answer is $\pi \approx 3.14$", r"\pi"), ("The answer is 6, not 5.", "6"),
    ("The answer is 5. This means that x is 6.", "5"), ("The answer is 5. Hmm, let me check: 2+3=5. Yes.", "5"),
    ("The answer is 5. No other value works.", "5"), ("The answer is 5, no matter what x is.", "5"),
    ("The answer is 5. Actually it is exactly 5.", "5"), ("The answer is 5 apples or 5 fruits", "5"),
    (r"\boxed{5}. This is not 6.", "5"), (r"\boxed{5}, as it is not 6", "5"),
    ("\\boxed{5}\n\nNote: It may be checked by substitution.", "5"),
    ("The answer is 42.\n\nIt might be useful to know that 42=6*7.", "42"),
    ("The final answer is 12.\n\nOr in words: twelve.", "12"), ("1.2e-3", "0.0012"),
    (r"\boxed{3\frac{1}{2}\%}", "3.5"), (r"\boxed{\frac{22}{7}\text{ cm}}", "22/7"),
    (r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\boxed{x<3}", "x<3"),
    (r"\boxed{3>x}", "x<3"), ("The answer is 5 km.", "5000 m"), ("The answer is 1 hour and 30 minutes.", "90 minutes"),
    ("The answer is x<3 and x>1.", "1<x<3"), ("The time is 90 minutes.", "1.5 hours"),
    (r"\boxed{1.2\mathrm{E}{-3}}", "0.0012"),
    (r"It is $\begin{vmatrix}1&2\\3&4\end{vmatrix} = \boxed{-2}$", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
]  # fmt: skip
WRONG = [
    (r"\boxed{12 cm^2}", "12 cm"), (r"\boxed{2\frac{1}{3}}", "2/3"), (r"\boxed{12\text{ cm}^2}", r"12\text{ cm}"),
    (r"\boxed{5 \text{ and } 7}", "57"), (r"\boxed{5,7}", "57"), (r"\boxed{1,23}", "123"), (r"\boxed{4 1/5}", "41/5"),
    (r"\boxed{2 or 3}", "23"), (r"\boxed{x=5}", "x=-5"), (r"\boxed{x=5}", "y=5"), (r"\boxed{x=1,y=2}", "x=2,y=1"),
    (r"\boxed{(1,2)}", "(2,1)"), (r"\boxed{[1,2]}", "(1,2)"), (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{0.333}", "1/3"), (r"\boxed{0.3333333}", "1/3"), (r"\boxed{3.1415927}", r"\pi"),
    (r"\boxed{1.4142136}", r"\sqrt2"), (r"\boxed{2.7182818}", "e"), (r"\boxed{x+1}", "x-1"), (r"\boxed{x}", "x^2"),
    (r"\boxed{\sqrt{3}}", "3"), (r"\boxed{3^2}", "32"), (r"\boxed{90^\circ}", "900"), (r"\boxed{5\%}", "500"),
    (r"\boxed{0.05}", "5"), (r"\boxed{5\text{ kg}}", r"5\text{ g}"), (r"\boxed{5 dollars}", "5 euros"),
    (r"\boxed{even}", "odd"), (r"\boxed{neve}", "even"), (r"\boxed{no}", "on"), (r"\boxed{yes}", "no"),
    (r"\boxed{A}", "B"), (r"\boxed{x<4}", "x>4"), (r"\boxed{x \le 4}", "x<4"), (r"\boxed{-\infty}", r"\infty"),
    (r"\boxed{}", "0"), (r"\boxed{}", ""), ("", "0"), ("I do not know.", "0"), ("The answer is not 15.", "15"),
    ("The answer is 15 or 16.", "15"), ("The answer is either 15 or 16", "16"), ("Maybe 7 or 8 is right", "8"),
    ("The numbers are 5, 6 and 7.", "7"), ("It might be 7.", "7"), ("The answer lies between 5 and 7.", "7"),
    ("7 is in step 3", "3"), ("x = 5 or so, in step 2", "2"), ("The answer is 15, not 16.", "16"),
    (r"\boxed{12", "12"), (r"\boxed{\frac{1}{2}", "0.5"), ("The answer is", "3"), ("Is it 7?", "7"),
    (r"\boxed{3:4}", "4:3"), (r"\boxed{1.5\times 10^3}", "1.5"), (r"\boxed{1.5e3}", "1.5e-3"), (r"\boxed{2x}", "2"),
    (r"\boxed{2x}", "x"), (r"\boxed{5!}", "5"), (r"\boxed{-5}", "5"), (r"\boxed{- 5}", "5"), (r"\boxed{5-3}", "-53"),
    (r"\boxed{5 3}", "53"), (r"\boxed{\pm 3}", "3"), (r"\boxed{1,2,3}", "123"), (r"\boxed{(1,200)}", "1200"),
    (r"\boxed{9^{9^{9^9}}}", "1"), (r"\boxed{10^{100000000}}", "1"), (r"\boxed{99999999!}", "1"),
    (r"\boxed{\frac{1}{0}}", "1"), (r"\boxed{1/0}", r"\infty"), (r"\boxed{x/0}", "0"),
    (r"\boxed{\frac{x^2-1}{x-1}}", "x-1"), (r"\boxed{\text{cannot be determined}}", "0"),
    (r"\boxed{0}", r"\text{cannot be determined}"), (r"\boxed{2\text{ or }8}", "8"), (r"\boxed{42 or 43}", "42"),
    (r"\boxed{42/43}", "42"), (r"\boxed{3 \text{ hours } 20 \text{ minutes}}", "3"),
    (r"\boxed{3 hours 20 minutes}", "320"), ("Step 1. We have 3. Step 2. Then 4", "4"),
    ("The answer is 42.5", "42"), ("The answer is 1,234", "1"), ("The answer is x", "5"),
    ("The answer is 3 times 4", "3"), ("The answer is 3 + 4", "3"), ("The answer is 2 or 3", "2"),
    ("The answer is -5", "5"), ("The answer is 5 or -5", "5"), ("The answer is 12 minutes, not 12 hours", "12 hours"),
    ("The answer is 50%", "50 dollars"), ("She has 42 or 43.", "42"), ("He bought 3 of the 42 apples", "42"),
    ("So we need 5 of them, which leaves 3", "5"), ("x = 5 and y = 6", "5"), ("x = 5 and y = 6", "6"),
    ("The sum of 3 and 4 is not 7", "7"), ("Let us check: 7", "7"), ("I think the answer could be 7 or 8.", "8"),
    ("The total is between 3 and 7.", "7"), (r"\boxed{3} or \boxed{4}", "3"), ("#### ", "3"),
    (r"\boxed{16\pi\text{ cm}^2}", "16"), (r"\boxed{\frac{4}{3}\pi}", "4/3"), (r"\boxed{x^2+y^2=1}", "1"),
    (r"\boxed{y=2x+1}", "2x-1"), (r"\boxed{2x+3y=5}", "5"), (r"\boxed{3x=9}", "9"),
    (r"\boxed{10\text{ m/s}}", r"10\text{ km/h}"), (r"\boxed{5 \text{ hours}}", r"5 \text{ minutes}"),
    (r"\boxed{x>2}", "2"), (r"\boxed{\ge 2}", "2"), (r"\boxed{(2,\infty)}", r"[2,\infty)"),
    (r"\boxed{10^{-3}}", "-1000"), (r"\boxed{1.5}", "15"), (r"\boxed{.5}", "5"), (r"\boxed{\sqrt[3]{8}}", "3"),
    (r"\boxed{x_1}", "x_2"), (r"\boxed{a^b}", "b^a"), (r"\boxed{ab}", "a+b"),
    (r"\boxed{\frac{a}{b}}", r"\frac{b}{a}"), (r"\boxed{(A)}", "B"), (r"\boxed{A, B}", "A"),
    (r"\boxed{\text{not } 5}", "5"), (r"\boxed{\neq 5}", "5"), (r"\boxed{5?}", "5"),
    (r"\boxed{\text{between 3 and 5}}", "5"), (r"\boxed{i}", "1"), (r"\boxed{12\%}", "12 apples"),
    (r"\boxed{5\text{ million}}", "5"), ("The answer is 5 million.", "5"), (r"\boxed{2 dozen}", "2"),
    (r"\boxed{3 hundred}", "3"), (r"\boxed{3 tenths}", "3"), ("The answer is 5 million dollars.", "5"),
    (r"\boxed{5 \text{ cm}}", r"5\text{ m}"), (r"\boxed{5 cm}", "5 m"), (r"\boxed{5 m}", "5 cm"),
    (r"\boxed{5 g}", "5 kg"), (r"\boxed{5 km}", "5 m"), (r"\boxed{5 s}", "5 min"), (r"\boxed{5 m^2}", "5 m"),
    (r"\boxed{101_2}", "101"), (r"\boxed{101_2}", "101_3"), (r"\boxed{101}", "101_2"), (r"\boxed{5 squared}", "5"),
    (r"\boxed{2 cubed}", "2"), (r"\boxed{5 factorial}", "5"), (r"\boxed{3 halves}", "3"), (r"\boxed{3 over 4}", "3"),
    (r"\boxed{5 times 3}", "5"), (r"\boxed{5 plus 3}", "5"), (r"\boxed{2 thirds}", "2"),
    (r"\boxed{5 choose 2}", "5"), (r"\boxed{2 to the power of 3}", "2"), (r"\boxed{5 mod 3}", "5"),
    ("The answer is 5. Wait, it is 6.", "5"), ("The answer is 5, or maybe 6.", "5"),
    ("The answer is 5, maybe 6.", "5"), ("The answer is 5 or maybe 6", "5"), ("The answer is 5 (or maybe 6).", "5"),
    ("The answer is 5 (or 6).", "5"), ("The answer is 5, but it could be 6.", "5"), ("The answer is 5, no, 6.", "5"),
    ("The answer is 5; or 6.", "5"), ("The answer is 5, perhaps 6", "5"),
    ("The answer is 5. No, that is wrong.", "5"), ("The answer is 5. Actually, the answer is 6.", "5"),
    ("The answer is 5. Or 6.", "5"), ("The answer is 5. Maybe 6.", "5"), (r"\boxed{5}. Wait, it is 6.", "5"),
    (r"\boxed{5}. Wait, that is wrong.", "5"), ("x = 7, y = 8", "8"), ("x = 7, y = 8", "7"), ("x = 7; y = 8", "8"),
    ("x = 7 and y = 8", "8"), ("The answer is x = 7, y = 8.", "8"), (r"\boxed{x = 7, y = 8}", "8"),
    ("$x=7$, $y=8$", "8"), ("x = 7\ny = 8", "8"), (r"\boxed{5} or \boxed{6}", "6"), (r"\boxed{5} or \boxed{6}", "5"),
    (r"$\boxed{5}$ and $\boxed{6}$", "6"), (r"\boxed{5}, \boxed{6}", "6"), (r"\boxed{5}\text{ or }\boxed{6}", "6"),
    (r"The answer is not \boxed{5}", "5"), (r"\boxed{5} is wrong", "5"), (r"\boxed{5} is not the answer.", "5"),
    (r"\boxed{e^{i\pi}}", "1"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\boxed{x \ge 2 \text{ or } x<-2}", r"(-\infty,-2)\cup(2,\infty)"),
    (r"\boxed{x>2}", r"(-\infty,-2)\cup(2,\infty)"), (r"\boxed{-2<x<2}", r"(-\infty,-2)\cup(2,\infty)"),
    (r"\boxed{25\%}", "2.5"), (r"\boxed{\pm 5}", "5"), (r"\boxed{45^\circ}", r"\frac{\pi}{4}"),
    (r"\boxed{60 \text{ mph}}", "60 km/h"), (r"\boxed{[0,1)}", "[0,1]"),
    (r"\boxed{6.02\times10^{23}}", r"6.02\times 10^{22}"), (r"\boxed{\frac{1}{3} \approx 0.333}", "0.333"),
    ("The answer is 42 or forty-two.", "43"), (r"\boxed{10\sqrt{2}\text{ cm}}", r"10\sqrt2\text{ m}"),
    ("#### 42 million", "42"), ("The answer is -3.", "3"), (r"\boxed{0.\overline{3}}", "0.3"),
    (r"\boxed{0.3...}", "0.3"), (r"\boxed{5'}", "5"), (r"\boxed{\overline{5}}", "5"), (r"\boxed{\vec{5}}", "5"),
    (r"\boxed{5^*}", "5"), (r"\boxed{5^T}", "5"), (r"\boxed{\bar{x}}", "x"), (r"\boxed{x'}", "x"),
    (r"\boxed{>5}", "5"), (r"\boxed{5+}", "5"), (r"\boxed{5-}", "5"), (r"\boxed{5k}", "5"), (r"\boxed{5K}", "5000"),
    (r"\boxed{5 \mod 7}", "5"), (r"\boxed{5 \pmod{7}}", "5"), (r"\boxed{n \equiv 5 \pmod 7}", "5"),
    ("The answer is five.", "5"), ("The answer is more than 5.", "5"), ("The answer is at least 5.", "5"),
    ("The answer is less than 5.", "5"), ("The answer is at most 5", "5"), ("The answer is greater than 5", "5"),
    ("The answer is under 5", "5"), ("The answer is 5 at most", "5"), ("The answer is 5 or more", "5"),
    ("The answer is 5 or less.", "5"), ("The answer is 5+", "5"), ("The answer is almost 5", "5"),
    ("The answer is half of 10", "10"), ("The answer is twice 5", "5"), ("The answer is minus 5", "5"),
    ("The answer is negative 5", "5"), ("The answer is 5 below zero", "5"), ("The answer is double 5", "5"),
    ("The answer is the square root of 5", "5"), ("The answer is 5th", "5"),
    (r"\boxed{x\in(-2,2)}", "|x|<2"), ("The answer is 3 dozen eggs.", "3"), (r"\boxed{4\%}", r"4^\circ"),
    (r"\boxed{30^\circ}", "30 minutes"), (r"\boxed{5 mL}", "5 L"), (r"\boxed{5 ms}", "5 s"),
    (r"\boxed{5 lb}", "5 kg"), (r"\boxed{5 cm^3}", "5 cm^2"), (r"\boxed{5\,m/s}", r"5\,m/s^2"),
    (r"\boxed{1010_{2}}", "1010"), (r"\boxed{0x1F}", "1"), (r"\boxed{1F_{16}}", "1"), (r"\boxed{12_{10}}", "12"),
    (r"\boxed{2^{n}}", "2"), (r"\boxed{5 + C}", "5"), (r"\boxed{O(n)}", "n"), (r"\boxed{5\sqrt{}}", "5"),
    (r"\boxed{5\, ?}", "5"), (r"\boxed{5 \cdot}", "5"), (r"\boxed{5/}", "5"), (r"\boxed{\frac{5}{}}", "5"),
    (r"\boxed{(5}", "5"), (r"\boxed{5)}", "5"), (r"\boxed{5]}", "5"), (r"\boxed{#5}", "5"), (r"\boxed{5 = 6}", "6"),
    (r"\boxed{5 \ne 6}", "6"), (r"\boxed{x \to 5}", "5"), (r"\boxed{f(5)}", "5"), (r"\boxed{a_5}", "5"),
    (r"\boxed{5 \text{ and a half}}", "5"), (r"\boxed{5 and a half}", "5"), ("The answer is 5 and a half.", "5"),
    ("The answer is 5 hundred and 2", "5"), ("The answer is five million", "5"), ("The answer is 5.5.5", "5"),
    ("The answer is 5-6.", "5"), ("The answer is 5 to 6", "5"), ("The answer is 5–6", "6"),
    ("The answer is 5~6", "6"), ("The answer is 5/6/7", "5/6"), ("The answer is 5 out of 6", "5/6"),
    ("The answer is 5 out of 6", "5"), ("The answer is 5 in 6", "5"), ("The answer is 5 per 100", "5"),
    ("The answer is 5 bits short", "4"), ("The answer is 6, not 5.", "5"), (r"\boxed{\text{(a) } 5}", "5"),
    (r"\boxed{\text{Yes, } 5}", "5"), (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", "12"),
    ("The answer is 5 km.", "500 m"), ("The answer is 1 hour and 30 minutes.", "130 minutes"), (r"\boxed{3t}", "3"),
    (r"\boxed{x<3 \text{ or } x>1}", "1<x<3"), (r"\boxed{1<x<3}", "1 < y < 3"),
]  # fmt: skip


def reward(text: str, label: str) -> float:
    return maths(Answer("", text, label, False, 9, True), {})


def check(text: str, label: str, expected: bool) -> None:
    """Also with the label in the box and the answer as the label, where the answer is one box."""
    assert reward(text, label) == expected
    box = re.fullmatch(r"\\boxed\{(.+)\}", text)
    if box and "\\boxed" not in box[1] and label and result_fault(box[1]) is None:
        assert reward(f"\\boxed{{{label}}}", box[1]) == expected


@pytest.mark.parametrize(("text", "label"), RIGHT)
def test_right_answers_get_the_reward(text, label):
    pytest.importorskip("math_verify")
    check(text, label, True)


@pytest.mark.parametrize(("text", "label"), WRONG)
def test_near_misses_and_answers_without_a_result_do_not(text, label):
    check(text, label, False)


def test_each_rule_of_the_table_has_its_verdict():
    """By the reward, with the answer and the label exchanged, and by the check of data."""
    pytest.importorskip("math_verify")
    cases = [json.loads(line) for line in VERDICTS.read_text(encoding="utf-8").splitlines()]
    assert len(cases) > 120
    for case in cases:
        answer = case["answer"]
        assert reward(answer, case["label"]) == case["verdict"], case
        result = stated_result(answer) or concluded_result(answer)
        if result:
            assert same_answer(case["label"], result) == case["verdict"], ("exchanged", case)
        if result is not None and "\\boxed" in answer:
            fault = maths_fault(answer, case["label"])
            assert (fault is None) == case["verdict"], ("check of data", case)


@pytest.mark.parametrize(("one", "other", "expected"), [
    ("1,000", "1000", True), ("2 or 8", "{8, 2}", False), ("12 cm", "12", True), ("12 cm", "12 m", False),
    (r"2\frac{1}{3}", "7/3", True), (r"2\frac{1}{3}", "2/3", False), ("2x", "x^2", False), ("Monday", "monday", True),
    (r"2 \sqrt{3}", r"2\sqrt{3}", True), ("x+1", "1+x", False),
])  # fmt: skip
def test_without_math_verify_results_are_compared_by_our_rules(one, other, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "glm46.storage.judge.math_verify_calls", None)
    assert same_answer(one, other) == same_answer(other, one) == expected


def test_a_thread_has_no_alarms_and_judges_all_the_same():
    pytest.importorskip("math_verify")
    found = []
    thread = threading.Thread(target=lambda: found.append(same_answer("x+1", "1+x")))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(("label", "said"), [
    ("", "nothing"), ("...", "nothing"), (r"\frac{1}{", "braces"), ("x}", "braces"), ("x+*/2)", "read"), ("34", None),
    (r"\{1, 2\}", None),
    ("no solution", None), (r"\infty", None), (r"\emptyset", None), ("x^2+1", None), ("(1, 2]", None),
])  # fmt: skip
def test_what_no_answer_could_equal_is_a_fault(label, said):
    pytest.importorskip("math_verify")
    fault = result_fault(label)
    assert fault is None if said is None else said in fault
