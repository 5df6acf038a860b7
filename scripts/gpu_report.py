"""One report about the GPU of this machine: see scripts/gpu_report.sh and docs/performance.md.

Each part is a process of its own with a time limit, so that a part that fails, hangs or fills the memory does not end
the others. This process needs only the standard library.

Each of four commands ends within `SECONDS`: some machines are lent for ten minutes at a time. At most five files are
written, anew after each part, so that a report that is cut off has what was measured.
"""

import argparse
import contextlib
import gzip
import json
import os
import platform
import shlex
import shutil
import signal
import site
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SECONDS = 570
OLDEST_TORCH = (2, 11)
LAST_LINES = 40
MOST_TRACE_BYTES = 15 * 2**20
STEPS = 6
Result = dict[str, Any]

# A slice of GLM-4.5-Air for one GPU: one dense layer and as many MoE layers as fit, on the documents of this checkout.
TRAINING = """
[job]
dump_folder = "{folder}"
[model]
{model}
[data]
document_mask = true
[[data.sources]]
name = "docs"
path = "{text}"
max_epochs = 1000
[data.sources.recipe]
input = ["{root}/docs/**/*.md"]
held_out = 0.0
[training]
{training}
[optimizer]
{optimizer}
[checkpoint]
enable = false
[metrics]
log_freq = 1
enable_tensorboard = false
"""


class Skipped(Exception):
    """A part that this machine or version cannot do; the message is the reason."""


def machine(folder: Path, is_dry: bool) -> Result:
    """Names, versions and the measured peak of a BF16 product."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise Skipped(f"torch {torch.__version__} is too old; glm46 needs {'.'.join(map(str, OLDEST_TORCH))} or newer")

    from glm46.engine.observe.hardware import device_peak_flops, measured_matmul_flops
    from glm46.operate.launch.environment import describe_version

    result = {"versions": describe_version(), "cuda": torch.version.cuda, "platform": platform.platform()}
    if not (is_dry or torch.cuda.is_available()):
        raise Skipped(f"torch {torch.__version__} finds no GPU; --dry-run tries every part on a CPU")
    if is_dry:
        return result | {
            "device": platform.processor() or platform.machine(),
            "measured_peak_tflops": measured_matmul_flops(torch.float32, torch.get_num_threads()) / 1e12,
        }
    device, size = torch.device("cuda"), 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    table = device_peak_flops(device, torch.bfloat16)
    return result | {
        "device": torch.cuda.get_device_name(),
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30,
        "measured_peak_tflops": 2 * size**3 / best / 1e12,
        "table_peak_tflops": table and table / 1e12,
    }


def gpu_tests(folder: Path, is_dry: bool) -> Result:
    """tests/gpu without FP8 and one-rank groups. Each file in a process of its own: a kernel that checks its operands
    ends a process's use of the GPU."""
    files = sorted(
        file for file in (ROOT / "tests/gpu").glob("test_*.py") if file.name not in (FLOAT8_TESTS, NCCL_TESTS)
    )
    return _pytest(folder, [files] if is_dry else [[file] for file in files])  # without a GPU all are skipped


def one_rank(folder: Path, is_dry: bool) -> Result:
    """Every path between ranks by NCCL, in groups of one rank."""
    return _pytest(folder, [[TESTS / NCCL_TESTS]])


def float8_tests(folder: Path, is_dry: bool) -> Result:
    """The tests of FP8. They compile what training in FP8 needs."""
    return _pytest(folder, [[TESTS / FLOAT8_TESTS]])


PYTHON = sys.orig_argv[0]
"""Of this process; under the tests of this script `sys.executable` is another one, which takes files only."""
TESTS = ROOT / "tests/gpu"
FLOAT8_TESTS, NCCL_TESTS = "test_float8_on_gpu.py", "test_one_rank_nccl.py"


