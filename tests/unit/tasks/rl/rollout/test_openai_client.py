"""The endpoint by OpenAI's own client: answers, streams, tools, and requests that the client sends again."""

import asyncio
import json
from collections.abc import Callable

import pytest

from glm46.storage.data.tokenizer import load_tokenizer
from tests.unit.tasks.rl.rollout.served_episode import Served, tokens_of

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")

CALL = "\nadding<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "A sum", "parameters": PARAMETERS}}
ASKED = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}


def run_client(of: Served, use: Callable, **options):
    """The result of ``use(client)``, which runs in a thread."""

    async def run():
        async with of:
            with openai.OpenAI(api_key=of.episode.key, base_url=of.url, **options) as client:
                return await asyncio.to_thread(use, client)

    return asyncio.run(run())


def check_trained_once(of: Served, turns: list[list[int]]) -> None:
    """All generated tokens, and no others, are labels of one conversation."""
    (completion,) = of.episode.session.samples()
    edges = [0, *(edge for reply in completion.replies for edge in reply), len(completion.tokens)]
    spans = zip(edges[::2], edges[1::2], strict=True)
    assert [completion.tokens[start:end] for start, end in spans] == turns and len(of.generated) == len(turns)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_cycle_of_a_tool_is_one_conversation_in_a_stream_too(is_stream):
    turns = [tokens_of(CALL), tokens_of("\nDone")]
    of = Served(turns.copy())

    def use(client):
        def create(**table):
            if not is_stream:
                return client.chat.completions.create(**table)
            with client.chat.completions.stream(**table, stream_options={"include_usage": True}) as stream:
                return stream.get_final_completion()

        first = create(**ASKED)
        message = first.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "6"}
        said = message.model_dump(
            exclude_none=True, exclude={"tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}
        )
        return first, create(**ASKED | {"messages": [*ASKED["messages"], said, result]}), client.models.list()

    first, second, models = run_client(of, use, max_retries=0)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "adding"
    assert (choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments) == (
        "add", '{"n": 5}'
    )  # fmt: skip
    assert second.choices[0].message.content == "Done" and second.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens == len(turns[0])
    assert second.usage.prompt_tokens == len(of.generated[1].prompt)
    assert [one.id for one in models] == ["policy"]
    check_trained_once(of, turns)


class Dropped(Served):
    """Closes the first connections behind their requests: while the turn is generated, or when its answer is ready."""

    def __init__(self, turns: list[list[int]], *, is_generated: bool, count: int):
        super().__init__(turns)
        self._is_generated, self._left, self._answer = is_generated, count, self.endpoint._answer
        self.endpoint._answer, self._held = self._answer_or_drop, []

    def ask(self, asked) -> None:
        if self._is_generated or not self._left:
            super().ask(asked)
        else:
            self._held += asked

    async def _answer_or_drop(self, *request) -> bytes:
        answer = asyncio.ensure_future(self._answer(*request))
        if not self._left:
            super().ask(self._held)
            self._held.clear()
            return await answer
        if self._is_generated:
            await answer
        else:
            await asyncio.sleep(0)  # the turn is asked for
        self._left -= 1
        raise ConnectionResetError


@pytest.mark.parametrize("is_stream", [False, True])
def test_glm_52_finds_a_deferred_tool_and_calls_it(is_stream):
    """Each prompt is what the template renders, with the thoughts of the steps before."""
    tokenizer = load_tokenizer("builtin", "GLM-5.2")
    find = {"type": "function", "function": {"name": "search_tools", "parameters": {}}}
    deferred = {"type": "function", "function": TOOL["function"] | {"defer_loading": True}}
    turns = [
        "I look.</think><tool_call>search_tools<arg_key>query</arg_key><arg_value>sum</arg_value></tool_call>",
        " There it is.</think>Adding.<tool_call>add<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
        "</think>Done.",
    ]
    ends = ("<|observation|>", "<|observation|>", "<|user|>")
    generated = [tokenizer.encode_with_special(f"{turn}{end}").tolist() for turn, end in zip(turns, ends, strict=True)]
    of = Served(generated.copy(), thinking=True, tokenizer=tokenizer, effort="high")
    results = [[{"type": "tool_reference", "name": "add"}], "6"]

    def use(client):
        messages = [{"role": "user", "content": "Hello"}]
        said = []
        for result in (*results, None):
            table = {"model": "any", "tools": [find, deferred], "messages": messages}
            if is_stream:
                chunks = list(client.chat.completions.create(**table, stream=True))
                said.append(chunks[0].choices[0].delta)
            else:
                said.append(client.chat.completions.create(**table).choices[0].message)
            calls = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()}
                for call in said[-1].tool_calls or ()
            ]
            answer = {"role": "assistant", "content": said[-1].content, "tool_calls": calls}
            answer["reasoning_content"] = said[-1].reasoning_content
            messages += [answer, {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}] if calls else []
        return said

    said = run_client(of, use, max_retries=0)
    arguments = [call.function.arguments for message in said for call in message.tool_calls or ()]
    assert arguments == ['{"query": "sum"}', '{"n": 5}'], "by the type in the description that was deferred"
    assert [message.reasoning_content for message in said] == ["I look.", " There it is.", ""]
    assert [message.content for message in said] == ["", "Adding.", "Done."]
    texts = [tokenizer.decode(request.prompt) for request in of.generated]
    assert texts[0].startswith("[gMASK]<sop><|system|>Reasoning Effort: High<|system|>\n# Tools")
    shown = f"<tools>\n{json.dumps(TOOL['function'])}\n</tools>"
    for number, response in enumerate([shown, "6"]):
        reply = f"<|observation|><tool_response>{response}</tool_response><|assistant|><think>"
        assert texts[number + 1] == f"{texts[number]}{turns[number]}{reply}"
    check_trained_once(of, generated)


@pytest.mark.slow
@pytest.mark.parametrize("is_generated", [False, True])
def test_a_request_that_a_dropped_connection_repeats_has_the_same_reply(is_generated):
    turns = [tokens_of("\nHi")]
    of = Dropped(turns.copy(), is_generated=is_generated, count=2)

    def use(client):
        return [client.chat.completions.create(**ASKED) for _ in range(2)]

    answers = run_client(of, use, max_retries=2)
    assert [one.choices[0].message.content for one in answers] == ["Hi", "Hi"] and of.episode.requests == 4
    assert answers[0].id == answers[1].id
    check_trained_once(of, turns)


def test_refusals_are_errors_that_the_client_does_not_repeat():
    of = Served([])

    def use(client):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            create(**ASKED | {"messages": [{"role": "user", "content": "much " * 2100}]})
        assert caught.value.code == "context_length_exceeded" and "raise rollout.max_new_tokens" in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="n: not possible"):
            create(**ASKED, n=2)
        with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
            client.with_options(api_key="other").chat.completions.create(**ASKED)

    run_client(of, use, max_retries=5)
    assert of.episode.requests == 2 and not of.generated
