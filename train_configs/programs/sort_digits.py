"""Has the policy sort digits in two tries. Any program that speaks OpenAI's chat API can stand here: it knows nothing
of the training, and runs once for each sample."""

import json
import os
from http.client import HTTPConnection
from urllib.parse import urlsplit

ADDRESS = urlsplit(os.environ["OPENAI_BASE_URL"])
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}


def ask(messages: list[dict]) -> dict:
    """The policy's answer to messages."""
    connection = HTTPConnection(ADDRESS.netloc)
    connection.request("POST", f"{ADDRESS.path}/chat/completions", json.dumps({"messages": messages}), HEADERS)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    if reply.status != 200:
        raise SystemExit(f"{reply.status}: {content['error']['message']}")
    return content["choices"][0]


def main() -> None:
    """One episode: after a wrong try the user gives the digits again."""
    digits = json.loads(os.environ["GLM46_TASK"])["prompt"]
    messages = [{"role": "user", "content": digits}]
    first = ask(messages)
    text = first["message"]["content"]
    if first["finish_reason"] == "stop" and text and text != "".join(sorted(digits)):
        ask([*messages, first["message"], {"role": "user", "content": digits}])


if __name__ == "__main__":
    main()
