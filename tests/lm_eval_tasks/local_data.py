"""Data of the tasks in this folder, in the form that lm-eval takes from a function."""

import json
from functools import partial
from pathlib import Path

from datasets import Dataset


def _documents(name: str, **_: object) -> dict[str, Dataset]:
    lines = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([*map(json.loads, lines)])}


next_line = partial(_documents, "next_line")
documentation = partial(_documents, "documentation")
rest_of_line = partial(_documents, "rest_of_line")
