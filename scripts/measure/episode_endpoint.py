"""Measure the time that the endpoint of episodes takes for a request, with an engine that answers at once.

    PYTHONPATH=. OMP_NUM_THREADS=1 python scripts/measure/episode_endpoint.py --sessions 256 --turns 8

Sessions send their whole conversation again with each turn, as clients do, from a process beside the server.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence

from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.open_requests import OpenRequest
from glm46.tasks.rl.rollout.records import Completion, Request, VersionSpan
from glm46.tasks.rl.rollout.session import Session

WORDS = "The quick brown fox jumps over the lazy dog. " * 20
"""A message of 361 tokens."""


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


async def _converse(address: str, key: str, turns: int, seconds: list[float]) -> None:
    messages = [{"role": "user", "content": WORDS}]
    for _ in range(turns):
        began = time.perf_counter()
        reply = await _ask(address, key, json.dumps({"messages": messages}).encode())
        seconds.append(time.perf_counter() - began)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": WORDS}]


def _clients(pairs: list[tuple[str, str]], turns: int, results: multiprocessing.Queue) -> None:
    async def run() -> list[float]:
        seconds: list[float] = []
        await asyncio.gather(*(_converse(*pair, turns, seconds) for pair in pairs))
        return seconds

    results.put(asyncio.run(run()))


class _Engine:
    """See `Requests`."""

    def __init__(self, answer: list[int]):
        self._answer = Completion(answer, [-1.0] * len(answer), "stop", [VersionSpan(0, 0)], None)

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        for one in asked:
            one.done(self._answer)

    def drop(self, asked: OpenRequest) -> None:
        pass


async def _serve(sessions: int, turns: int) -> tuple[list[float], float]:
    """Seconds of each request, and of the server's processor."""
    tokenizer = load_tokenizer("builtin")
    answer = [*tokenizer.encode(f"\n{WORDS}").tolist(), tokenizer.special["<|user|>"]]
    loop = asyncio.get_running_loop()
    endpoint = PolicyEndpoint(lambda: None, print)
    await endpoint.start()
    prompt = chat_prompt(tokenizer, [Message("user", WORDS)], thinking=False)
    pairs = []
    for number in range(sessions):
        session = Session(tokenizer, Request(prompt, number, 100_000), thinking=False, most_turns=turns)
        episode = endpoint.open(session, turns, _Engine(answer))
        pairs.append((endpoint.base_url(episode), episode.key))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_clients, args=(pairs, turns, results), daemon=True)
    process.start()
    began = time.process_time()
    seconds = await loop.run_in_executor(None, results.get)
    spent = time.process_time() - began
    process.join()
    return seconds, spent


def main() -> None:
    """Print the median of a request, and the processor's time of it in the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    seconds, spent = asyncio.run(_serve(given.sessions, given.turns))
    print(
        f"{given.sessions} sessions of {given.turns} turns: {1e3 * statistics.median(seconds):.1f} ms at the median, "
        f"{1e3 * spent / len(seconds):.2f} ms of the server's processor for each of {len(seconds):,} requests"
    )


if __name__ == "__main__":
    main()
