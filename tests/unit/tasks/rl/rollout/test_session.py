"""Sessions: tokens of turns as the chat format has them, and samples in which each generated token is trained once."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.chat_pieces import listed_tools
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.conversation import Message, ToolCall, parse_prompt
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.packing import PackShape, build_batch, items_of
from glm46.tasks.rl.rollout.records import Completion, Episode, Request
from glm46.tasks.rl.rollout.session import NoRoom, Session
from glm46.tasks.rl.rollout.session_samples import min_tokens
from glm46.tasks.rl.samples import Samples, to_samples

TOKENIZER = load_tokenizer("builtin")
MARKERS = {role: TOKENIZER.special[f"<|{role}|>"] for role in ("user", "observation")}
TAGS = re.compile(r"(</?(?:think|tool_call|arg_key|arg_value)>)")
QUESTION = Message("user", "12 * 3?")
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}}}},)


def session(
    *, thinking: bool = False, room: int = 100_000, most_turns: int = 100, keeps: bool = False, **more
) -> Session:
    prompt = chat_prompt(TOKENIZER, [QUESTION], thinking=thinking)
    options = {"thinking": thinking, "most_turns": most_turns, "keeps_thoughts": keeps}
    return Session(TOKENIZER, Request(prompt, 5, room), **options, **more)


class Policy:
    """Generates given texts; the log-probability of each token is another number."""

    def __init__(self):
        self.generated: dict[float, int] = {}

    def answer(self, of: Session, messages: list[Message], text: str, end: str = "user", tools=()) -> Message:
        turn = of.begin(messages, tools)
        if not turn.is_answered:
            tokens = []
            for part in filter(None, TAGS.split(text)):
                tokens += [TOKENIZER.special[part]] if TAGS.match(part) else TOKENIZER.encode(part).tolist()
            tokens += [MARKERS[end]] if end in MARKERS else []
            logprobs = [-1.0 - len(self.generated) - n for n in range(len(tokens))]
            self.generated |= dict(zip(logprobs, tokens, strict=True))
            finish = "stop" if end in MARKERS else "length"
            of.end(turn, Completion(tokens, logprobs, finish, [3] * len(tokens), None))
        return turn.answer


def check_trained_once(of: Session, policy: Policy) -> None:
    """Each generated token is a label once; and what the model read before each turn is its prompt."""
    samples = of.samples()
    rollout, read = rollout_of(samples), set()
    targets = rollout.targets[rollout.targets >= 0].tolist()
    assert Counter(zip(rollout.logprobs.tolist(), targets, strict=True)) == Counter(policy.generated.items())
    for number, completion in enumerate(samples):
        whole = tuple(rollout.tokens[slice(*rollout.bounds(number))].tolist())
        read |= {whole[:n] for n in range(len(completion.prompt), len(whole) + 1)}
        assert all(end <= len(completion.tokens) for _, end in completion.replies)
    assert all(tuple(of.request(turn).prompt) in read for turn in of.answered)


def rollout_of(samples: list) -> Samples:
    end = Episode(samples, group=0, reward=1.0, parts={"exact": 1.0})
    return to_samples([end], ["exact"], step=0, first_prompt=0, next_prompt=1)


def test_a_tool_cycle_is_one_sample_in_the_tokens_of_the_format():
    of, policy = session(), Policy()
    call = "\n<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    asked = [QUESTION]
    first = policy.answer(of, asked, call, "observation", TOOLS)
    assert first.tool_calls == (ToolCall("add", {"n": 5}),), "of the type that the tool describes"
    asked += [first, Message("tool", "36")]
    policy.answer(of, asked, "\n36", "user", TOOLS)
    assert of.request(of.turns[1]).prompt == chat_prompt(TOKENIZER, asked, tools=TOOLS, thinking=False)
    (sample,) = of.samples()
    assert not sample.contradicted
    check_trained_once(of, policy)


@pytest.mark.parametrize(("keeps", "samples"), [(False, 2), (True, 1)])
def test_a_users_message_behind_a_thought_begins_another_sample_unless_thoughts_are_kept(keeps, samples):
    of, policy = session(thinking=True, keeps=keeps), Policy()
    first = policy.answer(of, [QUESTION], "\n<think>let me see</think>\n36")
    assert (first.reasoning, first.content) == ("let me see", "36")
    policy.answer(of, [QUESTION, first, Message("user", "Sure?")], "\n<think>yes</think>\n36")
    assert len(of.samples()) == samples
    check_trained_once(of, policy)


@pytest.mark.parametrize(("flavor", "text", "samples"), [
    ("GLM-4.6", "\n36", 1), ("GLM-4.7", "</think>36", 2), ("GLM-5.1", "</think>36", 2), ("GLM-5.2", "</think>36", 1),
])  # fmt: skip
def test_a_turn_without_a_thought_goes_on_unless_its_tags_go(flavor, text, samples):
    """GLM-4.7 and 5.1 write the place of an opened thought otherwise in front of a user's message."""
    tokenizer, policy = load_tokenizer("builtin", flavor), Policy()
    first = Request(chat_prompt(tokenizer, [QUESTION], thinking=True), 5, 1000)
    of = Session(tokenizer, first, thinking=True, most_turns=2)
    answer = policy.answer(of, [QUESTION], text)
    assert (answer.content, answer.reasoning) == ("36", "")
    messages = [QUESTION, answer, Message("user", "Sure?")]
    policy.answer(of, messages, text)
    assert of.request(of.turns[1]).prompt == chat_prompt(tokenizer, messages, thinking=True) or flavor == "GLM-4.6"
    assert len(of.samples()) == samples
    check_trained_once(of, policy)


