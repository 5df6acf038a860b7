"""Options are read, and mistakes refused, before anything heavy is imported: neither costs an import of torch."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from glm46.config.loader import dump_config
from glm46.config.options import VERBS
from glm46.config.presets import resolve_shape
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.tokenizer_files import files_beside_weights

ROOT = Path(__file__).parents[3]
_PROGRAM = """
import contextlib, io, json, os, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
from glm46.cli import main
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@contextmanager
def process_without(*packages: str) -> Iterator[Callable[..., list]]:
    """A function that runs a command line in a process without these packages: exit code, output, errors."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "400", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )

    def run(*words: str) -> list:
        print(json.dumps(words), file=child.stdin, flush=True)
        return json.loads(child.stdout.readline())

    yield run
    child.communicate()


@pytest.fixture(scope="module")
def without_torch():
    with process_without("torch", "transformers", "jinja2", "matplotlib") as run:
        yield run


@pytest.fixture(scope="module")
def without_torch_alone():
    with process_without("torch") as run:
        yield run


@pytest.mark.parametrize(("words", "answer"), [
    ("plna", "did you mean plan?"), ("trian", "did you mean train?"), ("setup-clstr", "did you mean setup-cluster?"),
    ("checkpoint lst", "did you mean list?"), ("rl inspct", "did you mean inspect?"),
    ("convert to-fh", "did you mean to-hf?"), ("benchmark rats", "did you mean rates?"),
    ("benchmark rates --flavor debgu", "did you mean debug?"), ("plot x --x token", "did you mean tokens?"),
    ("plan --config x --netwrok 8", "--netwrok: did you mean --network?"),
    ("inspect x --row=3", "did you mean --rows?"),
    ("generate --model x --promt=x", "did you mean --prompt?"),
    ("convert to-hf --checkpoint x --output y --dtyp int4", "did you mean --dtype?"),
    ("zzz", "choose from launch, train, ablate"), ("convert zzz", "choose from to-hf, from-hf, from-dcp"),
])  # fmt: skip
def test_an_unknown_word_is_answered_with_the_nearest_known_one(words, answer, without_torch):
    code, printed, errors = without_torch(*words.split())
    assert code == 2 and not printed and len(errors.splitlines()) == 1, errors
    assert answer in errors and errors.endswith("; see --help\n"), errors


@pytest.mark.parametrize("verb", VERBS)
def test_help_and_typos_of_a_verb_and_of_its_kinds_import_nothing_heavy(verb, without_torch):
    code, printed, errors = without_torch(verb, "--help")
    assert code == 0, errors
    kinds = re.search(r"^usage:.* (\S+\|\S+) \.\.\.$", printed, re.MULTILINE)
    lines = [[verb], *([verb, kind] for kind in kinds[1].split("|"))] if kinds else [[verb]]
    for words in lines:
        code, printed, errors = without_torch(*words, "--help")
        assert code == 0 and f"python -m glm46 {' '.join(words)}" in printed, errors
        code, printed, errors = without_torch(*words, "--no-such-option")
        assert code == 2 and not printed and len(errors.splitlines()) == 1
        assert re.search("error: .*(--no-such-option|required).*; see --help", errors), errors


@pytest.mark.parametrize("verb", ["train", "plan", "launch"])
def test_help_shows_the_options_and_says_where_the_keys_are(verb, without_torch):
    code, printed, _ = without_torch(verb, "--help")
    assert code == 0 and "--help keys" in printed and "docs/reference/keys.md" in printed
    assert "global_batch_size" not in printed and len(printed.splitlines()) < 70
    code, printed, _ = without_torch(verb, "--help", "keys")
    assert code == 0 and "global_batch_size" in printed and "usage:" not in printed
    code, _, errors = without_torch(verb, "--help", "kyes")
    assert code == 2 and "--help kyes: write --help, or --help keys" in errors


@pytest.mark.parametrize("verb", ["launch", "ablate", "prepare", "generate", "convert", "checkpoint", "init"])
def test_help_imports_nothing_that_only_work_needs(verb):
    """What makes a help slow; seconds would be those of the machine."""
    code = (
        "import sys\nfrom glm46.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n"
        "    heavy = {'numpy', 'rich.console', 'prometheus_client', 'glm46.operate.estimate.memory'}\n"
        "    print('imported:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, verb, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "imported: []", done.stderr


@pytest.mark.parametrize(("verb", "most"), [("train", 45), ("inspect", 20), ("evaluate", 60)])
def test_help_of_a_verb_imports_few_modules_of_the_package(verb, most):
    """The time of a help is that of its imports: classes of keys and the modules that only the work needs."""
    program = "import sys\nfrom glm46.cli import main\ntry: main([sys.argv[1], '--help'])\nfinally: print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program, verb], cwd=ROOT, check=True, capture_output=True, text=True)
    modules = said.stdout.splitlines()[-1].split()
    assert "glm46.cli" in modules and "numpy" not in modules
    assert len([name for name in modules if name.startswith("glm46.")]) <= most


@pytest.mark.parametrize("verb", ["train", "launch"])
def test_the_first_line_of_a_start_comes_before_the_classes_of_keys_are_imported(verb, tmp_path):
    words = [verb, "--config", str(tmp_path / "missing.toml"), "--training.steps", "3"]
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "glm46", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    lines = said.stdout.splitlines()
    first = lines.index(f"starting     {tmp_path / 'missing.toml'} --training.steps 3")
    assert any(line.endswith(" glm46.config.run_config") for line in lines[first:])
    assert not any(re.search(r" (pydantic|torch|numpy)$", line) for line in lines[:first])
    assert said.returncode == 2 and sum(line.startswith("starting") for line in lines) == 1


def test_run_train_names_its_run_before_it_looks_for_a_python(tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "python $*"\n')
    fake.chmod(0o755)
    place = {name: value for name, value in os.environ.items() if name not in ("CONFIG_FILE", "NGPU", "HOSTFILE")}
    place["PATH"] = f"{tmp_path}:{place['PATH']}"

    def run_start(*words: str) -> list[str]:
        said = subprocess.run(
            ["./run_train.sh", *words], cwd=ROOT, env=place, check=True, stdout=subprocess.PIPE, text=True
        )
        return said.stdout.splitlines()

    first, *others = run_start("--training.steps", "3")
    assert first == "starting     train_configs/debug.toml --training.steps 3"
    assert [line.split()[2] for line in others] == ["glm46.operate.launch.environment", "glm46"]
    assert not any(line.startswith("starting") for line in run_start("--help"))


def check_refusal(run, words: list[str | Path], *parts: str) -> None:
    """Check that a command line is refused in one line with these parts, on a machine without GPUs."""
    code, _, errors = run(*map(str, words))
    assert code == 2, errors
    assert errors.count("\n") == 1 and all(part in errors for part in parts), errors


@pytest.mark.parametrize(("keys", "part"), [
    ({"checkpoint": {"initial_load_path": "nowhere"}}, "checkpoint.initial_load_path = 'nowhere': no such folder"),
    ({"model": {"tokenizer_path": "nowhere"}}, "tokenizer 'nowhere': no such file"),
    ({"model": {"vocab_size": 300}}, "model.shape.vocab_size = 300: the tokenizer 'builtin' has ids up to 8191"),
    ({"job": {"dump_folder": "file"}}, "file is a file, not a folder; set another folder"),
    ({"job": {"dump_folder": "file/run"}}, "file is a file, not a folder; set another folder"),
    ({"data": {"sources": [{"name": "a", "path": "nowhere"}]}}, "nowhere: no such folder; make it with"),
])  # fmt: skip
def test_train_refuses_folders_tokenizer_and_data(keys, part, make_config, tmp_path, without_torch_alone):
    (tmp_path / "file").touch()
    if "job" in keys:
        keys = {"job": {"dump_folder": str(tmp_path / keys["job"]["dump_folder"])}}
    file = tmp_path / "run.toml"
    file.write_text(dump_config(make_config(**keys)))
    before = sorted(tmp_path.rglob("*"))
    check_refusal(without_torch_alone, ["train", "--config", file], part)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_are_listed_without_torch_alone(tmp_path, without_torch_alone):
    check_refusal(without_torch_alone, ["checkpoint", "list", tmp_path / "nowhere"], "no such folder")
    check_refusal(without_torch_alone, ["checkpoint", "show", tmp_path], str(tmp_path))
    check_refusal(without_torch_alone, ["checkpoint", "prune", tmp_path, "--keep-latest-k", "1"], str(tmp_path))
    manager = CheckpointManager(tmp_path / "run", keep_latest_k=0)
    manager.save(7, {"model.weight": torch.zeros(3)}, {}, validation_loss=2.5)
    code, printed, errors = without_torch_alone("checkpoint", "list", str(tmp_path / "run"))
    assert code == 0 and "2.5000" in printed, errors


def test_rl_inspect_refuses_a_run_without_rollouts(tmp_path, without_torch_alone):
    check_refusal(without_torch_alone, ["rl", "inspect", tmp_path / "nowhere"], "no such folder")
    words = ["rl", "inspect", tmp_path, "--tokenizer", "builtin"]
    check_refusal(without_torch_alone, words, "no rollout", "run with [rl]")


@pytest.mark.parametrize(("device", "part"), [
    ("cuda", "this machine has 0 GPUs; use cpu"), ("cuda:1", "this machine has 0 GPUs"), ("tpu", "unknown device"),
])  # fmt: skip
def test_generate_refuses_a_device(device, part, tokenizer, tmp_path, make_config, without_torch_alone):
    shape = resolve_shape(make_config().model)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in files_beside_weights(tokenizer, max_length=64).items():
        (tmp_path / name).write_bytes(content)
    check_refusal(
        without_torch_alone,
        ["generate", "--model", tmp_path, "--prompt", "a", "--device", device],
        f"--device {device}",
        part,
    )
