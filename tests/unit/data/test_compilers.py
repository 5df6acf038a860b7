"""Texts that compile are kept, others are left out; nothing is ever run."""

import json
import shutil
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.data import compilers
from glm46.data.compilers import COMPILERS, compile_fault
from glm46.data.filters import VERIFIERS
from glm46.data.manifest import load_manifest
from glm46.data.prepare import prepare_text

GOOD = {
    "c": ['#include <stdio.h>\nint main(void) { return puts("é"); }\n'],
    "c++": ["#include <vector>\nstd::vector<int> f() { return {1, 2}; }\n"],
    "rust": ["pub fn f(x: &str) -> usize { x.len() }\n"],
    "go": ["package main\n\nfunc main() {}\n"],
    "javascript": ["const a = require('a');\n", "import a from 'a';\nexport const b = a ?? 1;\n"],
}
BAD = {
    "c": "int main(void) { return x; }\n",
    "c++": "template <class T> T f( { }\n",
    "rust": 'pub fn f() -> usize { "text" }\n',
    "go": "package main\nfunc {\n",
    "javascript": "const a = ;\n",
}


@pytest.mark.parametrize("language", COMPILERS)
def test_what_compiles_is_kept(language):
    program = COMPILERS[language][0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on this machine")
    assert [VERIFIERS[language](text) for text in GOOD[language]] == [None] * len(GOOD[language])
    assert VERIFIERS[language](BAD[language]) == f"does not compile with {program}"


def test_nothing_is_run_and_nothing_is_left(tmp_path, monkeypatch):
    if shutil.which("node") is None:
        pytest.skip("node is not on this machine")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = tmp_path / "ran"
    assert compile_fault(f"require('fs').writeFileSync({json.dumps(str(mark))}, 'x');\n", "javascript") is None
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nsleep 60 &\necho $! > child\ncp child " + str(tmp_path) + "\nwait\n")
    script.chmod(0o755)
    monkeypatch.setitem(compilers.COMPILERS, "c", (str(script), (("text.c",),)))
    monkeypatch.setattr(compilers, "WAIT_LIMIT_SECONDS", 1)
    assert compile_fault("int x;", "c") == f"{script} took too long"
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    assert not child.exists() or child.read_text().split(") ")[1].startswith("Z")


def test_endless_includes_do_not_fill_the_machine(monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not on this machine")
    monkeypatch.setattr(compilers, "_MEMORY_LIMIT_BYTES", 2**28)
    assert compile_fault('#include "/dev/zero"\n', "c") is not None


def test_a_recipe_leaves_out_what_does_not_compile(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not on this machine")
    lines = [json.dumps({"text": text}) + "\n" for text in (*GOOD["c"], BAD["c"])]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    recipe = TextRecipe(
        input=(str(tmp_path / "a.jsonl"),), output=str(tmp_path / "out"), verify="c", held_out=0.0, processes=1
    )
    prepare_text(recipe, report=print)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.splits["train"].documents == 1 and manifest.dropped == {"does not compile with gcc": 1}


def test_a_missing_compiler_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(compilers.COMPILERS, "rust", ("no-such-rustc", ((),)))
    (tmp_path / "a.rs").write_text("fn f() {}")
    recipe = TextRecipe(input=(str(tmp_path / "a.rs"),), output=str(tmp_path / "out"), verify="rust")
    with pytest.raises(UserError, match="no-such-rustc is not on this machine; install it"):
        prepare_text(recipe, report=print)
    assert not (tmp_path / "out.partial").exists()
