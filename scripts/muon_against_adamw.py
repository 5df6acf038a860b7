"""Muon against AdamW on the debug model: how many tokens does Muon need for AdamW's best validation loss?

    python scripts/muon_against_adamw.py                     # about an hour on one core; again after a stop: goes on
    python scripts/muon_against_adamw.py --tokens 409600     # longer runs

Every run is `python -m glm46 train` on train_configs/debug.toml with the same tokens in the same order, the same initial
weights, warm-up and decay; only optimizer, learning rate and budget differ. AdamW trains on all tokens, Muon on a part of
them, each with its rate decayed by its own end, so that a shorter run is a whole run and not a cut one. Rates are swept
in factors of two until the best one has a worse one on both sides. A run that is finished is not made again.

Writes <output>.json (what was run, every curve) and <output>.svg (the best curves).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "train_configs" / "debug.toml"
BATCH_SEQUENCES = 8
SEQ_LEN = 256
VALIDATIONS = 5
WARMUP_SHARE = 0.1
FIRST_RATES = {"AdamW": 4e-3, "Muon": 4e-3}
# AdamW's curve, Muon's on a part of the tokens, Muon's on all of them.
COLOURS = {"AdamW": "#c44e52", "Muon on a part": "#4c72b0", "Muon": "#8da0cb"}


def rounded(tokens: float) -> int:
    """Whole optimizer steps, a multiple of the number of validations."""
    unit = BATCH_SEQUENCES * SEQ_LEN * VALIDATIONS
    return max(1, round(tokens / unit)) * unit


def arguments(optimizer: str, rate: float, tokens: int, folder: Path) -> list[str]:
    """The command of one run."""
    keys = {
        "job.dump_folder": folder,
        "training.tokens": tokens,
        "training.local_batch_size": BATCH_SEQUENCES,
        "training.global_batch_size": BATCH_SEQUENCES,
        "training.seq_len": SEQ_LEN,
        "optimizer.name": optimizer,
        "optimizer.lr": rate,
        "lr_scheduler.warmup_tokens": int(WARMUP_SHARE * tokens),
        "checkpoint.enable": "false",
        "validation.freq": tokens // (BATCH_SEQUENCES * SEQ_LEN * VALIDATIONS),
        "validation.steps": 4,
        "metrics.log_freq": 5,
        "metrics.enable_tensorboard": "false",
    }
    words = [sys.executable, "-m", "glm46", "train", "--config", str(CONFIG)]
    return words + [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def curves(folder: Path) -> dict[str, list]:
    """[tokens, loss] of training and validation, as far as the run has come."""
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {
        "training": [[row["tokens"], round(row["loss"], 4)] for row in rows if "loss" in row],
        "validation": [[row["tokens"], round(row["validation_loss"], 4)] for row in rows if "validation_loss" in row],
    }


def measure(optimizer: str, rate: float, tokens: int, root: Path) -> dict:
    """The run with its curves, made now unless it was before."""
    folder = root / f"{optimizer}_{rate:g}_{tokens}"
    found = curves(folder)
    if not found["validation"] or found["validation"][-1][0] < tokens:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with open(folder / "console.txt", "w") as console:
            # One thread: a run does not depend on how many cores are free.
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = arguments(optimizer, rate, tokens, folder)
            subprocess.run(command, cwd=ROOT, env=environment, stdout=console, stderr=console, check=True)
        found = curves(folder)
    loss = found["validation"][-1][1]
    print(f"{optimizer:6} lr {rate:<8g} {tokens:>9,} tokens: validation loss {loss:.4f}", flush=True)
    return {"optimizer": optimizer, "lr": rate, "tokens": tokens, "final_validation_loss": loss, **found}


def sweep(first: float, run: Callable[[float], dict]) -> tuple[dict, list[dict]]:
    """The best run, and all: rates in factors of two around ``first`` until both neighbours of the best are known."""
    runs = {first: run(first), first / 2: run(first / 2)}
    while True:
        best = min(runs, key=lambda rate: runs[rate]["final_validation_loss"])
        unknown = [rate for rate in (best * 2, best / 2) if rate not in runs]
        if not unknown:
            return runs[best], [runs[rate] for rate in sorted(runs)]
        runs[unknown[0]] = run(unknown[0])


def plot(lines: dict[str, dict], highest: float) -> str:
    """Validation loss over tokens as SVG; ``highest`` cuts the curves' first points off."""
    points = [point for run in lines.values() for point in run["validation"] if point[0]]
    most, least = max(tokens for tokens, _ in points), min(loss for _, loss in points)
    width, height, left, top, bottom = 720, 420, 60, 20, 370

    def place(tokens: float, loss: float) -> str:
        x = left + tokens / most * (width - left - 20)
        return f"{x:.1f},{bottom - (loss - least) / (highest - least) * (bottom - top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for step in range(6):
        x, y = left + step / 5 * (width - left - 20), bottom - step / 5 * (bottom - top)
        parts.append(f'<path d="M{left} {y:.1f}H{width - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{least + step / 5 * (highest - least):.2f}'
                     f'</text><text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step / 5 * most:,.0f}</text>')  # fmt: skip
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">tokens (validation loss, nats)</text>')
    goal = lines["AdamW"]["final_validation_loss"]
    parts.append(
        f'<path d="M{place(0, goal)} L{place(most, goal)}" stroke="{COLOURS["AdamW"]}" stroke-dasharray="4 4"/>'
    )
    for row, (name, run) in enumerate(lines.items()):
        path = " ".join(place(*point) for point in run["validation"] if point[0] and point[1] <= highest)
        text = f"{name}: lr {run['lr']:g}, {run['tokens']:,} tokens, ends at {run['final_validation_loss']:.3f}"
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(
            f'<text x="{width - 24}" y="{top + 16 + 18 * row}" text-anchor="end" fill="{COLOURS[name]}">{text}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=204_800, help="tokens of an AdamW run")
    parser.add_argument("--share", type=float, default=0.8, help="part of them that Muon trains on")
    parser.add_argument("--folder", type=Path, default=Path("outputs/muon_against_adamw"), help="where the runs go")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/muon_against_adamw", help="no ending")
    options = parser.parse_args()
    root, tokens = options.folder.resolve(), rounded(options.tokens)
    fewer = rounded(options.share * options.tokens)

    adamw, all_adamw = sweep(FIRST_RATES["AdamW"], lambda rate: measure("AdamW", rate, tokens, root))
    part, all_part = sweep(FIRST_RATES["Muon"], lambda rate: measure("Muon", rate, fewer, root))
    muon = measure("Muon", part["lr"], tokens, root)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    first = arguments("NAME", 0.0, tokens, Path("FOLDER"))[1:]
    facts = {"command": " ".join(first).replace(str(ROOT) + "/", ""), "runs": [*all_adamw, *all_part, muon]}
    options.output.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = {"AdamW": adamw, "Muon on a part": part, "Muon": muon}
    highest = max(run["validation"][1][1] for run in lines.values())
    options.output.with_suffix(".svg").write_text(plot(lines, highest))
    gap = adamw["final_validation_loss"] - part["final_validation_loss"]
    print(f"Muon on {fewer / tokens:.0%} of the tokens ends {gap:+.4f} nats below AdamW's best on all of them")


if __name__ == "__main__":
    main()
