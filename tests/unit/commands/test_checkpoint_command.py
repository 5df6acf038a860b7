"""`python -m glm46 checkpoint list|verify|show|prune`: output, exit codes, and which files it removes."""

import pytest
import torch

from glm46.commands.checkpoint import checkpoint_command
from glm46.config.errors import UserError
from glm46.storage.checkpoint import save
from glm46.storage.checkpoint.manager import CheckpointManager

PATTERN = "runs [a-z]*?{1,2}"
"""A name of a folder that a glob would take for a pattern, which does not match itself."""


@pytest.fixture(params=["plain", PATTERN])
def run(tmp_path, request):
    tmp_path = tmp_path / request.param
    manager = CheckpointManager(tmp_path, keep_latest_k=0)
    for step, loss in ((100, 4.25), (200, 3.5), (300, None)):
        tensors = {"model.weight": torch.full((300, 1000), float(step)), "rng.0": torch.zeros(9, dtype=torch.uint8)}
        meta = {"progress": {"step": step, "tokens": step * 1000}, "config": "a\nb"}
        manager.save(step, tensors, meta, validation_loss=loss)
    return tmp_path


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def test_list_prints_step_tokens_loss_and_size(run, capsys):
    assert checkpoint_command(["list", str(run)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    assert all(word in rows[2] for word in ("200", "200,000", "3.5000", "1.1 MiB", "complete"))
    assert checkpoint_command(["list", str(run / "step-000200")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_losses_of_earlier_versions_are_marked_and_do_not_displace_measured_ones(run, capsys):
    """An earlier version wrote the last loss of the run into each manifest, without its step."""
    manager = CheckpointManager(run, keep_latest_k=0)
    with pytest.MonkeyPatch.context() as patch:
        facts = {"saved_at": 0.0, "validation_loss": 2.0, "good": True, "finite": True}
        patch.setattr(save.Snapshot, "facts", lambda self, world_size, is_finite: facts)
        for step in (400, 500):
            manager.save(step, {"model.weight": torch.zeros(3)}, {})
    manager.save(600, {"model.weight": torch.zeros(3)}, {})
    assert checkpoint_command(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if " 2.0000? " in line] == ["400", "500"]
    assert "3.5000?" not in "".join(lines)
    assert lines[-1] == "?: saved by an earlier version; the loss may have been measured at an earlier step"
    assert checkpoint_command(["prune", str(run), "--keep-latest-k", "1", "--keep-best-k", "1", "--yes"]) == 0
    assert names(run) == ["step-000200", "step-000500", "step-000600"]


def test_list_finds_missing_files_and_verify_changed_ones(run, capsys):
    flip(run / "step-000100" / "__0_0.distcp")
    (run / "step-000300" / "meta.json").unlink()
    assert checkpoint_command(["list", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.count("DAMAGED") == 1 and "step-000300/meta.json: missing" in out
    assert checkpoint_command(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.count("DAMAGED") == 2 and "step-000100/__0_0.distcp: SHA-256" in out and out.count("verified") == 1


def test_show_lists_meta_and_tensors(run, capsys):
    assert checkpoint_command(["show", str(run / "step-000200")]) == 0
    out = capsys.readouterr().out
    assert "300 x 1000" in out and "uint8" in out and '"tokens": 200000' in out and "2 tensors, 1.1 MiB" in out
    flip(run / "step-000200" / ".metadata")
    with pytest.raises(UserError, match="metadata: SHA-256"):
        checkpoint_command(["show", str(run / "step-000200")])


def test_prune_removes_only_with_yes_and_only_what_it_named(run, capsys):
    prune = ["prune", str(run), "--keep-latest-k", "1", "--keep-best-k", "1"]
    assert checkpoint_command(prune) == 0
    assert names(run) == ["step-000100", "step-000200", "step-000300"]
    assert "would remove" in capsys.readouterr().out
    assert checkpoint_command([*prune, "--yes"]) == 0
    assert names(run) == ["step-000200", "step-000300"]
    assert checkpoint_command(prune) == 0 and "nothing to remove" in capsys.readouterr().out


def test_prune_removes_nothing_when_the_newest_is_damaged(run):
    flip(run / "step-000300" / "__0_0.distcp")
    with pytest.raises(UserError, match="no older one is removed"):
        checkpoint_command(["prune", str(run), "--keep-latest-k", "1", "--yes"])
    assert len(names(run)) == 3
