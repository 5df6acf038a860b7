"""Solves a programming task with a tool that runs Python: the program of air_rl_agent.toml and glm47_rl_agent.toml. Its
last answer has the solution as a fenced block, which the reward "code" runs on the tests of the row's label."""

import json
import os
import subprocess
import sys
import tempfile
from http.client import HTTPConnection
from urllib.parse import urlsplit

ADDRESS = urlsplit(os.environ["OPENAI_BASE_URL"])
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
SECONDS, MOST_SHOWN = 10, 4000
"""Of one call of the tool, and characters of what it printed."""
LIMITED = """
import os, resource, sys
for what, most in ((resource.RLIMIT_AS, 4 << 30), (resource.RLIMIT_FSIZE, 64 << 20)):  # memory, and each file
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
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
        # Without the key, which it does not need. It shares this process's sandbox and could find the key there, or
        # end this process; more turns count as the episode's own, and one that ends so is left out of its group.
        alone, said = {"PATH": os.environ["PATH"], "HOME": os.getcwd()}, ""
        with tempfile.TemporaryFile() as printed:  # limited in length, which a pipe is not
            try:
                command = [sys.executable, "-I", "-S", "-c", LIMITED, code]
                streams = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.STDOUT}
                subprocess.run(command, env=alone, timeout=SECONDS, check=False, **streams)
            except subprocess.TimeoutExpired:
                said = f"\nerror: it took more than {SECONDS} s"
            printed.seek(max(printed.seek(0, os.SEEK_END) - 4 * MOST_SHOWN, 0))  # bytes of a character
            said = printed.read().decode(errors="replace") + said
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"error: {error}"[:MOST_SHOWN]
    return said[-MOST_SHOWN:] or "(nothing was printed)"


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
