"""Chat in the terminal: turns read token by token, the prompts of a conversation byte by byte, and a real terminal."""

import builtins
import io
import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest
import torch

from glm46.cli import main
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.engine.inference.generation import Continuation
from glm46.operate.models.terminal_chat import TerminalChat
from glm46.storage.chats.chat import chat_prompt, chat_reply
from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.chats.conversation import Message, ToolCall
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from tests.processes import HANG_SECONDS

TOKENIZER = load_tokenizer("builtin")
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"zone": "é"}}}]
CALLS = (ToolCall("now", {"zone": "é</arg_value>\n<tool_call>", "deep": "[1]"}), ToolCall("now"))
MESSAGES = [
    Message("assistant", "Hello", "why 中文 🙂\n\nso"),
    Message("assistant", "no thought: <think> is text 🙂"),
    Message("assistant", "Wait.", "look", CALLS),
    Message("assistant", "", "", CALLS[1:]),
    Message("assistant", "", "only thought"),
]


def ids_of(message: Message, thinking: bool = True) -> list[int]:
    """The turn as a model samples it, without the marker behind it."""
    before = [Message("user", "Hi")]
    start = chat_prompt(TOKENIZER, before, thinking=thinking)
    follow = Message("tool", "x") if message.tool_calls else Message("system", "x")
    whole = chat_prompt(TOKENIZER, [*before, message, follow], thinking=thinking)
    end = TOKENIZER.special["<|observation|>" if message.tool_calls else "<|system|>"]
    assert whole[: len(start)] == start
    return whole[len(start) : len(whole) - whole[::-1].index(end) - 1]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_turn_that_is_read_token_by_token_is_the_message_that_was_rendered(message):
    reader = TurnReader(TOKENIZER)
    parts = [part for part in map(reader.read, ids_of(message)) if part]
    rest, found = reader.end()
    texts = {kind: [part.text for part in parts if part.kind == kind] for kind in ("thought", "answer", "call")}
    assert rest is None and found == message
    assert "".join(texts["thought"]).strip() == message.reasoning
    assert "".join(texts["answer"]).strip() == message.content
    assert len(texts["call"]) == len(message.tool_calls)
    assert "\ufffd" not in "".join(part.text for part in parts)  # no character was shown in halves
    assert len(message.reasoning) < 10 or len(texts["thought"]) > 3  # it was shown while it was written


@pytest.mark.parametrize(
    "text, want",
    [
        ("<tool_call>now\n<arg_key>a</arg_key>\n", "<tool_call>now\n<arg_key>a</arg_key>"),  # cut off
        (
            "<tool_call>now\n<arg_value>a</arg_value></tool_call>",
            "<tool_call>now\n<arg_value>a</arg_value></tool_call>",
        ),
        ("<tool_call>\n</tool_call>\nbye", "<tool_call>\n</tool_call>\nbye"),
    ],
)
def test_a_call_that_is_not_in_the_format_is_text(text, want):
    reader = TurnReader(TOKENIZER)
    for piece in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
        for token in [TOKENIZER.special[piece]] if piece in TOKENIZER.special else TOKENIZER.encode(piece).tolist():
            reader.read(token)
    assert reader.end()[1] == Message("assistant", want)


def test_calls_are_made_behind_the_thought_only():
    reader = TurnReader(TOKENIZER)
    drafted = "<tool_call>later\n</tool_call>"
    for part in (
        "<think>",
        "<tool_call>",
        "later\n",
        "</tool_call>",
        "</think>",
        "<tool_call>",
        "now\n",
        "</tool_call>",
    ):
        for token in [TOKENIZER.special[part]] if part in TOKENIZER.special else TOKENIZER.encode(part).tolist():
            reader.read(token)
    assert reader.end()[1] == Message("assistant", "", drafted, (ToolCall("now"),))


def talk(lines, turns, monkeypatch, tokenizer=TOKENIZER, **options):
    """Run a chat with typed lines against turns that were written before; returns the prompts."""
    typed, written, prompts = iter(lines), iter(turns), []

    def line(*_):
        try:
            found = next(typed)
        except StopIteration:
            raise EOFError from None
        if found is KeyboardInterrupt:
            raise KeyboardInterrupt
        return found

    def answer(prompt):
        turn, finish = next(written)
        if turn is UserError:
            raise UserError("--max-new-tokens 5: too long")
        prompts.append(prompt)
        one = Continuation(prompt, 100)

        def rounds():
            for token in turn:
                one.tokens.append(token)
                yield
                if finish == "abort":
                    os.kill(os.getpid(), signal.SIGINT)
            one.finish = finish

        return one, rounds()

    monkeypatch.setattr(builtins, "input", line)
    TerminalChat(tokenizer, answer, frozenset(stop_ids(tokenizer)), **options).run()
    return prompts


