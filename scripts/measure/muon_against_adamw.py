"""Muon against AdamW on the debug model: how many tokens does Muon need for AdamW's best validation loss?

    python scripts/measure/muon_against_adamw.py                     # about an hour on one core; can be continued
    python scripts/measure/muon_against_adamw.py --tokens 409600     # longer runs

Every run is `python -m glm46 train` on train_configs/debug.toml with the same tokens in the same order, the same
initial weights, warm-up and decay; only optimizer, rate and budget differ. AdamW trains on all tokens, Muon on a part
of them, each with its rate decayed to its own end: a shorter run is a complete run. Rates are swept in
factors of two until the best one has a worse one on both sides. Finished runs are reused.

Writes <output>.json (commands and curves) and <output>.svg (the best curves).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "train_configs" / "debug.toml"
BATCH_SEQUENCES = 8
SEQ_LEN = 256
VALIDATIONS = 5
WARMUP_SHARE = 0.1
FIRST_RATES = {"AdamW": 4e-3, "Muon": 4e-3}
# AdamW; Muon on a part of the tokens; Muon on all of them.
COLOURS = ("#c44e52", "#4c72b0", "#55a868")


def rounded(tokens: float) -> int:
    """Tokens rounded to whole optimizer steps, a multiple of the number of validations."""
    unit = BATCH_SEQUENCES * SEQ_LEN * VALIDATIONS
    return max(1, round(tokens / unit)) * unit


def arguments(optimizer: str, rate: float | str, tokens: int, folder: Path) -> list[str]:
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
    """[tokens, loss] of training and validation, up to the last row of the run."""
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {
        "training": [[row["tokens"], round(row["loss"], 4)] for row in rows if "loss" in row],
        "validation": [[row["tokens"], round(row["validation_loss"], 4)] for row in rows if "validation_loss" in row],
    }


def measure(optimizer: str, rate: float, tokens: int, root: Path) -> dict:
    """Train one run, unless it is finished; returns it with its curves."""
    folder = root / f"{optimizer}_{rate:g}_{tokens}"
    found = curves(folder)
    if not found["validation"] or found["validation"][-1][0] < tokens:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with open(folder / "console.txt", "w") as console:
            # One thread, so that results do not depend on the number of free cores.
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = arguments(optimizer, rate, tokens, folder)
            subprocess.run(command, cwd=ROOT, env=environment, stdout=console, stderr=console, check=True)
        found = curves(folder)
    loss = found["validation"][-1][1]
    print(f"{optimizer:6} lr {rate:<8g} {tokens:>9,} tokens: validation loss {loss:.4f}", flush=True)
    return {"optimizer": optimizer, "lr": rate, "tokens": tokens, "final_validation_loss": loss, **found}


def sweep(first: float, run: Callable[[float], dict]) -> tuple[dict, list[dict]]:
    """Try rates in factors of two around ``first`` until the best has two worse neighbours; returns best and all."""
    runs = {first: run(first), first / 2: run(first / 2)}
    while True:
        best = min(runs, key=lambda rate: runs[rate]["final_validation_loss"])
        unknown = [rate for rate in (best * 2, best / 2) if rate not in runs]
        if not unknown:
            return runs[best], [runs[rate] for rate in sorted(runs)]
        runs[unknown[0]] = run(unknown[0])


def best_curves_svg(lines: list[dict]) -> str:
    """SVG of validation loss over tokens, without the points before training; the end of the first line is the goal."""
    curves_shown = [[point for point in run["validation"] if point[0]] for run in lines]
    points = [point for curve in curves_shown for point in curve]
    most = max(tokens for tokens, _ in points)
    least, highest = min(loss for _, loss in points) - 0.1, max(loss for _, loss in points) + 0.1
    width, height, left, right, top, bottom = 740, 420, 60, 700, 20, 360

    def across(tokens: float) -> str:
        return f"{left + tokens / most * (right - left):.1f}"

    def down(loss: float) -> str:
        return f"{top + (highest - loss) / (highest - least) * (bottom - top):.1f}"

    space, font, middle = "http://www.w3.org/2000/svg", 'font-family="sans-serif" font-size="13"', (left + right) / 2
    caption = "validation loss in nats, over tokens"
    parts = [
        f'<svg xmlns="{space}" viewBox="0 0 {width} {height}" {font}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{middle}" y="{height - 14}" text-anchor="middle">{caption}</text>',
    ]
    for step in range(6):
        tokens, loss = step / 5 * most, least + step / 5 * (highest - least)
        parts.append(f'<path d="M{left} {down(loss)}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{down(loss)}" dy="4" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<text x="{across(tokens)}" y="{bottom + 20}" text-anchor="middle">{tokens:,.0f}</text>')
    goal = down(lines[0]["final_validation_loss"])
    parts.append(f'<path d="M{left} {goal}H{right}" stroke="{COLOURS[0]}" stroke-dasharray="4 4"/>')
    for row, (run, curve, colour) in enumerate(zip(lines, curves_shown, COLOURS, strict=True)):
        path = " ".join(f"{across(tokens)},{down(loss)}" for tokens, loss in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(t)}" cy="{down(loss)}" r="3" fill="{colour}"/>' for t, loss in curve]
        text = f"{run['optimizer']}, lr {run['lr']:g}, {run['tokens']:,} tokens: {run['final_validation_loss']:.3f}"
        parts.append(f'<text x="{right - 4}" y="{top + 16 + 18 * row}" text-anchor="end" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Sweep both, then train Muon at its best rate on all tokens too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=204_800, help="tokens of an AdamW run")
    parser.add_argument("--share", type=float, default=0.8, help="part of them that Muon trains on")
    parser.add_argument("--folder", type=Path, default=Path("outputs/muon_against_adamw"), help="where the runs go")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs/images/muon_against_adamw", help="without an ending"
    )
    options = parser.parse_args()
    root, tokens = options.folder.resolve(), rounded(options.tokens)
    part = rounded(options.share * options.tokens)

    adamw, all_adamw = sweep(FIRST_RATES["AdamW"], lambda rate: measure("AdamW", rate, tokens, root))
    muon, all_muon = sweep(FIRST_RATES["Muon"], lambda rate: measure("Muon", rate, part, root))
    longer = measure("Muon", muon["lr"], tokens, root)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    words = arguments("NAME", "RATE", tokens, Path("FOLDER"))[1:]
    runs = ",\n  ".join(json.dumps(run) for run in [*all_adamw, *all_muon, longer])
    command = json.dumps("python " + " ".join(words).replace(f"{ROOT}/", ""))
    options.output.with_suffix(".json").write_text(f'{{\n "command": {command},\n "runs": [\n  {runs}\n ]\n}}\n')
    options.output.with_suffix(".svg").write_text(best_curves_svg([adamw, muon, longer]))
    goal = adamw["final_validation_loss"]
    for run in (muon, longer):
        reached = [seen for seen, loss in run["validation"] if loss <= goal]
        where = f"reaches {goal:.4f} by {reached[0]:,} tokens" if reached else f"never reaches {goal:.4f}"
        print(f"Muon on {run['tokens']:,} tokens {where} and ends at {run['final_validation_loss']:.4f}")


if __name__ == "__main__":
    main()
