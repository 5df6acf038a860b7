"""`generate` and `evaluate` on several ranks print what one process prints.

The commands of docs/tutorial.md run in their order, on smaller batches, and print the lines that the page shows.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.operate.launch.train_rank import train
from tests.builders import small_config
from tests.harness import run_ranks, start
from tests.processes import PROGRAM_SECONDS


def verb(*argv: str) -> None:
    """On each rank."""
    sys.exit(main(argv))


GENERATE = ["generate", "--prompt", "def", "--prompt", "class A", "--prompt", "def function", "--max-new-tokens", "20",
            "--temperature", "0.9", "--speculative"]  # fmt: skip
EVALUATE = ["evaluate", "--tasks", "loss,position,needle,drafts", "--lengths", "50,64", "--depths", "0,1"]
EVALUATE += ["--samples", "3"]
TASK_FOLDER = Path(__file__).parents[1] / "lm_eval_tasks"
LAYOUTS = {
    "data": (),
    "tensor, expert": ("--tensor-parallel-degree", "2", "--expert-parallel-degree", "2"),
    "pipeline": ("--pipeline-parallel-degree", "2"),
}
FOUR_RANKS = {
    "data": (),
    "tensor, expert": ("--tensor-parallel-degree", "2", "--expert-parallel-degree", "2"),
    "pipeline, expert": ("--pipeline-parallel-degree", "2", "--expert-parallel-degree", "2"),
}


@pytest.fixture(scope="module")
def folders(source_folder, tmp_path_factory) -> tuple[str, str]:
    """A step folder and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("run")
    assert train(small_config(source_folder, folder, checkpoint={"last_save_in_hf": True})) == 0
    return str(max((folder / "checkpoint").glob("step-*"))), str(max((folder / "huggingface").glob("step-*")))


def printed(*argv: str) -> str:
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()):
        assert main(argv) == 0
    return output.getvalue()


def columns(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "evaluation.json").read_text())["results"]
    return {name: value for result in found.values() for name, value in result["columns"].items()}


def test_text_and_figures_do_not_depend_on_the_ranks(folders, tmp_path):
    step, exported = folders
    text = printed(*GENERATE, "--model", exported)
    evaluate = [*EVALUATE, "--checkpoint", step, "--output"]
    printed(*evaluate, str(tmp_path / "one"))
    wanted = columns(tmp_path / "one")
    for name, degrees in LAYOUTS.items():
        output = tmp_path / name
        beside = start(verb, *evaluate, str(output), *degrees, ranks=2)
        said = start(verb, *GENERATE, "--model", exported, *degrees, ranks=2).text()
        assert " ".join(text.split()) in " ".join(said.split()), name  # a text may hold ends of lines of any kind
        beside.text()
        # FP32 sums in another order.
        assert columns(output) == pytest.approx(wanted, rel=1e-5), name


def test_a_degree_that_does_not_fit_is_refused_once(folders):
    started = start(verb, *GENERATE, "--model", folders[1], "--expert-parallel-degree", "4", ranks=2)
    started.wait()
    said = started.output.read_text()
    assert "exit codes [2, 2]" in said
    assert said.count("--expert-parallel-degree 4") == 1 and "2 processes" in said and "; take 2" in said


def test_answers_to_lm_eval_do_not_depend_on_the_ranks(folders, tmp_path):
    pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
    tasks = ["evaluate", "--model", folders[1], "--limit", "6", "--task-folder", str(TASK_FOLDER)]
    tasks += ["--tasks", "next_line,documentation,rest_of_line"]
    printed(*tasks, "--output", str(tmp_path / "one"))
    wanted = json.loads((tmp_path / "one" / "evaluation.json").read_text())["rows"]
    for name, degrees in FOUR_RANKS.items():
        output = tmp_path / name
        run_ranks(verb, 4, *tasks, "--output", str(output), *degrees)
        found = json.loads((output / "evaluation.json").read_text())["rows"]
        assert found.keys() == wanted.keys() and len(found) >= 6 * (4 + 1 + 1), name
        for key, row in wanted.items():
            # Tokens are equal; log-probabilities are FP32 sums in another order.
            assert found[key] == (row if key.startswith("text") else pytest.approx(row, rel=1e-5)), (name, key)


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
