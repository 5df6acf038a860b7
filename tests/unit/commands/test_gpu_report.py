"""scripts/gpu_report.sh without a GPU: every part runs, and what needs a GPU is skipped with its reason."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]


def script():
    spec = importlib.util.spec_from_file_location("gpu_report", ROOT / "scripts/gpu_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_dry_run_runs_every_part(tmp_path, warm_python):
    command = [ROOT / "scripts/gpu_report.sh", "--dry-run", "--output", tmp_path / "report", "--python", warm_python]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report/report.json").read_text())
    parts = {name: part["status"] for name, part in report["parts"].items()}
    titan = "done" if importlib.util.find_spec("torchtitan") else "skipped"
    need_gpu = ("tests", "one_rank", "float8_tests", "benchmark_compiled")
    assert parts == dict.fromkeys(script().PARTS, "done") | dict.fromkeys(need_gpu, "skipped") | {
        "benchmark_titan": titan
    }, report
    assert report["parts"]["bf16"]["state"]["graph_breaks"] == 0
    assert "no CUDA device on this machine" in report["parts"]["tests"]["reason"]
    results = {name: part.get("result") for name, part in report["parts"].items()}
    assert [row["name"] for row in results["benchmark"]["rows"]] == ["ours", "transformers grouped_mm"]
    if importlib.util.find_spec("torchtitan"):
        assert [row["name"] for row in results["benchmark_titan"]["rows"]] == ["ours", "torchtitan MoE"]
    else:
        assert "torchtitan (0.3 is known to work) cannot be" in report["parts"]["benchmark_titan"]["reason"]
    assert results["machine"]["measured_peak_tflops"] > 0 and "torch" in results["machine"]["versions"]
    assert {"routed experts", "optimizer"} <= {row["kind"] for row in results["profile"]["profile"]["rows"]}
    assert results["bf16"]["first_loss"] == pytest.approx(results["fp8"]["first_loss"], rel=0.01)
    assert results["bf16"]["last_loss"] != results["fp8"]["last_loss"]
    assert [row["drafts"] for row in results["generation"]["rows"]] == [False, False, True, True]
    assert all(row["shapes"] <= 16 for row in results["generation"]["rows"])
    assert results["lora"]["rows"][2]["grad_norm"] > 0 and results["lora"]["trained_parameters"] > 0
    assert 20 <= results["resume"]["killed_after_step"] < 100
    kernels = {row["kernel"]: row for row in results["kernels"]["rows"]}
    assert kernels["top k"]["share"] > 0 and kernels["copy from the host, slab"]["GB/s"] > 0
    text = (tmp_path / "report/report.md").read_text()
    for part in ("## GPU report of 20", "scripts/gpu_report.sh --dry-run", "| routed experts |", "FP8 is "):
        assert part in text
    shares = results["profile"]["optimizer_share"], results["profile"]["muon_share_of_flops"]
    assert (
        f"takes {shares[0]:.1%} of" in text and f"floor is {shares[1]:.1%}," in text and all(0 < x < 1 for x in shares)
    )
    # Machines that are lent give back few files, and none of a folder in a folder.
    files = sorted(file.name for file in (tmp_path / "report").iterdir())
    assert files == ["efficiencies.json", "logs.txt", "report.json", "report.md", "trace.json.gz"]
    assert "== bf16" in (tmp_path / "report/logs.txt").read_text()
    assert json.loads(gzip.decompress((tmp_path / "report/trace.json.gz").read_bytes()))["traceEvents"]


def test_the_share_of_the_optimizer_is_that_of_the_gpu_where_it_has_ranges():
    def event(name, category, start, length):
        return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length}

    host = [event("ProfilerStep#4", "user_annotation", 0.0, 100.0), event("optimizer", "user_annotation", 80.0, 10.0)]
    others = [{"ph": "M", "name": "process_name"}, event("Optimizer.step#Muon.step", "user_annotation", 0.0, 99.0)]
    assert script().optimizer_share(host + others) == pytest.approx(0.1)
    gpu = [
        event("ProfilerStep#4", "gpu_user_annotation", 10.0, 190.0),
        # The same step on another stream, which ends later.
        event("ProfilerStep#4", "gpu_user_annotation", 20.0, 190.0),
        event("optimizer", "gpu_user_annotation", 150.0, 40.0),
        event("optimizer", "gpu_user_annotation", 160.0, 40.0),
    ]
    assert script().optimizer_share(host + gpu + others) == pytest.approx(50 / 200)
    with pytest.raises(RuntimeError, match="no step with an optimizer"):
        script().optimizer_share(others)


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_does_not_end_the_others(tmp_path):
    made = script()
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho the driver is too old >&2\nexit 3\n")
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n")
    for file in (failing, hanging):
        file.chmod(0o755)
    failed = made.attend_part("machine", tmp_path, str(failing), True, 300)
    assert (failed["status"], failed["reason"]) == ("failed", "exit code 3")
    assert failed["output"] == ["the driver is too old"]
    hung = made.attend_part("tests", tmp_path, str(hanging), True, 2)
    assert (hung["status"], hung["reason"]) == ("failed", "not done after 2 s")
    (tmp_path / "counting").write_text('#!/bin/sh\necho \'{"passed": 3}\' >"$5/$3.so_far.json"\nexec sleep 1000\n')
    (tmp_path / "counting").chmod(0o755)
    cut_off = made.attend_part("tests", tmp_path, str(tmp_path / "counting"), True, 6)
    assert cut_off["status"] == "failed" and cut_off["result"] == {"passed": 3}
    late = made.attend_part("fp8", tmp_path, str(failing), True, 0.0)
    assert late["status"] == "skipped" and "no time was left" in late["reason"]
    report = {
        "date": "today", "command": "x", "is_dry": True, "missing": ["pynvml"],
        "parts": {"machine": failed, "tests": hung},
    }  # fmt: skip
    text = made.as_markdown(report)
    assert "| machine | failed: exit code 3 |" in text and "the driver is too old" in text and "pynvml" in text


def report_of_parts(folder, code: str, *arguments):
    """Exit code and report of a run whose parts are done by a shell script, whose $5 is the folder."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{code}\n")
    python.chmod(0o755)
    command = [sys.executable, ROOT / "scripts/gpu_report.py", "--output", folder, "--python", python, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended, json.loads((folder / "report.json").read_text())["parts"]


def test_a_report_grows_over_calls_for_some_parts(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"parts": {"fp8": {"status": "done", "seconds": 70.0}}}))
    write = 'echo \'{"status": "done", "result": {}}\' >"$5/$3.json"'
    ended, parts = report_of_parts(tmp_path, write, "--parts", "rates,tests")
    assert ended.returncode == 0 and {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        ["fp8", "machine", "rates", "tests"], "done"
    )
    assert parts["fp8"]["seconds"] == 70.0 and "| fp8 | done | 70.0 |" in (tmp_path / "report.md").read_text()
    ended, _ = report_of_parts(tmp_path, write, "--parts", "rates,fp9")
    assert ended.returncode == 2 and "--parts fp9: no such part; there are machine, tests" in ended.stderr


