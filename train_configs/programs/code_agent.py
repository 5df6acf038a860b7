"""Solves a programming task with a tool that runs Python: the program of air_rl_agent.toml and glm47_rl_agent.toml. Its
last answer has the solution as a fenced block, which the reward "code" runs on the tests of the row's label."""

import json
import os
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

ADDRESS = urlsplit(os.environ["OPENAI_BASE_URL"])
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
SECONDS, MOST_SHOWN = 10, 4000
"""Of one call of the tool, and characters of what it printed."""
TOOL = {
    "name": "python",
    "description": "Run a program in a new process of Python and read what it prints. Files stay between calls.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}
RULES = "Try your solution with the tool. Then answer with the whole solution in one fenced block of Python."


def ask(messages: list[dict]) -> dict:
    """The policy's answer to messages."""
    connection = HTTPConnection(ADDRESS.netloc)
    body = json.dumps({"messages": messages, "tools": [{"type": "function", "function": TOOL}]})
    connection.request("POST", f"{ADDRESS.path}/chat/completions", body, HEADERS)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    if reply.status != 200:  # no turn or no room is left, and the episode is cut
        raise SystemExit(f"{reply.status}: {content['error']['message']}")
    return content["choices"][0]["message"]


def run(call: dict) -> str:
    """What a call of the tool prints."""
    try:
        code = json.loads(call["function"]["arguments"])["code"]
        alone = {"PATH": os.environ["PATH"], "HOME": os.getcwd()}  # without the key of the endpoint
        done = subprocess.run(
            [sys.executable, "-c", code], env=alone, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=SECONDS, text=True, errors="replace",
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, subprocess.TimeoutExpired, OSError) as error:
        return f"error: {error}"[:MOST_SHOWN]
    return done.stdout[-MOST_SHOWN:] or "(nothing was printed)"


def main() -> None:
    """One episode: turns with calls of the tool, until one has none."""
    task = json.loads(os.environ["GLM46_TASK"])["prompt"]
    asked = task if isinstance(task, list) else [{"role": "user", "content": task}]
    messages = [{"role": "system", "content": RULES}, *asked]
    while calls := (answer := ask(messages)).get("tool_calls"):
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in calls]


if __name__ == "__main__":
    main()
