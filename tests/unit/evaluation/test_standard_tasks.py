"""Tasks of lm-eval: the numbers of its own `hf` backend, resumed calls, refused tasks."""

import json
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.evaluation import results
from glm46.evaluation.standard import FOLDER
from glm46.pretrain.task import train
from tests.small_run import small_config

pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
NAMES = ["glm46_next_line", "glm46_documentation", "glm46_rest_of_line"]


@pytest.fixture(scope="module")
def exported(source_folder, tmp_path_factory) -> str:
    """A Hugging Face folder; its texts need several windows."""
    folder = tmp_path_factory.mktemp("run")
    model = {"max_position_embeddings": 512}
    config = small_config(source_folder, folder, model=model, checkpoint={"last_save_in_hf": True})
    assert train(config) == 0
    return str(max((folder / "huggingface").glob("step-*")))


def evaluate(exported: str, output: Path, *argv: str) -> dict:
    assert main(["evaluate", "--model", exported, "--output", str(output), *argv]) == 0
    return json.loads((output / "evaluation.json").read_text())


def of_hf(exported: str) -> tuple[dict, dict]:
    """What lm-eval's own backend says: results by task, and answers by task and document."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=exported, device="cpu", dtype="float32", batch_size=8)
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found = simple_evaluate(model=model, tasks=NAMES, task_manager=manager, limit=12)
    answers = {
        (task, one["doc_id"], number): answer
        for task, of_task in found["samples"].items()
        for one in of_task
        for number, answer in enumerate(one["resps"])
    }
    return found["results"], answers


@pytest.mark.slow
def test_numbers_are_those_of_the_hf_backend(exported, tmp_path, monkeypatch, capsys):
    from glm46.evaluation import lm_eval_model

    answered = {}
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        real = getattr(lm_eval_model.LmEvalModel, name)

        def record(self, requests, real=real):
            found = real(self, requests)
            for request, answer in zip(requests, found, strict=True):
                answered[request.task_name, request.doc_id, request.idx] = answer
            return found

        monkeypatch.setattr(lm_eval_model.LmEvalModel, name, record)
    found = evaluate(exported, tmp_path, "--tasks", ",".join(NAMES), "--limit", "12")["results"]["standard"]
    wanted, answers = of_hf(exported)
    assert answered.keys() == answers.keys() and len(answers) == 12 * (4 + 1 + 1)
    for key, (theirs,) in answers.items():
        if isinstance(theirs, str):
            assert answered[key] == theirs, key
        else:
            ours, theirs = (pair if isinstance(pair, tuple) else (pair,) for pair in (answered[key], theirs))
            assert ours == pytest.approx(theirs, rel=1e-5), key  # FP32 sums in another order
    for one in found["figures"]:
        assert one["value"] == pytest.approx(wanted[one["task"]][f"{one['metric']},{one['filter']}"], rel=1e-5)
    assert {one["task"] for one in found["figures"]} == set(NAMES)
    assert "glm46_next_line" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_call_computes_only_what_is_missing(exported, tmp_path, monkeypatch):
    tasks = ["--tasks", ",".join(NAMES)]
    first = evaluate(exported, tmp_path, *tasks, "--limit", "3")
    added = []
    real = results.Results.add
    monkeypatch.setattr(results.Results, "add", lambda self, key, row: (added.append(key), real(self, key, row)))
    assert evaluate(exported, tmp_path, *tasks, "--limit", "3") == first and not added
    evaluate(exported, tmp_path, "--tasks", "glm46_next_line,glm46_rest_of_line", "--limit", "4")
    assert sorted(key.partition("/")[0] for key in added) == ["score"] * 4 + ["text"]


def write_task(folder: Path, name: str, **keys: str) -> Path:
    lines = (FOLDER / "next_line.yaml").read_text().replace("task: glm46_next_line", f"task: {name}")
    (folder / "local_data.py").write_text((FOLDER / "local_data.py").read_text())
    (folder / "next_line.jsonl").write_text((FOLDER / "next_line.jsonl").read_text())
    file = folder / f"{name}.yaml"
    file.write_text(lines + "".join(f"{key}: {value}\n" for key, value in keys.items()))
    return file


def test_own_task_files_and_folders(exported, tmp_path):
    file = write_task(tmp_path, "mine")
    for tasks in (["--tasks", str(file)], ["--tasks", "mine", "--task-folder", str(tmp_path)]):
        found = evaluate(exported, tmp_path / "output", *tasks, "--limit", "2")["results"]["standard"]
        assert {one["task"] for one in found["figures"]} == {"mine"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "glm46_nextline"], ("glm46_nextline", "did you mean glm46_next_line?")),
        (["--tasks", "/nowhere/task.yaml"], ("/nowhere/task.yaml: no such file",)),
        (["--tasks", "mine", "--task-folder", "/nowhere"], ("--task-folder /nowhere: no such folder",)),
        (["--tasks", "broken.yaml"], ("broken.yaml", "cannot be loaded")),
        (["--tasks", "long.yaml"], ("long", "2000 tokens", "512 positions", "lower")),
        (["--tasks", "loss", "--data", "x", "--fewshot", "2"], ("--fewshot", "tasks of lm-eval")),
    ],
)
@pytest.mark.usefixtures("small_task_index")
def test_bad_tasks(exported, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.jsonl}\n")
    write_task(tmp_path, "long")
    Path("next_line.jsonl").write_text(
        json.dumps({"context": "a " * 2000, "choices": list("abcd"), "answer": 0}) + "\n"
    )
    assert main(["evaluate", "--model", exported, *options]) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in said), err