@pytest.mark.parametrize("sent", ["none", "empty", "as it was"])
def test_a_thought_with_white_space_and_a_loaded_tool_of_glm_52(sent):
    """What follows a turn is what the template writes: the prompt is the same with and without the earlier tokens."""
    tokenizer, policy = load_tokenizer("builtin", "GLM-5.2"), Policy()
    find = {"name": "search_tools"}
    tools = (find, {"function": {"name": "tides", "parameters": {}, "defer_loading": True}})
    first = Request(chat_prompt(tokenizer, [QUESTION], tools=tools, thinking=True), 5, 1000)
    of = Session(tokenizer, first, thinking=True, most_turns=3, keeps_thoughts=True)
    answer = policy.answer(of, [QUESTION], " look\n</think><tool_call>search_tools</tool_call>", "observation", tools)
    assert (answer.reasoning, answer.tool_calls) == (" look\n", (ToolCall("search_tools"),))
    row = {"role": "assistant", "tool_calls": [find | {"arguments": {}}]}
    row |= {"none": {}, "empty": {"reasoning_content": ""}, "as it was": {"reasoning_content": " look\n"}}[sent]
    reply = {"role": "tool", "content": [{"type": "tool_reference", "name": "tides"}]}
    asked = [{"role": "user", "content": QUESTION.content}, row, reply]
    policy.answer(of, parse_prompt(asked, tools, is_sampled=True), "so</think>36", tools=tools)
    expected = chat_prompt(
        tokenizer, [QUESTION, answer, Message("tool", loaded_tools=("tides",))], tools=tools, thinking=True
    )
    assert of.request(of.turns[1]).prompt == expected
    assert '<tools>\n{"name": "tides", "parameters": {}}\n</tools>' in tokenizer.decode(expected)
    # An edited beginning is rendered whole, with the thought that the client did not send.
    edited = [{"role": "system", "content": "Brief."}, *asked]
    of.begin(parse_prompt(edited, tools, is_sampled=True), tools)
    kept = "<think> look\n</think>" in tokenizer.decode(of.request(of.turns[2]).prompt)
    assert kept == (sent == "as it was")
    check_trained_once(of, policy)


