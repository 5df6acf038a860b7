"""The process that server.py starts and asks. It has torch and glm46 imported, and forks.

It reads one JSON object per line, what to start or whom to look after, and answers with a process id or an exit code.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys

import torch
import torch._dynamo.backends.debugging  # with the next one, what a first compilation would import in each rank: 2 s
import torch._inductor.compile_fx

import glm46.storage.prepare.pipeline  # noqa: F401
import glm46.tasks.pretrain.task  # noqa: F401
import tests.small_run  # noqa: F401
from tests.ranks.forked_ranks import end_with, run_ranks


def _fork(task: dict) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        # Ranks end with their parent, a launcher does not: it would go on training after the tests were killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        output = os.open(task["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for descriptor, place in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, place)
        os.environ.update(task.get("environment", {}))
        end_with(lambda: _run(task["program"], task["arguments"], task.get("ranks")) or 0)
    return child


def _run(program: str, arguments: list, ranks: int | None) -> int | None:
    module, name = program.split(".")
    function = getattr(importlib.import_module(f"tests.ranks.{module}"), name)
    if ranks is None:
        return function(*arguments)
    return run_ranks(ranks, lambda: function(*arguments))


def main() -> None:
    """Serve until the tests close the input."""
    torch.set_num_threads(1)
    # Processes that ranks spawn, such as those of rewards, would import this module, which takes 4 s of a core.
    this = sys.modules["__main__"]
    this.__spec__ = None
    del this.__file__
    gc.collect()
    gc.freeze()  # a garbage collection in a rank would look at all that was imported, and copy its memory
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it for all that it starts
    running = set()
    for line in sys.stdin:
        task = json.loads(line)
        if "poll" in task:
            done, status = os.waitpid(task["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
            running.discard(done)
        else:
            answer = _fork(task)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for child in running:  # the tests were interrupted
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
