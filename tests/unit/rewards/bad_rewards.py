"""Rewards of a user with faults, for the processes of `Scorer`."""

import os
import time


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


def differing(group):
    """A filter of groups: keeps those whose answers differ, and fails for an empty answer."""
    texts = [scored.answer.text for scored in group if scored.reward >= 0]
    if "" in texts:
        raise ValueError("empty")
    return len(set(texts)) > 1


def reply(answer):
    """An environment that is silent, fails or gives no text, as the label says."""
    if answer.label == "fail":
        raise ValueError("no reply")
    return {"end": None, "number": 3, "text": f"{answer.text}!"}[answer.label]