@pytest.mark.parametrize("sent", [{}, {"reasoning_content": ""}, {"reasoning_content": " let me"}])
def test_a_thought_of_glm_52_that_was_cut_is_closed_as_it_was_sampled(sent):
    tokenizer, policy = load_tokenizer("builtin", "GLM-5.2"), Policy()
    first = Request(chat_prompt(tokenizer, [QUESTION], thinking=True), 5, 1000)
    of = Session(tokenizer, first, thinking=True, most_turns=2, keeps_thoughts=True)
    policy.answer(of, [QUESTION], " let me", end="")
    rows = [
        {"role": "user", "content": "12 * 3?"},
        {"role": "assistant", "content": ""} | sent,
        {"role": "user", "content": "Go on."},
    ]
    policy.answer(of, parse_prompt(rows, is_sampled=True), "so</think>36")
    opening = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>12 * 3?<|assistant|><think> let me</think>"
    assert tokenizer.decode(of.request(of.turns[1]).prompt) == f"{opening}<|user|>Go on.<|assistant|><think>"


def test_a_marker_that_another_role_contradicts_is_a_label_and_no_input():
    of, policy = session(), Policy()
    first = policy.answer(of, [QUESTION], "\n36", "observation")
    policy.answer(of, [QUESTION, first, Message("user", "Sure?")], "\nyes")
    completion, *others = of.samples()
    prompt = completion.prompt
    assert not others
    place = len(TOKENIZER.encode("\n36"))
    assert completion.contradicted == ((place, MARKERS["user"]),) and completion.tokens[place] == MARKERS["observation"]
    check_trained_once(of, policy)
    rollout = rollout_of(of.samples())
    shape = PackShape(256, 1, 1, None, 1)
    batch = build_batch(rollout, [[0]], 0, shape, items_of(rollout, range(1), shape), 256)
    at = len(prompt) + place
    assert batch["labels"][0, at - 1] == MARKERS["observation"] and batch["input_ids"][0, at] == MARKERS["user"]
    assert batch["mtp_input_ids"][0, 0, at - 1] == MARKERS["user"]
    read = of.request(of.turns[1]).prompt
    assert batch["input_ids"][0, : len(read)].tolist() == read


def test_a_cut_turn_is_followed_by_a_marker_that_is_no_label():
    of, policy = session(), Policy()
    first = policy.answer(of, [QUESTION], "\n3", "")
    policy.answer(of, [QUESTION, first, Message("user", "Go on")], "6")
    (completion,) = of.samples()
    (start, _), cut = completion.replies[0], len(TOKENIZER.encode("\n3"))
    assert start == cut and completion.tokens[start] == MARKERS["user"] and not completion.contradicted
    check_trained_once(of, policy)


def test_the_same_request_has_the_same_turn_and_another_one_a_branch():
    of, policy = session(), Policy()
    first = policy.answer(of, [QUESTION], "\n36")
    assert of.begin([QUESTION], ()) is of.turns[0]
    again = [QUESTION, first, Message("user", "Sure?")]
    cut, longer = of.begin(again, (), 1), of.begin(again, (), 50)
    assert of.begin(again, (), 1) is cut and (cut.most_tokens, longer.most_tokens) == (1, 50)
    assert of.begin([QUESTION], (), of.turns[0].room) is of.turns[0], "a limit that does not bind"
    assert len({of.request(turn).seed for turn in (cut, longer, of.turns[0])}) == 3
    for turn in (cut, longer):
        of.turns.remove(turn)
    policy.answer(of, again, "\nyes")
    policy.answer(of, [QUESTION, Message("assistant", "37"), Message("user", "Sure?")], "\nno")
    policy.answer(of, [QUESTION, first, Message("user", "Really?")], "\nyes")
    start = of.turns[0]
    assert [turn.parent for turn in of.turns] == [None, start, None, start]
    assert [len(sample.replies) for sample in of.samples()] == [1, 0, 2], "the first turn is trained once"
    check_trained_once(of, policy)
    other_tools = of.begin(again, TOOLS)
    assert other_tools.parent is None


