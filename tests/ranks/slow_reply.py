"""A function of a user's that replies to turns, once for some prompts only after two more steps of training."""

import os
import time


def reply(answer) -> str | None:
    number, folder = int(answer.prompt.split()[0]), os.environ["STEPS_FOLDER"]
    if answer.history:
        return None
    began, end = len(os.listdir(folder)), time.monotonic() + 10.0
    if number % 2 and began and _is_first(f"{folder}-{number}"):
        while len(os.listdir(folder)) < began + 2 and time.monotonic() < end:
            time.sleep(0.02)
    return answer.prompt


def _is_first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
