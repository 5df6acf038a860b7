"""A program that stays, for the tests: runs `program.py` for each line, and answers as the row says behind a slash."""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

PROGRAM = str(Path(__file__).with_name("program.py"))


def outcome(task: dict) -> dict:
    """What the program has of an episode: its last word as a score, or the text of its exit."""
    os.environ["GLM46_TASK"] = json.dumps(task)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(PROGRAM, run_name="__main__")
    except SystemExit as end:
        return {"error": str(end.code)} if end.code else {}
    words = said.getvalue().split()
    return {"score": float(words[-1])} if words else {}


for line in sys.stdin:
    given = json.loads(line)
    os.environ.update(given["variables"])
    kind, _, answers = given["task"]["kind"].partition("/")
    reply = {"episode": given["episode"], **outcome({**given["task"], "kind": kind})}
    if answers == "dies":
        sys.exit("out of memory")
    if answers == "another episode":
        reply["episode"] = os.environ["OPENAI_BASE_URL"].split("/")[-2]
    if answers == "words":
        print("a debugging line")
    if answers == "endless":
        sys.stdout.write("x" * 1_000_000)
    if answers == "silent":
        os.read(0, 1)
    print(json.dumps(reply), flush=True)
    if answers == "twice":
        print(json.dumps(reply), flush=True)
    if answers == "leaves":
        os._exit(0)