def test_messages_that_read_alike_have_one_turn_which_is_trained_once():
    """The format removes the thought of an earlier answer."""
    of, policy = session(thinking=True, most_turns=1), Policy()
    asked = [[QUESTION, Message("assistant", "36", thought), Message("user", "Sure?")] for thought in ("so", "")]
    first = policy.answer(of, asked[0], "\n<think>yes</think>\n36")
    assert of.begin(asked[1], ()) is of.turns[0] and policy.answer(of, asked[1], "\nno") == first
    with pytest.raises(NoRoom, match="max_turns"):
        of.begin([QUESTION], ())
    assert len(of.samples()) == 1
    check_trained_once(of, policy)


def test_an_episode_has_its_turns_and_a_conversation_its_room():
    of, policy = session(most_turns=1), Policy()
    first = policy.answer(of, [QUESTION], "\n36")
    with pytest.raises(NoRoom, match="max_turns"):
        of.begin([QUESTION, first, Message("user", "Sure?")], ())
    assert of.begin([QUESTION], ()) is of.turns[0]
    short = session(room=4)
    assert short.begin([QUESTION], ()).most_tokens == 4
    assert short.begin([Message("user", "?")], (), 2).most_tokens == 2
    with pytest.raises(NoRoom, match=r"rollout\.max_new_tokens"):
        short.begin([Message("user", "12 * 3 and much more than this?")], ())


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    """Encoding a request of 8 MB took up to 80 seconds, in which no other episode was answered."""
    many = 2_000
    spaces = " " * 500_000
    calls = [ToolCall(spaces), ToolCall("f", {spaces: "x"}), ToolCall("f", {"x": spaces})]
    requests = [[QUESTION, Message("assistant", tool_calls=(call,)), Message("tool")] for call in calls]
    requests += [
        [Message("user", spaces)],
        [Message("user")] * many,
        [QUESTION, Message("assistant", tool_calls=(ToolCall("f"),) * many), Message("tool")],
    ]
    short = session(room=1_000)
    encoded = []
    monkeypatch.setattr("glm46.tasks.rl.rollout.session.chat_prompt", lambda *given, **named: encoded.append(given))
    for messages in requests:
        with pytest.raises(NoRoom, match=r"tokens or more.*raise rollout\.max_new_tokens"):
            short.begin(messages, ())
    assert not encoded


@given(texts=st.lists(st.text(), min_size=1, max_size=4), keeps=st.booleans(), thinking=st.booleans())
def test_the_bound_of_a_prompt_is_never_above_its_tokens(texts, keeps, thinking):
    call = ToolCall(texts[0] or "f", dict.fromkeys(texts, texts[-1]))
    messages = [message for text in texts for message in (
        Message("user", text), Message("assistant", text, text, (call, call)), Message("tool", text), Message("tool"),
    )]  # fmt: skip
    descriptions = listed_tools(format_of(TOKENIZER), TOOLS)
    bound = min_tokens(messages, descriptions, longest_token=TOKENIZER.longest_token, keeps_thoughts=keeps)
    prompt = chat_prompt(TOKENIZER, messages, tools=TOOLS, thinking=thinking, keeps_thoughts=keeps)
    assert bound <= len(prompt)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), thinking=st.booleans(), keeps=st.booleans())
def test_each_generated_token_of_any_tree_of_messages_is_trained_once(data, thinking, keeps):
    of, policy = session(thinking=thinking, keeps=keeps), Policy()
    conversations = [[QUESTION]]
    for _ in range(data.draw(st.integers(1, 7))):
        messages = list(data.draw(st.sampled_from(conversations)))
        text = data.draw(st.sampled_from(["\n36", "\n<think>so</think>\n36", "", "\n<think>open", "\n <tool_call>add"]))
        calls = data.draw(st.booleans())
        if calls:
            text += "\n<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
        end = data.draw(st.sampled_from(["user", "observation", ""]))
        answer = policy.answer(of, messages, text, end, TOOLS)
        messages.append(answer)
        change = data.draw(st.sampled_from(["none", "none", "no thought", "edited"]))
        if change == "no thought":
            messages[-1] = Message("assistant", answer.content, "", answer.tool_calls)
        elif change == "edited":
            messages[0] = Message("user", f"{messages[0].content} now")
        if answer.tool_calls:
            messages.append(Message("tool", data.draw(st.sampled_from(["36", "37"]))))
        else:
            messages.append(Message("user", data.draw(st.sampled_from(["Sure?", "Go on"]))))
        conversations.append(messages)
    check_trained_once(of, policy)


