"""The race with TRL: both trainers learn the same, step by step, and a difference is refused."""

import pytest

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.operate.benchmark import finetune

pytest.importorskip("trl")


@pytest.mark.slow
@pytest.mark.thorough
def test_both_trainers_have_the_same_losses(capfd):
    options = ["--flavor", "debug", "--rank", "8", "--rows", "2", "--seq-len", "256", "--steps", "2", "--rounds", "1"]
    assert main(["benchmark", "finetune", *options]) == 0
    out = capfd.readouterr().out
    of = {line.split()[0]: line.split()[3:] for line in out.splitlines() if line.startswith(("  glm46  ", "  trl"))}
    ours, theirs = of["glm46"], of["trl"]
    assert len(ours) == 3 and float(ours[0]) > float(ours[2])
    assert [float(loss) for loss in ours] == pytest.approx([float(loss) for loss in theirs], abs=2e-4)
    assert "glm46 against trl: speed" in out and "peak memory" in out


def test_other_losses_are_refused():
    ours, theirs = (finetune.Measured([1.0], losses, 1) for losses in ([9.0, 8.0], [9.0, 8.1]))
    finetune.require_equal({"glm46": [ours], "trl": [ours]})
    with pytest.raises(UserError, match="losses differ"):
        finetune.require_equal({"glm46": [ours], "trl": [theirs]})


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(finetune, "find_spec", lambda name: None if name == "trl" else object())
    assert main(["benchmark", "finetune"]) == 2
    assert "benchmark finetune: trl not installed; pip install" in capsys.readouterr().err
