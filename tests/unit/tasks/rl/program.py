"""Programs of episodes for the tests: the row of the prompt says which."""

import json
import os
import sys
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

TASK = json.loads(os.environ["GLM46_TASK"])
ADDRESS, KEY = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]


def call(body: bytes, path: str = ADDRESS.path, key: str = KEY) -> tuple[int, dict]:
    """Status and content of the response to a request."""
    connection = HTTPConnection(ADDRESS.netloc)
    connection.request("POST", f"{path}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def ask(*messages: dict, **options) -> dict:
    status, content = call(json.dumps({"messages": messages, **options}).encode())
    if status != 200:
        sys.exit(f"{status} {content['error']['code']}")
    return content["choices"][0]["message"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def steps() -> int:
    """Optimizer steps that the run has begun."""
    return len(os.listdir(os.environ["STEPS_FOLDER"]))


def is_first() -> bool:
    """True in the first program with a prompt."""
    try:
        os.close(os.open(f"{os.environ['STEPS_FOLDER']}-{TASK['prompt']}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main(kind: str) -> None:
    question = user(TASK["prompt"])
    if kind == "across":
        waits, end = is_first(), time.monotonic() + 30.0
        first, began = ask(question, max_tokens=6), steps()
        while waits and began and steps() < began + 3 and time.monotonic() < end:
            time.sleep(0.02)
        ask(question, first, question, max_tokens=6)
        return
    if kind == "fails once":
        ask(question, max_tokens=6)
        if is_first():
            sys.exit(3)
        kind = "cut"
    if kind == "fails":
        print("it begins", flush=True)
        raise ValueError("no tool")
    if kind == "slow":
        time.sleep(float(os.environ["SLOW_SECONDS"]))
        kind = "cut"
    if kind == "cut":
        first = ask(question, max_tokens=6)
        ask(question, first, question, max_tokens=6)
        return
    if kind == "score and warning":
        ask(question, max_tokens=6)
        print(0.75)
        print("a warning", file=sys.stderr)
        return
    if kind == "score in errors":
        ask(question, max_tokens=6)
        print(1.0, file=sys.stderr)
        return
    if kind == "nests folders":
        ask(question, max_tokens=6)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        return
    if kind == "branches":
        first = ask(question, max_tokens=6)
        for name in ("One", "Two", "Three"):
            ask(user(f"{name} other question"), first, question, max_tokens=6)
        return
    if kind == "long":
        ask({"role": "system", "content": "You have many tools. " * 100}, question)
        return
    first = ask(question)
    if kind == "two tries":
        ask(question, first, question)
    elif kind == "edited":
        ask(user("Another"), first, question)
    elif kind == "hang":
        time.sleep(1000)
    elif kind == "flood":
        while True:
            ask(question)
    elif kind == "large":
        call(b"x" * 10_000_000)
        sys.exit(0)
    elif kind == "other session":
        sys.exit(f"status {call(b'{}', path='/s/0123456789abcdef/v1')[0]}")
    elif kind == "other key":
        sys.exit(f"status {call(b'{}', key=KEY[::-1])[0]}")
    elif kind == "many turns":
        messages = [question, first]
        while True:
            messages += [question, ask(*messages, question)]
    elif kind == "compacts":
        refused, _ = call(json.dumps({"messages": [user("much text " * 2000)]}).encode())
        ask(user(f"A summary, after status {refused}."))
    elif kind == "own score":
        print("score", TASK["prompt"].replace("Say", "\n"))
    elif kind == "file":
        with open("found.txt", "w") as file:
            file.write(f"{TASK.get('label')} {'HF_TOKEN' in os.environ}")


if __name__ == "__main__":
    main(TASK["kind"])
