"""Has the policy sort digits in two tries. Any program that speaks OpenAI's chat API can stand here: it knows nothing
of the training. It runs once for each sample, or stays and takes one line of standard input after another."""

import json
import os
import sys
from collections.abc import Mapping
from http.client import HTTPConnection
from urllib.parse import urlsplit


def ask(policy: Mapping[str, str], messages: list[dict]) -> dict:
    """The policy's answer to messages."""
    address = urlsplit(policy["OPENAI_BASE_URL"])
    headers = {"Authorization": f"Bearer {policy['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection = HTTPConnection(address.netloc)
    connection.request("POST", f"{address.path}/chat/completions", json.dumps({"messages": messages}), headers)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    if reply.status != 200:
        raise SystemExit(f"{reply.status}: {content['error']['message']}")
    return content["choices"][0]


def play(policy: Mapping[str, str], digits: str) -> None:
    """One episode: after a wrong try the user gives the digits again."""
    messages = [{"role": "user", "content": digits}]
    first = ask(policy, messages)
    text = first["message"]["content"]
    if first["finish_reason"] == "stop" and text and text != "".join(sorted(digits)):
        ask(policy, [*messages, first["message"], {"role": "user", "content": digits}])


def serve() -> None:
    """The episodes of a worker (kind = "worker")."""
    for line in sys.stdin:
        given = json.loads(line)
        answer = {"episode": given["episode"]}
        try:
            play(given["variables"], given["task"]["prompt"])
        except SystemExit as end:
            answer["error"] = str(end)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if task := os.environ.get("GLM46_TASK"):
        play(os.environ, json.loads(task)["prompt"])
    else:
        serve()
