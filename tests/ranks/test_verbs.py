"""`generate` and `evaluate` on several ranks print what one process prints."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.operate.launch.train_rank import train
from tests.builders import small_config
from tests.harness import run_ranks, start


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
