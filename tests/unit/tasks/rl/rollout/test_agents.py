"""What agents do, by OpenAI's own client: they give up, run calls at the same time, edit, compact and stream."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable

import pytest

from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.rollout import http_requests
from glm46.tasks.rl.rollout.records import Completion, Request
from glm46.tasks.rl.rollout.session import NoRoom, Session
from tests.processes import HANG_SECONDS
from tests.unit.tasks.rl.rollout.served_episode import TOKENIZER, Served, tokens_of

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")

GLM_47 = load_tokenizer("builtin", "GLM-4.7")
HELLO = [{"role": "user", "content": "Hello"}]
CALL = "<tool_call>{}\n<arg_key>n</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


def tool(name: str, kind: str = "number") -> dict:
    schema = {"type": "object", "properties": {"n": {"type": kind}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


class Slow(Served):
    """Generates the first turn when `release` is called, and other turns at once."""

    def __init__(self, turns: list[list[int]], **options):
        super().__init__(turns, **options)
        self._held, self.is_asked = [], asyncio.Event()

    def ask(self, asked) -> None:
        if self.generated or self._held:
            super().ask(asked)
        else:
            self._held += asked
            self._first = self.turns.pop(0)
            self.is_asked.set()

    def release(self) -> None:
        self.turns.insert(0, self._first)
        super().ask(self._held)


def run_client(served: Served, use: Callable, **options):
    """The result of ``use(client)``, which runs in a thread."""

    async def run():
        async with served:
            with openai.OpenAI(api_key=served.episode.key, base_url=served.url, max_retries=0, **options) as client:
                return await asyncio.to_thread(use, client)

    return asyncio.run(run())


def create(client, messages: list, **table):
    return client.chat.completions.create(model="policy", messages=messages, **table)


def test_a_turn_whose_client_gave_up_is_neither_last_nor_trained_until_somebody_gets_it():
    async def run():
        async with Slow([tokens_of("\nabandoned"), tokens_of("\nwanted")]) as served:
            key, session = served.episode.key, served.episode.session
            async with openai.AsyncOpenAI(api_key=key, base_url=served.url, max_retries=0) as client:
                with pytest.raises(openai.APITimeoutError):
                    await create(client, HELLO, timeout=0.3)
                wanted = await create(client, [{"role": "user", "content": "Another way"}])
                served.release()
                while len(session.answered) < 2:
                    await asyncio.sleep(0.01)
                before = session.samples(), session.conversation()
                again = await create(client, HELLO)
                return wanted, before, again, session.samples(), len(served.generated)

    wanted, (samples, messages), again, later, generated = asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))
    assert wanted.choices[0].message.content == messages[-1]["content"] == "wanted"
    (sample,) = samples
    assert TOKENIZER.decode(sample.tokens) == "\nwanted<|user|>"
    assert again.choices[0].message.content == "abandoned" and generated == 2, "a later request gets the same turn"
    assert [TOKENIZER.decode(one.tokens) for one in later] == ["\nabandoned<|user|>", "\nwanted<|user|>"]


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_is_closed_or_reset_is_a_client_that_has_gone(is_reset):
    async def run():
        async with Slow([tokens_of("\nabandoned")]) as served:
            address, _, path = served.url.removeprefix("http://").partition("/")
            _, writer = await asyncio.open_connection(*address.split(":"))
            body = json.dumps({"messages": HELLO}).encode()
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {served.episode.key}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await served.is_asked.wait()
            if is_reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            session = served.episode.session
            while not any(turn.is_withdrawn for turn in session.turns):
                await asyncio.sleep(0.01)
            served.release()
            while not session.answered:
                await asyncio.sleep(0.01)
            return session.samples()

    assert asyncio.run(asyncio.wait_for(run(), HANG_SECONDS)) == []


def test_a_turn_that_is_only_the_way_to_a_delivered_one_is_not_trained():
    session = Session(
        TOKENIZER,
        Request(chat_prompt(TOKENIZER, [Message("user", "Hello")], thinking=False), 3, 500),
        thinking=False,
        most_turns=4,
    )
    messages = [Message("user", "Hello")]
    for number, text in enumerate(("\none", "\ntwo", "\nthree")):
        turn = session.begin(messages, ())
        tokens = tokens_of(text)
        session.end(turn, Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens), None))
        if number == 1:
            session.withdraw(turn)
        messages = [*messages, turn.answer, Message("user", "Go on")]
    (completion,) = session.samples()
    edges = [0, *(edge for reply in completion.replies for edge in reply), len(completion.tokens)]
    spans = zip(edges[::2], edges[1::2], strict=True)
    trained = [TOKENIZER.decode(completion.tokens[start:end]) for start, end in spans]
    assert [text for text in trained if text] == ["\none<|user|>", "\nthree<|user|>"]


def test_a_stream_begins_at_once_and_gets_comments_that_the_client_does_not_see(monkeypatch):
    monkeypatch.setattr(http_requests, "COMMENT_SECONDS", 0.05)

    async def run():
        async with Slow([tokens_of("\nHi")]) as served:
            key = served.episode.key
            async with openai.AsyncOpenAI(api_key=key, base_url=served.url, max_retries=0) as client:
                # The client gives up if no byte comes within this time.
                stream = await create(client, HELLO, stream=True, timeout=openai.Timeout(5.0, read=1.0))
                asyncio.get_running_loop().call_later(2.5, served.release)
                return [chunk async for chunk in stream]

    chunks = asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))
    assert chunks[0].choices[0].delta.content == "Hi" and chunks[-1].choices[0].finish_reason == "stop"


def test_an_episode_that_ends_while_it_streams_is_an_error_of_the_client():
    async def run():
        async with Slow([tokens_of("\nHi")]) as served:
            key = served.episode.key
            async with openai.AsyncOpenAI(api_key=key, base_url=served.url, max_retries=0) as client:
                stream = await create(client, HELLO, stream=True)
                served.drop = lambda asked: None
                served.endpoint.close(served.episode)
                with pytest.raises(openai.APIError, match="this episode has ended"):
                    _ = [chunk async for chunk in stream]

    asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


def test_results_are_bound_to_parallel_calls_by_their_ids():
    turns = [tokens_of(CALL.format("weather", 1) + CALL.format("clock", 105.0)), tokens_of("\nDone")]
    served = Served(turns)

    def use(client):
        tools = [tool("weather"), tool("clock")]
        said = create(client, HELLO, tools=tools).choices[0].message
        first, second = said.tool_calls
        assert second.function.arguments == '{"n": 105.0}'
        echo = said.model_dump(exclude_none=True)
        echo["tool_calls"][1]["function"]["arguments"] = '{"n":105}'  # as JavaScript writes it
        results = [
            {"role": "tool", "tool_call_id": second.id, "content": "14:05"},
            {"role": "tool", "tool_call_id": first.id, "content": None},
        ]
        create(client, [*HELLO, echo, *results], tools=tools)
        with pytest.raises(openai.BadRequestError, match="tool_call_id 'other'"):
            create(client, [*HELLO, echo, results[0] | {"tool_call_id": "other"}], tools=tools)

    run_client(served, use)
    responses = "<tool_response>\n\n</tool_response>\n<tool_response>\n14:05\n</tool_response>"
    assert responses in TOKENIZER.decode(served.generated[1].prompt)
    assert len(served.episode.session.samples()) == 1, "the exact tokens of the turn are continued"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_arguments_are_json_that_every_client_reads(text):
    def refuse(name: str):
        raise ValueError(name)

    def use(client):
        (call,) = create(client, HELLO, tools=[tool("f")]).choices[0].message.tool_calls
        return json.loads(call.function.arguments, parse_constant=refuse)

    assert run_client(Served([tokens_of(CALL.format("f", text))]), use) == {"n": text}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallel_tool_calls", False),
        ("reasoning_effort", "none"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("repetition_penalty", 1.1),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("top_logprobs", 5),
        ("temperature", 0.2),
        ("a key of tomorrow\n", 1),
    ],
)
def test_a_key_without_effect_is_said_once(name, value):
    served = Served([tokens_of("\nHi")])
    run_client(served, lambda client: [create(client, HELLO, extra_body={name: value}) for _ in range(2)])
    (line,) = served.said
    assert repr(name)[1:-1] in line and "has no effect" in line and "\n" not in line


def test_keys_that_ask_for_nothing_are_not_said_and_names_do_not_fill_the_log():
    served = Served([tokens_of("\nHi")])
    neutral = {"parallel_tool_calls": True, "n": 1, "best_of": 1, "user": "me", "seed": None, "tool_choice": "auto"}

    def use(client):
        create(client, HELLO, extra_body=neutral)
        assert not served.said
        create(client, HELLO, extra_body={f"key{number}": 1 for number in range(1000)})

    run_client(served, use)
    assert len(served.said) == 50


def test_no_tool_call_is_given_where_none_is_asked_for_and_the_window_is_in_the_card():
    served = Served([tokens_of(f"\nA summary.{CALL.format('f', 1)}")])

    def use(client):
        return create(client, HELLO, tools=[tool("f")], tool_choice="none"), client.models.list()

    answer, (model,) = run_client(served, use)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("A summary.", None, "stop")
    assert '"name": "f"' in TOKENIZER.decode(served.generated[0].prompt)
    hello = chat_prompt(TOKENIZER, [Message("user", "Hello")], thinking=False)
    assert model.max_model_len == len(hello) + 2000


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_of_the_key_may_be_in_any_case(scheme):
    async def run():
        async with Served([]) as served:
            return await served.send(b"", "models", "GET", Authorization=f"{scheme} {served.episode.key}")

    assert asyncio.run(run())[0] == 200


def test_an_agent_that_compacts_and_goes_on_has_room_again():
    served = Served([tokens_of("\nA summary."), tokens_of("\n42")])

    def use(client):
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, [{"role": "user", "content": "much " * 2100}])
        assert caught.value.code == "context_length_exceeded" and served.episode.no_room
        create(client, [{"role": "user", "content": "Summary: little. The result?"}])

    run_client(served, use)
    assert not served.episode.no_room


def test_a_prompt_that_is_longer_than_any_conversation_is_refused_before_it_is_encoded(monkeypatch):
    served = Served([])

    def use(client):
        monkeypatch.setattr(TOKENIZER, "encode", lambda text: pytest.fail("encoded"))
        for content in (" " * 7_000_000, "a" * 1_000_000):
            with pytest.raises(openai.BadRequestError, match="tokens or more") as caught:
                create(client, [{"role": "user", "content": content}])
            assert caught.value.code == "context_length_exceeded"
        result = [
            *HELLO,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": json.dumps({"n": " " * 7_000_000})},
                    }
                ],
            },
        ]
        with pytest.raises(openai.BadRequestError, match="tokens or more"):
            create(client, [*result, {"role": "tool", "tool_call_id": "c", "content": "1"}])

    run_client(served, use)


def generated(text: str, *, end: str = "<|user|>") -> list[int]:
    return [*GLM_47.encode_with_special(text).tolist(), *([GLM_47.special[end]] if end else [])]


def prompts_of(turns: list[str], use: Callable, **options) -> tuple[list[str], Served]:
    """The prompts that the policy of GLM-4.7 reads when a client is used."""
    served = Served([generated(turn) for turn in turns], tokenizer=GLM_47, thinking=True, **options)
    run_client(served, use)
    return [GLM_47.decode(request.prompt) for request in served.generated], served


@pytest.mark.parametrize("sends_thoughts", [True, False])
def test_a_thought_that_was_cut_is_closed_in_the_next_prompt_as_the_template_does(sends_thoughts):
    """The expected text is the output of GLM-4.7's template with clear_thinking = false."""

    def use(client):
        said = create(client, HELLO).choices[0].message
        assert (said.content, said.reasoning_content) == ("", "let me add them one")
        echo = {"role": "assistant", "content": ""}
        echo |= {"reasoning_content": said.reasoning_content} if sends_thoughts else {}
        create(client, [*HELLO, echo, {"role": "user", "content": "Go on."}])

    prompts, served = prompts_of(["let me add them one", "so</think>42"], use, keeps_thoughts=True)
    opening = "[gMASK]<sop><|user|>Hello<|assistant|>"
    assert prompts[1] == f"{opening}<think>let me add them one</think><|user|>Go on.<|assistant|><think>"
    assert len(served.episode.session.samples()) == 2


