"""What a teacher has said before a run: it is stored by ``teach``, of a model or a server, and a student learns from it
as from the teacher itself."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.engine.inference.loading import load_for_inference
from glm46.operate.models import teach_ranks
from glm46.storage.data.manifest import load_manifest
from glm46.tasks.finetune import teacher_values
from glm46.tasks.finetune.task import train
from glm46.tasks.finetune.teacher_values import TeacherValues
from tests.small_run import call_here
from tests.teacher_folder import answer_of, write_answers
from tests.unit.tasks.finetune.teacher_server import TeacherServer
from tests.unit.tasks.finetune.test_distillation import start, step_of, taught, tuned
from tests.unit.tasks.finetune.test_preferences import contents, prepare_rows, rows_of

__all__ = ["start"]  # the fixture
TOP_K = 6


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(teacher_values, "_LEAST_DOCUMENTS", 4)


def learner(start: Path, out: Path, values: Path, kind: str = "full", **keys):
    return tuned(start, out, kind, **{
        "finetune": {"distillation": {"stored_path": str(values), "top_k": TOP_K} | keys},
        "training": {"steps": 4, "seq_len": 128, "global_batch_size": 2},
        "checkpoint": {"initial_load_path": str(step_of(start / "base", 2)), "initial_load_model_only": True,
                       "interval": 2},
    })  # fmt: skip


def run_teach(config, folder: Path, *options: str) -> int:
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps(config.model_dump(exclude_unset=True, exclude_none=True, mode="json")))
    return main(["teach", "--config", str(file), *options])


def of_teacher(start: Path) -> tuple[str, ...]:
    return "--checkpoint", str(step_of(start / "teacher", 8)), "--dtype", "float32"


@pytest.fixture(scope="module")
def stored(start, tmp_path_factory) -> Path:
    """The values of the teacher, as the verb stores them."""
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_values, "_LEAST_DOCUMENTS", 4)
        assert run_teach(learner(start, folder / "out", folder / "values"), folder, *of_teacher(start)) == 0
    return folder / "values"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "keys"), [
    ("full", {}), ("full", {"beta": 1.0, "sft_weight": 0.3}), ("lora", {"beta": 0.4, "top_k": 3}),
])  # fmt: skip
def test_a_student_learns_from_values_as_from_their_teacher(start, stored, tmp_path, kind, keys):
    config = learner(start, tmp_path / "stored", stored, kind, **keys)
    torch.seed()
    assert train(config) == 0
    of_network = taught(start, **{"top_k": TOP_K} | keys) | {"training": config.training.model_dump(exclude_unset=True)}
    assert train(tuned(start, tmp_path / "frozen", kind, **of_network)) == 0
    assert f"; teacher {stored} of " in (tmp_path / "stored/log.txt").read_text()
    found, expected = (rows_of(tmp_path / name, "loss") for name in ("stored", "frozen"))
    assert len(found) == len(expected) == 4
    for row, other in zip(found, expected, strict=True):
        for name in ("loss", "kl", "grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=2e-5), name
    held_out = [rows_of(tmp_path / name, "validation_kl")[-1]["validation_kl"] for name in ("stored", "frozen")]
    assert held_out[0] == pytest.approx(held_out[1], rel=2e-5)
    whole = contents(step_of(tmp_path / "stored", 4))
    shutil.rmtree(step_of(tmp_path / "stored", 4))
    torch.seed()
    assert train(config) == 0  # from step 2
    resumed = contents(step_of(tmp_path / "stored", 4))
    assert whole.keys() == resumed.keys() and all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "expert", "pipeline"])
def test_ranks_say_what_one_process_says(start, stored, tmp_path, axis):
    config = learner(start, tmp_path / "out", tmp_path / "values")
    options = "--nproc", "2", f"--{axis}-parallel-degree", "2"
    assert run_teach(config, tmp_path, *of_teacher(start), *options) == 0
    check_equal(start, TeacherValues(tmp_path / "values"), TeacherValues(stored))


def check_equal(start: Path, found: TeacherValues, expected: TeacherValues) -> None:
    """Equal but for rounding; equally likely tokens may change places."""
    assert found.facts["documents"] == expected.facts["documents"]
    documents = all_documents(start)
    assert len(documents) > 8
    for document in documents:
        (ids, logprobs), (other_ids, others) = found.of(document), expected.of(document)
        assert ids.shape == (document.is_target.sum(), TOP_K)
        assert np.allclose(logprobs, others, rtol=1e-5, atol=1e-6)
        apart = np.diff(others, append=-np.inf) < -1e-5
        assert (ids == other_ids)[apart & np.roll(apart, 1, axis=1)].all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_says_what_its_model_says(start, stored, tmp_path, kind, capsys):
    step, config = step_of(start / "teacher", 8), learner(start, tmp_path / "out", tmp_path / "values")
    model, _ = load_for_inference(step, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))
    with TeacherServer(model, faults=2) as one, TeacherServer(model) as other:
        urls = "--server", one.url, "--server", other.url
        assert run_teach(config, tmp_path, *urls, "--kind", kind) == 0
        assert one.asked and other.asked and one.refused == other.refused == []
    assert f"teacher of {kind}" in capsys.readouterr().out
    found, expected = TeacherValues(tmp_path / "values"), TeacherValues(stored)
    assert found.facts | {"teacher": ""} == expected.facts | {"teacher": ""}
    check_equal(start, found, expected)


def all_documents(start: Path) -> list:
    documents = teacher_values._documents([load_manifest(start / "chats")])
    return [document for document in documents if document.is_target.any()]


@pytest.mark.slow
def test_a_server_that_refuses_is_a_message(start, tmp_path, capsys):
    config = learner(start, tmp_path / "out", tmp_path / "values")
    model, _ = load_for_inference(
        step_of(start / "teacher", 8), tokenizer=None, dtype=torch.float32, device=torch.device("cpu")
    )
    with (
        TeacherServer(model, most=5) as few,
        TeacherServer(model, faults=10**6) as broken,
        TeacherServer(model, name="other") as another,
    ):
        cases = [
            ((few.url,), (), "--max-logprobs 6 --max-model-len"),
            ((broken.url,), (), "answered 503: refused; the same command goes on"),
            ((few.url, another.url), (), "serves another model than the others: other, teacher"),
            ((few.url,), ("--dtype", "float32"), "--dtype: has no effect with --server; remove it"),
            ((few.url,), ("--finetune.distillation.temperature", "2.0"), "temperature = 2: --server"),
            (("http://127.0.0.1:9",), (), "start it, or correct the address"),
            (("127.0.0.1:9",), (), "--server: 127.0.0.1:9 is not the address of a server; write http://HOST:PORT"),
        ]
        for urls, options, said in cases:
            servers = [word for url in urls for word in ("--server", url)]
            assert run_teach(config, tmp_path, *servers, *options) == 2
            assert said in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_command_goes_on(start, stored, tmp_path, monkeypatch, capsys):
    config, asked = learner(start, tmp_path / "out", tmp_path / "values"), []
    ask = teach_ranks._of_model

    def until_killed(loaded, of, documents):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(documents)
        return ask(loaded, of, documents)

    monkeypatch.setattr(teach_ranks, "_of_model", until_killed)
    assert run_teach(config, tmp_path, *of_teacher(start)) not in (0, 2)
    with pytest.raises(UserError, match=r"stored_path = .*values'?: lacks \d of \d parts; run .* teach"):
        train(config)
    monkeypatch.setattr(teach_ranks, "_of_model", lambda *arguments: asked.append(arguments[-1]) or ask(*arguments))
    assert run_teach(config, tmp_path, *of_teacher(start)) == 0
    numbers = [document.key for documents in asked for document in documents]
    assert len(numbers) == len(set(numbers)) == len(all_documents(start))  # none was asked twice
    files = sorted(path.name for path in stored.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "values").iterdir()) and len(files) > 3
    assert all((stored / name).read_bytes() == (tmp_path / "values" / name).read_bytes() for name in files)
    asked.clear()
    assert run_teach(config, tmp_path, *of_teacher(start)) == 0
    assert asked == [] and "nothing was missing" in capsys.readouterr().out


@pytest.mark.slow
def test_other_values_are_refused_before_work(start, stored, tmp_path, capsys):
    """By a run, and by the verb, with the key, what differs, and what to do."""
    prepare_changed(tmp_path)
    cases = [
        (
            {"top_k": TOP_K + 1},
            {},
            ["has 6 tokens of each target, fewer than finetune.distillation.top_k = 7", "teach'"],
        ),
        ({"temperature": 2.0}, {}, ["is of temperature 1, not of finetune.distillation.temperature = 2"]),
        ({"stored_path": str(tmp_path / "none")}, {}, ["holds no values of a teacher; run 'python -m glm46 teach'"]),
        (
            {},
            {"data": sources(tmp_path / "other")},
            ["lacks 2 of 2 shards of data.sources, which is other data, or in another chat"],
        ),
        ({}, {"data": sources(start / "text", "concatenate")}, ["is text, and values are stored of chats"]),
    ]
    for keys, tables, said in cases:
        of = learner(start, tmp_path / "out", stored, **keys)
        config = of.model_copy(update={name: getattr(tuned(start, tmp_path / "out", "full", **{name: table}), name)
                                       for name, table in tables.items()})  # fmt: skip
        with pytest.raises(UserError) as caught:
            train(config)
        assert len(caught.value.faults) == 1 and all(part in caught.value.faults[0] for part in said), caught.value
        assert not (tmp_path / "out/checkpoint").exists()
    folder = tmp_path / "values"
    shutil.copytree(stored, folder)
    facts = json.loads((folder / "manifest.json").read_text()) | {"tokenizer": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"is of another tokenizer .000000000000….* than model.tokenizer_path names"):
        train(learner(start, tmp_path / "out", folder))
    assert run_teach(learner(start, tmp_path / "out", folder), tmp_path, *of_teacher(start)) == 2
    assert "holds values of another tokenizer; name another folder" in capsys.readouterr().err
    no_folder = learner(start, tmp_path / "out", stored).model_copy(update={"finetune": None})
    assert run_teach(no_folder, tmp_path, *of_teacher(start)) == 2
    assert "finetune.distillation.stored_path: absent; name the folder" in capsys.readouterr().err


def prepare_changed(folder: Path) -> None:
    rows = [{"prompt": f"Say it {number} times.", "completion": f"{number} times."} for number in range(12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
        prepare_rows(folder / "other", rows, "prompt_completion")


def sources(folder: Path, packing: str = "best_fit") -> dict:
    return {"sources": [{"name": "chats", "path": str(folder), "packing": packing}]}


@pytest.mark.slow
def test_another_teacher_is_refused_by_the_verb_and_other_values_by_a_resume(start, stored, tmp_path, capsys):
    config = learner(start, tmp_path / "out", stored)
    other = "--checkpoint", str(step_of(start / "base", 2)), "--dtype", "float32"
    assert run_teach(config, tmp_path, *other) == 2
    assert "another teacher (" in capsys.readouterr().err
    assert train(config) == 0
    again = tmp_path / "again"  # without parts no work would be lost
    shutil.copytree(stored, again, ignore=shutil.ignore_patterns("part-*"))
    assert run_teach(learner(start, tmp_path / "out", again), tmp_path, *other) == 0
    (tmp_path / "file").touch()
    for name, said in (
        (tmp_path / "file", "cannot be"),
        (start / "chats", "holds other data than values of a teacher"),
    ):
        assert run_teach(learner(start, tmp_path / "out", name), tmp_path, *other) == 2
        assert (
            f"finetune.distillation.stored_path = {str(name)!r}: " in (err := capsys.readouterr().err) and said in err
        )
    copy = learner(start, tmp_path / "out", tmp_path / "values")
    assert run_teach(copy, tmp_path, *other) == 0
    shutil.rmtree(step_of(tmp_path / "out", 4))
    with pytest.raises(UserError, match="finetune.distillation.stored_path"):
        train(copy)


@pytest.mark.slow
def test_damaged_and_missing_values_are_refused(start, stored, tmp_path, capsys):
    folder = tmp_path / "values"
    shutil.copytree(stored, folder)
    part = sorted(folder.glob("part-*"))[0]
    content = bytearray(part.read_bytes())
    content[-300] ^= 1  # a log-probability or a token
    part.write_bytes(content)
    cut = sorted(folder.glob("part-*"))[1]
    cut.write_bytes(cut.read_bytes()[:-100])
    config = learner(start, tmp_path / "out", folder)
    with pytest.raises(UserError, match=r"part-00000.safetensors: is damaged; run .* teach.*, which asks for it again"):
        train(config)
    assert not (tmp_path / "out/checkpoint").exists()
    parts = len(sorted(stored.glob("part-*")))
    assert run_teach(config, tmp_path, *of_teacher(start)) == 0
    assert f"{parts - 2} of {parts} parts are there" in capsys.readouterr().out
    values = TeacherValues(folder)
    check_equal(start, values, TeacherValues(stored))
    with pytest.raises(UserError, match=r"has no values of a document of 4 tokens; name an empty folder"):
        values.of(teacher_values.AskedDocument(np.arange(4), np.array([False, True, True, False])))


def test_values_are_found_by_any_hash(tmp_path):
    """Those of hashes that end in zeros, too, which NumPy leaves out."""
    found = [answer_of(torch.tensor([1, n]), torch.tensor([n, -100]), torch.randn(2, 9), 4, 1.0) for n in range(1500)]
    assert sum(document.key.endswith(b"\0") for document, _ in found) > 2
    write_answers(tmp_path / "values", found, 7)
    values = TeacherValues(tmp_path / "values")
    for document, (ids, logprobs) in found:
        assert all(map(np.array_equal, values.of(document), (ids, logprobs)))
    batch = {
        "input_ids": torch.tensor([[1, 5, 1, 7, 0, 0]]), "labels": torch.tensor([[5, -100, 7, -100, -100, -100]]),
        "document_ids": torch.tensor([[0, 0, 1, 1, -1, -1]]),
    }  # fmt: skip
    ids, logprobs = values.of_batch(batch, 3)
    assert ids.shape == logprobs.shape == (1, 3, 6)
    for place, number in ((0, 5), (2, 7)):
        wanted = found[number][1]
        assert ids[0, :, place].tolist() == wanted[0][0, :3].tolist()
        assert logprobs[0, :, place].tolist() == wanted[1][0, :3].tolist()
    others = [1, 3, 4, 5]
    assert (ids[..., others] == -100).all() and (logprobs[..., others] == 0).all()


@pytest.mark.parametrize("bad", [
    [[0.0, -0.5]], [[-0.1, float("-inf")]], [[-2.0, -1.0]], [[float("nan"), -1.0]],
])  # fmt: skip
def test_values_of_no_distribution_are_refused(tmp_path, bad):
    document = teacher_values.AskedDocument(np.arange(2), np.array([True, False]))
    answer = np.array([[1, 2]], np.uint32), np.array(bad, np.float32)
    with pytest.raises(UserError, match="of tests: its log-probabilities are not"):
        write_answers(tmp_path / "values", [(document, answer)], 1)