def test_turns_of_an_earlier_start_are_given_again_until_another_one_is_asked_for():
    policy, noted, more = Policy(), [], []
    first = session(note=noted.append)
    answer = policy.answer(first, [QUESTION], "\n30")
    policy.answer(first, [QUESTION, answer, QUESTION], "\n31")
    again = session(recorded=noted, note=more.append)
    assert again.begin([QUESTION], ()).answer == answer
    other = policy.answer(again, [QUESTION, answer, Message("user", "Why?")], "\n33")
    assert other.content == "33"
    (completion,) = again.samples()
    assert "31" not in TOKENIZER.decode(completion.tokens) and len(noted) == 2 and len(more) == 1
    cut = noted[0]._replace(finish="length")
    short = session(recorded=[cut])
    assert not short.begin([QUESTION], ()).is_answered, "it was cut at another length"


def test_each_turn_and_branch_has_a_seed_of_its_own_and_the_same_one_after_a_restart():
    def seeds(of: Session, order: list[int]) -> list[int]:
        policy, asked = Policy(), [[QUESTION, Message("user", f"{n}?")] for n in range(3)]
        first = policy.answer(of, [QUESTION], "\n36")
        for n in order:  # of one length, behind one turn and from the begin
            policy.answer(of, [QUESTION, first, Message("user", f"{n}?")], "\nyes")
            policy.answer(of, asked[n], "\nyes")
        requests = [of.request(turn) for turn in of.turns]
        return [one.seed for one in sorted(requests, key=lambda one: one.prompt)]

    found = seeds(session(), [0, 1, 2])
    assert len({*found}) == 7 and all(0 <= seed < 2**63 for seed in found)
    assert seeds(session(), [2, 0, 1]) == found, "whichever a program asks first"
    of = session()
    assert of.request(of.begin([QUESTION], ())).seed == 5, "as a sample without turns"
    other = Session(TOKENIZER, Request(of.request(of.turns[0]).prompt, 6, 100_000), thinking=False, most_turns=100)
    assert not {*seeds(other, [0, 1, 2])} & {*found}


def test_experts_of_earlier_turns_are_neither_asked_for_nor_kept_twice():
    noted, messages, turns = [], [QUESTION], []
    of = session(note=noted.append)
    for value, text in ((1, "\n30"), (2, "\n31"), (3, "\n32")):
        turn = of.begin(messages, ())
        request, tokens = of.request(turn), [*TOKENIZER.encode(text).tolist(), MARKERS["user"]]
        assert request.known == sum(turns) and len(request.prompt) == turn.length
        fed = len(request.prompt) + len(tokens) - 1
        routes = np.full((fed, 1, 1), value, np.uint8)
        of.end(turn, Completion(tokens, [-1.0] * len(tokens), "stop", [3] * len(tokens), routes))
        turns.append(fed - request.known)
        messages = [*messages, turn.answer, QUESTION]
    again = session(recorded=noted)
    for number in (1, 3, 5):
        assert again.begin(messages[:number], ()).answer == messages[number]
    for one in (of, again):
        (completion,) = one.samples()
        prompt = completion.prompt
        assert completion.routes[:, 0, 0].tolist() == [1] * turns[0] + [2] * turns[1] + [3] * turns[2]
        assert len(completion.routes) == len(prompt) + len(completion.tokens) - 1
