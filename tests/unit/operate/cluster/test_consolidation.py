"""Node-local files come together on shared storage whole, whatever interrupts the way; local copies go last.

Two nodes are two folders: the parts are made by splitting a checkpoint, as a save on two nodes would leave them.

The process that forks the programs of tests runs one of these programs.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from glm46.storage.checkpoint import gathering
from glm46.storage.checkpoint.gathering import copy_part, parts_in, publish_gathered, whole_saves
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.processes import PROGRAM_SECONDS

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = ROOT / "scripts" / "consolidate_checkpoints.py"
# Replaces ssh: runs the command in a folder named after the host, so that a relative path is another disk on each.
REMOTE_SHELL = """
import subprocess, sys
host, command = sys.argv[-2:]
if host == "down":
    sys.exit("ssh: connect to host down port 22: No route to host")
print("Welcome to", host)
sys.exit(subprocess.run(["sh", "-c", command], cwd=sys.path[0] + "/" + host).returncode)
"""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((1000,), value + i) for i in range(4)}


@pytest.fixture
def cluster(tmp_path):
    """a/local and b/local hold steps 10 and 20 in two halves; shared/ is empty."""
    from glm46.files.durable import hash_file
    from glm46.storage.checkpoint.integrity import MANIFEST, write_manifest

    (tmp_path / "shared").mkdir()
    for step in (10, 20):
        manager = CheckpointManager(tmp_path / "whole", keep_latest_k=0)
        manager.save(step, tensors(step), {"step": step})
        folder = tmp_path / "whole" / f"step-{step:06d}"
        # A second rank's file, which only one node has.
        (folder / "__1_0.distcp").write_bytes(bytes(range(256)) * 100)
        body = json.loads((folder / MANIFEST).read_bytes())["body"]
        (folder / MANIFEST).unlink()
        files = {path.name: hash_file(path) for path in folder.iterdir()}
        write_manifest(folder, step, files, {"saved_at": body["saved_at"], "validation_loss": None})
        for host, other in (("a", "__1_0.distcp"), ("b", "__0_0.distcp")):
            part = tmp_path / host / "local" / folder.name
            shutil.copytree(folder, part)
            (part / other).unlink()
    (tmp_path / "hosts").write_text("# two nodes\na slots=8\nb\na\n")
    (tmp_path / "ssh").write_text(f"#!{sys.executable}{REMOTE_SHELL}")
    (tmp_path / "ssh").chmod(0o755)
    return tmp_path


def run_script(python: str, cluster: Path, *options: str) -> subprocess.CompletedProcess:
    command = [python, SCRIPT, "--node-local-dir", "local", "--output-dir", cluster / "shared"]
    command += ["--hostfile", cluster / "hosts"]
    own = os.environ | {"PATH": f"{cluster}:{os.environ['PATH']}"}
    return subprocess.run([*command, *options], capture_output=True, text=True, cwd=cluster, env=own, check=False)


@pytest.fixture
def consolidate(warm_python):
    """The script by forks: each node's phases run in processes that do not import torch again."""
    return partial(run_script, warm_python)


def check_gathered(cluster: Path, step: int) -> None:
    manager = CheckpointManager(cluster / "shared", keep_latest_k=0)
    target = tensors(0)
    assert manager.newest() == step
    assert manager.load(step, target) == {"step": step}
    assert all(torch.equal(target[name], value) for name, value in tensors(step).items())


@pytest.mark.slow
def test_the_script_gathers_the_newest_save_and_removes_the_local_copies(consolidate, cluster):
    done = consolidate(cluster)
    assert done.returncode == 0, done.stderr
    assert "step 20: copying from 2 node(s)" in done.stdout
    check_gathered(cluster, 20)
    assert [path.name for path in sorted(cluster.glob("[ab]/local/*"))] == ["step-000010"] * 2
    assert sorted(path.name for path in (cluster / "shared").iterdir()) == ["latest", "step-000020"]
    done = consolidate(cluster, "--step", "10", "--keep-local")
    assert done.returncode == 0 and len(list(cluster.glob("[ab]/local/step-000010"))) == 2
    done = consolidate(cluster, "--step", "10")
    assert done.returncode == 0 and "already published" in done.stdout
    assert not list(cluster.glob("[ab]/local/step-*"))
    check_gathered(cluster, 20)


