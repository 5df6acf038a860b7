"""Verify the steps and the final result of a worked solution: find the result, and compare it with the reference
answer."""

import re

from glm46.storage.judge.equal_results import same_answer
from glm46.storage.judge.result_values import has_words, number_of

_MARKS = re.compile(
    r"####|(?:\bans(?:wers?)?\b|答案)[*_]*\s*(?:is\b|are\b|[:：是])|^[#* ]{0,8}(?:final )?answer[*_]{0,4}$", re.I | re.M
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LONGEST_JOINT = 60
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_NOT = re.compile(
    r"(?:\b(?:not|never|neither|nor)\b|n't\b)(?: equal(?: to)?| be| choose)?[\s$*:(\[\\]*$", re.IGNORECASE
)
_IS_NOT = re.compile(r"[\s$*.)\]\\]{0,8}(?:is|was) (?:wrong|incorrect|not\b)", re.IGNORECASE)
_JOINED = re.compile(
    r"[\s$)\]\\]*(?:[,;]|[,;]?\s*(?:\\text\{\s*)?(?:or|and)\b(?:\s*\})?(?: maybe| perhaps| possibly| also)?)"
    r"[\s$(\[\\]*(?:[A-Za-z]\w*\s*=\s*)?",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"\W{0,6}(?:but |hmm|oh\b)?\W{0,6}(?:wait|actually|no[,.!]|hold on|scratch that|oops|sorry|correction"
    r"|on second thought|let me (?:re-?\w{1,20}|double|correct|fix|check again)|i made an? (?:mistake|error)"
    r"|i (?:was|am) (?:wrong|mistaken)|or(?! equivalently| in )|maybe|perhaps|possibly"
    r"|(?:it|this) (?:could|might|may) (?:also )?be(?= [-\d$\\])"
    r"|(?:that|this|it|which)(?:'s| is| was) (?:wrong|incorrect|false|not (?:right|correct|true)))(?!\w)",
    re.IGNORECASE,
)
_LEADS = re.compile(
    r"(?:[\s:*=_]|(?:therefore|thus|simply|just|indeed|exactly|equal to|equals|given by|is"
    r"|the (?:number|value|integer))\b,?)+",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"[.。!?](?=\s|$)|[;；]|,\s+(?=[A-Za-z])(?!(?:or|and)\b|[a-z]\s*=)|\s+\((?=[A-Za-z ]{4})"
    r"|\s(?:because|since|which|so|as|where|when|by|after|but|not|than|that)\b"
    r"|\s(?:and|or)\s+(?=[a-z]{2})"
)
_UNSURE = re.compile(
    r"\W*(?:(?:and|but|though|although)\b)?\W*(?:or|maybe|perhaps|possibly|no(?! (?:matter|more|less|other|doubt|need))"
    r"|wait|actually|sorry|rather|i mean|also|either|(?:(?:it|this|that) )?(?:could|might|may))\b(?! than)",
    re.IGNORECASE,
)
"""Text after a result that offers another result."""
_SENTENCE_END = re.compile(r"(?<=[.!?])[\s*$]+|\n")
_DENIED = re.compile(r"not\b.*?\b(?:it is|it's|but|rather|is)\s+(.+)", re.IGNORECASE)
_CONCLUSION = re.compile(
    r".*(?:\b(?:is|are|equals?|makes?|gives?|gets?|has|have|leaves?|totals?)\b|=)(?: a total of)?(.+)", re.IGNORECASE
)
_VALUE = re.compile(r"\s*([A-Za-z])\s*=[^=]+")
_DOUBTS = re.compile(
    r"\b(?:or|either|maybe|perhaps|might|may|could|not|possibly|one of|between)\b|\?|=.*\band\b.*=", re.IGNORECASE
)

# A numbered step at the beginning of a line: "Step 3:", "**Step 3** -", "### Step 3", "3.", "3)".
_STEP = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]*)?(?:\*\*)?(?:(step)[ \t]+)?(\d{1,4})(?(1)\b|[.)](?=\s))[*.:) \t-]*", re.I | re.M
)
_LEAST_STEPS = 2


def maths_fault(text: str, answer: str | None) -> str | None:
    """Return the reason if a solution does not end in the reference answer, else None.

    Args:
        text: a problem with its solution; `stated_result` extracts the result.
        answer: reference answer, alone or at the end of a solution.
    """
    if answer is None or not answer.strip():
        return "no answer to check against"
    result = stated_result(text)
    if not result:
        return "states no final answer"
    return None if same_answer(result, stated_result(answer) or answer) else "wrong answer"