@pytest.mark.parametrize("keeps, first", [(True, "<think>why</think>A"), (False, "</think>A")])
def test_later_prompts_hold_thoughts_where_they_are_kept(keeps, first, monkeypatch):
    tokenizer = load_tokenizer("builtin", "GLM-4.7")
    turn = tokenizer.encode_with_special("why</think>A<|user|>").tolist()
    options = dict(tokenizer=tokenizer, thinks=True, keeps_thoughts=keeps)
    _, prompt = talk(["Hi", "And?"], [(turn, "stop")] * 2, monkeypatch, **options)
    assert tokenizer.decode(prompt) == f"[gMASK]<sop><|user|>Hi<|assistant|>{first}<|user|>And?<|assistant|><think>"


def test_prompts_state_the_effort(monkeypatch):
    tokenizer = load_tokenizer("builtin", "GLM-5.2")
    turn = tokenizer.encode_with_special("why</think>A<|user|>").tolist()
    *_, prompt = talk(
        ["Hi", "And?"], [(turn, "stop")] * 2, monkeypatch, tokenizer=tokenizer, thinks=True, effort="high"
    )
    opening = "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>Hi<|assistant|><think></think>A"
    assert tokenizer.decode(prompt) == f"{opening}<|user|>And?<|assistant|><think>"


def test_a_conversation_has_the_prompts_of_the_format(monkeypatch, capsys):
    """Thoughts of earlier turns are left out, those of the turn with the calls stay, and results come from the user."""
    reasoned, called, last = MESSAGES[0], MESSAGES[2], MESSAGES[1]
    observation, user = TOKENIZER.special["<|observation|>"], TOKENIZER.special["<|user|>"]
    turns = [
        ([*ids_of(reasoned), user], "stop"), ([*ids_of(called), observation], "stop"), ([*ids_of(last), user], "stop"),
        (UserError, None), ([*ids_of(last)[:3]], "length"),
    ]  # fmt: skip
    lines = ["Hi", "When?", "1", "2", "too long", "/new", " /etc", "/exit", "D"]
    prompts = talk(lines, turns, monkeypatch, system="Be brief.", tools=TOOLS, thinks=True)

    def prompt(*messages):
        return chat_prompt(TOKENIZER, [Message("system", "Be brief."), *messages], tools=TOOLS, thinking=True)

    first = [Message("user", "Hi"), reasoned, Message("user", "When?")]
    results = [Message("tool", "1"), Message("tool", "2")]
    assert prompts == [
        prompt(first[0]),
        prompt(*first),
        prompt(*first, called, *results),
        prompt(Message("user", " /etc")),
    ]
    assert "why" not in TOKENIZER.decode(prompts[1]) and "look" in TOKENIZER.decode(prompts[2])
    # What was sampled stays as it is, byte by byte, when results follow it.
    between = chat_reply(TOKENIZER, [Message("tool", "1")], thinking=True)[1:]
    assert prompts[2][: len(prompts[1]) + len(turns[1][0])] == prompts[1] + turns[1][0]
    assert prompts[2][len(prompts[1]) + len(turns[1][0]) :][: len(between) - 1] == between[:-1]
    said = capsys.readouterr()
    assert "call: now(zone=é</arg_value>" in said.out and "why 中文 🙂" in said.out and "call: now()" in said.out
    assert "--max-new-tokens 5: too long" in said.err
    assert "cut off after --max-new-tokens 100" in said.err


