"""The reward for a choice: the letter that an answer decides for, in linear time."""

import re
from collections.abc import Mapping
from typing import Any

from glm46.storage.prepare.maths import last_box, takes_back
from glm46.tasks.rl.rewards.answer import Answer

# Every repetition has a bound: these rewards are called in the process that trains.
_PLAIN = [(re.compile(pattern, re.MULTILINE), plain) for pattern, plain in (
    (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|bf|rm)\s{0,4}\{([^{}]{0,400})\}", r"\1"), ("’", "'"),
    (r"<answer>", "\nAnswer: "), (r"</answer>", "\n"), (r"(?<![A-Za-z])'([A-Z])'", r"\1"),
    (r"\\(?:[,;: ]|q?quad\b)", " "),
    (r"\\[()\[\]!]|[*`$\"“”~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^[ \t>#✅✔☑👉➡️→]{0,12}(?:[-–•+]\s{1,4})?", ""),
    (r"((?i:\banswer(?: is)?|\bis))\s{0,2}:?\s{0,2}\n\s{0,4}", r"\1: "), (r":\s{0,2}:", ":"),
)]  # fmt: skip
"""Markup, delimiters and ends of lines that say nothing about the choice."""
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
_DECISIONS = [re.compile(form, re.IGNORECASE) for form in (
    r"(?:(?P<before>\b\w{1,20})\s)?\b(?:answer|choice|option|selection|statement|pick)(?: choice| option| letter)?"
    r"(?: (?:to|for|among|here)\b[^.:,;]{0,60}?)?\s{0,3}(?:(?:\bis|\bare|'s|\b(?:would|must|should|will|has to) be)\b"
    r"[\s:]{1,3}|[:：=→⇒]|->|[-–—] |(?=\([A-Z]\)[\s.]{0,4}$))"
    rf"\s{{0,4}}{_SURELY}(?:not (?-i:\(?[A-Z]\)?),? but (?:rather )?)?{_NAMED}{_LETTER}",
    rf"(?:答案(?:应该|应)?[是为:：]|选择?)\s{{0,4}}{_LETTER}",
    r"(?:\b(?:i|we)(?:'ll|'d|'m|'re| will| would| am| are| must| have to| should| therefore| thus){0,3} "
    r"|(?:^|, |let's )(?:so |then ){0,2})(?:choose|chose|choosing|pick|picked|picking|select|selected|selecting|go with"
    rf"|going with|settle on|opt for|answer|say)(?: with| that| it is)?[\s:]{{1,3}}{_SURELY}{_NAMED}{_LETTER}",
    r"(?:(?:^|[,;:—–] ?|\b(?:so|thus|hence|therefore|that|is|think|believe|conclude|because|since|but|sure"
    rf"|(?-i:(?<!\b[A-Z] )(?<!\b[A-Z]\) ))and)\s){_NAMED}|\b(?:option|choice|answer)\s){_LETTER}"
    rf"\s(?:is|must be|has to be)\s{_SURELY}{_THE_ANSWER}",
    r"(?:^|[,:—–] ?|(?=\b(?:so|leaving|leaves|which is)\b))(?:(?:so|thus|therefore|hence|then|and|but|yes|no|wait"
    r"|actually|sorry|rather|∴|by elimination|which|leaving|leaves|(?:it|that|this)(?:'s|(?= is\b| must\b| leaves\b))"
    rf"|is|must be)\b[\s,:—]{{0,3}}){{0,6}}{_SURELY}{_NAMED}{_LETTER}"
    r"(?= it is[\s.!]{0,4}$|[\s.!:]{0,4}$|, (?:as|because|not|rather)\b)",
)]  # fmt: skip
"""How a sentence decides for a letter: "the answer is C", "I choose C", "C is correct", "so C"."""
_OF_ANSWER = re.compile(
    r"the|my|our|your|final|correct|right|best|only|actual|true|appropriate|likely|accurate|closest|suitable|so|thus"
    r"|hence|therefore|then|and|that|is|this|an?", re.IGNORECASE,
)  # fmt: skip
"""Words before "answer" that leave it the answer: a wrong or common answer is another's."""
_CLAUSE = re.compile(r"[,;:—]|\b(?:so|thus|hence|therefore|but|because|since)\b", re.IGNORECASE)
_EARLIER = re.compile(r"\b(?:at first|initially|originally)\b", re.IGNORECASE)
_SUPPOSED = re.compile(
    r"\b(?:if|unless|whether|suppose|would|might|may|could|temp\w+|mistake\w*|at first|often)\b", re.I
)
_HEDGED = re.compile(r"\b(?:either|maybe|perhaps|possibly)\b", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not|never|neither|nor|nobody|cannot|wrong|incorrect|false|doubt|unlikely)\b|n't\b", re.I)
_REFUSED = [re.compile(form, re.IGNORECASE) for form in (
    r"(?:\b(?:not|never|neither|nor|rules? out|ruled out|ruling out|eliminat(?:e|es|ing)|exclud(?:e|es|ing)"
    rf"|reject|avoid)|n't)\s(?:be |choose |pick )?{_NAMED}{_LETTER}",
    rf"{_LETTER}:?\s(?:(?:is|was|are|can|could|must|has|does|do|been|be|clearly|definitely|also|therefore|simply)"
    r"(?:\s|(?=n't))){0,4}(?:cannot|not|never|n't|no\b|wrong|incorrect|false|out|impossible|eliminated|excluded|ruled|fails)\b",
)]  # fmt: skip
_EXPLAINED = re.compile(
    r"[,;]?\s(?:because|since|(?<!well )as(?! well)|not|rather|instead|while|whereas|unlike)\b", re.IGNORECASE
)
_TURNS = re.compile(
    r"\b(?:but|however|though|although|yet)\b.{0,60}?(?:\b(?:wrong|incorrect|false|cannot|also|could|might|it is not)\b"
    r"|n't)|^\W{0,4}(?:or|and/or|(?:only )?(?:if|unless))\b|\bor (?:maybe|perhaps|possibly)\b", re.IGNORECASE,
)  # fmt: skip
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
"""A small letter in brackets, or at the begin of a line. The word "a" is none."""
_OPTION = re.compile(
    rf"(?:(?:option|choice)\s)?{_LETTER}(?:[.:]\s|(?<=[)\]])|\s[-–—]\s)\s{{0,4}}(?![,;/&]|or\b|and\b)(?P<rest>.{{1,400}})",
    re.DOTALL | re.IGNORECASE,
)
_JUDGED = re.compile(
    r"\s*(?:(?:is|was|are|can|could|may|might|must|does|has|fails?|seems?|looks?|would)\b|(?:no|false|wrong|incorrect|out)\b"
    r"|[✗✘❌×])", re.IGNORECASE,
)  # fmt: skip


