"""Rewards that compare and count text, in linear time: exact, choice, format, repetition."""

import re
from collections.abc import Mapping
from typing import Any

from glm46.rewards.answer import Answer

_WRAPPED = r"(?:[\s*_`'\"“$({\[]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf)\{|(?:option|choice|answer)\b){0,12}"
_CLOSED = r"(?![\w'’])(?:[\s*_`'\"”$)}\]]|\\[)\]]){0,12}"
# Every repetition has a bound: these rewards are called in the process that trains.
_LETTER = rf"{_WRAPPED}(?P<letter>[A-Z]){_CLOSED}"
_BOX = re.compile(rf"\\boxed\s*\{{{_WRAPPED}(?P<letter>[A-Za-z])(?![A-Za-z])[).:]?(?P<rest>[^{{}}]*)")
_STATED = (
    re.compile(
        r"(?:answer|choice|option|答案)[*_]{0,4}\s{0,4}(?:is\b|[:：是])[*_:\s]{0,8}(?:therefore|thus|clearly)?"
        + _LETTER,
        re.I,
    ),
    re.compile(rf"{_LETTER}is (?:the |therefore |thus |clearly )*(?:correct|right|best|answer)"),
    re.compile(rf"(?:choose|pick|select|go with|option|choice)\s+{_LETTER}", re.I),
    re.compile(rf"^(?:so|thus|therefore|hence)?,? ?(?:it is|it's)?{_LETTER}[.!]?$", re.I | re.M),
    re.compile(r"(?P<letter>(?<![A-Za-z])\([A-Z]\)|^[A-Z](?=[).:]\s))", re.M),
)
"""Where a letter stands, the surest form first; the last match of the first form that matches counts."""
_SECOND = re.compile(
    r"[\s,/&*]{0,4}(?:\b(?:or|and)\b|[,/&])\s{0,4}[*(]{0,3}(?:maybe |perhaps |possibly |option ){0,2}[*(]{0,3}"
    r"[A-Z](?![A-Za-z'’])"
)
_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|and|so|which|not|but|for|with|is|in|on)\b)[a-z]")
_OPTIONS = re.compile(r"(?:^|[\s(\[*])([A-Z])(?:[).:\]]|\*\*)", re.M)


def exact(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the result is the label, or one of several labels, without the white space around it."""
    return float(bool(answer.result) and answer.result in {str(label).strip() for label in labels(answer)})


def check_exact_label(label: Any) -> None:
    """Check that an answer can be a label.

    Raises:
        ValueError: none can.
    """
    if not isinstance(label, str | int | float):
        raise ValueError("is not a text or a number; write it as one of these, or as a list of them")
    if not str(label).strip():
        raise ValueError("is empty, as an answer that was not given; write what the answer is to be")


def choice(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the letter that the result decides for is the label, such as "C".

    A box comes first, then "the answer is C", "C is correct", "I choose C", a line of the letter alone, "(C)". A small
    letter counts in a box alone, and "A" and "I" not as words of a sentence. If the prompt lists options, other letters
    are no choices. Two letters are none.
    """
    wanted = {_letter(label) for label in labels(answer)}
    return float(_chosen(answer.result, set(_OPTIONS.findall(answer.prompt)), wanted) in wanted)


def check_choice_label(label: Any) -> None:
    """Check that a label is a letter.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(r"[A-Z]", _letter(label)):
        raise ValueError('is no letter from A to Z; write one such as "C", or take the reward exact')


def well_formed(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the answer ended by itself, closed its thought exactly once, if it could think at all, and holds no other
    tag of a thought, and some text behind it."""
    opened, closed = answer.text.count("<think>"), answer.text.count("</think>")
    is_closed = closed == 1 and opened <= 1 and answer.text.find("<think>") < answer.text.find("</think>")
    is_formed = is_closed if answer.thinking else not opened and not closed
    return float(answer.is_finished and is_formed and bool(answer.result))


def repetition(answer: Answer, options: Mapping[str, Any]) -> float:
    """From 0 to -1: the share of runs of ``n`` words (4) that were there before."""
    words, n = answer.text.split(), options.get("n", 4)
    runs = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def labels(answer: Answer) -> list[Any]:
    """The labels of an answer, of which one suffices."""
    return list(answer.label) if isinstance(answer.label, list | tuple) else [answer.label]


def _letter(label: Any) -> str:
    return str(label).strip().strip("()").upper()


def _chosen(text: str, listed: set[str], wanted: set[str]) -> str | None:
    """The letter that a text decides for, of those that the prompt lists, if it does, and those that are right."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        return None if _SECOND.match(boxes[-1]["rest"]) else boxes[-1]["letter"].upper()
    for form in _STATED:
        found = [
            match
            for match in form.finditer(text)
            if (letter := match["letter"].strip("()")).isupper()
            and (letter in listed | wanted or len(listed) < 2)
            and not (letter in "AI" and match["letter"] == letter and _GOES_ON.match(text, match.end("letter")))
            and not (letter == "I" and match["letter"] == letter and letter not in listed | wanted)
        ]
        if found:
            last = found[-1]
            return None if _SECOND.match(text, last.end()) else last["letter"].strip("()")
    return None
