"""Finds the program and the files named by a command in a config."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from glm46.config.errors import UserError

_FILES = (".py", ".sh", ".db")
"""Suffixes of words that name files."""


def found_program(command: Sequence[str], key: str = "rl.environment.command") -> list[str]:
    """Return a command with absolute paths, which works from another folder.

    Raises:
        UserError: its first word is not a program, or a script among its other words does not exist.
    """
    words = [
        str(Path(word).absolute()) if Path(word).exists() and ("/" in word or word.endswith(_FILES)) else word
        for word in command
    ]
    if words and shutil.which(words[0]) is None:
        fault = "no such program; correct the first word"
        if Path(words[0]).is_file():
            fault = "not executable; put its interpreter in front of it, or run chmod +x"
        elif " " in words[0]:
            fault = f"one word with spaces; write each word by itself: {json.dumps(words[0].split())}"
        raise UserError(f"{key} = {json.dumps(words)}: {words[0]}: {fault}")
    for word in words[1:]:
        if word.endswith(_FILES) and not Path(word).is_file():
            raise UserError(f"{key} = {json.dumps(words)}: {word}: no such file from {Path.cwd()}; correct this word")
    return words
