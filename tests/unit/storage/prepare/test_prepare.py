"""Sources prepared from the library of Python, and the worker processes that do it."""

import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.operate.launch.process_end import started_ranks
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare import input_files, pipeline
from glm46.storage.prepare.pipeline import prepare_text
from glm46.storage.prepare.workers import call_in_workers, end_worker, start_worker
from tests.processes import wait_until


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library in place of the real one."""
    root = tmp_path / "lib"
    (root / "test").mkdir(parents=True)
    rng = random.Random(0)
    words = ["def ", "return ", "x", " = ", "(y)", "\n", "    ", "größe", "# note\n"]
    for i in range(200):
        (root / f"m{i:03d}.py").write_text(f"# module {i}\n" + "".join(rng.choices(words, k=rng.randint(100, 900))))
    (root / "copy.py").write_bytes((root / "m000.py").read_bytes())
    (root / "latin.py").write_bytes("# größe\n".encode("latin-1") * 50)
    (root / "blank.py").write_text("\n" * 300)
    (root / "tiny.py").write_text("\n")
    (root / "test" / "test_m.py").write_text("assert True\n" * 50)
    monkeypatch.setattr(input_files.sysconfig, "get_path", lambda _: str(root))
    return root


def prepare(source: str, output: Path, report=print):
    """The recipe of debug.toml for an embedded source."""
    recipe = TextRecipe(
        input=(f"builtin:{source}",), output=str(output), name=source, held_out=0.02, deduplicate="exact"
    )
    return prepare_text(recipe, report=report)


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def test_documents_come_out_as_they_went_in(library, tokenizer, tmp_path):
    lines = []
    manifest = prepare("python_stdlib", tmp_path / "out", report=lines.append)
    texts = []
    for split in manifest.splits.values():
        stream = TokenStream(manifest.folder, split, manifest.vocab_size)
        tokens = np.empty(split.tokens, np.int64)
        used, ends = stream.read(0, tokens)
        ends = np.concatenate(ends)
        assert used == split.tokens == ends[-1] and split.documents == len(ends)
        assert (tokens[ends - 1] == tokenizer.eos_id).all() and (tokens == tokenizer.eos_id).sum() == len(ends)
        found = [tokenizer.decode(t[:-1]) for t in np.split(tokens, ends[:-1])]
        assert split.text_bytes == sum(len(text.encode()) for text in found)
        texts += found
    originals = [(library / f"m{i:03d}.py").read_text() for i in range(200)]
    assert sorted(texts) == sorted(originals)
    assert manifest.dropped == {"empty": 1, "exact duplicate": 1, "not UTF-8": 1}
    # The hash holds out 2 % of the documents on average: 4 of 200, and above 12 would be a one in a thousand event.
    assert 1 <= manifest.splits["validation"].documents <= 12
    assert not any(name.startswith(("out.partial", ".out")) for name in os.listdir(tmp_path))
    assert any("tokens" in line for line in lines)


def test_a_second_call_uses_the_existing_shards(library, tmp_path):
    prepare("python_stdlib", tmp_path / "out")
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()}
    again = prepare("python_stdlib", tmp_path / "out")
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()} == before
    assert again == load_manifest(tmp_path / "out")


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter(library, tmp_path, monkeypatch):
    prepare("python_stdlib", tmp_path / "a")
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda _: {0})
    prepare("python_stdlib", tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


# A run in its own process: many small parts. It stands still after so many, so that a kill finds it at work.
_RUN = """
import sys, time
from glm46.config.text_recipe import TextRecipe
from glm46.storage.prepare import input_files, pipeline, readers
from glm46.storage.prepare.pipeline import prepare_text
if __name__ == "__main__":
    readers.PART_BYTES = 20_000
    input_files.sysconfig.get_path = lambda _: sys.argv[1]
    call = pipeline.call_in_workers
    def held(*arguments):
        for number, result in enumerate(call(*arguments)):
            if number == int(sys.argv[3]):
                time.sleep(600)
            yield result
    pipeline.call_in_workers = held
    recipe = TextRecipe(
        input=("builtin:python_stdlib",), output=sys.argv[2], name="python_stdlib", held_out=0.02, deduplicate="exact"
    )
    prepare_text(recipe, report=print)
