"""Write the facts of train_configs/debug_short_answers.jsonl as chats in eight phrasings and several forms of answers.

    python scripts/measure/phrase_chats.py data/phrased

The files, `sentence.jsonl`, `short.jsonl`, `one_of_four.jsonl` and `embellished.jsonl`, have the same 1,040 questions
in the same order, and the same bytes every time. docs/results/finetuning.md compares adapters with all
weights on them.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

FACTS = Path(__file__).parents[2] / "train_configs" / "debug_short_answers.jsonl"
QUESTIONS = (
    "What is the {kind} of {of}?",
    "Which {noun} is the {kind} of {of}?",
    "Name the {kind} of {of}.",
    "Tell me the {kind} of {of}.",
    "The {kind} of {of}, please.",
    "Do you know the {kind} of {of}?",
    "I forgot the {kind} of {of}. What is it?",
    "Give me the {kind} of {of}.",
)
NOUNS = {"capital": "city", "opposite": "word", "plural": "word"}


def read_facts() -> list[tuple[str, str, str]]:
    """Such as ("capital", "Japan", "Tokyo"), by kind."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in NOUNS}
    for line in FACTS.read_text(encoding="utf-8").splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        if match := re.search(r"(capital|opposite|plural) of (.+?)[?.]", question):
            found[match[1]][match[2]] = answer.split(",")[0]
    return [(kind, of, answer) for kind, facts in found.items() for of, answer in facts.items()]


def sentence(kind: str, of: str, answer: str) -> str:
    return f"The {kind} of {of} is {answer}."


def short(kind: str, of: str, answer: str) -> str:
    return f"{answer}, {of}." if kind == "capital" else f"{answer}, not {of}."


def forms() -> dict[str, Callable[[str, str, str], str]]:
    """By name of the file; the last two draw from generators of their own."""
    one, two = random.Random(1), random.Random(2)

    def one_of_four(kind: str, of: str, answer: str) -> str:
        return one.choice((f"{answer}.", f"It is {answer}.", short(kind, of, answer), f"Sure: {answer}."))

    def embellished(kind: str, of: str, answer: str) -> str:
        before = two.choice(("", "Sure! ", "Gladly. ", "Of course: "))
        return before + sentence(kind, of, answer) + two.choice(("", " Anything else?"))

    return {form.__name__: form for form in (sentence, short, one_of_four, embellished)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    asked = [(question, fact) for fact in read_facts() for question in QUESTIONS]
    random.Random(0).shuffle(asked)
    for name, answer in forms().items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for question, (kind, of, fact) in asked:
                user = question.format(kind=kind, noun=NOUNS[kind], of=of)
                turns = (("user", user), ("assistant", answer(kind, of, fact)))
                messages = [{"role": role, "content": content} for role, content in turns]
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
