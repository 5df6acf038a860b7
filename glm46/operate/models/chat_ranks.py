"""The ranks of a chat in the terminal: this process is the first of them, so that it keeps the terminal."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from glm46.compute.distributed.environment import (
    RANK_MARK,
    replace_variables,
    set_variable,
    set_variables,
    share_cores,
    variables_that_begin,
    visible_gpus,
)
from glm46.operate.estimate.machine import detect_machine

_END_SECONDS = 10
"""Time for the others to end after the chat, before they are killed."""


@contextmanager
def first_of_ranks(verb: str, argv: Sequence[str], count: int) -> Iterator[Callable[[list[int]], None]]:
    """Start the other ranks of a verb, which run it with the same options; inside, this process is rank 0.

    They have no terminal, so Ctrl-C does not reach them, and wait for prompts on their standard input: no collective
    waits while nothing is typed.

    Yields:
        A function that sends them a prompt, a line of JSON.
    """
    before, others = variables_that_begin(""), []
    share_cores(detect_machine(visible_gpus(), nodes=1).cores, count)
    torch.set_num_threads(int(set_variables(["OMP_NUM_THREADS"])["OMP_NUM_THREADS"]))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "LOCAL_RANK": 0}
    for name, value in shared.items():
        set_variable(name, str(value))
    set_variable(RANK_MARK, "True")  # rank 0 makes no store of its own
    try:
        for rank in range(1, count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            others.append(
                subprocess.Popen(
                    [sys.executable, "-m", "glm46", verb, *argv],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=variables_that_begin("") | own,
                    start_new_session=True,
                    text=True,
                )
            )

        def send(prompt: list[int]) -> None:
            for other in others:
                print(json.dumps(prompt), file=other.stdin, flush=True)

        yield send
    finally:
        for other in others:
            with suppress(OSError):  # it has ended
                other.stdin.close()
        for other in others:
            try:
                other.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()
        replace_variables(before)