"""


def _start(script: Path, library: Path, output: Path, most: int = 10**6) -> subprocess.Popen:
    environment = {"PYTHONPATH": str(Path(pipeline.__file__).parents[3]), "PATH": os.environ["PATH"]}
    command = [sys.executable, str(script), str(library), str(output), str(most)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)  # fmt: skip


def _kill_at(run: subprocess.Popen, pieces: Path, count: int) -> None:
    """Kill a run when so many pieces are there."""
    wait_until(lambda: pieces.is_dir() and sum(1 for _ in pieces.iterdir()) >= count)
    os.killpg(run.pid, signal.SIGKILL)  # a dead parent does not take its pool with it at once
    run.wait()


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes(library, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    whole = _start(script, library, tmp_path / "whole")
    output = whole.communicate()[0]
    assert whole.returncode == 0, output
    rng, pieces = random.Random(1), tmp_path / "killed.partial" / "parts"
    for count in sorted(rng.sample(range(1, 15), 4)):
        _kill_at(_start(script, library, tmp_path / "killed", count), pieces, count)
        assert not (tmp_path / "killed").exists()
    last = _start(script, library, tmp_path / "killed")
    output = last.communicate()[0]
    assert last.returncode == 0, output
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


@pytest.mark.slow
def test_two_runs_at_once_make_one_source(library, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    runs = [_start(script, library, tmp_path / "out") for _ in range(2)]
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert load_manifest(tmp_path / "out", full=True).splits["train"].documents > 150
    assert sum("prepared python_stdlib" in output for output in outputs) == 1


@pytest.mark.slow
def test_text_that_changed_since_the_interruption_is_read_again(library, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_splits", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare("python_stdlib", tmp_path / "out")
    assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()
    (library / "m001.py").write_text("# changed\n" * 40)
    prepare("python_stdlib", tmp_path / "out")
    prepare("python_stdlib", tmp_path / "fresh")
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_a_folder_with_other_files_is_not_changed(library, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("do not touch")
    with pytest.raises(UserError, match="no manifest.json"):
        prepare("python_stdlib", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


def test_a_source_made_of_other_text_is_refused(library, tmp_path):
    prepare("python_stdlib", tmp_path / "out")
    with pytest.raises(UserError, match="holds the source 'python_stdlib'"):
        prepare("python_packages", tmp_path / "out")


def test_an_unknown_source_is_refused(tmp_path):
    with pytest.raises(UserError, match="python_stdlib, python_packages"):
        prepare("wikipedia", tmp_path / "out")


@pytest.mark.slow
def test_the_embedded_sources_hold_twenty_megabytes():
    files = [file for source in input_files.EMBEDDED_SOURCES for file in input_files.embedded_files(source)]
    assert sum(file.stat().st_size for file in files) >= 20e6
    assert not any("tests" in file.parts for file in files)


_started = None


def start(value):
    global _started
    _started = value


def answer(number, kind):
    if kind == "fault":
        raise EOFError("damaged", number)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "slow":
        time.sleep(600)
    return _started + number


@pytest.mark.slow
def test_every_item_is_answered_once_by_any_number_of_workers():
    for workers, count in ((1, 3), (3, 5), (4, 2)):
        results = list(call_in_workers(workers, start, (100,), answer, [(i, "") for i in range(count)]))
        assert sorted(results) == [(i, 100 + i) for i in range(count)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("kind", "error", "text"), [("fault", EOFError, "damaged"), ("killed", UserError, "SIGKILL")])
def test_a_fault_ends_all_workers_at_once(kind, error, text):
    with pytest.raises(error, match=text):
        list(call_in_workers(2, start, (0,), answer, [(0, "slow"), (1, kind)]))
    assert not multiprocessing.active_children()


def other_session(number):
    """A program in a session of its own, as a limited program is."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as program:
        time.sleep(600)
    return program


def test_a_worker_and_its_program_are_no_ranks():
    """The launcher passes a signal on to ranks and lives on; without ranks it ends."""
    connection, process = start_worker(start, (0,), other_session)
    connection.send((0, (0,)))
    wait_until(lambda: any(os.getpgid(child) == child for child in _children(process.pid)))
    assert os.getpgid(process.pid) == process.pid
    try:
        assert not started_ranks()
    finally:
        for child in _children(process.pid):
            os.kill(child, signal.SIGKILL)
        end_worker(process)


def _children(process):
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
