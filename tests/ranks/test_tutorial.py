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
SMALL_SHAPE = """num_hidden_layers = 2
hidden_size = 64
intermediate_size = 128
moe_intermediate_size = 32
n_routed_experts = 4
num_experts_per_tok = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
"""
_MODEL = f'flavor = "debug"\n\n[model.shape]\n{SMALL_SHAPE}'
_ROLLOUT = {"prompts_per_rollout": "4", "group_size": "4", "global_batch_size": "16", "samples": "1"}
SMALLER = {
    "debug.toml": {
        "flavor": _MODEL, "tokens": "12_800", "seq_len": "64", "local_batch_size": "1", "global_batch_size": "2",
        "warmup_tokens": "768", "steps": "1",
    },
    "sft_debug.toml": {
        "flavor": _MODEL, "tokens": "40_960", "seq_len": "128", "max_tokens": "128", "local_batch_size": "1",
        "global_batch_size": "2", "warmup_tokens": "1_280", "freq": "50", "max_new_tokens": "4",
    },
    "rl_debug_labels.toml": _ROLLOUT,
    "rl_debug.toml": _ROLLOUT | {"max_num_seqs": "16"},
}  # fmt: skip
"""Values instead of those of the shipped files; the number of steps, and so the name of each folder, is unchanged."""
DOCUMENTS = 400
"""Files of the second source. Which documents are held out follows from their text, so the text is the same on every
machine and in every commit: with the shipped ``held_out = 0.02``, eight are expected."""
DOCUMENT_LINES = 20


def blocks() -> list[tuple[str, list[str]]]:
    """Each command of the page with the lines of the output behind it, without those whose text is left out; a block
    that begins with ``# not`` is not run here."""
    found = re.findall(r"(?s)```bash\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE.read_text(encoding="utf-8"))
    return [
        (command, [line for line in output.splitlines() if line.strip("… ")])
        for command, output in found if not command.startswith("# not")
    ]  # fmt: skip


def pattern(line: str) -> str:
    """A line of the page as a regular expression: with other numbers and spaces, and anything in place of ``…``."""
    parts = re.split(r"(…|\s+|[-+]?\d[\d.,]*(?:e[-+]\d+)?)", line.strip())
    parts[1::2] = [".*" if part == "…" else r"\s+" if part.isspace() else r"[-+]?[\d.,e+-]+" for part in parts[1::2]]
    parts[::2] = map(re.escape, parts[::2])
    return "".join(parts)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what the commands use, with smaller runs."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("run_train.sh", "pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("scripts", "train_configs"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "glm46").symlink_to(ROOT / "glm46")
    (folder / "packages").mkdir()
    for number in range(DOCUMENTS):
        lines = [f"def add_{number}_{line}(value):\n    return value + {line}\n\n" for line in range(DOCUMENT_LINES)]
        (folder / "packages" / f"module_{number}.py").write_text("".join(lines), encoding="utf-8")
    for name, values in SMALLER.items():
        text = (folder / "train_configs" / name).read_text(encoding="utf-8")
        for key, value in values.items():
            text, count = re.subn(rf"(?m)^{key} = .*", value if "=" in value else f"{key} = {value}", text)
            assert count == 1, f"{name}: {key}"
        text = text.replace('"builtin:python_packages"', '"packages/*.py"')
        (folder / "train_configs" / name).write_text(text, encoding="utf-8")
    return folder


def test_every_command_of_the_tutorial_prints_what_the_page_shows(checkout):
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    for command, lines in blocks():
        ended = subprocess.run(
            ["bash", "-e", "-c", command], cwd=checkout, env=os.environ | variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", timeout=PROGRAM_SECONDS,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}{ended.stdout}"
        rest = ended.stdout
        for line in lines:
            found = re.search(pattern(line), rest)
            assert found, f"{command}{line}\nis not in\n{rest}"
            rest = rest[found.end() :]