def choice(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the letter that the result decides for is the label, such as "C".

    A box comes first, if nothing behind it decides otherwise. Else the last sentence that decides counts ("the answer
    is C", "C is correct", "I choose C", "so C", a line of the letter alone), and without any the only option that is
    restated ("(C) three"). A decision for two letters, and one that is denied or taken back, is none. A small letter
    counts in a box alone, and in brackets if the prompt lists small ones. If the prompt lists options, other letters
    are no choices.
    """
    wanted = {_letter(label) for label in answer.labels}
    return float(_chosen(answer.result, answer.prompt, wanted) in wanted)


def choice_fault(label: Any) -> str:
    """The fault of a label that is not a letter; empty for a letter."""
    if isinstance(label, str) and re.fullmatch(r"[A-Z]", _letter(label)):
        return ""
    return 'is no letter from A to Z; write one such as "C", or take the reward exact'


def _letter(label: Any) -> str:
    return str(label).strip().strip("()").upper()


def _chosen(text: str, prompt: str, wanted: set[str]) -> str | None:
    """The letter that a text decides for, of those that the prompt lists, if it does, and those that are right."""
    listed = set(_OPTIONS.findall(prompt))
    if len(listed) < 2 and {"a", "b"} <= (small := set(_SMALL_OPTIONS.findall(prompt))):
        listed = {letter.upper() for letter in small}
        text = _SMALL_CHOICE.sub(lambda choice: choice[0].upper(), text)
    known = listed | wanted if len(listed) > 1 else {*map(chr, range(65, 91))} - ({"I"} - wanted)
    box, rest = last_box(text)
    if box is None:
        return _decided(_plain(text), prompt, known)
    box = _plain(box).removesuffix(".")
    box = box.upper() if re.fullmatch(r"\(?[a-z]\)?", box) else box
    match = re.fullmatch(rf"{_NAMED}{_LETTER}", box, re.IGNORECASE)
    letter = match["letter"] if match else _restated([box], prompt, known)
    return letter if letter and _decided(_plain(rest), "", known, letter) == letter else None


def _plain(text: str) -> str:
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text.strip()


def _decided(text: str, prompt: str, known: set[str], decision: str | None = None) -> str | None:
    """The last decision of a text; None if it is for several letters, taken back or not made."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    has_decided, refused, alone = False, set[str](), set[str]()
    for line in lines:
        option = _OPTION.match(line)
        if option is not None and _JUDGED.match(option["rest"]):
            option = None
        for sentence in _SENTENCE_END.split(line if option is None else option["rest"]):
            said, denied = _said(sentence[-_LONGEST_SENTENCE:], known)
            refused |= denied
            if match := _ALONE.fullmatch(sentence):
                alone |= {match["letter"], *("" if option is None else option["letter"])}
                said |= alone  # several such lines are a list
            if said:
                has_decided, decision = True, said.pop() if len(said) == 1 else None
            elif decision in denied or takes_back(sentence):
                decision = None
    return decision if has_decided or decision or refused else _restated(lines, prompt, known)


def _said(sentence: str, known: set[str]) -> tuple[set[str], set[str]]:
    """The letters that a sentence decides for, more than one if that is not clear, and those that it refuses."""
    denied = {match["letter"] for form in _REFUSED for match in form.finditer(sentence)}
    said = set()
    for form in () if sentence.endswith("?") else _DECISIONS:
        for match in form.finditer(sentence):
            letter, start, end = match["letter"], match.start("letter"), match.end()
            *_, clause = _CLAUSE.split(sentence[: match.start()]) if not _CLAUSE.match(match[0]) else [""]
            lead = clause + sentence[match.start() : start]
            before = match.groupdict().get("before")
            is_word = not match["closed"] and _GOES_ON.match(sentence, match.end("letter"))
            is_supposed = _SUPPOSED.search(clause) or _EARLIER.search(lead + sentence[end : end + 20])
            if letter not in known or is_word or is_supposed or (before and not _OF_ANSWER.fullmatch(before)):
                continue
            if _NEGATED.search(clause):
                denied.add(letter)
                continue
            rest = sentence[end : end + 300]
            listed = start - match.start() < 4 and _LISTED.search(sentence[: match.start()])
            others = _letters(f"{listed[0] if listed else ''} {_EXPLAINED.split(rest)[0]}", known) - denied
            is_clear = not (_TURNS.search(rest) or _HEDGED.search(lead) or re.search(r"\b(?:also|both)\b", match[0]))
            said |= {letter} | others | (set() if is_clear else {""})
    return said, denied - said


def _letters(text: str, known: set[str]) -> set[str]:
    return {
        match["letter"] for match in _MENTION.finditer(text)
        if match["letter"] in known and (match["closed"] or not _GOES_ON.match(text, match.end("letter")))
    }  # fmt: skip


def _restated(lines: list[str], prompt: str, known: set[str]) -> str | None:
    """The letter of the only option that a text states, in its first or last line, such as "(C) three"."""
    options = [_OPTION.fullmatch(line) for line in lines]
    letters = {option["letter"] for option in options if option}
    if len(letters) != 1 or not letters <= known or not (options[0] or options[-1]):
        return None
    for option in filter(None, options):
        rest = option["rest"].strip()
        if rest.rstrip(".") not in prompt and (_JUDGED.match(rest) or _letters(rest, known) - letters):
            return None
    return letters.pop()
