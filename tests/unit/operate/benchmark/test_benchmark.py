"""Measured rates of kernels and links are what a plan takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.operate.benchmark.rates import fit_rows
from glm46.operate.estimate.target_cluster import Efficiencies
from tests.processes import free_port


def test_measured_rates_are_what_the_planner_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("glm46.operate.benchmark.rates.TOKENS", 64)
    file = tmp_path / "efficiencies.json"
    options = ["rates", "--flavor", "debug", "--json", str(file)]
    assert main(["benchmark", *options]) == 0
    described = capsys.readouterr().out.splitlines()[0].partition("'")[2].rstrip("'")
    measured = Efficiencies.read(file, Efficiencies())
    assert measured.source.startswith("CPU, debug, 64 tokens") and measured.launch_seconds > 0
    assert all(getattr(measured, name) > 0 for name in ("products", "experts", "attention"))
    assert {"experts_rows", "attention_rows"} <= measured.measured
    debug = str(Path(__file__).parents[4] / "train_configs/debug.toml")
    assert main(["plan", "--config", debug, "--gpu", described, "--measured", str(file)]) == 0
    assert f"efficiencies: {measured.source}" in capsys.readouterr().out
    assert main(["benchmark", *options[:-1], str(tmp_path / "none" / "file")]) == 2


@pytest.mark.parametrize(("most", "half"), [(650e12, 1536.0), (280e12, 300.0), (1e12, 0.0)])
def test_the_fit_over_rows_finds_what_made_the_speeds(most, half):
    found = fit_rows({rows: most * rows / (rows + half) for rows in (32, 128, 512, 2048, 8192)})
    assert found == pytest.approx((most, half))


def test_a_single_size_holds_for_all_rows():
    assert fit_rows({64: 5e12}) == (5e12, 0.0)
    # Speeds that fall with rows, as on a CPU whose cache ends, are no negative number of rows.
    assert fit_rows({32: 2e9, 128: 1.9e9, 512: 1.7e9})[1] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "measured"), [(1, {"link", "call_seconds"}), (2, {"network", "call_seconds"})])
def test_measured_links_join_the_file_of_rates(hosts, measured, tmp_path):
    """Two ranks, of one host or of two by what their launcher says."""
    file = tmp_path / "shares.json"
    file.write_text(json.dumps({"products": 0.7, "source": "a GPU"}))
    command = [sys.executable, "-m", "glm46", "benchmark", "links", "--gpu", "CPU:bf16=1,memory=9,bandwidth=99,link=99"]
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // hosts), "MASTER_ADDR": "localhost",
             "MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [*command, "--json", str(file)], stdout=subprocess.PIPE, text=True,
            env=os.environ | names | {"RANK": str(rank), "LOCAL_RANK": str(rank % (2 // hosts))},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and not printed[1]
    assert printed[0].count("all-to-all") == printed[0].count("all-reduce") == 4
    shares = json.loads(file.read_text())
    assert shares.keys() == {"products", "source"} | measured and shares["source"].startswith("a GPU; 2 ranks of CPU")
    assert Efficiencies.read(file, Efficiencies()).measured == measured | {"products"}


def test_links_of_one_process_are_refused(capsys):
    assert main(["benchmark", "links"]) == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.thorough
def test_both_trainers_have_the_same_losses(capfd):
    """The comparison with TRL."""
    race = pytest.importorskip("scripts.measure.finetune_with_trl", exc_type=ImportError)
    race.main(["--flavor", "debug", "--rank", "8", "--rows", "2", "--seq-len", "256", "--steps", "2", "--rounds", "1"])
    out = capfd.readouterr().out
    losses = {
        line.split()[0]: [float(loss) for loss in line.split()[3:]]
        for line in out.splitlines()
        if line.startswith(("  glm46  ", "  trl"))
    }
    assert len(losses["glm46"]) == 3 and losses["glm46"][0] > losses["glm46"][2]
    assert losses["glm46"] == pytest.approx(losses["trl"], abs=2e-4)
    assert "glm46 against trl: speed" in out and "peak memory" in out
