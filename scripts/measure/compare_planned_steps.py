"""Predicted against measured step times of ten layouts on the two cores of a CPU.

    python scripts/measure/compare_planned_steps.py --json steps.json

Two ranks with one thread each measure what they reach with the kernels of a layer and with gloo, both at once. The
planner predicts from these rates, as `plan --measured` does from those of a GPU. Then each layout trains some steps.
Nothing else may run on the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from glm46.config.loader import load_config  # noqa: E402
from glm46.engine.observe.peaks import Accelerator  # noqa: E402
from glm46.operate.benchmark.rates import cpu_peaks, efficiencies, measure_rates  # noqa: E402
from glm46.operate.estimate.step_time import StepTime, step_time  # noqa: E402
from glm46.operate.estimate.target_cluster import Efficiencies, TargetCluster  # noqa: E402
from glm46.run.plan import resolve_plan  # noqa: E402

RANKS, STEPS, SKIPPED = 2, 6, 1
SEQ_LEN, SEQUENCES = 512, 4
_GLOO_BYTES = (1 << 25, 1 << 12)
"""Sizes of the collectives that give the bandwidth, and the time of a call."""

CONFIG = f"""
[model]
flavor = "debug"
[model.shape]
hidden_size = 512
intermediate_size = 1536
moe_intermediate_size = 256
num_hidden_layers = 5
num_attention_heads = 8
num_key_value_heads = 2
[[data.sources]]
name = "python_stdlib"
path = "data/python_stdlib"
recipe = {{ input = ["builtin:python_stdlib"], deduplicate = "exact" }}
[training]
steps = {STEPS}
seq_len = {SEQ_LEN}
local_batch_size = 2
global_batch_size = {SEQUENCES}
mixed_precision_param = "float32"
[optimizer]
name = "AdamW"
lr = 1e-4
[checkpoint]
enable = false
[metrics]
log_freq = 1
enable_tensorboard = false
"""
_PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule"]
LAYOUTS: dict[str, list[str]] = {
    "FSDP2": [],
    "FSDP2, selective": ["--activation_checkpoint.mode", "selective"],
    "FSDP2, full": ["--activation_checkpoint.mode", "full"],
    "replicas": ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"],
    "EP2": ["--parallelism.expert_parallel_degree", "2"],
    "TP2": ["--parallelism.tensor_parallel_degree", "2"],
    "TP2, full": ["--parallelism.tensor_parallel_degree", "2", "--activation_checkpoint.mode", "full"],
    "CP2": ["--parallelism.context_parallel_degree", "2"],
    "PP2 1F1B": [*_PIPELINE, "1F1B"],
    "PP2 Interleaved1F1B, full": [*_PIPELINE, "Interleaved1F1B", "--activation_checkpoint.mode", "full"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rates", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rates:
        return measure_here(arguments.rates)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        config, rates = Path(folder, "steps.toml"), Path(folder, "rates.json")
        config.write_text(CONFIG)
        subprocess.run([sys.executable, "-m", "glm46", "prepare", "--config", str(config)], check=True, cwd=ROOT)
        _torchrun([__file__, "--rates", str(rates)])
        measured_rates = json.loads(rates.read_text())
        rows = {}
        for name, overrides in LAYOUTS.items():
            predicted = predict(config, overrides, measured_rates)
            seconds = train(config, overrides, Path(folder, name.replace(" ", "-")))
            rows[name] = {"predicted": predicted.seconds, "measured": seconds, "parts": predicted.parts}
            print(f"{name:28} predicted {predicted.seconds:6.2f} s, measured {seconds:6.2f} s", flush=True)
    summary = summarise(rows)
    print(f"median error {summary['median_error']:.1%}, pairs in the right order {summary['ranking']:.0%}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rates": measured_rates, "layouts": rows, **summary}, indent=1) + "\n")
    return None


def summarise(rows: dict[str, dict]) -> dict[str, float]:
    """Median relative error, and the share of pairs of layouts that the prediction orders as the measurement does."""
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows.values()]
    pairs = [
        (a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in combinations(rows.values(), 2)
    ]
    return {"median_error": statistics.median(errors), "ranking": sum(pairs) / len(pairs)}


def predict(config: Path, overrides: list[str], rates: dict) -> StepTime:
    """The step of a layout on the CPU that these rates describe."""
    plan = resolve_plan(load_config(config, overrides, world_size=RANKS), RANKS)
    cluster = TargetCluster(
        Accelerator(**rates["peaks"]),
        RANKS,
        efficiencies=Efficiencies(**{"experts_rows": 0.0, "attention_rows": 0.0} | rates["efficiencies"]),
    )
    return step_time(plan, 0, SEQUENCES, cluster)


def train(config: Path, overrides: list[str], folder: Path) -> float:
    """Median seconds of a step of a run."""
    _torchrun(["-m", "glm46", "train", "--config", str(config), "--job.dump_folder", str(folder), *overrides])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return statistics.median([json.loads(line)["step_seconds"] for line in lines][SKIPPED:])


def _torchrun(command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*launcher, *command], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def measure_here(file: Path) -> None:
    """Measure kernels and collectives on both ranks at once. Collective."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plan = resolve_plan(load_config(file.with_name("steps.toml"), [], world_size=RANKS), RANKS)
    dist.barrier()
    peaks = cpu_peaks(torch.float32, 1 << 34)
    dist.barrier()
    rates = measure_rates(plan.shape, 2 * SEQ_LEN, torch.device("cpu"), torch.float32)
    dist.barrier()
    bandwidth, call_seconds = _gloo_rates()
    peaks = Accelerator("CPU", peaks.bf16_flops, 1 << 34, 0.0, peaks.memory_bandwidth, bandwidth)
    measured = efficiencies(rates, peaks, "measured") | {
        "link": 1.0, "call_seconds": call_seconds, "overlap": 0.0,
    }  # fmt: skip
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"peaks": vars(peaks), "efficiencies": measured}))
    dist.destroy_process_group()


def _gloo_rates() -> tuple[float, float]:
    """Bytes per second that a rank sends in large collectives, and seconds of one of hardly any bytes."""
    bandwidths, calls = [], []
    for size in _GLOO_BYTES:
        whole = torch.ones(size // 4)
        part = torch.ones(size // 4 // RANKS)
        for collective in (
            lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
        ):
            seconds = _median(collective)
            calls.append(seconds)
            bandwidths.append(size / RANKS / seconds)
    return statistics.harmonic_mean(bandwidths[:3]), statistics.mean(calls[3:])


def _median(run: Callable[[], Tensor | None]) -> float:
    times = []
    for _ in range(12):
        dist.barrier()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
