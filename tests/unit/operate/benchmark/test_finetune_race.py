"""The comparison with TRL: both trainers learn the same, step by step."""

import pytest

pytest.importorskip("trl")


@pytest.mark.slow
@pytest.mark.thorough
def test_both_trainers_have_the_same_losses(capfd):
    from scripts.measure.finetune_with_trl import main

    main(["--flavor", "debug", "--rank", "8", "--rows", "2", "--seq-len", "256", "--steps", "2", "--rounds", "1"])
    out = capfd.readouterr().out
    losses = {
        line.split()[0]: [float(loss) for loss in line.split()[3:]]
        for line in out.splitlines()
        if line.startswith(("  glm46  ", "  trl"))
    }
    assert len(losses["glm46"]) == 3 and losses["glm46"][0] > losses["glm46"][2]
    assert losses["glm46"] == pytest.approx(losses["trl"], abs=2e-4)
    assert "glm46 against trl: speed" in out and "peak memory" in out
