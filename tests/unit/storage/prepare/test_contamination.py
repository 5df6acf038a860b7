"""Evaluation text is found in documents whatever its case, punctuation and white space; what is too short is named."""

import json

import numpy as np
import pytest

from glm46.config.text_recipe import TextRecipe
from glm46.storage.prepare.contamination import evaluation_text, word_hashes
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import call_here

WORDS = np.array([f"word{number}" for number in range(8_000)])
QUESTION = "Which of the seven rivers of Thuringia, if any, flows north-west before it reaches the Saale?"


def evaluation(*texts):
    return evaluation_text([(f"exam.jsonl line {line}", text) for line, text in enumerate(texts, start=1)])


def words(rng, count):
    return rng.choice(WORDS, count).tolist()


def test_long_evaluation_text_is_found_by_runs_of_thirteen_words():
    rng = np.random.default_rng(3)
    question, page = words(rng, 40), words(rng, 600)
    exam = evaluation(" ".join(question))
    assert [(length, len(runs)) for length, runs in exam.runs.items()] == [(13, 40 - 12)]
    assert not exam.is_in(" ".join(page))
    assert exam.is_in(" ".join([*page, *question[5:18], *page]))
    assert not exam.is_in(" ".join([*page, *question[5:17], *page]))


@pytest.mark.parametrize("length", range(8, 14))
def test_short_evaluation_text_is_found_as_a_whole(length):
    rng = np.random.default_rng(length)
    question, page = words(rng, length), words(rng, 600)
    exam = evaluation(" ".join(question))
    assert exam.short == [] and [*exam.runs] == [length]
    assert exam.is_in(" ".join([*page, *question, *page])) and exam.is_in(" ".join(question))
    assert not exam.is_in(" ".join([*page, *question[1:], *page]))
    assert not exam.is_in(" ".join([*page, *question[:-1], *page]))


@pytest.mark.parametrize("copy", [
    QUESTION, QUESTION.upper(), QUESTION.replace(" ", "  "), QUESTION.replace(" ", "\u00a0"),
    QUESTION.replace(" ", "\r\n"), QUESTION.replace(",", "").rstrip("?"), QUESTION.replace("seven", "*seven*"),
    QUESTION.replace("north-west", "north\u2011west"), f"({QUESTION})",
])  # fmt: skip
def test_case_punctuation_and_white_space_do_not_hide_evaluation_text(copy):
    assert evaluation(QUESTION).is_in(f"A page. {copy} And more of it.")


def test_texts_below_eight_words_are_not_looked_for_but_named():
    exam = evaluation("2 + 2 = ?", QUESTION, "Who wrote Faust?", "one two three four five six seven")
    assert exam.short == ["exam.jsonl line 1", "exam.jsonl line 3", "exam.jsonl line 4"]
    assert not exam.is_in("Who wrote Faust?") and exam.is_in(QUESTION)


def test_each_character_of_a_script_without_blanks_counts_and_thirteen_are_needed():
    assert len(word_hashes("三角形ABCの面積, x1 = 7")) == 9
    assert evaluation("下列说法中正确的是哪一").short == ["exam.jsonl line 1"]
    question = "已知三角形的三条边长分别为三四五求它的面积"
    assert evaluation(question).is_in(f"题目:{question[:5]} {question[5:]}。")
    assert not evaluation(question).is_in(question[:12])


def test_a_preparation_names_the_texts_that_were_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)

    def write(name, texts):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(tmp_path / name)

    short = "The largest planet?"
    exam = write("exam.jsonl", [QUESTION, short])
    pages = [f"A page number {number} about trees and rivers and the way home." for number in range(3)]
    source = write("pages.jsonl", [*pages, f"Quiz: {QUESTION.lower()}", short])
    recipe = TextRecipe(
        input=(source,), output=str(tmp_path / "out"), decontaminate=(exam,), held_out=0.0, processes=1,
        deduplicate="exact",
    )  # fmt: skip
    lines = []
    manifest = prepare_text(recipe, report=lines.append)
    assert manifest.dropped == {"holds evaluation text": 1} and manifest.splits["train"].documents == 4
    assert list(manifest.noted.values()) == [1]
    assert any("too short to be looked for" in line and "exam.jsonl line 2" in line for line in lines)
