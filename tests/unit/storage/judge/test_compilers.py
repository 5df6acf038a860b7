"""Texts that compile are kept, others are filtered; nothing is run."""

import json
import platform
import shutil
from importlib import metadata

import pytest

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.shards import open_shard
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.judge import compilers
from glm46.storage.judge.compilers import COMPILERS, compile_fault, verifier_version
from glm46.storage.prepare import pipeline
from glm46.storage.prepare.documents import VERIFIERS
from glm46.storage.prepare.pipeline import prepare_text
from tests.processes import HANG_SECONDS, is_alive, wait_until

GOOD = {
    "c": ['#include <stdio.h>\nint main(void) { return puts("é"); }\n'],
    "c++": ["#include <vector>\nstd::vector<int> f() { return {1, 2}; }\n"],
    "rust": ["pub fn f(x: &str) -> usize { x.len() }\n"],
    "go": ["package main\n\nfunc main() {}\n"],
    "javascript": ["const a = require('a');\n", "import a from 'a';\nexport const b = a ?? 1;\n"],
}
BAD = {
    "c": "int main(void) { return x; }\n", "c++": "template <class T> T f( { }\n",
    "rust": 'pub fn f() -> usize { "text" }\n', "go": "package main\nfunc {\n", "javascript": "const a = ;\n",
}  # fmt: skip


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


@pytest.mark.slow
def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nsleep 600 &\necho $! > child\nmv child " + str(tmp_path) + "\nwait\n")
    script.chmod(0o755)
    monkeypatch.setitem(compilers.COMPILERS, "c", (str(script), (("text.c",),)))
    for limit in (4, 16, 64, HANG_SECONDS):
        monkeypatch.setattr(compilers, "WAIT_LIMIT_SECONDS", limit)
        assert compile_fault("int x;", "c") == f"{script} took too long"
        if (tmp_path / "child").exists():  # else a busy machine had not even begun
            break
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_a_compiler_has_few_variables_and_reads_no_file_of_the_user(tmp_path, monkeypatch):
    """A stand-in for gcc that accepts a text if it sees a variable, or if it reads the file that the text names."""
    secret = tmp_path / "secret"
    secret.write_text("password")
    program = tmp_path / "bin" / "gcc"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nread -r name < text.c || exit 0\n[ -n "$HF_TOKEN" ] || cat "$name"\n')
    program.chmod(0o755)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setitem(compilers.COMPILERS, "c", (str(program), (("text.c",),)))
    assert compile_fault("/nowhere\n", "c") == f"does not compile with {program}"
    without_jail = compilers.jail_of_programs() == compilers.NO_JAIL
    assert (compile_fault(f"{secret}\n", "c") is None) == without_jail
    assert compile_fault("/etc/passwd\n", "c") is None  # of the system: the program runs


@pytest.mark.parametrize("language", COMPILERS)
def test_a_compiler_works_in_the_sandbox_of_this_machine(language):
    program = shutil.which(COMPILERS[language][0])
    if program is None:
        pytest.skip(f"{COMPILERS[language][0]} is not on this machine")
    assert compilers._jail_of(program, language) == compilers.jail_of_programs()


def test_endless_includes_do_not_fill_the_machine(monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not on this machine")
    monkeypatch.setattr(compilers, "_MEMORY_LIMIT_BYTES", 2**28)
    assert compile_fault('#include "/dev/zero"\n', "c") is not None


def test_a_recipe_filters_text_that_does_not_compile(tmp_path):
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


@pytest.mark.slow
def test_work_begun_with_one_compiler_does_not_continue_with_another(tmp_path, monkeypatch):
    def install(version, accepts):
        program = tmp_path / "bin" / "gcc"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo gcc {version} && echo more && exit 0\n'
            f'echo {version} >> {tmp_path / "calls"}\ngrep -q "{accepts}" text.c\n'
        )
        program.chmod(0o755)

    def interrupted(*_):
        raise KeyboardInterrupt

    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{name}\n"}) + "\n" for name in ("old", "new")))
    recipe = TextRecipe(
        input=(str(tmp_path / "a.jsonl"),), output=str(tmp_path / "out"), verify="c", held_out=0.0, processes=1,
    )  # fmt: skip
    install(1, "old")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_splits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_text(recipe, report=print)
        # The same compiler continues: nothing is compiled again.
        with pytest.raises(KeyboardInterrupt):
            prepare_text(recipe, report=print)
    install(2, "new")
    prepare_text(recipe, report=print)
    manifest = load_manifest(tmp_path / "out")
    assert (tmp_path / "calls").read_text().split() == ["1", "1", "2", "2"]
    assert manifest.settings["verifier"] == "gcc 2" and manifest.splits["train"].documents == 1
    (shard,) = manifest.splits["train"].shards
    assert load_tokenizer("builtin").decode(open_shard(tmp_path / "out" / shard.file).tokens[:-1]) == "new\n"
    # Existing shards need no compiler, and the recipe is the same.
    install(3, "other")
    assert prepare_text(recipe, report=print) == manifest


def test_a_program_without_a_version_is_identified_by_its_bytes(tmp_path, monkeypatch):
    program, versions = tmp_path / "gofmt", []
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for text in ("one", "two", "one"):
        program.write_text(f"#!/bin/sh\n# {text}\nexit 2\n")
        program.chmod(0o755)
        versions.append(verifier_version("go"))
    assert versions[0] == versions[2] != versions[1] and versions[0].startswith("gofmt ")
    assert verifier_version("json") is verifier_version("none") is None
    assert verifier_version("maths") == f"math-verify {metadata.version('math-verify')}"
    assert verifier_version("python") == f"Python {platform.python_version()}"
