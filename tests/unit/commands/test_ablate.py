"""`python -m glm46 ablate`: which runs it makes of a file and a command line, what it refuses, and how it goes on.

A stand-in for the launcher writes rows in no time; the real one trains in the last test.
"""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import tomli_w

from glm46.cli import main
from glm46.config.loader import dump_config, load_config
from glm46.operate.ablation.ablation_runs import plan_ablation
from glm46.operate.estimate.machine import Gpu, Machine
from tests.builders import TINY, small_config
from tests.processes import wait_until

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "train_configs" / "fp8_ablation.toml"
PYTHON = sys.executable
MACHINE = Machine(cores=4, memory_bytes=2**34, free_bytes=2**34)

# Instead of python -m glm46 launch --config FILE --nproc N: fails at a rate of 0.5, waits for a signal at 0.25.
LAUNCHER = """#!{python} -IS
import json, pathlib, re, signal, sys, time
assert sys.argv[1:4] == ["-m", "glm46", "launch"] and sys.argv[6:8] == ["--nproc", "2"], sys.argv
file = pathlib.Path(sys.argv[5])
folder, text = file.parent, file.read_text()
lr, seed = (float(re.search(rf"(?m)^{{key}} = (.*)$", text)[1]) for key in ("lr", "seed"))
with (folder / "starts").open("a") as starts:
    starts.write("x")
if 0.5 <= lr < 0.6:
    print("Traceback (most recent call last):\\nValueError: the rate is too high\\nerror: rank 0 ended with code 1")
    sys.exit(1)
steps = range(1, 11)
with (folder / "metrics.jsonl").open("w") as rows:
    for step in steps:
        rows.write(json.dumps({{"kind": "train", "step": step, "tokens": 32 * step, "loss": 3 + lr + seed, "loss_mean":
            3 + lr + seed, "grad_norm": 1 + lr, "tokens_per_second": 9.0, "resident_memory_gib/max": 0.5}}) + "\\n")
if lr == 0.25 and not (folder / "stopped").exists():
    def stop(number, frame):
        (folder / "stopped").touch()
        sys.exit(130 if number == signal.SIGINT else 75)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    (folder / "waits").touch()
    time.sleep(600)
"""


@pytest.fixture
def file(tmp_path, source_folder):
    """A function that writes the TOML file of a small run with an [ablation]."""

    def write(ablation: dict | None = None, **tables) -> Path:
        config = small_config(source_folder, tmp_path / "out", **tables)
        table = tomli.loads(dump_config(config)) | ({"ablation": ablation} if ablation else {})
        path = tmp_path / "run.toml"
        path.write_text(tomli_w.dumps(table))
        return path

    return write


