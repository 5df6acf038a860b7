"""Rewards of a user with faults, for the processes of `FunctionPool`."""

import os
import subprocess
import time
from pathlib import Path


def hang(answer):
    while True:
        time.sleep(60)


def crash(answer):
    os._exit(7)


def words(answer):
    return "1.0"


def infinite(answer):
    return float("inf")


def some(answer, bad):
    """Fails where the label is ``bad``."""
    if answer.label == bad:
        raise SystemExit(3)
    return len(answer.text)


def reply(answer):
    """An environment that is silent, fails or gives no text, as the label says."""
    if answer.label == "fail":
        raise ValueError("no reply")
    return {"end": None, "number": 3, "text": f"{answer.text}!"}[answer.label]


def start_and_hang(answer):
    """Starts a program that would outlive its process, and hangs; writes its process id into the file of the label."""
    program = subprocess.Popen(["sleep", "600"])
    Path(answer.label).write_text(str(program.pid))
    hang(answer)


def return_twice(answer):
    """Forks, so that each copy of the process returns."""
    if answer.label == "twice" and not os.fork():
        time.sleep(0.2)
        return -1.0
    return float(len(answer.text))
