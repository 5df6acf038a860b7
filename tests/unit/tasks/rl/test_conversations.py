"""Conversations with an environment: the tokens are those of the chat format, and only generated ones are targets."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from glm46.commands.rl import describe_rollout
from glm46.compute.model.cross_entropy import IGNORE
from glm46.config.errors import UserError
from glm46.config.rl import RLConfig
from glm46.config.rollout import RolloutConfig as RolloutSection
from glm46.storage.chats.chat import ChatOptions, chat_prompt, render
from glm46.storage.chats.conversation import Conversation, Message, ToolCall
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.rl.conversations import Conversations
from glm46.tasks.rl.environment import run_episodes
from glm46.tasks.rl.journal import write_fields, write_rollout
from glm46.tasks.rl.journal_files import FOLDER
from glm46.tasks.rl.packing import PackShape, build_batch, collect, items_of
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import RewardRule
from glm46.tasks.rl.rewards.calculator import calculate
from glm46.tasks.rl.rewards.function_pool import FunctionPool, Score
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.records import Completion, Episode, Request, SamplingRules
from glm46.tasks.rl.rollout.session import Session
from glm46.tasks.rl.rollouts import generate_rollout
from glm46.tasks.rl.sampling import Sampler
from tests.processes import HANG_SECONDS
from tests.unit.tasks.rl.samples import InRounds

TOOLS = ({"name": "calculator"},)
QUESTION = Message("user", "12 * 3 + 1/2?")
CALL = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "12 * 3 + 1/2"}),))
LONGEST = 200


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Scripted(InRounds):
    """An engine that generates the turns of a document, one in each call."""

    def __init__(self, turns: list[list[int]], *, has_routes: bool = False):
        self._turns, self.asked, self._has_routes = list(turns), [], has_routes

    def generate(self, requests, rules):
        self.asked += requests
        tokens = self._turns.pop(0)
        return [
            Completion(tokens, [-0.5] * len(tokens), "stop", [7] * len(tokens), self._routes(one, tokens), (),
                       len(tokens), 1)
            for one in requests
        ]  # fmt: skip

    def _routes(self, request: Request, tokens: list[int]) -> np.ndarray | None:
        """The number of the call, as the expert of all tokens that were fed."""
        fed = len(request.prompt) + len(tokens) - 1
        return np.full((fed, 1, 1), len(self.asked), np.uint8) if self._has_routes else None


def document_of(messages: tuple[Message, ...], tokenizer) -> tuple[list[int], list[list[int]], np.ndarray]:
    """Prompt and generated turns of a conversation as fine-tuning renders it, and which of all tokens are targets."""
    rendered = render(Conversation(messages, TOOLS), tokenizer, ChatOptions())
    (document,) = rendered.documents
    prompt = chat_prompt(tokenizer, messages[:1], tools=TOOLS, thinking=False)
    edges = np.flatnonzero(np.diff(document.is_target.astype(int), prepend=0, append=0))
    turns = [document.ids[start:end].tolist() for start, end in edges.reshape(-1, 2)]
    assert document.ids[: edges[0]].tolist() == prompt
    return document.ids.tolist(), turns, document.is_target


def sampler(engine, tokenizer, replies, longest: int = LONGEST) -> Sampler:
    section = RolloutSection.model_validate({"max_new_tokens": longest})
    config = RLConfig.model_validate({
        "prompts_per_rollout": 1, "group_size": 1, "prompts": {"file": "p.jsonl"}, "rewards": [{"name": "exact"}],
        "environment": {"function": "a:b", "max_turns": 3},
    }).resolved()  # fmt: skip
    rules = SamplingRules(1.0, frozenset(stop_ids(tokenizer)), tokenizer.vocab_size)
    pool = FunctionPool([RewardRule("exact")])
    environment = replying(replies, tokenizer, 3)
    return Sampler(config, section, tokenizer, engine, [], rules, 0, pool, environment)


def replying(reply, tokenizer, most_turns: int) -> Conversations:
    """An environment whose function is one of this process."""
    pool = SimpleNamespace(reply=reply, close=lambda: None)
    return Conversations(pool, tokenizer, frozenset(stop_ids(tokenizer)), False, most_turns, ThreadPoolExecutor(4))


def calculated(answer):
    return calculate(answer), ""


def rolled_out(of: Sampler, prompt: Prompt):
    of.prompts = [prompt]
    return generate_rollout(of, of.generate_groups, 7, 0)


def test_a_tool_is_asked_and_its_tokens_are_no_targets(tokenizer):
    messages = (QUESTION, CALL, Message("tool", "73/2"), Message("assistant", "73/2"))
    ids, turns, is_target = document_of(messages, tokenizer)
    engine = Scripted(turns)
    prompt = Prompt(ids[: int(np.argmax(is_target))], QUESTION.content, "73/2")
    rollout = rolled_out(sampler(engine, tokenizer, calculated), prompt)
    assert [*rollout.prompt(0), *rollout.completion(0)] == ids, "as fine-tuning would render it"
    assert rollout.reward.tolist() == [1.0], "the last turn is judged"
    assert rollout.figures["draft_acceptance_ratio"] == 2 / sum(map(len, turns)), "of both turns"
    assert engine.asked[1].prompt == ids[: len(ids) - len(turns[1])]
    assert engine.asked[1].max_new_tokens == LONGEST - (len(ids) - len(turns[1]) - len(prompt.tokens))

    shape = PackShape(256, 1, 1, None, 0)
    batch = build_batch(rollout, [[0]], 0, shape, items_of(rollout, range(1), shape), 256)
    labels = batch["labels"][0, : len(ids) - 1].numpy()
    assert np.array_equal(labels != IGNORE, is_target[1:])
    assert np.array_equal(labels[is_target[1:]], np.array(ids)[is_target])
    generated = batch["place"][0][batch["place"][0] >= 0].numpy()
    assert (rollout.logprobs[generated] == -0.5).all() and len(generated) == is_target.sum()
    assert (batch["sample"][0] >= 0).sum() == is_target.sum()


def test_what_a_tool_replied_is_shown_outside_of_the_mask_and_without_values(tokenizer, tmp_path):
    messages = (QUESTION, CALL, Message("tool", "73/2"), Message("assistant", "73/2"))
    ids, turns, is_target = document_of(messages, tokenizer)
    start = int(np.argmax(is_target))
    rollout = rolled_out(sampler(Scripted(turns), tokenizer, calculated), Prompt(ids[:start], "?", "73/2"))
    shape = PackShape(256, 1, 1, None, 0)
    batch = build_batch(rollout, [[0]], 0, shape, items_of(rollout, range(1), shape), 256)
    fields = {}
    for name, value in (("advantages", 0.25), ("old_logprobs", -0.5), ("correction", 1.0)):
        fields[name] = torch.full((len(rollout.logprobs),), -torch.inf)
        collect(torch.full((1, 256), value), batch, fields[name])
    folder = tmp_path / FOLDER
    write_rollout(folder, rollout, "")
    write_fields(folder, rollout.step, fields)
    lines = list(describe_rollout(tmp_path, tokenizer, step=None, samples=1, by_token=True))
    assert "advantage 0.25 (tokens 0.25 to 0.25)" in lines
    (text,) = [line for line in lines if line.startswith(tokenizer.decode(ids[:start]))]
    replied = tokenizer.decode(ids[start + len(turns[0]) : len(ids) - len(turns[1])])
    assert "73/2" in replied and text.endswith(
        f"[[{tokenizer.decode(turns[0])}]]{replied}[[{tokenizer.decode(turns[1])}]]"
    )
    head = next(n for n, line in enumerate(lines) if line.split()[:2] == ["token", "mask"])
    table = lines[head + 1 :]
    assert lines[head].split()[2:] == ["logprob", "old", "ratio", "advantage", "weight"] and len(table) == len(ids)
    generated = ["1", "-0.5000", "-0.5000", "1.0000", "0.2500", "1.0000"]
    for line, is_generated in zip(table, is_target.tolist(), strict=True):
        assert line.split()[-6:] == generated if is_generated else line.endswith("    0"), line


def test_a_user_may_reply_too(tokenizer):
    messages = (QUESTION, Message("assistant", "36"), Message("user", "Sure?"), Message("assistant", "73/2"))
    ids, turns, is_target = document_of(messages, tokenizer)
    prompt = Prompt(ids[: int(np.argmax(is_target))], QUESTION.content, "73/2")
    history = []

    def doubt(answer):
        history.append(answer.history)
        return None if answer.history else "Sure?", ""

    rollout = rolled_out(sampler(Scripted(turns), tokenizer, doubt), prompt)
    assert [*rollout.prompt(0), *rollout.completion(0)] == ids
    assert history[0] == () and history[1][0].strip() == "36" and "Sure?" in history[1][1]


def test_turns_have_seeds_of_their_own_which_are_those_of_a_session(tokenizer):
    """A server begins its random numbers for each request."""
    said = [QUESTION, *(Message("assistant" if n % 2 else "user", f"{n}?") for n in range(1, 6))]
    ids, turns, is_target = document_of(tuple(said), tokenizer)
    of = sampler(engine := Scripted(turns), tokenizer, lambda answer: (f"{len(answer.history) + 2}?", ""))
    rolled_out(of, Prompt(ids[: int(np.argmax(is_target))], QUESTION.content, "1"))
    session, requests = Session(tokenizer, engine.asked[0], thinking=False, most_turns=3), []
    for number, tokens in enumerate(turns):
        turn = session.begin(said[: 2 * number + 1], TOOLS)
        requests.append(session.request(turn))
        session.end(turn, Completion(tokens, [-0.5] * len(tokens), "stop", [7] * len(tokens), None))
    assert engine.asked == requests and len({one.seed for one in requests}) == 3
    assert requests[0].seed == of.requests(of.prompts[0], 0)[0].seed


def test_a_reply_without_room_ends_the_sample_and_a_failure_drops_it(tokenizer):
    ids, turns, is_target = document_of((QUESTION, CALL, Message("tool", "1")), tokenizer)
    prompt = Prompt(ids[: int(np.argmax(is_target))], QUESTION.content, "1")
    rollout = rolled_out(sampler(Scripted(turns), tokenizer, calculated, len(turns[0]) + 3), prompt)
    assert rollout.completion(0).tolist() == turns[0] and rollout.outcome.tolist() == [1]
    of_fault = sampler(Scripted(turns), tokenizer, lambda answer: (None, "ValueError: no"))
    of_fault.prompts = [prompt]
    (one,) = of_fault.score(of_fault.generate_groups(0, 1), {0: prompt})
    assert one.reward is None and "rl.environment: ValueError: no" in one.fault


def test_why_samples_are_dropped_is_said_once_for_each_cause(tokenizer):
    faults = [f"mine:f: ValueError: bad {n!r}" for n in "abc"] + ["code: no value within 10 s", ""]
    of, said = sampler(Scripted([[5]] * 9), tokenizer, calculated), []
    of.rewards = SimpleNamespace(score=lambda answers: [Score(None if f else 1.0, {}, f) for f in faults])
    of.environment, of.say, of.prompts = None, said.append, [Prompt([1], "?", "1")]
    for _ in range(3):
        of.score(of.generate_groups(0, 5), dict.fromkeys(range(5), of.prompts[0]))
    assert said == 2 * [
        f"3 of 5 samples are dropped without reward, because of {faults[0]}",
        f"1 of 5 samples are dropped without reward, because of {faults[3]}",
    ], "the first and the second time"


def in_rounds(of: Sampler, request: Request) -> list[Episode]:
    return run_episodes(of.environment, of.prompt, [(0, request)], of.engine, of.rules, lambda: False)


class Answering:
    """See `Requests`: answers by an engine, at once."""

    def __init__(self, engine):
        self._engine = engine

    def ask(self, asked):
        for one in asked:
            (completion,) = self._engine.generate([one.request], None)
            one.done(completion)

    def drop(self, asked):
        pass


def in_background(of: Sampler, request: Request, turns=()) -> tuple[Episode | BaseException, list[Completion]]:
    """The end of a conversation that goes on by itself behind recorded turns, and its new turns."""
    ends, noted = queue.SimpleQueue(), []
    member = Member(0, request, Episode(list(turns), is_part=True), finish=ends.put, note=noted.append)
    of.environment.begin(of.prompt, Answering(of.engine), [member])
    return ends.get(timeout=HANG_SECONDS), noted


def test_a_conversation_that_goes_on_by_itself_is_that_of_rounds(tokenizer):
    messages = (QUESTION, CALL, Message("tool", "73/2"), Message("assistant", "73/2"))
    ids, turns, is_target = document_of(messages, tokenizer)
    prompt = Prompt(ids[: int(np.argmax(is_target))], QUESTION.content, "73/2")

    def made(longest: int = LONGEST, replies=calculated, script=turns) -> tuple[Sampler, Request]:
        of = sampler(Scripted(script), tokenizer, replies, longest)
        of.prompts = [prompt]
        return of, Request(prompt.tokens, 5, longest)

    for longest in (len(turns[0]) + 3, LONGEST):
        of, request = made(longest)
        (expected,) = in_rounds(of, request)
        end, noted = in_background(*made(longest))
        assert end == expected and len(end.samples[0].replies) == len(noted) - 1
    asked = of.engine.asked
    end, noted = in_background(*made())
    of, request = made(script=turns[1:])
    again, new = in_background(of, request, noted[:1])
    assert again == end and new == noted[1:] and of.engine.asked == asked[1:], "the first turn is not generated again"
    of, request = made(replies=lambda answer: (None, "ValueError: no"))
    end, _ = in_background(of, request)
    assert end.fault == "rl.environment: ValueError: no"

    def breaks(answer):
        raise UserError("the function cannot be loaded")

    error, _ = in_background(*made(replies=breaks))
    assert isinstance(error, UserError), "it ends the run"


def test_the_end_of_a_run_waits_for_no_call_of_the_function(tokenizer):
    """Calls that wait for a thread are given up before the processes of the others end."""
    of, has_ended = sampler(Scripted([]), tokenizer, calculated), threading.Event()
    of.engine.close, of.environment.pool.close = lambda: None, has_ended.set
    threads = of.environment.threads
    calls = [threads.submit(has_ended.wait, HANG_SECONDS) for _ in range(100)]
    of.close()
    assert calls[0].result(HANG_SECONDS) and calls[-1].cancelled()


def test_a_turn_is_kept_with_the_experts_of_its_own_tokens_alone(tokenizer):
    """Those of the turns before would grow with the square of their number."""
    messages = (QUESTION, CALL, Message("tool", "73/2"), Message("assistant", "73/2"))
    ids, turns, is_target = document_of(messages, tokenizer)
    prompt = Prompt(ids[: int(np.argmax(is_target))], QUESTION.content, "73/2")
    of, request = sampler(Scripted(turns, has_routes=True), tokenizer, calculated), Request(prompt.tokens, 5, LONGEST)
    of.prompts = [prompt]
    end, noted = in_background(of, request)
    first = len(prompt.tokens) + len(turns[0]) - 1
    routes, asked = end.samples[0].routes, of.engine.asked
    assert routes[:, 0, 0].tolist() == [1] * first + [2] * (len(ids) - 1 - first) and asked[1].known == first
    assert [len(turn.routes) for turn in noted] == [first, len(ids) - 1 - first]
    again, new = in_background(of, request, noted)
    assert not new and np.array_equal(again.samples[0].routes, routes)
    whole = [
        noted[0],
        noted[1]._replace(routes=routes),
    ]  # of an earlier version
    again, _ = in_background(of, request, whole)
    assert np.array_equal(again.samples[0].routes, routes)
    of = sampler(Scripted(turns, has_routes=True), tokenizer, calculated)
    of.prompts = [prompt]
    (expected,) = in_rounds(of, request)
    assert np.array_equal(expected.samples[0].routes, routes)
