"""A small task set of verifiers with its harness: sort six digits in two tries. The harness is a program that the
subprocess runtime starts, without uv and network."""

import random
import sys

import verifiers.v1 as vf

PROGRAM = """
import json, sys
from http.client import HTTPConnection
from urllib.parse import urlsplit
url, key, digits = sys.argv[1:]
address = urlsplit(url)

def ask(messages):
    connection = HTTPConnection(address.netloc)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", address.path + "/chat/completions", body, headers)
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"{reply.status} {reply.read()}")
    return json.loads(reply.read())["choices"][0]["message"]

messages = [{"role": "user", "content": digits}]
first = ask(messages)
if first["content"] != "".join(sorted(digits)):
    ask([*messages, first, messages[0]])
print("a program may print")
"""


class SortData(vf.TaskData):
    """Digits."""


class SortTask(vf.Task[SortData]):
    """Sorting of digits."""

    @vf.reward
    async def is_sorted(self, trace: vf.Trace) -> float:
        """1 if the last answer is right."""
        print("a reward may print")
        return float(trace.branches[-1].messages[-1].content == "".join(sorted(self.data.prompt)))


class SortConfig(vf.TasksetConfig):
    """Its size."""

    tasks: int = 1000


class SortTasks(vf.Taskset[SortTask, SortConfig]):
    """Random digits, the same at each start."""

    def load(self):
        """Tasks in a fixed order."""
        chosen = random.Random(0)
        for _ in range(self.config.tasks):
            yield SortTask(SortData(prompt="".join(chosen.choices("0123456789", k=6))), self.config.task)


class SortHarness(vf.Harness[vf.HarnessConfig]):
    """The program."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Run it to its end."""
        return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt], {})


__all__ = ["SortHarness", "SortTasks"]
