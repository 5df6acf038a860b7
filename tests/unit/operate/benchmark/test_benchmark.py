"""Measured rates of kernels are what a plan takes."""

from contextlib import suppress
from pathlib import Path

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.operate.estimate.target_cluster import Efficiencies


def test_measured_rates_are_what_the_planner_takes(tmp_path, capsys):
    file = tmp_path / "efficiencies.json"
    options = ["rates", "--flavor", "debug", "--tokens", "64", "--threads", "1", "--json", str(file)]
    for _ in range(4):
        assert main(["benchmark", *options]) == 0
        described = capsys.readouterr().out.splitlines()[0].partition("'")[2].rstrip("'")
        # A share above 1 is refused: another program held the core while the peak was measured, and not afterwards.
        with suppress(UserError):
            measured = Efficiencies.read(file, Efficiencies())
            break
    else:
        measured = Efficiencies.read(file, Efficiencies())
    assert measured.source.startswith("CPU, debug, 64 tokens") and measured.launch_seconds > 0
    assert all(getattr(measured, name) > 0 for name in ("products", "experts", "attention"))
    debug = str(Path(__file__).parents[4] / "train_configs/debug.toml")
    assert main(["plan", "--config", debug, "--gpu", described, "--measured", str(file)]) == 0
    assert f"efficiencies: {measured.source}" in capsys.readouterr().out
    assert main(["benchmark", *options[:-1], str(tmp_path / "none" / "file")]) == 2
