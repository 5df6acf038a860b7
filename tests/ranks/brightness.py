"""A reward of a user's, in a module that imports nothing: each process of a scorer imports it."""


def brightness(answer) -> float:
    """A reward that some answers get: the share of their characters with an even code."""
    return sum(ord(letter) % 2 == 0 for letter in answer.text) / max(len(answer.text), 1)