def _pytest(folder: Path, groups: list[list[Path]]) -> Result:
    """Tests of groups of files, each group in a process of its own. Failed ones are repeated, each kernel waited for,
    so that the traceback shows the call. What is known after each group is there if the part is cut off."""
    from xml.etree import ElementTree

    cases, failed, reasons = 0, [], []
    # -v: the output of a part that takes too long names the tests that have ended, and the one that has not.
    options = ["-v", "--tb=short", f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    for number, files in enumerate(groups):
        report = folder / f"tests-{number}.xml"
        command = [PYTHON, "-m", "pytest", *map(str, files), *options, f"--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT).returncode
        found = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        bad = [case for case in found if case.find("failure") is not None or case.find("error") is not None]
        cases += len(found)
        reasons += [case.find("skipped").get("message") for case in found if case.find("skipped") is not None]
        for case in bad:
            fault = next(found for found in map(case.find, ("failure", "error")) if found is not None)
            failed.append(f"{case.get('name')}: {(fault.get('message') or '?').splitlines()[0]}")
        if code and not bad:
            failed.append(f"{files[0].name}: pytest ended with {code}")
        elif bad:
            again = [f"{ROOT / case.get('classname').replace('.', '/')}.py::{case.get('name')}" for case in bad]
            blocking = os.environ | {"CUDA_LAUNCH_BLOCKING": "1"}
            subprocess.run([PYTHON, "-m", "pytest", *again, *options], cwd=ROOT, env=blocking)
        passed = cases - len(reasons) - sum(": pytest ended" not in line for line in failed)
        result = {"passed": passed, "skipped": len(reasons), "failed": "; ".join(failed) or "none"}
        _so_far(folder, result)
    if not failed and cases and len(reasons) == cases:
        raise Skipped(f"{cases} tests: {reasons[0]}")
    if failed:
        raise RuntimeError(f"{passed} passed, failed:\n" + "\n".join(failed))
    return result


def _so_far(folder: Path, result: Result) -> None:
    """What a part has found, for the report if it is cut off."""
    (folder / f"{os.environ['GPU_REPORT_PART']}.so_far.json").write_text(json.dumps(result))


def benchmark(folder: Path, is_dry: bool) -> Result:
    """Our training step against the peers that are installed, eager."""
    from importlib.util import find_spec

    peers = [] if find_spec("transformers") is None else ["transformers grouped_mm"]
    return _race(["ours", *peers], is_dry) | {"peers": peers or "none installed"}


def benchmark_compiled(folder: Path, is_dry: bool) -> Result:
    """Our compiled training step against the eager one. Apart from the peers: three copies would not fit."""
    if is_dry:
        raise Skipped("compiling for a CPU takes minutes")
    return _race(["ours", "ours compiled"], is_dry)


def benchmark_titan(folder: Path, is_dry: bool) -> Result:
    """Our training step against the same model with the MoE layers of TorchTitan, eager."""
    from glm46.config.errors import UserError
    from scripts.measure.titan import import_configs

    try:
        import_configs()
    except UserError as error:
        raise Skipped(str(error)) from error
    return _race(["ours", "torchtitan MoE"], is_dry)


def _race(names: list[str], is_dry: bool) -> Result:
    import torch

    from glm46.run.flops import training_flops
    from scripts.measure.model_speed import Workload, median_ratio, race
    from scripts.measure.speed_with_peers import CONTESTANTS

    if is_dry:
        dtype = torch.bfloat16 if "torchtitan MoE" in names else torch.float32  # its experts compute in BF16 only
        work = Workload("debug", 1, 32, torch.device("cpu"), dtype, layers=2)
    else:
        # Two models with gradients: 74 GB in four layers.
        layers = 4 if torch.cuda.mem_get_info()[1] > 100e9 else 3
        work = Workload("GLM-4.5-Air", 1, 4096, torch.device("cuda"), torch.bfloat16, layers=layers)
    contestants = race(
        work, {name: CONTESTANTS[name] for name in names}, 2 if is_dry else 5, lambda line: print(line, flush=True)
    )
    flops = training_flops(work.shape(), work.seq_len).total * work.tokens
    rows = []
    for one in contestants:
        seconds = statistics.median(one.seconds)
        rows.append({
            "name": one.name,
            "ms": seconds * 1e3,
            "tokens_per_second": work.tokens / seconds,
            "tflops": flops / seconds / 1e12,
            "against_ours": median_ratio(one, contestants[0]),
            "peak_gib": one.peak_bytes and one.peak_bytes / 2**30,
        })  # fmt: skip
    return {
        "work": f"{work.flavor}, {work.shape().num_hidden_layers} layers, {work.batch} x {work.seq_len}",
        "rows": rows,
    }


def profile(folder: Path, is_dry: bool) -> Result:
    """Return the FLOPs by kind of module, and the optimizer's share, of a step of training whose trace is kept."""
    overrides = ["--profiling.enable_profiling", "true", "--profiling.profile_freq", "4" if is_dry else str(STEPS)]
    trained = _train("profile", folder, is_dry, overrides)
    (table,) = folder.glob("profile/profile_traces/*/rank0_flops.json")
    trace = json.loads(table.with_name("rank0_trace.json").read_text(), strict=False)
    share = optimizer_share(trace["traceEvents"])
    return trained | {"optimizer_share": share, "profile": json.loads(table.read_text())}


def optimizer_share(events: list[dict[str, Any]]) -> float:
    """Return the optimizer's share of the recorded step.

    With ranges of a GPU both times are from its first to its last kernel in the range: the host's range ends when the
    kernels are launched.
    """
    ranges: dict[str, list[dict[str, Any]]] = {"gpu_user_annotation": [], "user_annotation": []}
    for event in events:
        if event["ph"] == "X" and event.get("cat") in ranges:
            ranges[event["cat"]].append(event)
    for annotations in ranges.values():
        optimizer = [event for event in annotations if event["name"] == "optimizer"]
        steps = [event for event in annotations if event["name"].startswith("ProfilerStep#")]
        if optimizer and steps:
            return _covered(optimizer) / _covered(steps)
    raise RuntimeError("the trace has no step with an optimizer")


def _covered(events: list[dict[str, Any]]) -> float:
    """Return the time in which at least one of these events ran. A GPU has a range for each stream."""
    covered = 0.0
    end = float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        stop = event["ts"] + event["dur"]
        covered += max(stop - max(event["ts"], end), 0.0)
        end = max(end, stop)
    return covered


def bf16(folder: Path, is_dry: bool) -> Result:
    """Training in BF16, compiled."""
    return _train("bf16", folder, is_dry, [] if is_dry else ["--compile.enable", "true"])


def fp8(folder: Path, is_dry: bool) -> Result:
    """Training with FP8 products, compiled, for the same steps."""
    from glm46.config.run_config import RunConfig

    if "float8" not in RunConfig.model_fields:
        raise Skipped("this version of glm46 has no [float8]")
    recipe = ["--float8.recipe_name", "rowwise", "--float8.experts_recipe_name", "rowwise"]
    return _train(
        "fp8", folder, is_dry, [*recipe, *(["--float8.emulate", "true"] if is_dry else ["--compile.enable", "true"])]
    )


def training_config(name: str, folder: Path, is_dry: bool, overrides: list[str], free_bytes: float = float("inf")):
    """The config of a training part, with as many layers as fit, and three at least."""
    from glm46.config.loader import load_config
    from glm46.operate.estimate.memory import plan_memory

    values = {
        "folder": folder / name, "text": folder / "text", "root": ROOT,
        "model": 'flavor = "GLM-4.5-Air"\nshape = {num_nextn_predict_layers = 0, num_hidden_layers = 4}',
        # 64k tokens a step: Muon's products do not depend on the tokens, and hide all else in a step of one row.
        "training": f'steps = {STEPS}\nseq_len = 4096\nglobal_batch_size = 16\ndtype = "bfloat16"',
        "optimizer": 'state_dtype = "bfloat16"',
    }  # fmt: skip
    if is_dry:
        values["model"] = 'flavor = "debug"\nshape = {num_hidden_layers = 2, n_routed_experts = 4, hidden_size = 64}'
        values["optimizer"] = ""
        values["training"] = 'steps = 4\nseq_len = 32\nmixed_precision_param = "float32"'
    file = folder / f"{name}.toml"
    file.write_text(TRAINING.format(**values))
    config = load_config(file, overrides, world_size=1)
    if not is_dry and plan_memory(config, 1, device="gpu").total > 0.9 * free_bytes:
        config = load_config(file, [*overrides, "--model.shape.num_hidden_layers", "3"], world_size=1)
    return config


def _train(name: str, folder: Path, is_dry: bool, overrides: list[str]) -> Result:
    """Train some steps in this process; with fewer layers if the memory does not suffice."""
    import torch

    for layers in (None, 3, 2):
        fewer = [] if layers is None else ["--model.shape.num_hidden_layers", str(layers)]
        shutil.rmtree(folder / name, ignore_errors=True)
        try:
            return _train_once(name, folder, is_dry, [*overrides, *fewer]) | {"out_of_memory": layers is not None}
        except torch.OutOfMemoryError as error:
            print(f"{layers or 'all'} layers: {error}", flush=True)
        torch.cuda.empty_cache()
    raise RuntimeError("out of memory with 2 layers")


def _train_once(name: str, folder: Path, is_dry: bool, overrides: list[str]) -> Result:
    import torch

    from glm46.operate.estimate.memory import plan_memory
    from glm46.operate.estimate.muon_cost import muon_cost
    from glm46.operate.estimate.plan_sizes import step_tokens
    from glm46.operate.estimate.rank_parts import parts_of_ranks
    from glm46.operate.launch.train_rank import train
    from glm46.run.flops import training_flops
    from glm46.run.plan import resolve_plan
    from glm46.storage.prepare.pipeline import prepare_run

    free = float("inf") if is_dry else torch.cuda.mem_get_info()[0]
    config = training_config(name, folder, is_dry, overrides, free)
    plan = resolve_plan(config, 1)
    prepare_run(plan, report=lambda line: print(line, flush=True))
    if code := train(config):
        raise RuntimeError(f"training ended with code {code}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    last = rows[len(rows) // 2 :]  # without the first steps, which compile and fill caches
    means = {
        key: statistics.median(row[key] for row in last)
        for key in ("tokens_per_second", "step_seconds", "tflops_per_device", "mfu", "memory_peak_gib/max")
        if all(row.get(key) is not None for row in last)
    }
    shape = f"{config.model.flavor}, {plan.shape.num_hidden_layers} layers, {step_tokens(plan):,} tokens a step"
    memory = plan_memory(config, 1, device="cpu" if is_dry else "gpu")
    planned = (memory.total - memory.process) / 2**30  # the allocator's peak leaves out the process too
    peak = means.get("memory_peak_gib/max")
    products = step_tokens(plan) * training_flops(plan.shape, config.training.seq_len, plan.document_tokens).total
    muon = muon_cost(parts_of_ranks(plan)[0], plan.shape, plan.layout, config).flops
    return {
        "work": shape,
        **means,
        "planned_tensors_gib": planned,
        **({"peak_over_plan": peak / planned} if peak else {}),
        "tflop_per_step": products / 1e12,
        "muon_tflop_per_step": muon / 1e12,
        "muon_share_of_flops": muon / (products + muon),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def kernels(folder: Path, is_dry: bool) -> Result:
    """Single kernels beside their bounds."""
    from scripts.measure.gpu_parts import measure_kernels

    return measure_kernels(is_dry)


def generation(folder: Path, is_dry: bool) -> Result:
    """Decoding with and without drafts."""
    from scripts.measure.gpu_parts import measure_generation

    return measure_generation(is_dry)


def lora(folder: Path, is_dry: bool) -> Result:
    """Three steps of LoRA."""
    from scripts.measure.gpu_parts import train_adapters

    return train_adapters(training_config("lora", folder, is_dry, ["--model.shape.num_nextn_predict_layers", "0"]))


def resume(folder: Path, is_dry: bool) -> Result:
    """A launched run with checkpoints, killed and started again."""
    from scripts.measure.gpu_parts import kill_and_resume

    steps, interval = (100, 10) if is_dry else (12, 2)
    overrides = ["--checkpoint.enable", "true", "--checkpoint.interval", str(interval), "--training.steps", str(steps)]
    # Nothing is measured but the checkpoints, whose writing must not take longer than the steps.
    overrides += ["--model.shape.num_hidden_layers", "2", *([] if is_dry else ["--model.flavor", "100M"])]
    config = training_config("resume", folder, is_dry, overrides)
    from glm46.config.loader import dump_config
    from glm46.run.plan import resolve_plan
    from glm46.storage.prepare.pipeline import prepare_run

    prepare_run(resolve_plan(config, 1), report=lambda line: print(line, flush=True))
    file = folder / "resume-resolved.toml"
    file.write_text(dump_config(config))
    return kill_and_resume(file, folder / "resume", steps, 2 * interval, 170.0)


def rates(folder: Path, is_dry: bool) -> Result:
    """Shares of the peaks that kernels reach, also as efficiencies.json for ``plan --measured``."""
    file = folder / "efficiencies.json"
    flavor = ["--flavor", "debug"] if is_dry else []
    from glm46.commands.benchmark import benchmark_command

    benchmark_command(["rates", *flavor, "--json", str(file)])
    return json.loads(file.read_text())


Part = Callable[[Path, bool], Result]
PARTS: dict[str, tuple[Part, int]] = {
    "machine": (machine, 35),  # and the packages from the folder of wheels
    "tests": (gpu_tests, 240),
    "one_rank": (one_rank, 120),
    "float8_tests": (float8_tests, 120),
    "profile": (profile, 120),
    "benchmark": (benchmark, 120),
    "kernels": (kernels, 120),
    "generation": (generation, 120),
    "bf16": (bf16, 240),
    "benchmark_compiled": (benchmark_compiled, 90),
    "fp8": (fp8, 180),
    "resume": (resume, 180),
    "lora": (lora, 90),
    "rates": (rates, 90),
    "benchmark_titan": (benchmark_titan, 90),
}
"""Parts in their order, with their seconds. What a part leaves is for those after it. Parts that are asked for by name
may take longer, as long as there is time."""
COMMANDS = {
    "1": ("machine", "tests", "one_rank", "float8_tests"),
    "2": ("machine", "profile", "benchmark", "kernels", "generation"),
    "3": ("machine", "bf16", "benchmark_compiled", "fp8"),
    "4": ("machine", "resume", "lora", "rates", "benchmark_titan"),
}
"""45 minutes on one GPU: four commands, each of at most `SECONDS`, by worth; nothing counts before the first is green.
In 15 minutes: 1, and the first parts of 2."""


def run_part(name: str, folder: Path, is_dry: bool) -> None:
    """The process of a part: write its result, and what the device and the compiler say after it."""
    os.environ["GPU_REPORT_PART"] = name
    try:
        found = {"status": "done", "result": PARTS[name][0](folder, is_dry)}
    except Skipped as reason:
        found = {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        found = {
            "status": "failed",
            "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }
    if found["status"] != "skipped":
        found["state"] = state_of_torch()
    (folder / f"{name}.json").write_text(json.dumps(found))


def state_of_torch() -> Result:
    """Graph breaks and graphs of this process and, on a GPU, memory, what the process has beside the allocator, and the
    kernel that torch takes for attention without documents."""
    import torch
    from torch._dynamo.utils import counters

    state: Result = {
        "graph_breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]
    }  # fmt: skip
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return state
    memory, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
    q, k = (torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16, device="cuda") for heads in (96, 8))
    chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)
    return state | {
        "allocated_peak_gib": memory["allocated_bytes.all.peak"] / 2**30,
        "reserved_peak_gib": memory["reserved_bytes.all.peak"] / 2**30,
        "allocation_retries": memory["num_alloc_retries"],
        "out_of_memory": memory["num_ooms"],
        "beside_the_allocator_gib": (total - free - torch.cuda.memory_reserved()) / 2**30,
        "attention": torch.nn.attention.SDPBackend(chosen).name,
        "cudnn": torch.backends.cudnn.version(),
    }


def _sample() -> tuple[float, float] | None:
    """Clock in MHz and power in W of the first GPU; None without nvidia-smi."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
        clock, power = map(float, said.split(","))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return clock, power


def attend_part(name: str, folder: Path, python: str, is_dry: bool, seconds: float) -> Result:
    """Run a part in a process of its own; its status, seconds, clocks and power, and result or reason."""
    command = [python, __file__, "--part", name, "--output", str(folder), *(["--dry-run"] if is_dry else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # some machines find torch there
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
    variables |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if is_dry else {}
    began, log, file = time.monotonic(), folder / f"{name}.log", folder / f"{name}.json"
    if seconds < 1:
        return {"status": "skipped", "reason": f"no time was left of {SECONDS} s", "seconds": 0.0}
    so_far = folder / f"{name}.so_far.json"
    for old in (file, so_far):
        old.unlink(missing_ok=True)
    samples: list[tuple[float, float]] = []
    with log.open("w") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None and (left := seconds - (time.monotonic() - began)) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(2.0, left))
                samples += filter(None, [None if is_dry else _sample()])
            is_late = process.poll() is None
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own processes too, which hold the GPU
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reason = f"not done after {seconds:.0f} s" if is_late else f"exit code {process.returncode}"
    found = json.loads(file.read_text()) if file.exists() else {"status": "failed", "reason": reason}
    if found["status"] == "failed":
        found["output"] = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        if so_far.exists():
            found["result"] = json.loads(so_far.read_text())
    if samples:
        clocks, powers = zip(*samples, strict=True)
        found["clocks"] = {"median_mhz": statistics.median(clocks), "highest_mhz": max(clocks), "most_w": max(powers)}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def install(wheels: Path, folder: Path) -> tuple[str, list[str]]:
    """An environment over this one with the packages that it lacks, from a folder; its Python and what is missing."""
    place = folder / "venv"
    # Without a pip of its own, which some Pythons cannot install; that of this Python works on the other environment.
    venv.EnvBuilder(system_site_packages=True, symlinks=True, clear=True).create(place)
    python, version = str(place / "bin/python"), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # An environment made from another one sees the packages of the system only.
    (place / "lib" / version / "site-packages/outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    code = "import json; from glm46.operate.launch.environment import unfit_packages as f; print(json.dumps(f(%r)))"

    def lacking(extras: list[str]) -> list[str]:
        asked = subprocess.run([python, "-c", code % extras], cwd=ROOT, capture_output=True, text=True, check=True)
        return [requirement for _, requirement in json.loads(asked.stdout)]

    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    pip += ["--find-links", str(wheels)]
    extras, tried = ["hf", "gpu"], set()
    while rest := set(lacking(extras)) - tried:  # what reads the list of packages may be missing itself
        if subprocess.run([*pip, *sorted(rest)]).returncode:  # the folder lacks one: install the others
            for requirement in sorted(rest):
                subprocess.run([*pip, requirement])
        tried |= rest
    if any(wheels.glob("torchtitan-*.whl")):  # a peer of the benchmark, which no extra names
        subprocess.run([*pip, "torchtitan"])
    return python, lacking(extras)


def as_markdown(report: Result) -> str:
    """The report for docs/performance.md."""
    parts, about = report["parts"], report["parts"]["machine"].get("result", {})
    lines = [f"## GPU report of {report['date']}", "", f"`{report['command']}`", ""]
    lines += [f"* {key.replace('_', ' ')}: {_show(value)}" for key, value in about.items()]
    lines += (
        [f"* packages missing in the folder of wheels: {', '.join(report['missing'])}"] if report["missing"] else []
    )
    lines += ["", "| part | status | seconds |", "|---|---|---|"]
    for name, part in parts.items():
        lines.append(
            f"| {name} | {part['status']}{': ' + part['reason'] if 'reason' in part else ''} | {part['seconds']} |"
        )
    for name, part in parts.items():
        result = part.get("result", {})
        states = part.get("state", {}) | part.get("clocks", {})
        tables = [rows for rows in (result.get("rows"), result.get("profile", {}).get("rows")) if rows]
        if not (result or "output" in part):
            continue
        lines += ["", f"### {name}", ""]
        lines += ["```", *part["output"], "```"] if "output" in part else []
        plain = {key: value for key, value in (result | states).items() if not isinstance(value, (list, dict))}
        lines += [", ".join(f"{key.replace('_', ' ')} {_show(value)}" for key, value in plain.items())]
        for rows in tables:
            heads = list(rows[0])
            lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
            lines += [f"| {' | '.join(_show(row[head]) for head in heads)} |" for row in rows]
    speeds = [parts.get(name, {}).get("result", {}).get("tokens_per_second") for name in ("bf16", "fp8")]
    if all(speeds):
        how = " (dry run: FP32, and FP8 emulated)" if report["is_dry"] else ""
        lines += ["", f"FP8 is {speeds[1] / speeds[0]:.2f} times as fast as BF16{how}."]
    for name in ("bf16", "fp8"):
        over = parts.get(name, {}).get("result", {}).get("peak_over_plan")
        lines += [] if over is None else ["", f"{name}: the peak memory of tensors is {over:.1%} of the planned one."]
    profiled = parts.get("profile", {}).get("result")
    if profiled:
        measured = profiled["optimizer_share"]
        floor = profiled["muon_share_of_flops"]
        sentence = f"The optimizer takes {measured:.1%} of the profiled step. Its floor is {floor:.1%}, the share of "
        sentence += "Muon's products in the FLOPs of the step: what it takes if all products run at one rate."
        lines += ["", sentence]
    peak = parts["machine"].get("result", {}).get("measured_peak_tflops")
    for name in ("benchmark", "benchmark_titan", "benchmark_compiled") if peak else ():
        for row in parts.get(name, {}).get("result", {}).get("rows", []):
            lines += ["", f"{row['name']} ({name}) reaches {row['tflops'] / peak:.1%} of the measured peak."]
    return "\n".join(lines) + "\n"


def write_files(report: Result, folder: Path, work: Path) -> None:
    """Write report.json, report.md, the output of all parts, and what some leave."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(as_markdown(report))
    logs = [work / f"{name}.log" for name in PARTS]
    texts = [f"== {log.stem}\n{log.read_text(errors='replace')[-500_000:]}" for log in logs if log.exists()]
    (folder / "logs.txt").write_text("\n".join(texts))
    if (work / "efficiencies.json").exists():
        shutil.copy(work / "efficiencies.json", folder)
    for trace in work.glob("profile/profile_traces/*/rank0_trace.json"):
        packed = gzip.compress(trace.read_bytes(), 6)
        if len(packed) <= MOST_TRACE_BYTES:
            (folder / "trace.json.gz").write_bytes(packed)
        trace.unlink()


def _show(value: object) -> str:
    return (
        ""
        if value is None
        else f"{value:,.4g}"
        if isinstance(value, float) and value < 1e4
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def main() -> int:
    """Run all parts and write the report; 0 if none has failed."""
    parser = argparse.ArgumentParser(
        prog="gpu_report.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "number", nargs="?", choices=COMMANDS, help="one of four commands of ten minutes; absent: all parts, in forty"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/gpu_report"),
        help="folder of report.json, report.md, logs.txt, efficiencies.json and trace.json.gz",
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that this Python lacks")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU; what needs a GPU is skipped")
    parser.add_argument(
        "--parts", metavar="NAME,NAME",
        help=f"only these of {', '.join(PARTS)}; the others stay as they are in an earlier report",
    )  # fmt: skip
    parser.add_argument("--python", default=sys.executable, help="interpreter of the parts; absent: this one")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        parser.error(f"--wheels {arguments.wheels}: no such folder; name one that holds .whl files")
    names = arguments.parts.split(",") if arguments.parts else list(COMMANDS.get(arguments.number, PARTS))
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"--parts {unknown[0]}: no such part; there are {', '.join(PARTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for variable, cache in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        # Beside the report: a later command finds the code that an earlier one has compiled.
        os.environ.setdefault(variable, str(folder.parent / "gpu_report_cache" / cache))
    if arguments.part:
        run_part(arguments.part, folder, arguments.dry_run)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu_report-", ignore_cleanup_errors=True) as work:
        return measure(arguments, names, folder, Path(work))


def measure(arguments: argparse.Namespace, names: list[str], folder: Path, work: Path) -> int:
    """Run the parts in the folder ``work`` and write the report; 0 if none has failed, 2 without a GPU."""
    began, python, missing, planned = time.monotonic(), arguments.python, [], 0
    if arguments.wheels is not None:
        python, missing = install(arguments.wheels.absolute(), work)
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["scripts/gpu_report.sh", *sys.argv[1:]]),
        "is_dry": arguments.dry_run,
        "missing": missing,
        "parts": {},
    }
    file = folder / "report.json"
    if names != list(PARTS) and file.exists():
        report["parts"] = json.loads(file.read_text())["parts"]
    for name in dict.fromkeys(["machine", *names]):
        print(f"{name} ...", flush=True)
        planned += PARTS[name][1]
        left = (SECONDS if arguments.parts else planned) - (time.monotonic() - began)
        part = report["parts"][name] = attend_part(name, work, python, arguments.dry_run, left)
        print(
            f"  {part['status']} in {part['seconds']:.0f} s{': ' + part['reason'] if 'reason' in part else ''}",
            flush=True,
        )
        write_files(report, folder, work)  # after each part, so that an interruption leaves what is known
        if name == "machine" and part["status"] == "skipped":
            return 2
    print(f"{folder / 'report.md'} and report.json")
    return int(any(part["status"] == "failed" for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