@pytest.mark.parametrize(("name", "is_forked"), [
    pytest.param("step-000010", True, id="step-000010"),
    pytest.param("step-10", False, marks=pytest.mark.slow, id="step-10-new_interpreters"),
])  # fmt: skip
def test_step_folders_on_both_sides_name_the_step(name, is_forked, warm_python, cluster, monkeypatch):
    python = warm_python if is_forked else sys.executable
    if not is_forked:  # a node's phase takes a tenth of a second, not the seconds of torch
        (cluster / "torch.py").write_text("raise ImportError('not for this script')")
        monkeypatch.setenv("PYTHONPATH", str(cluster))
    done = run_script(
        python, cluster, "--node-local-dir", f"local/{name}", "--output-dir", str(cluster / "shared" / name)
    )
    assert done.returncode == 0, done.stderr
    check_gathered(cluster, 10)
    assert sorted(path.name for path in (cluster / "shared").iterdir()) == ["latest", "step-000010"]
    assert [path.name for path in sorted(cluster.glob("[ab]/local/*"))] == ["step-000020"] * 2


def test_step_folders_that_differ_are_refused(consolidate, cluster):
    for options in (["--output-dir", "shared/step-000020"], ["--step", "20"]):
        done = consolidate(cluster, "--node-local-dir", "local/step-10", *options)
        assert done.returncode == 2
        assert "local/step-10" in done.stderr and options[1] in done.stderr and "give one step" in done.stderr


def test_a_node_that_is_down_or_lacks_a_file_changes_nothing(consolidate, cluster):
    (cluster / "hosts").write_text("a\ndown\n")
    done = consolidate(cluster)
    assert done.returncode == 2
    assert "down: no answer, exit code 1: ssh: connect to host down" in done.stderr and "whole: none" in done.stderr
    assert not list((cluster / "shared").iterdir()) and len(list(cluster.glob("[ab]/local/step-*"))) == 4
    (cluster / "hosts").write_text("a\nb\n")
    (cluster / "b" / "local" / "step-000020" / "__1_0.distcp").unlink()
    done = consolidate(cluster)
    assert done.returncode == 0 and "step 10: copying" in done.stdout
    check_gathered(cluster, 10)


@pytest.mark.slow
def test_a_local_file_that_was_changed_is_not_published(consolidate, cluster):
    path = cluster / "b" / "local" / "step-000020" / "__1_0.distcp"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    done = consolidate(cluster)
    assert done.returncode == 2 and "b: local/step-000020/__1_0.distcp: arrived with SHA-256" in done.stderr
    assert not (cluster / "shared" / "step-000020").exists()
    assert len(list(cluster.glob("[ab]/local/step-000020"))) == 2
    path.write_bytes(bytes(range(256)) * 100)  # the next attempt keeps what has arrived and copies the rest
    assert consolidate(cluster).returncode == 0
    check_gathered(cluster, 20)


def test_bad_options_are_named(consolidate, cluster):
    done = consolidate(cluster, "--step", "15")
    assert done.returncode == 2 and "of step 15" in done.stderr and "10, 20" in done.stderr
    (cluster / "hosts").write_text("# none\n")
    assert "names no host" in consolidate(cluster).stderr
    (cluster / "hosts").write_text("-oProxyCommand=evil\n")
    assert "is not a host name" in consolidate(cluster).stderr
    (cluster / "hosts").write_text("a\nb\n")
    done = consolidate(cluster, "--output-dir", str(cluster / "nowhere"))
    assert done.returncode == 2 and "is the storage mounted?" in done.stderr


class Cut(BaseException):
    """The process is killed here."""


@pytest.mark.parametrize("survived", range(7))
def test_a_gathering_interrupted_at_any_copy_continues(cluster, monkeypatch, survived):
    locals_ = [cluster / "a" / "local", cluster / "b" / "local"]
    (save,) = [one for one in whole_saves(part for local in locals_ for part in parts_in(local)[0]) if one.step == 20]
    copies = []

    def copy_until_cut(source, target, original=gathering._copy_durably):
        if len(copies) == survived:
            target.write_bytes(source.read_bytes()[:50])
            raise Cut
        copies.append(target)
        original(source, target)

    def gather_all():
        for local in locals_:
            assert copy_part(local, cluster / "shared", save) == []
        manifest = (locals_[0] / "step-000020" / "manifest.json").read_bytes()
        assert publish_gathered(cluster / "shared", 20, manifest) == []

    monkeypatch.setattr(gathering, "_COPY_THREADS", 1)
    monkeypatch.setattr(gathering, "_copy_durably", copy_until_cut)
    if survived < 4:  # four files: each is copied once although both nodes have the two small ones
        with pytest.raises(Cut):
            gather_all()
        assert not (cluster / "shared" / "step-000020").exists()
        monkeypatch.undo()
    gather_all()
    check_gathered(cluster, 20)
    assert len(copies) == min(survived, 4)


def test_clients_that_go_before_their_request_end_no_server(warm_python):
    for sent in (b"", b"-", b"-[1, 2"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(Path(warm_python).with_name("socket")))
            client.sendall(sent)
    done = subprocess.run([warm_python, "-c", "print(1)"], capture_output=True, timeout=PROGRAM_SECONDS, check=True)
    assert done.stdout == b"1\n"