@pytest.fixture
def launcher(tmp_path, monkeypatch) -> Path:
    """The stand-in, in place of this Python for started processes."""
    path = tmp_path / "launcher"
    path.write_text(LAUNCHER.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr("glm46.operate.ablation.ablation_training.sys.executable", str(path))
    return path


def faults(capsys, *arguments: str) -> list[str]:
    """The messages of a refused call, before which nothing was written."""
    assert main(["ablate", *map(str, arguments)]) == 2
    return capsys.readouterr().err.splitlines()


TWO = {"variants": [{"name": "muon"}, {"name": "adamw", "keys": {"optimizer": {"name": "AdamW", "lr": 0.125}}}]}


def test_variants_of_the_file_times_varied_keys_times_seeds(file):
    config = file(TWO, optimizer={"name": "Muon", "ns_steps": 4})
    varied = ["training.max_norm=0.5,2.0", "debug.deterministic=true,false"]
    plan = plan_ablation(config, ["--training.steps", "3"], varied, None, MACHINE, seeds=[7, 3])
    assert len(plan.keys) == 8 and len(plan.runs) == 16
    assert list(plan.keys)[:2] == [
        f"muon,training.max_norm=0.5,debug.deterministic={value}" for value in ("true", "false")
    ]
    assert [run.seed for run in plan.runs] == [7] * 8 + [3] * 8
    run = plan.runs[-1]
    assert run.config.debug.seed == 3 and run.config.training.max_norm == 2.0 and run.config.training.steps == 3
    assert (run.config.optimizer.name, run.config.optimizer.lr) == ("AdamW", 0.125)
    assert run.folder == plan.folder / run.variant / "seed-3" and run.processes == 2
    assert run.config.ablation is None and "ablation" not in dump_config(run.config)


def test_runs_of_an_ablation_share_no_folder(file, tmp_path):
    config = file(TWO, checkpoint={"folder": str(tmp_path / "big")}, metrics={"enable_tensorboard": True})
    for run in plan_ablation(config, [], [], None, MACHINE).runs:
        assert run.config.checkpoint_folder == tmp_path / "big" / run.variant / f"seed-{run.seed}"
        assert run.config.tensorboard_folder == run.folder / "tb"


def test_bare_words_arrays_and_texts_can_be_varied(file):
    def values(text: str) -> list:
        plan = plan_ablation(file(), [], [text], 1, MACHINE)
        return [value for keys in plan.keys.values() for value in keys.values()]

    assert values("optimizer.name=Muon,AdamW") == ["Muon", "AdamW"]
    assert values("moe.bias_update_rate=0.1,[[0, 0.1], [9, 0.2]]") == [0.1, [[0, 0.1], [9, 0.2]]]
    assert values('optimizer.state_dtype="float32","8bit"') == ["float32", "8bit"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("0 variants", "two are needed", "--vary")),
        (["--vary", "optimizer.lr=0.1"], ("1 variant:", "two are needed")),
        (["--vary", "lr=0.1,0.2"], ("--vary lr=0.1,0.2", "section.key=VALUE,VALUE")),
        (["--vary", "optimizer.lr=1,2", "--optimizer.rl", "1"], ("optimizer.rl: unknown key", "valid keys")),
        (["--vary", "optimizer.lr=0.1,-1"], ("variant optimizer.lr=-1", "optimizer.lr = -1", "greater than 0")),
        (["--vary", "training.global_batch_size=4,3"], ("global_batch_size=3", "a multiple of")),
        (["--vary", "optimizer.lr=0.1,0.1"], ("optimizer.lr=0.1", "names must differ")),
        (["--vary", "optimizer.lr=0.1,x"], ('optimizer.lr = "x"', "valid number")),
        (["--vary", "a"], ("--vary a", "section.key=VALUE,VALUE")),
        (["--vary", "optimizer.lr="], ("--vary optimizer.lr=:", "section.key=VALUE,VALUE")),
        (["--vary", "optimizer.lr=0.1,0.2", "--seeds", "1,1"], ("--seeds 1,1", "twice", "remove one")),
        (["--vary", "parallelism.tensor_parallel_degree=1,3", "--nproc", "2"], ("tensor_parallel_degree=3",)),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_remedy_before_any_run(file, launcher, tmp_path, capsys, arguments, words):
    said, *_ = faults(capsys, "--config", file(), *arguments)
    assert all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ablation", "words"),
    [
        ({"variants": [*TWO["variants"], {"name": "muon", "keys": {}}]}, ("variant muon", "names must differ")),
        ({"variants": [{"name": "a"}, {"name": "b", "keys": {"job": {"dump_folder": "x"}}}]},
         ('variant b: job.dump_folder = "x"', "set that outside of the variants")),
        ({"variants": [{"name": "a"}, {"name": "b", "keys": {"debug": {"seed": 1}}}]},
         ("variant b: debug.seed = 1", "--seeds")),
        ({"variants": [{"name": "a"}, {"name": "b", "keys": {"ablation": {"variants": [1]}}}]},
         ("variant b: ablation.variants = [1]", "for all variants")),
        ({"variants": [{"name": "a/b"}, {"name": "b"}]}, ('ablation.variants[0].name = "a/b"', "'a_b'")),
        ({"variants": [{"name": "a", "optimizer": {"lr": 1.0}}, {"name": "b"}]},
         ("ablation.variants[0].optimizer: unknown key", "name, keys")),
        ({"variants": [{"name": "a"}, {"name": "b", "keys": {"optimizer": {"ns_steps": 3}}}]},
         ("run.toml, variant b: optimizer.ns_steps = 3", "no effect")),
        ({"variants": [{"name": "a"}, {"keys": {}}]}, ("ablation.variants[1].name: required",)),
        ({"seeds": [1]}, ("ablation.seeds: was removed", "ablate --seeds 0,1,2")),
    ],
)  # fmt: skip
def test_mistakes_of_the_file_are_named_with_their_remedy(file, launcher, capsys, ablation, words):
    (said,) = faults(capsys, "--config", file(ablation))
    assert all(word in said for word in words), said


