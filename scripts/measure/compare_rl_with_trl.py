"""Time to a reward on the debug task: this project and TRL's GRPOTrainer, one after the other, on the same cores.

    CONFIG_FILE=train_configs/rl_debug_labels.toml NGPU=1 ./run_train.sh
    pip install trl datasets accelerate
    OMP_NUM_THREADS=1 python scripts/measure/compare_rl_with_trl.py --reward 0.4 --steps 80 --seed 0

Both start from the weights of rl_debug_labels.toml, TRL from its export as transformers reads it, and use one process,
FP32, AdamW with the same keys, the same prompts, token by token, the same reward, 32 prompts of 8 samples in a step of
one update, the same loss (GRPO: ratios of tokens, clip 0.2, mean over samples), and temperature 1. TRL draws with
transformers and its key-value cache, the 256 samples in one batch, and trains on them in one batch. The order of the
prompts and the draws differ, and TRL leaves the biases that balance experts as they are. The seconds are those of the
loop, without start, loading and saves. Nothing else may run on the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from glm46.config.loader import load_config  # noqa: E402
from glm46.config.run_config import RunConfig  # noqa: E402
from glm46.storage.data.tokenizer import load_tokenizer  # noqa: E402
from glm46.storage.huggingface.tokenizer_files import stop_ids  # noqa: E402
from glm46.tasks.rl.prompts import read_prompts  # noqa: E402

RECIPE = ROOT / "train_configs" / "rl_debug.toml"
_MEAN_OF = 5
"""Steps whose mean reward is compared: a step has 256 samples of 32 prompts."""

Rows = list[tuple[float, float]]
"""Seconds since the loop began, and the mean reward of its samples, of each step."""


def steps_to(reward: float, rows: Rows) -> int | None:
    """Steps until the mean reward of the last ones is reached; None if it is not."""
    for end in range(_MEAN_OF, len(rows) + 1):
        if statistics.mean(value for _, value in rows[end - _MEAN_OF : end]) >= reward:
            return end
    return None


def run_ours(base: Path, folder: Path, arguments: argparse.Namespace) -> Rows:
    """Train with this project."""
    keys = {
        "--job.dump_folder": folder, "--checkpoint.initial_load_path": base, "--rl.algorithm": "grpo",
        "--training.steps": arguments.steps, "--optimizer.lr": arguments.lr, "--lr_scheduler.min_lr_factor": 1.0,
        "--metrics.log_freq": 1, "--checkpoint.enable": "false", "--debug.seed": arguments.seed,
        "--validation.enable": "false", "--rl.validation": "[]",
    }  # fmt: skip
    overrides = [str(part) for pair in keys.items() for part in pair]
    _glm46("train", "--config", str(RECIPE), *overrides)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    began = rows[0]["unix_seconds"] - rows[0]["step_seconds"]
    return [(row["unix_seconds"] - began, row["reward"]) for row in rows]


def run_trl(base: Path, folder: Path, arguments: argparse.Namespace) -> Rows:
    """Train with TRL, until the reward is reached."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOTrainer

    model_folder = folder / "hf"
    _glm46("convert", "to-hf", "--checkpoint", str(base), "--output", str(model_folder), "--dtype", "float32")
    config = load_config(RECIPE, ["--checkpoint.initial_load_path", str(base)])
    stops = stop_ids(load_tokenizer(config.model.tokenizer_path))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_folder / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stops[0])
    rows: Rows = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_log(self, _: Any, __: Any, control: Any, logs: dict[str, float], **___: Any) -> None:
            if "reward" in logs:
                rows.append((time.perf_counter() - self.began, logs["reward"]))
            control.should_training_stop |= steps_to(arguments.reward, rows) is not None

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, experts_implementation=arguments.experts
        ),
        reward_funcs=_exact,
        args=_trl_arguments(config, stops, folder, arguments),
        train_dataset=_dataset(config, tokenizer),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return rows


def _exact(completions: list[str], label: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, label, strict=True)]


def _dataset(config: RunConfig, tokenizer: Any) -> Any:
    """The prompts of a run as texts that this tokenizer encodes to the same tokens."""
    from datasets import Dataset

    ours, most = load_tokenizer(config.model.tokenizer_path), config.training.seq_len - config.rollout.max_new_tokens
    file = ROOT / config.rl.prompts.file
    prompts = read_prompts(file, config.rl.prompts, ours, most_tokens=most, needs_label=True)
    texts = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    for text, prompt in zip(texts, prompts, strict=True):
        assert tokenizer(text, add_special_tokens=False).input_ids == list(prompt.tokens), text
    return Dataset.from_dict({"prompt": texts, "label": [str(prompt.label) for prompt in prompts]})


def _trl_arguments(config: RunConfig, stops: list[int], folder: Path, arguments: argparse.Namespace) -> Any:
    """The keys of the recipe as TRL calls them."""
    from trl import GRPOConfig

    rl, optimizer = config.rl.model_copy(update={"algorithm": "grpo"}).resolved(), config.optimizer
    return GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, seed=arguments.seed, max_steps=arguments.steps,
        per_device_train_batch_size=int(config.training.global_batch_size), num_generations=rl.group_size,
        max_completion_length=config.rollout.max_new_tokens, temperature=config.rollout.temperature,
        generation_kwargs={"eos_token_id": stops}, beta=0.0, loss_type="grpo", epsilon=rl.clip.low,
        learning_rate=arguments.lr, lr_scheduler_type="constant", weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1, adam_beta2=optimizer.beta2, adam_epsilon=optimizer.eps,
        max_grad_norm=config.training.max_norm, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip


def _glm46(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "glm46", *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=ROOT / "outputs/rl_debug_labels/checkpoint/step-000040")
    parser.add_argument("--reward", type=float, default=0.4, help="mean of five steps that ends the time")
    parser.add_argument("--steps", type=int, default=80, help="at most so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts and of the draws")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--experts", choices=("eager", "grouped_mm", "batched_mm"), help="how transformers computes")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--json", type=Path, help="write seconds and reward of each step")
    arguments = parser.parse_args()
    found: dict[str, Rows] = {}
    for name, run in (("ours", run_ours), ("trl", run_trl)):
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                rows = found[name] = run(arguments.base.resolve(), Path(folder), arguments)
            first, last = (statistics.mean(value for _, value in part) for part in (rows[:_MEAN_OF], rows[-_MEAN_OF:]))
            steps = steps_to(arguments.reward, rows)
            when = f"after {steps} steps, {rows[steps - 1][0]:.1f} s" if steps else "not reached"
            step_seconds = rows[-1][0] / len(rows)
            rewards = f"reward {first:.3f} to {last:.3f}; {arguments.reward:g}"
            print(f"{name:4}  {step_seconds:.3f} s a step, {rewards} {when}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
