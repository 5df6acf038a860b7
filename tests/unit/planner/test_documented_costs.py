"""The table of docs/parallelism.md on the cost of long rows: each figure from the planner's own formulas.

    PYTHONPATH=. python tests/unit/planner/test_documented_costs.py

prints the table.
"""

from pathlib import Path

from glm46.config.presets import PRESETS
from glm46.planner.activations import gathered_key_bytes, travelling_key_bytes
from glm46.planner.flops import attention_flops

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/parallelism.md"
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


if __name__ == "__main__":
    print("\n".join(table()))