def test_parts_end_in_time_and_leave_what_they_do_not_need(tmp_path, monkeypatch):
    made = script()
    assert {part for parts in made.COMMANDS.values() for part in parts} == set(made.PARTS)
    for parts in made.COMMANDS.values():
        assert sum(made.PARTS[name][1] for name in parts) <= made.SECONDS < 600 - 20
    monkeypatch.setattr(made, "PARTS", dict.fromkeys(("machine", "tests", "bf16"), (None, 2000)))
    monkeypatch.setattr(made, "SECONDS", 6000)
    given = []
    monkeypatch.setattr(made, "attend_part", lambda *part: given.append(part[-1]) or {"status": "done", "seconds": 0.0})
    arguments = SimpleNamespace(python="python", wheels=None, dry_run=True, parts=None)
    assert made.measure(arguments, ["machine", "tests", "bf16"], tmp_path, tmp_path) == 0
    assert given == pytest.approx([2000, 4000, 6000], abs=500)  # none of them took time
    given.clear()
    arguments.parts = "tests"
    made.measure(arguments, ["tests"], tmp_path, tmp_path)
    assert given == pytest.approx([6000, 6000], abs=500)


RUNS = {
    "profile": ["--profiling.enable_profiling", "true", "--profiling.profile_freq", "6"],
    "bf16": ["--compile.enable", "true"],
    "fp8": ["--compile.enable", "true", "--float8.recipe_name", "rowwise", "--float8.experts_recipe_name", "rowwise"],
}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_the_runs_of_a_gpu_are_sound_and_fit(overrides, tmp_path):
    from glm46.operate.estimate.memory import plan_memory
    from glm46.operate.estimate.plan_sizes import step_tokens
    from glm46.run.plan import resolve_plan

    # An H200, less, and an H100. The gradients of BF16 weights are added in FP32, so four layers need 79 GiB.
    for gib, layers in ((139, 4), (90, 4), (79, 3)):
        config = script().training_config("run", tmp_path, False, overrides, gib * 2**30)
        assert config.model.shape.num_hidden_layers == layers
        assert plan_memory(config, 1, device="gpu").total < 0.9 * gib * 2**30
        assert step_tokens(resolve_plan(config, 1)) == 65536  # what the goal for the optimizer's share is stated for
