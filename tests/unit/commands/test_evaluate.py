"""`python -m glm46 evaluate`: the numbers of the run's own validation, resumed results, refused options."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import tomli
import tomli_w
from safetensors.torch import load_file, save_file

from glm46.cli import main
from glm46.engine.evaluation import results
from glm46.files.durable import hash_file
from glm46.operate.launch.train_rank import train
from glm46.operate.models import evaluate_ranks
from glm46.storage.checkpoint.integrity import MANIFEST, META, read_manifest, records_of, write_manifest
from tests.builders import metric_rows, small_config

OPTIONS = ["--lengths", "50,64", "--depths", "0,1", "--samples", "4"]


@pytest.fixture(scope="module")
def trained(source_folder, tmp_path_factory) -> Path:
    """The dump folder of a run that validates."""
    folder = tmp_path_factory.mktemp("run")
    validation = {"enable": True, "freq": 100}
    config = small_config(source_folder, folder, validation=validation, checkpoint={"last_save_in_hf": True})
    assert train(config) == 0
    return folder


def step_of(trained: Path) -> str:
    return str(max((trained / "checkpoint").glob("step-*")))


def last_validation(trained: Path) -> dict[str, float]:
    rows = metric_rows(trained)
    row = [row for row in rows if row["kind"] == "validation"][-1]
    return {name.removeprefix("validation_"): value for name, value in row.items() if name.startswith("validation_")}


def columns(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "evaluation.json").read_text())["results"]
    return {name: value for result in found.values() for name, value in result["columns"].items()}


def count_rows(monkeypatch) -> list[str]:
    """Keys of the rows that are computed from now on."""
    keys: list[str] = []
    monkeypatch.setattr(
        results.Results, "add", lambda self, key, row: (keys.append(key), self.figures.update({key: row}))
    )
    return keys


@pytest.mark.slow
def test_it_gives_the_numbers_of_the_last_validation(trained, tmp_path, capsys):
    # The validation read all held-out rows.
    options = ["--tasks", "loss,drafts", "--samples", "1000", "--output", str(tmp_path)]
    assert main(["evaluate", "--checkpoint", step_of(trained), *options]) == 0
    measured = columns(tmp_path)
    expected = last_validation(trained)
    assert expected.keys() - measured.keys() == {"seconds"} and measured.keys() <= expected.keys()
    for name, value in measured.items():
        assert value == pytest.approx(expected[name], rel=1e-6), name  # FP32, in batches of other sizes
    out = capsys.readouterr().out
    assert "bits per byte" in out and "depth 1" in out


@pytest.mark.slow
def test_tables_of_long_text(trained, capsys):
    assert main(["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--tasks", "position,needle"]) == 0
    out = capsys.readouterr().out
    assert "Loss by position in 3 documents of at least 64 tokens" in out and "longer than trained on" in out
    assert "Needle in a haystack" in out and "depth 1" in out


def test_variables_of_a_job_system_make_no_rank(trained, monkeypatch, capsys):
    """Kubeflow sets them in every pod; other processes would be waited for, or this one would be silent."""
    pod = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    step = step_of(trained)
    assert main(["evaluate", "--checkpoint", step, *OPTIONS, "--tasks", "position"]) == 0
    assert main(["generate", "--checkpoint", step, "--prompt", "def f", "--max-new-tokens", "2"]) == 0
    assert "2 tokens, first after" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_call_computes_only_what_is_missing(trained, tmp_path, monkeypatch, capsys):
    command = ["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--output", str(tmp_path)]
    assert main(command) == 0
    table = capsys.readouterr().out
    keys = count_rows(monkeypatch)
    assert main(command) == 0
    assert keys == [] and capsys.readouterr().out == table
    more = ["--lengths", "50,60,64", "--samples", "5", "--tasks", "needle"]
    assert main([*command, *more]) == 0
    assert len(keys) == 2 * 5 + 2 * 2 * 1 and all(
        key.startswith(("needle/60/", "needle/50/", "needle/64/")) for key in keys
    )


def test_rows_that_a_stopped_call_has_finished_are_kept(trained, tmp_path, monkeypatch):
    command = ["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--output", str(tmp_path), "--tasks", "needle"]
    original, calls = results._score, 0

    def stops(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(results, "_score", stops)
    assert main(command) == 130
    finished = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    assert len(finished) == 8  # all of length 50
    monkeypatch.setattr(results, "_score", original)
    keys = count_rows(monkeypatch)
    assert main(command) == 0
    assert len(keys) == 8 and not finished.keys() & set(keys)


@pytest.mark.slow
def test_a_hugging_face_folder_gives_the_same_numbers_from_stated_text(trained, source_folder, tmp_path):
    exported = [path.parent for path in trained.rglob("config.json")]
    common = [*OPTIONS, "--tasks", "position,needle", "--data", str(source_folder), "--output"]
    assert main(["evaluate", "--checkpoint", step_of(trained), *common, str(tmp_path / "step")]) == 0
    assert main(["evaluate", "--model", str(exported[0]), *common, str(tmp_path / "hf")]) == 0
    step, hf = columns(tmp_path / "step"), columns(tmp_path / "hf")
    assert step.keys() == hf.keys()
    # The export has BF16 weights.
    assert all(hf[name] == pytest.approx(value, rel=1e-3) for name, value in step.items())


def test_the_picture_is_drawn_and_its_absence_is_explained(trained, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    command = ["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--output", str(tmp_path)]
    assert main(command) == 0
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "evaluation.png").unlink()
    monkeypatch.setattr(evaluate_ranks, "find_spec", lambda name: None)
    capsys.readouterr()
    assert main(command) == 0
    assert "[plot]" in capsys.readouterr().out and not (tmp_path / "evaluation.png").exists()


def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(trained, small_disk, capsys):
    disk, _ = small_disk
    with suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while file.write(b"x" * 4096) == 4096:
            pass
    command = ["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--tasks", "needle", "--output", str(disk)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert str(disk / "evaluation.json") in said and "No space left on device" in said and "--output" in said
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_nothing_is_written_without_an_output_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--tasks", "position"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments, words", [
    (["--tasks", "needl"], ("--tasks", "needl", "needle")),
    (["--tasks", "chess"], ("--tasks", "chess", "unknown task")), (["--lengths", "0"], ("--lengths", "0")),
    (["--lengths", "64,x"], ("--lengths", "x")),
    (["--lengths", "64,9999"], ("--lengths 9999", "2048", "max_position_embeddings")),
    (["--depths", "1.5"], ("--depths", "1.5", "between 0 and 1")), (["--samples", "0"], ("--samples", "0")),
    (["--lengths", "20"], ("needle", "20", "at least")),
    (["--lengths", "2000", "--tasks", "position"], ("position", "2000", "longest")),
    (["--data", "nowhere"], ("nowhere", "prepare")),
    (["--data", "a/text", "--data", "b/text"], ("--data", "a/text", "b/text", "rename")),
])  # fmt: skip
@pytest.mark.usefixtures("small_task_index")
def test_mistakes_are_named_with_exit_code_2(trained, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["evaluate", "--checkpoint", step_of(trained), *arguments])
    except SystemExit as end:  # argparse's own
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and all(word in said for word in words), said


def test_text_that_is_gone_is_named_with_the_option_that_states_other_text(trained, monkeypatch, capsys):
    known = evaluate_ranks._training
    monkeypatch.setattr(
        evaluate_ranks, "_training", lambda folder: known(folder)._replace(sources={"a": Path("moved/a")})
    )
    assert main(["evaluate", "--checkpoint", step_of(trained), *OPTIONS]) == 2
    said = capsys.readouterr().err
    assert "moved/a" in said and "--data" in said


def test_a_run_of_an_earlier_version_is_measured_on_its_own_text(trained, tmp_path, capsys):
    step = tmp_path / Path(step_of(trained)).name
    shutil.copytree(step_of(trained), step)
    meta = json.loads((step / META).read_text())
    table = tomli.loads(meta["config"])
    table["data"]["sources"][0] |= {"prepare": {}}
    table["training"]["gc_freq"] = 50
    (step / META).write_text(json.dumps(meta | {"config": tomli_w.dumps(table)}))
    body = read_manifest(step, None)[0]
    files = records_of(body) | {META: hash_file(step / META)}
    (step / MANIFEST).unlink()
    write_manifest(step, body["step"], files, {})
    options = ["--tasks", "loss", *OPTIONS, "--samples", "1000", "--output", str(tmp_path / "out")]
    assert main(["evaluate", "--checkpoint", str(step), *options]) == 0
    assert columns(tmp_path / "out")["loss"] == pytest.approx(last_validation(trained)["loss"], rel=1e-6)


def test_drafts_of_a_folder_without_prediction_layers_are_refused(trained, source_folder, tmp_path, capsys):
    """As transformers saves it."""
    folder = tmp_path / "without"
    shutil.copytree(next(trained.rglob("config.json")).parent, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    first = f"model.layers.{config['num_hidden_layers']}."
    for file in folder.glob("*.safetensors"):
        save_file({n: t for n, t in load_file(file).items() if not n.startswith(first)}, file)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    assert main(["evaluate", "--model", str(folder), "--data", str(source_folder), "--tasks", "drafts"]) == 2
    said = capsys.readouterr().err
    assert "--tasks drafts" in said and str(folder) in said and "another" in said


def test_a_damaged_checkpoint_is_named_and_not_measured(trained, tmp_path, capsys):
    step = tmp_path / Path(step_of(trained)).name
    shutil.copytree(step_of(trained), step)
    shard = max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["evaluate", "--checkpoint", str(step), *OPTIONS, "--output", str(tmp_path / "out")]) == 2
    assert shard.name in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_without_text_and_foreign_results_are_refused(trained, source_folder, tmp_path, capsys):
    exported = str(next(trained.rglob("config.json")).parent)
    assert main(["evaluate", "--model", exported]) == 2
    assert "--data" in capsys.readouterr().err
    command = ["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--tasks", "position", "--output", str(tmp_path)]
    assert main(command) == 0
    assert main([*command, "--dtype", "bfloat16"]) == 2
    said = capsys.readouterr().err
    assert "evaluation.json" in said and "dtype" in said and "--output" in said
    for content in (
        "{",
        '{"identity": 3, "rows": {}}',
        '{"identity": {}, "rows": 5}',
        '{"identity": {}, "rows": {"a": 5}}',
    ):
        (tmp_path / "evaluation.json").write_text(content)
        assert main(command) == 2
        assert "not results" in capsys.readouterr().err


@pytest.mark.slow
def test_results_in_the_folder_of_the_model_are_extended(trained, source_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(next(trained.rglob("config.json")).parent, tmp_path / "model")
    command = ["evaluate", "--model", str(folder), *OPTIONS, "--tasks", "needle", "--data", str(source_folder)]
    assert main([*command, "--output", str(folder)]) == 0
    keys = count_rows(monkeypatch)
    assert main([*command, "--output", str(folder)]) == 0
    assert not keys


def test_text_of_another_tokenizer_and_without_held_out_documents_is_refused(trained, source_folder, tmp_path, capsys):
    other, empty = tmp_path / "other", tmp_path / "empty"
    for folder in (other, empty):
        shutil.copytree(source_folder, folder)
    text = (other / "manifest.json").read_text()
    known = json.loads(text)["tokenizer"]
    for file in other.iterdir():
        file.write_bytes(file.read_bytes().replace(known.encode(), known[::-1].encode()))
    content = json.loads(text)
    content["splits"]["validation"] = {"documents": 0, "tokens": 0, "text_bytes": 0, "shards": []}
    (empty / "manifest.json").write_text(json.dumps(content))
    command = ["evaluate", "--checkpoint", step_of(trained), *OPTIONS, "--data"]
    assert main([*command, str(other)]) == 2
    capsys.readouterr()
    assert main([*command, str(empty)]) == 2
    said = capsys.readouterr().err
    assert str(empty) in said and "held_out" in said