def steps_fault(text: str, answer: str | None) -> str | None:
    """Return the reason if a text is not reasoning in steps, else None.

    There are at least two steps, numbered from 1 without a gap at the beginnings of lines ("Step 1:", or all as "1." or
    "1)"). Each step has text, and the last one, or the text after it, gives the final answer.

    Args:
        text: a problem with its solution. Of several lists the last one counts, since the problem may have one.
        answer: reference answer; None: no comparison.
    """
    marks = [*_STEP.finditer(text)]
    if any(mark[1] for mark in marks):
        marks = [mark for mark in marks if mark[1]]  # numbers inside steps are not steps
    start = max((place for place, mark in enumerate(marks) if int(mark[2]) == 1), default=len(marks))
    steps = marks[start:]
    if len(steps) < _LEAST_STEPS:
        return "no steps" if not steps else "a single step"
    if [int(step[2]) for step in steps] != list(range(1, len(steps) + 1)):
        return "steps out of order"
    ends = [*(step.start() for step in steps[1:]), len(text)]
    if any(not text[step.end() : end].strip() for step, end in zip(steps, ends, strict=True)):
        return "an empty step"
    result = stated_result(text[steps[-1].start() :])
    if not result:
        return "states no final answer behind its steps"
    is_wrong = answer is not None and answer.strip() and not same_answer(result, stated_result(answer) or answer)
    return "wrong answer" if is_wrong else None


def stated_result(text: str) -> str | None:
    r"""Return the final result of a solution: the content of the last ``\boxed{...}``, else the rest of the line after
    the last ``####`` (in GSM8K) or "answer is", reduced to the result if it is a sentence. None if there is none of
    these, or if a later box is not closed because the text was truncated."""
    boxed, after = last_box(text)
    marked, place = (boxed, None) if boxed else _marked(text)
    if marked is None:
        return None
    following = re.sub(r"[ \t]+", " ", after if boxed else text[place:].lstrip(" *_:$()[]\\\n"))
    first, *later = _SENTENCE_END.split(following)
    later = [first, *later] if boxed else later
    for number, sentence in enumerate(later):
        if takes_back(sentence):
            corrected = " ".join(later[number:])
            return stated_result(corrected) or concluded_result(corrected) or ""
    return boxed or _of_sentence(marked)


def concluded_result(text: str) -> str | None:
    """Return the result of an answer without box and mark: from a last sentence such as "3 and 4 make 7", or a text
    that is only a result. None for anything else, such as several candidates."""
    if _BOX.search(text):
        return None
    text = text.strip()
    last = re.split(r"[.。!?]\s+|\n", text.rstrip("."))[-1].strip()
    for candidate in (text.rstrip("."), last):
        parts = re.split(r"[,;\n]|\band\b", candidate.replace("$", ""))
        values = [value for part in parts if (value := _VALUE.fullmatch(part))]
        if len(values) == len(parts) and len({value[1] for value in values}) > 1:
            return ", ".join(value[0].strip() for value in values)
    if _DOUBTS.search(last):
        return None
    result = _of_sentence(match[1]) if (match := _CONCLUSION.fullmatch(last)) else ""
    if number_of(result) is not None:
        return result
    return text if "\n" not in text and (number_of(text) is not None or not has_words(text)) else None


def _of_sentence(sentence: str) -> str:
    """Return the result from the rest of a sentence after "the answer is"."""
    sentence = " ".join(sentence.split())
    if match := _DENIED.match(sentence):
        return _of_sentence(match[1])
    if lead := _LEADS.match(sentence):
        sentence = sentence[lead.end() :]
    if sentence.count("$") % 2 == 0:
        sentence = sentence.replace("$", "")
    sentence = re.sub(r"\\[()\[\]]|\*\*|`", "", sentence)
    end = _CLAUSE.search(sentence)
    return sentence[: end.start()].strip() if end and not _UNSURE.match(sentence, end.start()) else sentence.strip()


def last_box(text: str) -> tuple[str | None, str]:
    r"""Return the content of the last ``\boxed{...}`` and the text after it. Boxes joined by "or", "and" or a comma
    count as one. The content is empty if the text denies the box or is truncated inside it, and None if there is no
    box."""
    contents = list[str]()
    after = ""
    next_start = 0
    for box in reversed(list(_BOX.finditer(text))):
        inside = _braced(text, box.end() - 1)
        if inside is None:
            break
        end = box.end() + len(inside) + 1
        if not contents:
            after = text[end:]
            if _NOT.search(text[max(box.start() - 60, 0) : box.start()]) or _IS_NOT.match(after):
                break
        elif next_start - end > _LONGEST_JOINT or not _JOINED.fullmatch(text[end:next_start]):
            break
        contents.append(inside.strip())
        next_start = box.start()
    return (" or ".join(reversed(contents)) if _BOX.search(text) else None), after


def before_last_box(text: str) -> str:
    r"""Return the text before the last ``\boxed{...}``; the whole text if it has no box."""
    *_, start = [len(text), *(box.start() for box in _BOX.finditer(text))]
    return text[:start]


def takes_back(sentence: str) -> bool:
    """Return True if a sentence retracts the text before it, such as "Wait, it is 6."."""
    return _TAKES_BACK.match(sentence) is not None


def _marked(text: str) -> tuple[str | None, int]:
    """Return the rest of the line after the last mark, or the next line that is not empty, and the end of the mark."""
    *_, mark = [None, *_MARKS.finditer(text)]
    *_, box = [None, *_BOX.finditer(text)]
    if mark is None or (box is not None and box.start() > mark.start()):
        return None, 0
    lines = (line.strip() for line in text[mark.end() :].splitlines())
    return next((line for line in lines if line.strip(" *_:$()[]\\")), None), mark.end()


def _braced(text: str, start: int) -> str | None:
    """Return the text between the brace at ``start`` and the matching one; None if there is no match."""
    depth = 0
    for part in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return text[start + 1 : part.start()]
    return None
