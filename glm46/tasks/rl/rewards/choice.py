"""The reward for multiple choice: finds the letter that an answer chooses, in linear time."""

import re
from collections.abc import Mapping
from typing import Any

from glm46.storage.judge.maths import before_last_box, last_box, takes_back
from glm46.tasks.rl.rewards.answer import Answer

# Every repetition is bounded, because this reward runs in the training process.
_PLAIN = [
    (re.compile(pattern, re.MULTILINE), plain)
    for pattern, plain in (
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|bf|rm)\s{0,4}\{([^{}]{0,400})\}", r"\1"),
        ("’", "'"),
        (r"<answer>", "\nAnswer: "),
        (r"</answer>", "\n"),
        (r"(?<![A-Za-z])'([A-Z])'", r"\1"),
        (r"\\(?:[,;: ]|q?quad\b)", " "),
        (r"\\[()\[\]!]|[*`$\"“”~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^[ \t>#✅✔☑👉➡️→]{0,12}(?:[-–•+]\s{1,4})?", ""),
        (r"((?i:\banswer(?: is)?|\bis))\s{0,2}:?\s{0,2}\n\s{0,4}", r"\1: "),
        (r":\s{0,2}:", ":"),
    )
]
"""Markup, delimiters and line ends that do not affect the choice, with their replacements."""
_LETTER = (
    r"(?-i:(?<![A-Za-z0-9.\\'+/^-])[(\[{<]?\s?(?P<letter>[A-Z])\s?(?P<closed>[)\]}>]?)"
    r"(?![A-Za-z0-9_'+#/^\\&]|-[A-Za-z]|\s?[=+^]|\.[A-Za-z0-9]))"
)
_MENTION = re.compile(_LETTER)
_NAMED = r"(?:(?:the )?(?:answer |final |correct ){0,2}(?:option|choice|answer|letter)[\s:]{1,4})?"
_SURELY = (
    r"(?:(?:therefore|thus|hence|then|clearly|definitely|certainly|obviously|indeed|simply|most likely|likely|probably"
    r"|only|also|both)[\s,]{1,3}){0,3}"
)
_THE_ANSWER = (
    r"(?:correct|right|(?:the|my|our) (?:only |single |final |most ){0,2}"
    r"(?:correct |right |best |appropriate |likely )?(?:answer|choice|option|one)"
    r"|(?:the )?best (?:answer|choice|option))\b"
)
_DECISIONS = [
    re.compile(form, re.IGNORECASE)
    for form in (
        r"(?:(?P<before>\b\w{1,20})\s)?\b(?:answer|choice|option|selection|statement|pick)(?: choice| option| letter)?"
        r"(?: (?:to|for|among|here)\b[^.:,;]{0,60}?)?\s{0,3}"
        r"(?:(?:\bis|\bare|'s|\b(?:would|must|should|will|has to) be)\b"
        r"[\s:]{1,3}|[:：=→⇒]|->|[-–—] |(?=\([A-Z]\)[\s.]{0,4}$))"
        rf"\s{{0,4}}{_SURELY}(?:not (?-i:\(?[A-Z]\)?),? but (?:rather )?)?{_NAMED}{_LETTER}",
        rf"(?:答案(?:应该|应)?[是为:：]|选择?)\s{{0,4}}{_LETTER}",
        r"(?:\b(?:i|we)(?:'ll|'d|'m|'re| will| would| am| are| must| have to| should| therefore| thus){0,3} "
        r"|(?:^|, |let's )(?:so |then ){0,2})(?:choose|chose|choosing|pick|picked|picking"
        r"|select|selected|selecting|go with"
        rf"|going with|settle on|opt for|answer|say)(?: with| that| it is)?[\s:]{{1,3}}{_SURELY}{_NAMED}{_LETTER}",
        r"(?:(?:^|[,;:—–] ?|\b(?:so|thus|hence|therefore|that|is|think|believe|conclude|because|since|but|sure"
        rf"|(?-i:(?<!\b[A-Z] )(?<!\b[A-Z]\) ))and)\s){_NAMED}|\b(?:option|choice|answer)\s){_LETTER}"
        rf"\s(?:is|must be|has to be)\s{_SURELY}{_THE_ANSWER}",
        r"(?:^|[,:—–] ?|(?=\b(?:so|leaving|leaves|which is)\b))(?:(?:so|thus|therefore|hence|then|and|but|yes|no|wait"
        r"|actually|sorry|rather|∴|by elimination|which"
        r"|(?:i|we) (?:think|believe|conclude)(?: that)?|leaving|leaves"
        r"|(?:it|that|this)(?:'s|(?= is\b| must\b| leaves\b))"
        rf"|is|must be)\b[\s,:—]{{0,3}}){{0,6}}{_SURELY}{_NAMED}{_LETTER}"
        r"(?= it is[\s.!]{0,4}$|[\s.!:]{0,4}$|, (?:as|because|not|rather)\b)",
    )
]
"""Patterns of sentences that choose a letter: "the answer is C", "I choose C", "C is correct", "so C"."""
_OF_ANSWER = re.compile(
    r"the|my|our|your|final|correct|right|best|only|actual|true|appropriate|likely|accurate|closest|suitable|so|thus"
    r"|hence|therefore|then|and|that|is|this|an?",
    re.IGNORECASE,
)
"""Words before "answer" that keep its meaning; after other words, such as "wrong" or "common", it is no choice."""
_CLAUSE = re.compile(r"[,;:—]|\b(?:so|thus|hence|therefore|but|because|since)\b", re.IGNORECASE)
_EARLIER = re.compile(r"\b(?:at first|initially|originally)\b", re.IGNORECASE)
_SUPPOSED = re.compile(
    r"\b(?:if|unless|whether|suppose|would|might|may|could|temp\w+|mistake\w*|at first|often)\b", re.I
)
_HEDGED = re.compile(r"\b(?:either|maybe|perhaps|possibly)\b", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not|never|neither|nor|nobody|cannot|wrong|incorrect|false|doubt|unlikely)\b|n't\b", re.I)
_REFUSED = [
    re.compile(form, re.IGNORECASE)
    for form in (
        r"(?:\b(?:not|never|neither|nor|rules? out|ruled out|ruling out|eliminat(?:e|es|ing)|exclud(?:e|es|ing)"
        rf"|reject|avoid)|n't)\s(?:be |choose |pick )?{_NAMED}{_LETTER}",
        rf"{_LETTER}:?\s(?:(?:is|was|are|can|could|must|has|does|do|been|be|clearly|definitely|also|therefore|simply)"
        r"(?:\s|(?=n't))){0,4}(?:cannot|not|never|n't|no\b|wrong|incorrect|false|out|impossible|eliminated|excluded|ruled|fails)\b",
    )
]
_EXPLAINED = re.compile(
    r"[,;]?\s(?:because|since|(?<!well )as(?! well)|not|rather|instead|while|whereas|unlike)\b", re.IGNORECASE
)
_TURNS = re.compile(
    r"\b(?:but|however|though|although|yet)\b.{0,60}?(?:\b(?:wrong|incorrect|false|cannot|also|could|might|it is not)\b"
    r"|n't)|^\W{0,4}(?:or|and/or|(?:only )?(?:if|unless))\b|\bor (?:maybe|perhaps|possibly)\b",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\s+(?!(?:because|since|as|and|or|so|which|not|but|for|with|is|in|on|by|from|due|given|based|when|if|then|that|while"
    r"|where|at|here|only|rather|instead|according|has|was|are|must|to|though|although|it|also|both|maybe|perhaps"
    r"|possibly|plus)\b)[a-z]"
)
_LISTED = re.compile(r"(?<![A-Za-z])[A-Z]\)?$")
_SENTENCE_END = re.compile(r"(?<=[.!?。])\s+|;\s")
_LONGEST_SENTENCE = 600
_ALONE = re.compile(rf"{_LETTER}[.:]?")
_OPTIONS = re.compile(r"(?:^|[\s(\[*])([A-Z])(?:[).:\]]|\*\*)", re.MULTILINE)
_SMALL_OPTIONS = re.compile(r"(?:^|[\s(\[*])([a-z])[).\]]", re.MULTILINE)
_SMALL_CHOICE = re.compile(r"(?<![\w(\[])[(\[]?[a-z][)\]](?!\w)|^[a-z](?=\.?\s*$|[.:]\s)", re.MULTILINE)
"""A lower-case letter in brackets, or alone or before a point or colon at the start of a line; not the word "a"."""
_OPTION = re.compile(
    rf"(?:(?:option|choice)\s)?{_LETTER}(?:[.:]\s|(?<=[)\]])|\s[-–—]\s)\s{{0,4}}(?![,;/&]|or\b|and\b)(?P<rest>.{{1,400}})",
    re.DOTALL | re.IGNORECASE,
)
_JUDGED = re.compile(
    r"\s*(?:(?:is|was|are|can|could|may|might|must|does|has|fails?|seems?|looks?|would)\b|(?:no|false|wrong|incorrect|out)\b"
    r"|[✗✘❌×])",
    re.IGNORECASE,
)

_MATHEMATICS = re.compile(r"\\[A-Za-z]|[0-9=<>^+]")
"""Marks a box as mathematics, whatever letters it contains."""
_LISTED_LETTERS = re.compile(
    r"(?:[A-Z]|\\(?:cup|cap|land|lor|wedge|vee|neg|lnot|quad|to)\b|\b(?:and|or|not|both|either|neither|nor)\b|[\W_]){0,400}"
)
"""A box with only letters and connectives, which is no mathematics."""
_MAX_BOXES = 32
"""Maximum number of boxes to read, from the last one backwards."""


def choice(answer: Answer, options: Mapping[str, Any]) -> float:  # noqa: ARG001 - a reward's
    """Return 1 if the letter that the result chooses is the label, such as "C".

    A letter in a box takes precedence, unless text after the box contradicts it. A box of mathematics is read like
    text. Otherwise the last sentence with a choice counts ("the answer is C", "C is correct", "I choose C", "so C", a
    line with only the letter), and without such a sentence the only option that is restated ("(C) three"). Choices of
    two letters, and denied or retracted ones, count as no answer. A lower-case letter counts alone in a box, and in
    brackets if the prompt lists lower-case options. If the prompt lists options, other letters do not count.
    """
    expected = {_letter(label) for label in answer.labels}
    return float(_chosen(answer.result, answer.prompt, expected) in expected)


def choice_fault(label: object) -> str:
    """Explain why a label is not a letter; empty for a letter."""
    if isinstance(label, str) and re.fullmatch(r"[A-Z]", _letter(label)):
        return ""
    return 'is no letter from A to Z; write one such as "C", or take the reward exact'


def _letter(label: object) -> str:
    return str(label).strip().strip("()").upper()


def _chosen(text: str, prompt: str, expected: set[str]) -> str | None:
    """Return the letter that a text chooses. If the prompt lists options, only these and the expected letters count."""
    listed = set(_OPTIONS.findall(prompt))
    if len(listed) < 2 and {"a", "b"} <= (small := set(_SMALL_OPTIONS.findall(prompt))):
        listed = {letter.upper() for letter in small}
        text = _SMALL_CHOICE.sub(lambda choice: choice[0].upper(), text)
    allowed = listed | expected if len(listed) > 1 else {*map(chr, range(65, 91))} - ({"I"} - expected)
    before = text
    after = ""
    for _ in range(_MAX_BOXES):
        box, rest = last_box(before)
        if box is None:
            return _decided(_plain(before + after), prompt, allowed)
        box = _plain(box).removesuffix(".")
        letter = _boxed_letter(box, prompt, allowed)
        if letter is not None:
            return letter if _decided(_plain(rest + after), "", allowed, letter) == letter else None
        if not box or _LISTED_LETTERS.fullmatch(box) or _OPTION.match(box):
            return None
        if not _MATHEMATICS.search(box):
            return None if _letters(box, allowed) else _decided(_plain(rest + after), prompt, allowed)
        before = before_last_box(before)
        after = f"0{rest}{after}"  # a number instead of the box, so that \boxed{5} C remains a quantity
    return None


def _boxed_letter(box: str, prompt: str, allowed: set[str]) -> str | None:
    """Return the letter in a box, alone or with the text of its option."""
    box = box.upper() if re.fullmatch(r"\(?[a-z]\)?", box) else box
    match = re.fullmatch(rf"{_NAMED}{_LETTER}", box, re.IGNORECASE)
    return match["letter"] if match else _restated([box], prompt, allowed)


def _plain(text: str) -> str:
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text.strip()


def _decided(text: str, prompt: str, allowed: set[str], decision: str | None = None) -> str | None:
    """Return the last choice in a text; None if it has several letters, is retracted, or is missing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    has_decided = False
    refused = set[str]()
    alone = set[str]()
    for line in lines:
        option = _OPTION.match(line)
        if option is not None and _JUDGED.match(option["rest"]):
            option = None
        for sentence in _SENTENCE_END.split(line if option is None else option["rest"]):
            chosen, denied = _said(sentence[-_LONGEST_SENTENCE:], allowed)
            refused |= denied
            if match := _ALONE.fullmatch(sentence):
                alone |= {match["letter"], *("" if option is None else option["letter"])}
                chosen |= alone  # several such lines are a list
            if chosen:
                has_decided = True
                decision = chosen.pop() if len(chosen) == 1 else None
            elif decision in denied or takes_back(sentence):
                decision = None
    return decision if has_decided or decision or refused else _restated(lines, prompt, allowed)


def _said(sentence: str, allowed: set[str]) -> tuple[set[str], set[str]]:
    """Return the letters that a sentence chooses, more than one if it is ambiguous, and the letters that it rejects."""
    denied = {match["letter"] for form in _REFUSED for match in form.finditer(sentence)}
    chosen = set()
    for form in () if sentence.endswith("?") else _DECISIONS:
        for match in form.finditer(sentence):
            letter = match["letter"]
            start = match.start("letter")
            end = match.end()
            *_, clause = _CLAUSE.split(sentence[: match.start()]) if not _CLAUSE.match(match[0]) else [""]
            lead = clause + sentence[match.start() : start]
            before = match.groupdict().get("before")
            is_word = not match["closed"] and _GOES_ON.match(sentence, match.end("letter"))
            is_supposed = _SUPPOSED.search(clause) or _EARLIER.search(lead + sentence[end : end + 20])
            if letter not in allowed or is_word or is_supposed or (before and not _OF_ANSWER.fullmatch(before)):
                continue
            if _NEGATED.search(clause):
                denied.add(letter)
                continue
            rest = sentence[end : end + 300]
            listed = start - match.start() < 4 and _LISTED.search(sentence[: match.start()])
            others = _letters(f"{listed[0] if listed else ''} {_EXPLAINED.split(rest)[0]}", allowed) - denied
            is_clear = not (_TURNS.search(rest) or _HEDGED.search(lead) or re.search(r"\b(?:also|both)\b", match[0]))
            chosen |= {letter} | others | (set() if is_clear else {""})
    return chosen, denied - chosen


def _letters(text: str, allowed: set[str]) -> set[str]:
    return {
        match["letter"]
        for match in _MENTION.finditer(text)
        if match["letter"] in allowed and (match["closed"] or not _GOES_ON.match(text, match.end("letter")))
    }


def _restated(lines: list[str], prompt: str, allowed: set[str]) -> str | None:
    """Return the letter of the only option that a text restates, in its first or last line, such as "(C) three"."""
    options = [_OPTION.fullmatch(line) for line in lines]
    letters = {option["letter"] for option in options if option}
    if len(letters) != 1 or not letters <= allowed or not (options[0] or options[-1]):
        return None
    for option in filter(None, options):
        rest = option["rest"].strip()
        if rest.rstrip(".") not in prompt and (_JUDGED.match(rest) or _letters(rest, allowed) - letters):
            return None
    return letters.pop()