def test_ctrl_c_stops_an_answer_or_the_input_and_not_the_chat(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    called = MESSAGES[3]
    turns = [
        (ids_of(MESSAGES[1], False), "abort"),
        ([*ids_of(called), TOKENIZER.special["<|observation|>"]], "stop"),
        (TOKENIZER.encode("\x1b[2Jbye").tolist(), "stop"),
    ]
    lines = [KeyboardInterrupt, "A", "B", KeyboardInterrupt, "C"]
    prompts = talk(lines, turns, monkeypatch, thinks=True)
    # The first answer is kept as far as it was written; the message whose call got no result is left out.
    kept = TOKENIZER.decode(turns[0][0][:1]).strip()
    messages = [Message("user", "A"), Message("assistant", kept), Message("user", "C")]
    assert prompts[2] == chat_prompt(TOKENIZER, messages, thinking=True)
    said = capsys.readouterr()
    assert "[stopped]" in said.err and "\x1b" not in said.out and "[2Jbye" in said.out
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a random model with room for long answers."""
    shape = resolve_shape(ModelConfig(flavor="debug", shape={"num_hidden_layers": 2, "max_position_embeddings": 65536}))
    torch.manual_seed(0)
    model = Transformer(shape)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        torch.nn.init.normal_(tensor, 1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    config = config_of(shape, None, eos_ids=stop_ids(TOKENIZER), dtype="float32")
    options = ExportOptions(other_files=files_beside_weights(TOKENIZER, max_length=64))
    tensors = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    folder = tmp_path_factory.mktemp("chat") / "hf"
    export_weights(folder, shape, config, tensors, options=options)
    return str(folder)


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str):
        self._here, there = os.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=there, stdout=there, stderr=there, close_fds=True
        )
        os.close(there)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._here, text.encode())

    def wait_for(self, text: str, since: int = 0, press: str = "") -> int:
        """Wait until the terminal shows a text; returns the place behind it. ``press`` is typed each second: Python
        notices a signal that comes just before it waits for input with the next one only."""
        end = time.monotonic() + HANG_SECONDS
        while text not in self.seen[since:]:
            assert time.monotonic() < end, self.seen[-2000:]
            if not select.select([self._here], [], [], 1)[0]:
                self.type(press)
            else:
                try:
                    self.seen += os.read(self._here, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    raise AssertionError(self.seen[-2000:]) from None
        return self.seen.index(text, since) + len(text)


@pytest.mark.slow
def test_a_terminal_streams_an_answer_which_ctrl_c_stops_and_sigterm_ends_it(model):
    command = [sys.executable, "-m", "glm46", "generate", "--model", model, "--chat", "--max-new-tokens", "60000"]
    terminal = Terminal(*command)
    at = terminal.wait_for("> ")
    terminal.type("Hi\n")
    at = terminal.wait_for("Hi", at)
    terminal.wait_for("\n", at + 40)  # more than the echo: the answer is shown while it is written
    terminal.type("\x03")
    at = terminal.wait_for("[stopped]", at)
    at = terminal.wait_for("> ", at)
    terminal.type("half a line\x03")  # at the prompt Ctrl-C discards the line
    at = terminal.wait_for("> ", at, press="\x03")
    terminal.process.terminate()
    assert terminal.process.wait(HANG_SECONDS) == 128 + signal.SIGTERM


def test_mistakes_are_named_before_a_model_is_read(tmp_path, capsys, monkeypatch):
    command = ["generate", "--model", str(tmp_path), "--chat"]
    file = tmp_path / "tools.json"
    for content, words in (
        (None, "No such file"), ("{", "Expecting"), ('{"a": 1}', "list of objects"),
        ('[{"type": "function"}]', "1 of 1"),
    ):  # fmt: skip
        if content is not None:
            file.write_text(content)
        assert main([*command, "--tools", str(file)]) == 2
        error = capsys.readouterr().err
        assert f"--tools {file}" in error and words in error and "give a list such as" in error
    file.write_text(json.dumps(TOOLS))
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x", "--tools", str(file)]) == 2
    assert "--tools belong to --chat" in capsys.readouterr().err
    assert main(["generate", "--model", str(tmp_path)]) == 2
    assert "--prompt" in capsys.readouterr().err
    for several in (["--nproc", "2"], []):
        monkeypatch.setenv("NGPU", "3")
        assert main([*command, *several]) == 2
        error = capsys.readouterr().err
        assert "--chat without --prompt" in error and "one process" in error and "NGPU" in error


@pytest.mark.slow
def test_tools_are_shown_to_the_model_with_a_prompt_too(model, tmp_path, monkeypatch, capsys):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    seen = []
    kept = lambda prompt, *rest: seen.append(list(prompt)) or Continuation(prompt, *rest)  # noqa: E731
    monkeypatch.setattr("glm46.operate.models.generate_ranks.Continuation", kept)
    command = ["generate", "--model", model, "--chat", "--tools", str(file), "--max-new-tokens", "1"]
    assert main([*command, "--prompt", "Hi"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert main(command) == 0
    want = chat_prompt(TOKENIZER, [Message("user", "Hi")], tools=TOOLS, thinking=False)
    assert seen == [want, want]


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_refused_and_the_chat_goes_on(model, monkeypatch, capsys):
    command = ["generate", "--model", model, "--chat", "--dtype", "float32", "--max-new-tokens", "12"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Hi\n/new\n{'word ' * 70000}\nAnd then?\n/exit\n"))
    assert main(command) == 0
    output = capsys.readouterr()
    assert output.err.count("error: ") == 1 and "65536" in output.err and output.out.strip()
