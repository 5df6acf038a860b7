"""The tables of docs/results on the cost of long rows and of whole runs: each figure from the planner.

    PYTHONPATH=. python tests/unit/operate/estimate/test_documented_costs.py

prints the tables.
"""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glm46.cli import main
from glm46.config.presets import PRESETS
from glm46.operate.estimate.activations import travelling_key_bytes
from glm46.run.context_keys import gathered_key_bytes
from glm46.run.flops import attention_flops

ROOT = Path(__file__).resolve().parents[4]
DOCUMENT = ROOT / "docs/results/long_rows_2026-11-26.md"
RUNS = {
    "glm46_phase1": ("GLM-4.6, phase 1", "H800", 8192, "2.5", "$27.7M and $62.4M for all"),
    "glm46_phase2": ("GLM-4.6, phase 2", "H800", 8192, "2.5", ""),
    "glm46_phase3": ("GLM-4.6, phase 3", "H800", 8192, "2.5", ""),
    "scaled_64gpu": ("scaled down: 24 layers, 32 experts, 100B tokens", "H100", 64, "3", "$138K"),
    "glm46_sft": ("fine-tuning, all weights of 355B", "H100", 128, "3", "$5K to $50K"),
    "glm46_lora_fp8": ("fine-tuning, LoRA on an FP8 base of 355B", "H100", 8, "3", ""),
    "air_lora": ("fine-tuning, LoRA on Air", "H100", 8, "3", ""),
}
SHAPE, TENSOR, WIDTH, DOCUMENT_TOKENS, WINDOW = PRESETS["GLM-4.6"], 8, 2, 4096, 4096
HEAD = [
    "| row | context | received | held | ring held | hidden state | document | of 4,096 | window | received | held |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def line(length: int, ranks: int) -> str:
    windowed = SHAPE.model_copy(update={"sliding_window": WINDOW})
    keys = 2 * length * SHAPE.num_key_value_heads / TENSOR * SHAPE.head_dim * WIDTH

    def held(shape) -> float:
        return keys if ranks == 1 else gathered_key_bytes(shape, WIDTH, rows=1, length=length, cp=ranks, tp=TENSOR)

    def work(shape, document: int) -> float:
        return length / ranks / TENSOR * attention_flops(shape, document) / 1e12

    def received(shape) -> float:
        """Most that a rank receives: what it attends to, less its own keys."""
        return min(keys, held(shape)) - keys / ranks

    travelling = travelling_key_bytes(SHAPE, WIDTH, rows=1, length=length, cp=ranks, tp=TENSOR)
    return "| " + " | ".join([
        f"{length:,}", str(ranks), f"{received(SHAPE) / 1e6:.0f} MB", f"{held(SHAPE) / 1e6:.0f} MB",
        "-" if ranks == 1 else f"{travelling / 1e6:.0f} MB",
        f"{length / ranks / TENSOR * SHAPE.hidden_size * WIDTH / 1e6:.0f} MB",
        f"{work(SHAPE, length):.1f} TFLOP", f"{work(SHAPE, DOCUMENT_TOKENS):.2f} TFLOP",
        f"{work(windowed, length):.2f} TFLOP", f"{received(windowed) / 1e6:.0f} MB", f"{held(windowed) / 1e6:.0f} MB",
    ]) + " |"  # fmt: skip


def table() -> list[str]:
    return HEAD + [line(n, ranks) for n in (32_768, 65_536, 131_072, 196_608) for ranks in (1, 2, 4, 8, 16)]


def test_the_table_of_the_document_is_what_the_planner_computes():
    assert "\n".join(table()) in DOCUMENT.read_text()


def run_line(recipe: str) -> str:
    what, gpu, gpus, price, quick_start = RUNS[recipe]
    config = ["--config", str(ROOT / f"train_configs/{recipe}.toml"), "--gpu", gpu, "--gpus", str(gpus)]
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        file = Path(folder) / "plan.json"
        assert main(["plan", *config, "--price", price, "--json", str(file)]) == 0
        cost = json.loads(file.read_text())
    dollars = cost["dollars"]
    days, hours = (f"{float(f'{cost[key]:.3g}'):,.10g}" for key in ("days", "gpu_hours"))
    money = f"${dollars / 1e6:.1f}M" if dollars >= 1e6 else f"${float(f'{dollars:.3g}'):,g}"
    return f"| {what} | `{recipe}` | {gpus:,} {gpu} | {days} | {hours} | {money} | {quick_start} |"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RUNS)
def test_the_cost_of_a_run_is_what_plan_prints(recipe):
    assert run_line(recipe) in (ROOT / "docs/results/published_runs_2026-11-26.md").read_text()


if __name__ == "__main__":
    print("\n".join(table()), "", *map(run_line, RUNS), sep="\n")
