"""Anthropic's messages API of the endpoint, by Anthropic's own client; and bodies that nobody's client sends."""

import asyncio
import json

import pytest

from tests.unit.tasks.rl.rollout.served_episode import TOKENIZER, Served, tokens_of

TOOL = {
    "name": "add",
    "description": "A sum",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
CALL = "<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
THINKS = "\n<think>Hm.</think>\nadding" + CALL.format(5) + CALL.format(6)
ASKED = {"model": "any", "max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}]}


def run_client(use, turns: list[str], *, thinking: bool = False):
    """The result of ``use(client)`` in a thread, and the episode."""
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic is not installed")

    async def whole():
        async with Served([tokens_of(turn) for turn in turns], thinking=thinking) as of:
            url = of.url.removesuffix("/v1")
            with anthropic.Anthropic(api_key=of.episode.key, base_url=url, max_retries=0) as client:
                return await asyncio.to_thread(use, client), of

    return asyncio.run(whole())


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_cycle_of_thoughts_calls_and_results_is_one_conversation(is_stream):
    def use(client):
        def create(**table):
            if not is_stream:
                return client.messages.create(**table)
            with client.messages.stream(**table) as stream:
                return stream.get_final_message()

        table = ASKED | {"system": "Be brief.", "tools": [TOOL]}
        first = create(**table)
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": f"r{call.input['n']}"}],
            }
            for call in reversed(calls)
        ]
        said = [*results, {"type": "text", "text": "Go on."}]
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        answer = {"role": "assistant", "content": blocks}
        table["messages"] = [*ASKED["messages"], answer, {"role": "user", "content": said}]
        counted = client.messages.count_tokens(**{key: table[key] for key in ("model", "messages", "system", "tools")})
        return first, create(**table), counted.input_tokens

    (first, second, counted), of = run_client(use, [THINKS, "\n<think>Well.</think>\nDone"], thinking=True)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[0].thinking == "Hm." and first.content[1].text == "adding"
    assert [block.input for block in first.content[2:]] == [{"n": 5}, {"n": 6}] and first.stop_reason == "tool_use"
    assert second.stop_reason == "end_turn" and second.content[-1].text == "Done" and second.model == "any"
    assert first.usage.output_tokens == len(tokens_of(THINKS))
    assert second.usage.input_tokens == counted == len(of.generated[1].prompt)
    (sample,) = of.episode.session.samples()
    text = TOKENIZER.decode(of.generated[1].prompt)
    assert sample.prompt == of.generated[0].prompt and len(sample.completion.replies) == 1, "one conversation"
    assert text.index("r5") < text.index("r6\nGo on.") and "Be brief." in text and '"name": "add"' in text


def test_what_anthropic_refuses_and_what_is_cut_is_told_in_its_words():
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic is not installed")

    def use(client):
        long = [{"role": "user", "content": "much " * 2100}]
        faults = []
        for table in (ASKED | {"messages": long}, ASKED | {"stop_sequences": ["x"]}):
            with pytest.raises(anthropic.BadRequestError) as caught:
                client.messages.create(**table)
            faults.append(caught.value.body["error"]["message"])
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(**ASKED)
        return faults

    faults, _ = run_client(use, [])
    assert faults[0].startswith("prompt is too long: ") and faults[1].startswith("stop_sequences: not possible")


@pytest.mark.parametrize(("said", "table"), [
    ("messages: not a list", {}), ("messages: not a list", {"messages": [1]}),
    ("content: not a list", {"messages": [{"role": "user", "content": 5}]}),
    ("content: not a list", {"messages": [{"role": "assistant"}]}),
    ("is not a block of text", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("is not a block of text", {"messages": [{"role": "user", "content": [{"type": "text", "text": []}]}]}),
    ("no block of the policy", {"messages": [{"role": "assistant", "content": [{"type": ["x"]}]}]}),
    ("not behind a tool", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": {}}]}]}),
    ("neither the user's", {"messages": [*ASKED["messages"], {"role": "assistant", "content": "Sure"}]}),
    ("unknown role", {"messages": [{"role": {"a": 1}, "content": "x"}]}),
    ("arguments are not", {"messages": [*ASKED["messages"], {"role": "assistant", "content": [
        {"type": "tool_use", "id": [1], "name": "add", "input": [1]}]}, *ASKED["messages"]]}),
    ("no name or no input_schema", ASKED | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools: not a list", ASKED | {"tools": {"name": 1}}),
    ("tool_choice: not possible", ASKED | {"tool_choice": {"type": "any"}}),
    ("output_config.format: not possible", ASKED | {"output_config": {"format": {"type": "json_schema"}}}),
    ("max_tokens", ASKED | {"max_tokens": "many"}),
    ("neither text", ASKED | {"system": {"a": 1}}),
    ("not JSON", b"[" * 100_000), ("not an object", []),
])  # fmt: skip
def test_hostile_bodies_are_refused(said, table):
    async def run():
        async with Served([]) as of:
            found = [await of.send(table, what) for what in ("messages", "messages/count_tokens")]
            return found, await of.send(b"", "models", "GET")

    found, after = asyncio.run(run())
    for status, content in found:
        told = json.loads(content)
        assert status == 400 and told["type"] == "error" and said in told["error"]["message"], content
    assert after[0] == 200, "the endpoint goes on"