def test_an_empty_open_thought_is_closed_where_thoughts_are_removed():
    served = Served(
        [[*TOKENIZER.encode_with_special("\n<think>").tolist(), TOKENIZER.special["<|user|>"]], tokens_of("\nHi")],
        thinking=True,
    )

    def use(client):
        create(client, HELLO)
        answer = {"role": "assistant", "content": ""}
        create(client, [*HELLO, answer, {"role": "user", "content": "Go on."}])

    run_client(served, use)
    text = TOKENIZER.decode(served.generated[1].prompt)
    assert text == "[gMASK]<sop><|user|>\nHello<|assistant|>\n<think></think><|user|>\nGo on.<|assistant|>"


def test_an_edited_history_keeps_its_thoughts_where_thoughts_are_kept():
    """The expected text is the output of GLM-4.7's template with clear_thinking = false."""

    def use(client):
        create(client, HELLO)
        first = {"role": "assistant", "content": "A1", "reasoning_content": "T1"}
        second = {"role": "assistant", "content": "A2", "reasoning_content": "T2"}
        edited, last = ({"role": "user", "content": text} for text in ("Q2, edited", "Q3"))
        create(client, [*HELLO, first, edited, second, last])

    prompts, served = prompts_of(["T1</think>A1", "so</think>42"], use, keeps_thoughts=True)
    assert prompts[1] == (
        "[gMASK]<sop><|user|>Hello<|assistant|><think>T1</think>A1<|user|>Q2, edited<|assistant|><think>T2</think>A2"
        "<|user|>Q3<|assistant|><think>"
    )
    assert len(served.episode.session.samples()) == 1, "it continues the tokens of the first turn"


def test_another_request_may_follow_an_answer_directly():
    served = Served([tokens_of("\none"), tokens_of("\ntwo")])

    def use(client):
        said = create(client, HELLO).choices[0].message
        create(client, [*HELLO, {"role": "assistant", "content": said.content}])

    run_client(served, use)
    text = TOKENIZER.decode(served.generated[1].prompt)
    assert text.endswith("\none<|assistant|>\n<think></think>")
    assert len(served.episode.session.samples()) == 1


def test_no_room_is_still_said_with_its_remedy():
    prompt = chat_prompt(TOKENIZER, [Message("user", "Hello")], thinking=False)
    session = Session(TOKENIZER, Request(prompt, 3, 10), thinking=False, most_turns=2)
    with pytest.raises(NoRoom, match=r"rollout\.max_new_tokens"):
        session.begin([Message("user", "a much longer question than there is room for, in all")], ())
