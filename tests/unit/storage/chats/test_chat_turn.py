"""Turns are read in one way by programs, rewards and evaluation: the answer is what follows the last thought."""

import pytest

from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.rewards.answer import Answer, exact, maths

TOKENIZER = load_tokenizer("builtin")
CALL = "<tool_call>now\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("\n42", "42", 0),
        ("\n<think>why</think>\n42", "42", 0),
        ("\n<think>first</think>wrong</think>42", "42", 0),
        ("\n<think>a</think>b<think>c</think>d", "d", 0),
        ("\n<think>a</think></think>d", "d", 0),
        ("a</think>42", "42", 0),
        (f"\n<think>a</think>b{CALL}</think>{CALL}", "", 1),
        (f"\n<think>a</think>{CALL}<think>b</think>c", "c", 0),
    ],
)
def test_programs_and_rewards_read_the_same_answer(text, content, calls):
    reader = TurnReader(TOKENIZER)
    for token in TOKENIZER.encode_with_special(text).tolist():
        reader.read(token)
    assert not reader.in_thought
    message = reader.end()[1]
    assert (message.content, len(message.tool_calls)) == (content, calls)
    answer = Answer("6 * 7?", text, "42", True, 9, True)
    assert answer.result == content and answer.spoken.count("<tool_call>") == calls
    if content == "42":
        assert exact(answer, {}) == 1.0 and maths(answer, {}) == 1.0


@pytest.mark.parametrize("text", ["\n<think>42", "\n<think>a</think>b<think>42"])
def test_an_open_thought_is_no_answer(text):
    reader = TurnReader(TOKENIZER)
    for token in TOKENIZER.encode_with_special(text).tolist():
        reader.read(token)
    answer = Answer("6 * 7?", text, "42", True, 9, True)
    assert reader.in_thought and reader.end()[1].content == answer.result == "" and exact(answer, {}) == 0.0
