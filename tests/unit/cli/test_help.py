"""Options are read before anything heavy is imported: a help or a typo costs no import of torch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.config.options import VERBS

ROOT = Path(__file__).parents[3]
_PROGRAM = """
import contextlib, io, json, os, sys
for name in ("torch", "transformers", "jinja2", "matplotlib"):
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


@pytest.fixture(scope="module")
def without_torch():
    """A function that runs a command line in a process that cannot import torch: exit code, output, errors."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "400", "PYTHONPATH": str(ROOT)},
    )

    def run(*words: str) -> list:
        print(json.dumps(words), file=child.stdin, flush=True)
        return json.loads(child.stdout.readline())

    yield run
    child.communicate()


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
