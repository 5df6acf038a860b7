"""Rewards of answers, and what happens to a sample whose reward fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from glm46.config.errors import UserError
from glm46.config.rl_data import EnvironmentConfig
from glm46.tasks.rl.rewards.answer import Answer, RewardRule, exact, maths, remote, repetition, well_formed
from glm46.tasks.rl.rewards.calculator import calculate
from glm46.tasks.rl.rewards.choice import choice
from glm46.tasks.rl.rewards.code import code
from glm46.tasks.rl.rewards.function_pool import FunctionPool, _result, environment_pool
from glm46.tasks.rl.rollout.records import Episode, pack_groups, unpack_groups
from tests.processes import HANG_SECONDS, is_alive, wait_until

BAD = "tests.unit.tasks.rl.rewards.bad_rewards"


def answer(text, label=None, thinking=False, finished=True) -> Answer:
    return Answer("question", text, label, thinking, len(text), finished)


@pytest.mark.parametrize(
    ("reward", "text", "label", "expected"),
    [
        (exact, "<think>34</think>\n35 ", "35", 1),
        (exact, "35", "34", 0),
        (exact, "b", ["a", "b"], 1),
        (exact, "35", 35, 1),
        (choice, "The answer is (C).", "C", 1),
        (choice, "A is wrong, so \\boxed{B}", "B", 1),
        (choice, "A or B? Answer: a", "B", 0),
        (maths, "so \\boxed{\\frac{1}{2}}", "0.5", 1),
        (maths, "first \\boxed{1}, then \\boxed{2}", "1", 0),
        (maths, "3 and 4 make 1,007.", "1007", 1),
        (maths, "nothing", "1", 0),
        (maths, "<think>7</think>It is 8", "7", 0),
        (repetition, "a b c d e f", None, 0),
        (repetition, "a b c d a b c d", None, -0.2),
        (repetition, "a b", None, 0),
    ],
)
def test_text_is_compared(reward, text, label, expected):
    assert reward(answer(text, label), {}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "thinking", "finished", "expected"),
    [
        ("\n<think>so</think>\nyes", True, True, 1),
        ("\nso</think>yes", True, True, 1),
        ("<think>so</think>yes</think>", True, True, 0),
        ("yes", True, True, 0),
        ("<think>so</think>", True, True, 0),
        ("<think>so</think>yes", True, False, 0),
        ("</think><think>yes", True, True, 0),
        ("yes", False, True, 1),
        ("yes</think>no", False, True, 0),
    ],
)
def test_form_of_a_thought(text, thinking, finished, expected):
    assert well_formed(answer(text, thinking=thinking, finished=finished), {}) == expected


_CALL = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
_RIGHT = {
    exact: ("35", "35"), choice: ("The answer is C.", "C"), maths: ("\\boxed{35}", "35"),
    code: ("```python\ndef f(x):\n    return x\n```", ["assert f(1) == 1"]), well_formed: ("35", None),
}  # fmt: skip
"""A right answer and its label for each reward that judges one."""


@pytest.mark.parametrize("reward", list(_RIGHT))
@pytest.mark.parametrize(
    ("form", "thinking", "finished", "expected"),
    [
        ("<think>so</think>{}", True, True, 1),
        ("so</think>{}", True, True, 1),
        ("{}", False, True, 1),
        ("<think>{}", True, True, 0),
        ("{}", True, False, 0),
        ("<think>{}", False, True, 0),
        ("<think>a</think><think>{}", True, True, 0),
        ("<think>{}</think>", True, True, 0),
        ("<think>so</think>{}", True, False, 0),
        ("{}", False, False, 0),
        ("", False, True, 0),
        (_CALL, False, True, 0),
        (f"<think>so</think>{_CALL}", True, True, 0),
    ],
)
def test_an_answer_that_is_not_there_yet_has_no_reward(reward, form, thinking, finished, expected):
    text, label = _RIGHT[reward]
    assert reward(answer(form.format(text), label, thinking, finished), {}) == expected


@pytest.mark.parametrize("reward", list(_RIGHT))
def test_an_answer_without_a_thought_is_an_answer_but_not_in_the_form_of_a_thought(reward):
    text, label = _RIGHT[reward]
    assert reward(answer(text, label, thinking=True), {}) == (reward is not well_formed)


def test_a_server_is_not_asked_about_an_answer_that_is_not_there():
    for text, thinking, finished in (("<think>so", True, False), ("", False, True), ("35", False, False)):
        assert remote(answer(text, None, thinking, finished), {"url": "http://127.0.0.1:9"}) == 0


_OPTIONS = "Which is it?\nA) one\nB) two\nC) three\nD) four"


DECIDED = {
    "A": [
        "The answer is A.", "The answer is A because 2+2=4", "Option (A) is correct", "The answer is A", "Answer: A",
        "The answer is A, because it fits", "Option A is the correct answer.", "A is the best answer", "A is right.",
        "The answer is A.\n\nA is right since B, C and D fail.", "A\n\nExplanation: B and C do not hold.",
        "Correct answer: A. Mitosis",
    ],
    "B": [
        r"\boxed{\text{(B)}}", r"\boxed{b}", "The correct answer is **B) 42**.", "Answer: $B$",
        "I think the answer is B. I am sure.", "So it's B.", "I choose B", "B is correct, a fact.",
        "First I thought the answer is A. But the answer is B.", "Vitamin C is the best cure, but I choose B",
        "The correct answer is B. Vitamin D",
    ],
    "C": [
        "The answer is C, and no other answer a student may give would fit.", r"\boxed{C. three}",
        r"The answer is \boxed{C}. I hope it is correct.", "**Answer: C**", "**Answer:** C", "C", "(C)", "C) three",
        "**C**", "Therefore, C.", "The answer is C and not B", "I'm going with C.", "I am going with (C).",
        "I'll go with C", r"Final Answer: The final answer is $\boxed{C}$", "The correct answer is (C).",
        "the answer is (C)", "The answer is C, not D", "The answer is C rather than D.", r"\boxed{\text{Option C}}",
        r"\boxed{\textbf{(C)}\ 42}", r"\boxed{\mathrm{C}}", r"\boxed{(C) \; three}", r"$\boxed{\textbf{C}}$",
        r"\boxed{C.}", r"The answer is D. \boxed{C}",
        "Answer: C\n\nExplanation: A is wrong because B is small. D is too large.",
        "The answer is C. A and B are wrong, D is impossible.", "### Final Answer\n\n**C**",
        "**Final Answer:**\n\nC) three", "Answer:\nC", "The correct answer is:\n\n**C) three**",
        "The correct answer is:\n\n(C) three", "The best answer is C.", "Therefore, the correct option is (C).",
        "Thus, option C is correct.", "So the answer must be C.", "So C is the answer.",
        "Hence, (C) is the correct answer.", "答案是C", "答案：C", "故选C。", "选C", "My answer is C.",
        "My final answer: C", "Correct answer: C", "Correct Answer: **C**", "**The correct answer is C.**",
        "The correct choice is **C**",
        "The answer is option C.", "The answer is choice (C).", "The answer is definitely C.",
        "The answer is most likely C.", "C.", "C) 42", "C: three", "(C) three", "[C]", "By elimination, C.",
        "That leaves C.", "So it must be C.", "We choose (C).", "I select option C.", "I pick C because it fits.",
        "The answer to the question is C.", "Answer: (C) three", "Answer: C. three",
        "A and B are wrong, so the answer is C", "It is not A, so the answer is C.",
        "The answer is C, since B and D are false.", "Since A is false, B is false and D is false, C is correct.",
        "The answer is not A but C.", "Not A, B or D: the answer is C.", "The answer is $C$", r"The answer is \(C\)",
        r"The answer is $\text{C}$", r"The answer is $\textbf{(C)}$", "The final answer is C. I hope it is correct.",
        "Final answer: C. Vitamin D is a distractor.", "The correct answer is C, as A and B do not apply.",
        "The correct statement is C.", "## Answer: C", "**Answer**: **C**", "**C. It does not change**",
        "The correct answer is **C. It does not change**.", r"The final answer is $\boxed{\text{C}}$.", "Answer is C",
        "My choice is C", "I would choose C.", "I'd pick C.", "Let's go with C.",
        "We can conclude that the answer is C.", "Therefore, the answer is option C: three.",
        "Hence the correct option is **C**.", "Among the choices, C is the best answer.",
        "So, the best choice is (C) three.", "A, B and D are incorrect. The answer is C.", "C, not D",
        r"\boxed{\text{C: three}}", r"\boxed{\text{C}) \text{ three}}", r"\boxed{\text{Answer: C}}", r"\boxed{ C }",
        r"\boxed{\mathbf{(C)}}", r"\fbox{C}", "<answer>C</answer>", "The answer is “C”.", "The answer is 'C'.",
        "The correct answer, therefore, is C.", "The correct answer is indeed C.", "Correct option: C) three",
        "✅ **C**", "👉 Answer: C", "Answer - C", "Answer → C", "The answer would be C.", "The answer should be C",
        "The answer is clearly (C).", "Final Answer: C", "FINAL ANSWER: C", "Final answer is C", "Answer (C)",
        "Answer C", "Choice C", "Option C", "Option (C).", "Option C: three", "C – three", "C - three",
        "The answer is C – three.", "The answer is C (three).", "The answer is C, three.", "The answer is C: three",
        "The answer is C.\n\nThe other options are wrong:\nA) too small\nB) too large\nD) never",
        "Let us look:\nA) wrong\nB) wrong\nC) right\nD) wrong\n\n**C**",
        "A. wrong\nB. wrong\nC. correct\nSo the answer is C.",
    ],
    "D": [
        "ANSWER: D", "The correct option is D because A is a distractor.", "A: no\nB: no\nTherefore the answer is D",
        "Option C is wrong, so D", r"\boxed{C}. Wait, \boxed{D}", "The answer is C. Wait, it is D.",
        "The answer is C. Wait, no, D.", "I first chose C. Then I saw that D is correct.",
        "C is wrong. The answer is D. D is right.", "C is wrong because of x. Therefore, D.",
        "The answer cannot be C. It must be D.", "C seems tempting, but the answer is D.",
        "The answer looks like C, but it is D.", "I chose C at first, but D is correct.", r"\boxed{C} \boxed{D}",
    ],
    "": [
        r"\boxed{A, B}", "A student may say so.", "I do not know.", "It is a question.", "The answer is a prime.",
        "The answer is A student's guess", "It is A or B", "The answer is A or B", "The answer is C or maybe D",
        r"\boxed{42}", "The answer is I think C", "The answer is not C", "Plan B failed and vitamin C helps",
        "The answer is Apple", "A is not correct", "The answer is CAT", "Don't choose C", "Don't choose C.",
        "(C) is wrong", "(C) is wrong.", "not C", "Not C.", "rule out C", "We can rule out C.", "I rule out (C).",
        "Eliminate C", "A) one\nB) two\nC) three\nD) four", "A. one\nB. two\nC. three\nD. four", "A\nB\nC\nD",
        "(A) one (B) two (C) three (D) four", "(A) (B) (C) (D)", "A, B, C, D", "A B C D",
        "The options are A, B, C and D.", "C as well as D", "The answer is C as well as D", r"\boxed{B\text{ or }C}",
        r"\boxed{C=5}", "C++", "C-section", "C#", "The answer is C++", "The answer is C-section", "It isn't C",
        "The answer isn't C", "The answer can't be C", "Neither B nor C", "The answer is neither B nor C.",
        "I don't think the answer is C", "I doubt that C is correct", "C is incorrect", "C cannot be right",
        "C and D are both correct", "Both C and D", "C is correct. D is also correct.", "C/D", "C or D",
        "Either C or D", r"\boxed{C} or \boxed{D}", r"\boxed{CD}", r"\boxed{C, D}", r"\boxed{\text{not } C}",
        r"\boxed{C++}", r"\boxed{C^2}", r"\boxed{C_1}", r"\boxed{-C}", r"The answer is not \boxed{C}",
        r"\boxed{C} is wrong", r"\boxed{C}. Wait, the answer is D.", "The answer is C. Actually, that is wrong.",
        "A common wrong answer is C.", "The wrong answer is C", "The incorrect option is C.",
        "One might think the answer is C, but it is not.", "Many students choose C.", "If the answer is C, then x = 5.",
        "Is the answer C?", "Why not C?", "The answer is C?", "Maybe the answer is C or D", "I would not choose C",
        "I wouldn't pick C.", "Never choose C", "Avoid C", "All of A, B, C and D", "C sharp is a note",
        "C is a language", "Plan C is the best plan", "The answer is C major", "Grade C", "Carbon is C",
        "The answer is 5 C", "It costs 5 C.", "Answer: A or B or C", "Answer: A/B/C/D", "Answer: ABCD",
        "The answer is A through D", "The answer is one of A, B, C, D", "C is not the answer; D is.",
        "Everything but C", "Anything but C.", "All except C", "The answer is anything but C",
        "The answer is all except C", "C is almost correct", "C would be correct if x were 5",
        "C is correct only if x = 5", "The answer is C if x>0 and D otherwise", "I cannot decide between C and D",
        "The answer is C and D", "The answer is C & D", "The answer is C+D", "The answer is C, D",
        "The answers are B and C", "The answer is (C) or (D)", "Answer: C (or D)", "Answer: C, maybe D",
        "Answer: C? D?", "The answer is C but D could also be right", "A is the best", "None of these", "I don't know",
        "A is false. B is false. D is false.", "Answer: not C", "Answer: C or something else", "Do not pick C",
        "Nobody would choose C", "Only a fool would pick C.", "C? No.", "I chose C at first.", "C, D", "C. D.",
        "(C), (D)", "C and/or D", "C; D", "C - D", "Both", "Type C", "Hepatitis C", "Appendix C", "C'est la vie",
        r"C:\Windows", "C'", "Step C", "It's a C grade", "20 °C", "The answer is 20 °C", "The answer is 20°C.",
        r"\boxed{20^\circ C}", r"\boxed{C \cup D}", r"\boxed{C\cdot 5}", r"\boxed{ABCD}", r"\boxed{C?}",
        r"\boxed{C\ or\ D}", r"\boxed{C/D}", r"\boxed{C; D}", r"\boxed{\{C, D\}}", r"\boxed{\text{C and D}}",
        "The answer is C three", "- A: wrong\n- B: wrong\n- C: correct\n- D: wrong",
    ],
}  # fmt: skip
"""Answers by the letter that they decide for, if any."""


@pytest.mark.parametrize("prompt", ["question", _OPTIONS])
@pytest.mark.parametrize(("text", "letter"), [(text, letter) for letter, texts in DECIDED.items() for text in texts])
def test_a_choice_is_the_letter_that_the_answer_decides_for(prompt, text, letter):
    """And no other one."""
    found = [label for label in "ABCDI" if choice(answer(text, label)._replace(prompt=prompt), {})]
    assert found == [*letter]


@pytest.mark.parametrize("prompt", ["p", "Which?\nA) one\nB) two\nC) three\nD) four"])
@pytest.mark.parametrize(("text", "label", "expected"), [
    ("We get \\boxed{\\langle H\\rangle \\ll \\Delta E}.\n**Answer: D**", "D", 1),
    (r"\boxed{x^2 + 1} The answer is (B).", "B", 1), (r"\boxed{42} So C.", "C", 1), ("\\boxed{42}\n\n**C**", "C", 1),
    (r"Answer: C. \boxed{3}", "C", 1), (r"\boxed{C}, which is \boxed{42}.", "C", 1),
    (r"So B. \boxed{C} is \boxed{42}.", "B", 0),
    (r"\boxed{P(A) = 0.3}. The answer is (B).", "B", 1), (r"\boxed{P(A) = 0.3}. The answer is (B).", "A", 0),
    (r"\boxed{x=1} or \boxed{x=2}. Answer: B", "B", 1), (r"\boxed{\text{Paris}}. The answer is (B).", "B", 1),
    (r"The answer is B. \boxed{\text{none of these}}", "B", 0), (r"The answer is C. Wait, it is \boxed{42}", "C", 0),
    (r"The answer is \boxed{5} C.", "C", 0), (r"\boxed{A = 3}", "A", 0), (r"\boxed{7}. Wait, is it C?", "C", 0),
    (r"\boxed{42}, so the answer is not C", "C", 0), (r"\boxed{42}. So C or D.", "C", 0),
    (r"\boxed{C, D}. So C.", "C", 0), (r"\boxed{C \cup D}. So C.", "C", 0), (r"\boxed{ABCD}. So A.", "A", 0),
    (r"\boxed{E}. So C.", "C", 0), (r"\boxed{\text{not } C}. So C.", "C", 0), (r"\boxed{1}" * 5_000 + "So C.", "C", 0),
])  # fmt: skip
def test_a_box_of_mathematics_does_not_hide_the_choice(prompt, text, label, expected):
    assert choice(answer(text, label)._replace(prompt=prompt), {}) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("Answer: I think it is C", 1), ("I think it is C.", 1), ("We conclude that it is C.", 1), ("I believe C.", 1),
    ("Answer: I do not think it is C", 0), ("I don't think it is C.", 0), ("Answer: I think it is C or D", 0),
    ("If I think it is C, I am wrong.", 0), ("I think it is C but it might be D.", 0), ("Do I think it is C?", 0),
    ("I think it is C. Actually, that is wrong.", 0), ("I think it is C. So D.", 0), ("I think C is a language.", 0),
])  # fmt: skip
def test_an_opinion_is_a_choice(text, expected):
    assert choice(answer(text, "C"), {}) == expected


def test_a_letter_that_the_prompt_does_not_list_is_no_choice():
    assert choice(answer("The answer is B.\nThe answer is E.", "B")._replace(prompt=_OPTIONS), {}) == 1
    assert choice(answer("The answer is B.\nThe answer is E.", "B"), {}) == 0


@pytest.mark.parametrize("form", ["({})", "{})", "{}."])
@pytest.mark.parametrize(("text", "expected"), [
    ("The answer is (b).", 1), ("(b) two", 1), ("b", 1), ("b) two", 1), ("**Answer: (b)**", 1),
    ("So (c) is wrong, and (b) is correct.", 1),
    ("The answer is B.", 1), ("\\boxed{b}", 1), ("The answer is (c).", 0), ("The answer is not (b).", 0),
    ("(b) or (c)", 0), ("The answer is a choice that (b) has too.", 0), ("f(b) = 2", 0),
    ("The answer is (e).", 0), ("", 0),
])  # fmt: skip
def test_options_in_small_letters_are_chosen_by_them(form, text, expected):
    words = ("one", "two", "three", "four")
    prompt = "\n".join(f"{form.format(letter)} {word}" for letter, word in zip("abcd", words, strict=True))
    for label in "Bb":
        assert choice(answer(text, label)._replace(prompt=f"Which is it?\n{prompt}"), {}) == expected


PROGRAM = "text\n```python\n{}\n```"


@pytest.mark.parametrize(
    ("program", "label", "options", "expected"),
    [
        ("def f(x):\n    return x + 1", ["assert f(1) == 2", "assert f(2) == 3"], {}, 1),
        ("def f(x):\n    return 2", ["assert f(1) == 2", "assert f(2) == 3"], {}, 0),
        ("def f(x):\n    return 2", ["assert f(1) == 2", "assert f(2) == 3"], {"all": False}, 0.5),
        ("print(int(input()) * 2)", json.dumps({"inputs": ["2", "3"], "outputs": ["4\n", "6"]}), {}, 1),
        ("while True: pass", ["pass"], {"seconds": 0.2}, 0),
        ("x = bytearray(10 ** 9)", ["pass"], {"memory_gib": 0.25}, 0),
        ("open('out', 'w').write('x' * 2 ** 22)", ["pass"], {}, 0),
    ],
)
def test_code_runs_against_its_tests_within_limits(program, label, options, expected):
    assert code(answer(PROGRAM.format(program), label), options) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "expected"), [("while True: pass", 0.0), ("if input() != 'b':\n    while 1: pass", 0.25)]
)
def test_a_program_that_loops_in_each_test_has_a_score(program, expected):
    """Together its tests would take 20 s, and the reward has 10: a reward that is killed drops its sample."""
    label = {"inputs": ["a", "b", "c", "d"], "outputs": [""] * 4}
    scorer = FunctionPool([RewardRule("code", seconds=10.0, options={"seconds": 5, "all": False})], processes=1)
    try:
        (score,) = scorer.score([answer(PROGRAM.format(program), label)])
    finally:
        scorer.close()
    assert (score.total, score.fault) == (expected, "")


@pytest.mark.slow
def test_too_many_tests_are_a_fault_of_the_reward_and_not_of_the_program():
    program, label = PROGRAM.format("import time\ntime.sleep(1.5)"), ["pass"] * 4
    with pytest.raises(TimeoutError, match=r"of 4 tests took all of 4\.5 s"):
        code(answer(program, label), {"timeout_seconds": 5, "seconds": 4})


@pytest.mark.slow
def test_a_silent_server_is_left_before_the_time_of_the_reward_ends():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()  # connections open, and nobody answers
        options = {"url": f"http://127.0.0.1:{server.getsockname()[1]}", "seconds": 1}
        scorer = FunctionPool([RewardRule("remote", seconds=60.0, options=options)], processes=1)
        try:
            (score,) = scorer.score([answer("yes")])
        finally:
            scorer.close()
    assert score.total is None and score.fault == "remote: TimeoutError: timed out", "of a try, not of the process"


@pytest.mark.parametrize(("label", "seconds"), [("x+y", 3), (["x-y", "z", "x+y"], 1)])
def test_math_verify_has_time_for_each_of_its_calls(label, seconds, monkeypatch):
    asked = []

    @dataclass
    class Config:
        units: bool = True
        normalization_config: Any = None

    def parse(text, extraction_config, parsing_timeout):
        assert not extraction_config[0].normalization_config.units
        asked.append(parsing_timeout)
        return [text]

    def verify(gold, target, numeric_precision, timeout_seconds):
        asked.append(timeout_seconds)
        return gold == ["\\boxed{x+y}"] and target == ["\\boxed{y+x}"]

    library = {"parse": parse, "verify": verify, "LatexExtractionConfig": lambda: Config(normalization_config=Config())}
    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(**library))
    monkeypatch.delitem(sys.modules, "glm46.storage.judge.math_verify_calls", raising=False)
    assert maths(answer("\\boxed{y+x}", label), {"timeout_seconds": 10.0}) == 1
    assert set(asked) == {seconds} and sum(asked) < 10


def test_code_without_tests_is_no_score():
    with pytest.raises(ValueError, match="assert"):
        code(answer(PROGRAM.format("1"), []), {})
    assert code(answer("no block", ["pass"]), {}) == 0


@pytest.mark.slow
def test_a_server_gives_the_reward():
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(seen) > 1 else 503)
            self.end_headers()
            self.wfile.write(b'{"reward": 0.25}')

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = {"url": f"http://127.0.0.1:{server.server_port}/judge", "seconds": 2}
    try:
        with pytest.raises(OSError, match="503"):
            remote(answer("yes", "no"), options | {"tries": 1})
        assert remote(answer("yes", "no"), options) == 0.25
    finally:
        server.shutdown()
    assert seen[-1] == {"prompt": "question", "response": "yes", "label": "no"}


def test_a_failing_reward_drops_the_sample_and_no_other():
    rules = [
        RewardRule("exact", weight=2.0),
        RewardRule(f"{BAD}:some", weight=0.5, options={"bad": "b"}),
    ]
    scorer = FunctionPool(rules, processes=2)
    try:
        good, dropped, other = scorer.score([answer("a", "a"), answer("b", "b"), answer("ccc", "a")])
    finally:
        scorer.close()
    assert good.total == 2.5
    assert good.parts == {"exact": 1.0, f"{BAD}:some": 1.0}
    assert dropped.total is None
    assert "SystemExit" in dropped.fault
    assert other.total == 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "said"), [("hang", "0.3 s"), ("crash", "code 7"), ("words", "number"), ("infinite", "number")]
)
def test_a_reward_that_hangs_crashes_or_gives_no_number_ends_in_bounded_time(function, said):
    scorer = FunctionPool([RewardRule(f"{BAD}:{function}", seconds=0.3 if function == "hang" else 60.0)], processes=1)
    began = time.monotonic()
    try:
        scores = scorer.score([answer("a"), answer("b")])
    finally:
        scorer.close()
    assert [score.total for score in scores] == [None, None]
    assert all(said in score.fault for score in scores)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_programs_that_a_reward_has_started_end_with_it_at_its_deadline(tmp_path):
    scorer = FunctionPool([RewardRule(f"{BAD}:start_and_hang", seconds=3.0)], processes=1)
    try:
        (score,) = scorer.score([answer("a", str(tmp_path / "id"))])
        assert score.total is None
        wait_until(lambda: not is_alive(int((tmp_path / "id").read_text())))
    finally:
        scorer.close()


def test_programs_that_a_reward_has_started_end_with_the_run_that_is_killed(tmp_path):
    run = f"""
