"""Measure the time that the endpoint of episodes takes for a request, beside that of its engine.

    PYTHONPATH=. OMP_NUM_THREADS=1 python scripts/measure/episode_endpoint.py --turns 8 --answer-seconds 4
    PYTHONPATH=. OMP_NUM_THREADS=1 python scripts/measure/episode_endpoint.py --parts --turns 100 --repeats 60

Sessions send their whole conversation again with each turn, as clients do, from a process beside the server. They begin
at random moments of the first answer; with an engine that answers at once the clients wait for each other. With
`--parts` one conversation of calls and results of tools is measured in this process, part by part: what holds the
interpreter of rank 0, in which the endpoint and the client of the engines are threads.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import to_json

from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.rollout.chat_api import completion_response, parsed
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.open_requests import OpenRequest
from glm46.tasks.rl.rollout.records import Completion, Request
from glm46.tasks.rl.rollout.session import Session

SENTENCE = "The quick brown fox jumps over the lazy dog. "
WORDS = SENTENCE * 20
"""A message of 361 tokens."""
CALL = "<tool_call>look\n<arg_key>path</arg_key>\n<arg_value>src/a.py</arg_value>\n</tool_call>"


async def _ask(address: str, key: str, body: bytes) -> dict:
    host, _, path = address.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    content = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return json.loads(content)


async def _converse(address: str, key: str, turns: int, answer_seconds: float, seconds: list[float]) -> None:
    messages = [{"role": "user", "content": WORDS}]
    await asyncio.sleep(random.random() * answer_seconds)
    for _ in range(turns):
        began = time.perf_counter()
        reply = await _ask(address, key, json.dumps({"messages": messages}).encode())
        seconds.append(time.perf_counter() - began - answer_seconds)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": WORDS}]


def _clients(pairs: list[tuple[str, str]], turns: int, answer_seconds: float, results: multiprocessing.Queue) -> None:
    async def run() -> list[float]:
        seconds: list[float] = []
        await asyncio.gather(*(_converse(*pair, turns, answer_seconds, seconds) for pair in pairs))
        return seconds

    results.put(asyncio.run(run()))


class _Engine:
    """See `Requests`."""

    def __init__(self, answer: list[int], seconds: float):
        self._seconds = seconds
        self._answer = Completion(answer, [-1.0] * len(answer), "stop", [0] * len(answer), None)

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        for one in asked:
            asyncio.get_running_loop().call_later(self._seconds, one.done, self._answer)

    def drop(self, asked: OpenRequest) -> None:
        pass


async def _serve(sessions: int, turns: int, answer_seconds: float) -> tuple[list[float], float]:
    """Seconds of each request besides the engine's, and of the server's processor."""
    tokenizer = load_tokenizer("builtin")
    answer = [*tokenizer.encode(f"\n{WORDS}").tolist(), tokenizer.special["<|user|>"]]
    loop = asyncio.get_running_loop()
    endpoint = PolicyEndpoint(print)
    await endpoint.start()
    prompt = chat_prompt(tokenizer, [Message("user", WORDS)], thinking=False)
    pairs = []
    for number in range(sessions):
        session = Session(tokenizer, Request(prompt, number, 100_000), thinking=False, most_turns=turns)
        episode = endpoint.open(session, turns, _Engine(answer, answer_seconds))
        pairs.append((endpoint.base_url(episode), episode.key))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_clients, args=(pairs, turns, answer_seconds, results), daemon=True)
    process.start()
    began = time.process_time()
    seconds = await loop.run_in_executor(None, results.get)
    spent = time.process_time() - began
    process.join()
    return seconds, spent


def _parts(turns: int, repeats: int) -> tuple[int, float, Counter[str]]:
    """Tokens of a conversation of calls whose results have so many sentences, MiB that its session holds, and
    milliseconds of the processor by part."""
    tokenizer, spent = load_tokenizer("builtin"), Counter[str]()

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        found = work()
        spent[part] += 1e3 * (time.thread_time() - began)
        return found

    text = tokenizer.encode_with_special(f"\nI call the tool now. {SENTENCE * 12}{CALL}").tolist()
    answer = [*text, tokenizer.special["<|observation|>"]]
    messages: list[dict] = [{"role": "user", "content": WORDS}]
    prompt = chat_prompt(tokenizer, [Message("user", WORDS)], thinking=False)
    session = Session(tokenizer, Request(prompt, 0, 10**6), thinking=False, most_turns=turns)
    rows = [{"token_id": token, "logprob": -1.23456789} for token in answer]
    reply = json.dumps({"choices": [{"token_ids": answer, "logprobs": {"content": rows}}]})
    for _ in range(turns):
        body = json.dumps({"messages": messages}).encode()
        table, asked, tools, most = timed("read", lambda body=body: parsed(body, is_message=False))
        turn = timed("begin", lambda asked=asked, tools=tools, most=most: session.begin(asked, tools, most))
        request = timed("prompt", lambda turn=turn: session.request(turn))
        timed("engine", lambda request=request: (to_json({"token_ids": request.prompt}), json.loads(reply)))
        logprobs = [-1.0] * len(answer)
        versions = [0] * len(answer)
        completion = Completion([*answer], logprobs, "stop", versions, None)
        timed("end", lambda turn=turn, completion=completion: session.end(turn, completion))
        content = timed("answer", lambda table=table, turn=turn: completion_response(table, turn, "turn-0"))[0]
        message = json.loads(content)["choices"][0]["message"]
        messages += [message, {"role": "tool", "content": SENTENCE * repeats}]
    timed("samples", session.samples)
    tokens, after = turn.length, 0
    if tracemalloc.is_tracing():
        del request, body, asked, messages
        after = tracemalloc.get_traced_memory()[0]
    return tokens, after / 2**20, spent


def main() -> None:
    """Print the median of a request, and the processor's time of it in the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer-seconds", type=float, default=0.0, help="of the engine")
    parser.add_argument("--parts", action="store_true", help="of one conversation, in this process")
    parser.add_argument("--repeats", type=int, default=60, help="sentences of 18 tokens in a result of a tool")
    given = parser.parse_args()
    if given.parts:
        tokens, _, spent = _parts(given.turns, given.repeats)
        tracemalloc.start()
        _, held, _ = _parts(given.turns, given.repeats)
        said = ", ".join(f"{part} {value:.0f}" for part, value in spent.items())
        print(
            f"{given.turns} turns, {tokens:,} tokens: {sum(spent.values()):.0f} ms of the processor for the episode "
            f"({said}); its session holds {held:.1f} MiB"
        )
        return
    seconds, spent = asyncio.run(_serve(given.sessions, given.turns, given.answer_seconds))
    print(
        f"{given.sessions} sessions of {given.turns} turns, an engine that answers after {given.answer_seconds:g} s: "
        f"besides it {1e3 * statistics.median(seconds):.1f} ms at the median, "
        f"{1e3 * spent / len(seconds):.2f} ms of the server's processor for each of {len(seconds):,} requests"
    )


if __name__ == "__main__":
    main()