@pytest.mark.parametrize(("seeds", "rule"), [("1,-1", "at least 0"), ("a,b", "whole number"), ("", "whole number")])
def test_seeds_are_whole_numbers(file, capsys, seeds, rule):
    with pytest.raises(SystemExit) as end:
        main(["ablate", "--config", str(file()), "--vary", "optimizer.lr=0.1,0.2", f"--seeds={seeds}"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "--seeds" in said and rule in said


def test_a_run_that_the_machine_cannot_hold_is_refused(file, capsys, monkeypatch):
    small = Machine(cores=1, memory_bytes=2**20, free_bytes=2**20)
    monkeypatch.setattr("glm46.operate.ablation.ablation.detect_machine", lambda gpus: small)
    said = "\n".join(faults(capsys, "--config", file(TWO)))
    assert "variant muon: this machine cannot train it" in said and "This machine cannot run it:" in said


def test_ablate_trains_on_one_node(file, capsys, monkeypatch):
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    (said,) = faults(capsys, "--config", file(TWO))
    assert "2 nodes" in said and "NNODES" in said


@pytest.mark.parametrize("verb", ["launch", "train"])
def test_a_file_of_several_runs_is_not_trained_as_one(file, capsys, verb):
    path = file(TWO)
    assert main([verb, "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (str(path), "2 variants", "ablate --config", "--ablation.variants="))
    assert load_config(path, ["--ablation.variants="]).ablation.variants == ()


def results(folder: Path) -> dict[str, str]:
    return {str(path.parent.relative_to(folder)): path.read_text() for path in folder.rglob("status.txt")}


def rows_of(page: Path) -> dict[str, list[str]]:
    """Cells of the first table of a report by variant."""
    lines = page.read_text().splitlines()
    first = lines.index("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = (line.strip("| ").split(" | ") for line in lines[first + 1 :])
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows if len(cells) == 7}


def starts(folder: Path) -> dict[str, int]:
    return {str(path.parent.relative_to(folder)): len(path.read_text()) for path in folder.rglob("starts")}


@pytest.mark.slow
def test_a_failed_variant_is_in_the_report_and_the_others_are_trained(file, launcher, tmp_path, capsys):
    path, out = file(), tmp_path / "out"
    arguments = ["--config", str(path), "--vary", "optimizer.lr=0.125,0.5,1.0", "--seeds", "0,2", "--nproc", "2"]
    assert main(["ablate", *arguments]) == 1
    said = capsys.readouterr().out
    assert "6 runs" in said and said.count(": failed with exit code 1") == 2
    states = {f"optimizer.lr={lr}/seed-{seed}": "finished" for lr in (0.125, 1.0) for seed in (0, 2)}
    assert results(out) == states | {f"optimizer.lr=0.5/seed-{seed}": "failed with exit code 1" for seed in (0, 2)}
    rows = rows_of(out / "ablation.md")
    # Losses are 3 + lr + seed: 4.0 to 3.125, and 6.0 to 5.125.
    assert rows["optimizer.lr=1.0"][:2] == ["5.0000 ± 1.4142", "+22.537 ± 7.726"]
    assert rows["optimizer.lr=0.5"] == ["", "", "", "", "", "", "0 of 2"]
    page = (out / "ablation.md").read_text()
    assert "| optimizer.lr=0.5, seed 0 | failed with exit code 1 |" in page
    # The config of each run can be started by hand.
    assert load_config(out / "optimizer.lr=1.0" / "seed-2" / "config.toml").debug.seed == 2


@pytest.mark.slow
def test_a_second_call_trains_only_what_is_not_finished_and_refuses_other_keys(file, launcher, tmp_path, capsys):
    path, out = file(), tmp_path / "out"
    call = ["--config", str(path), "--vary", "optimizer.lr=0.125,0.5", "--nproc", "2"]
    assert main(["ablate", *call]) == 1
    assert main(["ablate", *call]) == 1
    assert starts(out) == {"optimizer.lr=0.125/seed-0": 1, "optimizer.lr=0.5/seed-0": 2}
    assert "2 runs" in capsys.readouterr().out
    said = faults(capsys, *call, "--training.max_norm", "2.0")
    assert len(said) == 2 and all("training.max_norm = 2.0" in line and "was started with 1.0" in line for line in said)
    assert all(str(out) in line and "job.dump_folder" in line for line in said)
    assert starts(out) == {"optimizer.lr=0.125/seed-0": 1, "optimizer.lr=0.5/seed-0": 2}


def test_an_ablation_of_which_nothing_could_be_trained_has_a_report(file, launcher, tmp_path):
    assert main(["ablate", "--config", str(file()), "--vary", "optimizer.lr=0.5,0.50001", "--nproc", "2"]) == 1
    assert "failed" in (tmp_path / "out" / "ablation.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_stops_the_run_and_the_next_call_continues(file, launcher, tmp_path, number, code):
    path, out = file(), tmp_path / "out"
    program = (
        f"import sys; sys.executable = {str(launcher)!r}; from glm46.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [PYTHON, "-c", program, "ablate", "--config", path, "--vary", "optimizer.lr=0.125,0.25,1.0"]
    command += ["--nproc", "2"]
    usual = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **usual) as process:
        waits = out / "optimizer.lr=0.25" / "seed-0" / "waits"
        wait_until(lambda: waits.exists() or process.poll() is not None)
        os.kill(process.pid, number)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == code and "the same command continues" in said
    assert results(out) == {"optimizer.lr=0.125/seed-0": "finished", "optimizer.lr=0.25/seed-0": "stopped"}
    page = (out / "ablation.md").read_text()
    assert "| optimizer.lr=0.25, seed 0 | stopped |" in page and "| optimizer.lr=1.0, seed 0 | not started |" in page
    again = subprocess.run(command, check=True, timeout=300, **usual)
    assert "1 finished, 2 to train" in again.stdout and set(results(out).values()) == {"finished"}
    assert starts(out)["optimizer.lr=0.125/seed-0"] == 1


def test_the_shipped_ablation_resolves_to_its_variants():
    plan = plan_ablation(SHIPPED, [], [], None, MACHINE)
    recipes = [(run.config.float8.recipe_name, run.config.float8.experts_recipe_name) for run in plan.runs]
    assert dict(zip(plan.keys, recipes, strict=True)) == {
        "without_fp8": (None, None),
        "tensorwise": ("tensorwise", None),
        "rowwise": ("rowwise", "rowwise"),
        "rowwise_with_gw_hp": ("rowwise_with_gw_hp", "rowwise"),
        "rowwise_mxfp8_experts": ("rowwise", "mxfp8"),
    }
    assert all(run.config.training.steps == 300 for run in plan.runs)
    assert all(run.config.training.mixed_precision_param == "bfloat16" for run in plan.runs)


@pytest.mark.parametrize("gpus, emulated", [
    ([], ["tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_mxfp8_experts"]),
    (["NVIDIA H100 80GB HBM3"], ["rowwise_mxfp8_experts"]),
    (["NVIDIA B200"], []),
    (["NVIDIA A100-SXM4-80GB"], ["tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_mxfp8_experts"]),
])  # fmt: skip
def test_what_a_machine_has_no_kernels_for_is_emulated(gpus, emulated):
    machine = dataclasses.replace(MACHINE, gpus=tuple(Gpu(name, 80 * 2**30) for name in gpus))
    plan = plan_ablation(SHIPPED, [], [], 1, machine)
    assert [run.variant for run in plan.runs if run.config.float8.emulate] == emulated
    assert [name for name, own in plan.keys.items() if own.get("float8.emulate")] == emulated


def test_a_variant_that_emulates_has_no_speed(file, launcher, tmp_path, capsys):
    fp8 = {"float8": {"recipe_name": "tensorwise", "filter_fqns": ["k_proj"]}}
    config = file({"variants": [{"name": "plain"}, {"name": "fp8", "keys": fp8}]}, model={"intermediate_size": 48})
    assert main(["ablate", "--config", str(config), "--nproc", "2"]) == 0
    assert "FP8 is emulated, without a speed to compare: fp8" in capsys.readouterr().out
    rows = rows_of(tmp_path / "out/ablation.md")
    assert rows["plain"][4] == "9" and rows["fp8"][4:6] == ["", ""]


def assert_all_recipes_end_within_one_percent(folder: Path) -> None:
    """The final loss of each variant of the shipped file changes, by less than 1 % of the loss without FP8."""
    rows = rows_of(folder / "ablation.md")
    assert rows.pop("without_fp8")[1] == "" and len(rows) == 4
    for name, (_, gap, validation_loss, *_) in rows.items():
        assert 0 < abs(float(gap)) < 1.0 and validation_loss, name


@pytest.mark.slow
def test_the_recipes_are_really_trained(file, tmp_path, monkeypatch, warm_python):
    """Through the launcher, a tiny model: from the same weights on the same data, FP8 moves the loss a little."""
    launcher = tmp_path / "launcher"
    program = "import sys; from tests.ranks.forked_launch import launch; sys.exit(launch(*sys.argv[4:]))"
    launcher.write_text(f'#!/bin/sh\nexec {warm_python} -c {shlex.quote(program)} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr("glm46.operate.ablation.ablation_training.sys.executable", str(launcher))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ablation = tomli.loads(SHIPPED.read_text())["ablation"]
    path = file(ablation, validation={"enable": True}, model=TINY | {"moe_intermediate_size": 32})  # mxfp8 needs 32
    assert main(["ablate", "--config", str(path), "--nproc", "1", "--training.steps", "3"]) == 0
    assert_all_recipes_end_within_one_percent(tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_shipped_ablation_ends_within_one_percent(tmp_path, monkeypatch, dtype, steps=300):
    """The file as it stands, with the debug model, and with a baseline in FP32."""
    monkeypatch.chdir(tmp_path)  # its data are prepared in the working folder
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keys = ["--training.steps", str(steps), "--training.mixed_precision_param", dtype]
    assert main(["ablate", "--config", str(SHIPPED), "--nproc", "1", *keys]) == 0
    assert_all_recipes_end_within_one_percent(tmp_path / "outputs" / "fp8_ablation")