from glm46.tasks.rl.rewards.answer import Answer, RewardRule
from glm46.tasks.rl.rewards.function_pool import FunctionPool
if __name__ == "__main__":
    scorer = FunctionPool([RewardRule("{BAD}:start_and_hang", seconds=600)])
    scorer.score([Answer("", "a", "{tmp_path / "id"}", False, 1, True)])
"""
    (tmp_path / "run.py").write_text(run)
    process = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        program = int(wait_until(lambda: (tmp_path / "id").is_file() and (tmp_path / "id").read_text()))
        worker = int(Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGSTOP)  # nothing of it runs any more, as of one that holds the interpreter
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not is_alive(program) and not is_alive(worker))


def test_a_call_of_another_thread_ends_with_the_pool_and_no_other_begins(tmp_path):
    scorer = FunctionPool([RewardRule(f"{BAD}:start_and_hang", seconds=2 * HANG_SECONDS)], processes=1)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(scorer.score, [answer("a", str(tmp_path / name)) for name in ("id", "other")])
        program = int(wait_until(lambda: (tmp_path / "id").is_file() and (tmp_path / "id").read_text()))
        scorer.close()
        assert isinstance(call.exception(HANG_SECONDS), UserError) and not (tmp_path / "other").exists()
    wait_until(lambda: not is_alive(program))


@pytest.mark.slow
def test_a_reward_that_returns_twice_shifts_no_other():
    scorer = FunctionPool([RewardRule(f"{BAD}:return_twice")], processes=1)
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    try:
        scores = scorer.score([answer(text, "twice" if text == "a" else None) for text in texts])
        time.sleep(0.5)
        scores += scorer.score([answer(text) for text in texts])
    finally:
        scorer.close()
    assert [score.total for score in scores] == [1, 2, 3, 4, 5] * 2


def test_a_reply_with_the_number_of_another_task_is_dropped():
    scorer = FunctionPool([RewardRule("math")], processes=1)
    ((connection, process),) = scorer._idle
    connection.send((99, (0, answer("\\boxed{4}", "3"))))  # its reply will lie before that of the next task
    try:
        assert [score.total for score in scorer.score([answer("\\boxed{3}", "3")])] == [1.0]
    finally:
        scorer.close()


@pytest.mark.slow
def test_a_process_that_is_killed_between_two_rollouts_costs_no_sample():
    scorer = FunctionPool([RewardRule("math")], processes=1)
    try:
        for _ in range(2):
            assert scorer.score([answer("\\boxed{3}", "3")])[0].total == 1.0
            ((_, process),) = scorer._idle
            process.kill()
            process.join()
        # The process beside it, which ends its session, keeps a copy of its pipe open for a moment.
        ours, theirs = Pipe()
        with ours, theirs:
            scorer._idle[0] = ours, process
            assert scorer.score([answer("\\boxed{3}", "3")])[0].total == 1.0
    finally:
        scorer.close()


@pytest.mark.slow
def test_a_process_that_ends_at_each_start_drops_the_sample(monkeypatch):
    """Without this rule, new processes are started without end."""
    scorer = FunctionPool([RewardRule("math")], processes=1)
    start, started = scorer._start, []

    def start_and_kill():
        assert scorer._starting.locked(), "no other thread starts one"
        connection, process = start()
        process.kill()
        process.join()
        started.append(process)
        return connection, process

    monkeypatch.setattr(scorer, "_start", start_and_kill)
    scorer._idle[0][1].kill()
    scorer._idle[0][1].join()
    try:
        (score,) = scorer.score([answer("\\boxed{3}", "3")])
    finally:
        scorer.close()
    assert score.total is None and "ended with code -9" in score.fault and len(started) == 1


@pytest.mark.parametrize("name", ["no_such_module:f", f"{BAD}:no_such_function"])
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(name):
    with pytest.raises(UserError, match=r"rl\.rewards.*no_such"):
        FunctionPool([RewardRule(name)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.std([0.0, 1.0]) > 0.01, 1.0), (np.std([1.0, 1.0]) > 0.01, 0.0), (np.float32(0.5), 0.5), (np.ones(1), 1.0),
        (torch.tensor(True), 1.0), (torch.tensor(0.25), 0.25),
    ],
)  # fmt: skip
def test_a_reward_or_filter_may_give_a_scalar_of_numpy_or_torch(value, expected):
    found, fault = _result(RewardRule("m:f"), {"m:f": lambda answer, options: value}, answer("a"))
    assert found == expected and type(found) is float and not fault


@pytest.mark.parametrize("value", [np.ones(2), torch.ones(2), np.float32("nan"), np.str_("1")])
def test_other_values_of_numpy_and_torch_are_faults(value):
    found, fault = _result(RewardRule("m:f"), {"m:f": lambda answer, options: value}, answer("a"))
    assert found is None and fault


@pytest.mark.parametrize("is_environment", [False, True])
def test_what_a_user_function_says_with_a_lone_surrogate_can_be_recorded(is_environment):
    def value(giving):
        return _result(RewardRule("m:f", is_environment=is_environment), {"m:f": giving}, answer("a"))

    def fail(answer, options):
        raise ValueError("bad \ud83d")

    shown = type("Shown", (), {"__repr__": lambda self: "\ud83d"})()
    faults = [value(fail)[1], value(lambda answer, options: shown)[1]]
    (ends,) = unpack_groups(pack_groups({0: [Episode([], fault) for fault in faults]})).values()
    assert ends[0].fault == "ValueError: bad ?" and ends[1].fault.startswith("gave ?, which is not a ")
    if is_environment:
        replies = [value(lambda answer, options, text=text: text)[0] for text in ("a \ud83d", "", None)]
        assert replies == ["a ?", "", None]


def test_a_label_that_cannot_be_pickled_is_refused_and_its_process_ends():
    scorer = FunctionPool([RewardRule(f"{BAD}:some", options={"bad": "b"})], processes=1)
    try:
        with pytest.raises(UserError, match=r"rl\.rewards: a label cannot be pickled: .*; simplify it"):
            scorer.score([answer("a", lambda: None)])
        assert not scorer._processes
        assert scorer.score([answer("ccc", "a")])[0].total == 3.0
    finally:
        scorer.close()


@pytest.mark.slow
def test_an_environment_replies_and_its_faults_are_named():
    environment = environment_pool(EnvironmentConfig(function=f"{BAD}:reply"))
    try:
        found = [environment.reply(answer("a", label)) for label in ("text", "end", "fail", "number")]
    finally:
        environment.close()
    assert found[:2] == [("a!", ""), (None, "")]
    assert "no reply" in found[2][1] and "not a text" in found[3][1]
    with pytest.raises(UserError, match=r"rl\.environment.*no_such"):
        environment_pool(EnvironmentConfig(function="no_such_module:f"))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("12 * (3 + 1/2)", "42"), ("-1/3", "-1/3"), ("0.1 + 0.2", "3/10"), ("1/0", "error"), ("2 ** 9", "error"),
        ("f(1)", "error"), ("1 +", "error"), ("(" * 190, "error"), (None, None),
    ],
)  # fmt: skip
def test_the_calculator_answers_calls(expression, expected):
    call = f"<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>{expression}</arg_value>\n</tool_call>"
    found = calculate(answer("no call" if expression is None else f"I ask.\n{call}"))
    assert found == expected if expected is None or expected != "error" else found.startswith("error")


def test_a_call_inside_a_thought_is_a_draft():
    """Neither the calculator nor another environment answers it, and the conversation ends with an open thought."""
    call = "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    draft, real = call.format("1"), call.format("2")
    assert calculate(answer(f"<think>{draft}</think>{real}", thinking=True)) == "2"
    assert calculate(answer(f"<think>{draft}</think>no call", thinking=True)) is None
    environment = environment_pool(EnvironmentConfig(function=f"{BAD}:reply"))
    texts = (f"<think>{draft}", draft, f"<think>{draft}</think>", f"<think>{draft}</think>{real}")
    try:
        found = [environment.reply(answer(text, "text", thinking=True)) for text in texts]
    finally:
        environment.close()
    assert found == [(None, ""), (f"{draft}!", ""), (None, ""), (f"{texts[3]}!", "")]


@pytest.mark.parametrize("text", [" ", "*", "\n", "(", "answer is ", "(A", "```", "A or "])
def test_rewards_of_the_process_that_trains_take_linear_time(text):
    began = time.monotonic()
    for reward, label in ((exact, "C"), (choice, "C"), (well_formed, None), (repetition, None)):
        reward(answer(f"{text * 400_000}x", label), {})
    assert time.monotonic() - began < 60  # quadratic time: hours
