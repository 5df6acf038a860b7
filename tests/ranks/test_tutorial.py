"""The commands of docs/tutorial.md run in their order, on smaller batches, and print the lines that the page shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PROGRAM_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
SMALLER = {
    "debug.toml": {
        "tokens": 12_800, "seq_len": 64, "local_batch_size": 1, "global_batch_size": 2, "warmup_tokens": 768, "steps": 1,
        "builtin:python_packages": "glm46/config",
    },
    "sft_debug.toml": {
        "tokens": 40_960, "seq_len": 128, "max_tokens": 128, "local_batch_size": 1, "global_batch_size": 2,
        "warmup_tokens": 1_280, "freq": 160, "max_new_tokens": 4,
    },
    "lora_debug.toml": {
        "tokens": 25_600, "seq_len": 128, "max_tokens": 128, "local_batch_size": 1, "global_batch_size": 2,
        "warmup_tokens": 1_280, "freq": 100, "max_new_tokens": 4,
    },
    "rl_debug_labels.toml": {"prompts_per_rollout": 4, "group_size": 4, "global_batch_size": 16, "samples": 1},
    "rl_debug.toml": {
        "prompts_per_rollout": 4, "group_size": 4, "global_batch_size": 16, "max_num_seqs": 16, "samples": 1,
    },
}  # fmt: skip
"""Values in place of those of the shipped files; the numbers of steps, and so all names of folders, are those."""


def blocks() -> list[tuple[str, str]]:
    """Each command of the page with the output behind it; a block that begins with ``# not`` is not run here."""
    found = re.findall(r"(?s)```bash\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE.read_text(encoding="utf-8"))
    return [(command, output) for command, output in found if not command.startswith("# not")]


def pattern(line: str) -> str:
    """A line of the page as a regular expression: other numbers and spaces, and anything in place of ``…``."""
    kinds = {"…": ".*", " ": r"\s+"}
    parts = re.split(r"(…|\s+|[-+]?\d[\d.,]*(?:e[-+]\d+)?)", line.strip())
    return "".join(kinds.get(part[:1], r"[-+]?[\d.,e+-]+" if index % 2 else re.escape(part))
                   for index, part in enumerate(parts) if part)  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what the commands use, with smaller runs."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("run_train.sh", "pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("scripts", "train_configs"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "glm46").symlink_to(ROOT / "glm46")
    for name, values in SMALLER.items():
        text = (folder / "train_configs" / name).read_text(encoding="utf-8")
        for key, value in values.items():
            text, count = re.subn(rf"(?m)^{key} = [\d_]+", f"{key} = {value}", text) if isinstance(value, int) \
                else (text.replace(key, value), text.count(key))  # fmt: skip
            assert count, f"{name} has no {key}"
        (folder / "train_configs" / name).write_text(text, encoding="utf-8")
    return folder


def test_every_command_of_the_tutorial_prints_what_the_page_shows(checkout):
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for command, output in blocks():
        ended = subprocess.run(
            ["bash", "-e", "-c", command], cwd=checkout, env=variables | {"PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PROGRAM_SECONDS,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}{ended.stdout}"
        place = 0
        for line in output.splitlines():
            found = re.compile(pattern(line)).search(ended.stdout, place) if line.strip("… ") else None
            assert found or not line.strip("… "), f"{command}has no line such as\n{line}\n{ended.stdout[place:]}"
            place = found.end() if found else place
