"""Fine-tuning by this project and by TRL with PEFT: the same model, adapters and chats, one after the other in rounds.

    pip install trl peft transformers
    python scripts/measure/finetune_with_trl.py --rounds 3 --steps 2 --threads 1

Both train LoRA on attention and routed experts, from the same folder of adapters, in FP32 on a CPU and BF16 on a
GPU, without recomputation. Each packs the chats by itself, best fit, into the rows of one step, so that every step has
all chats: its loss must be the same in both trainers, step by step.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from glm46.compat import quiet_libraries  # noqa: E402
from glm46.compute.model.transformer import Transformer  # noqa: E402
from glm46.compute.parallelize.plan import initialise  # noqa: E402
from glm46.config.faults import counted  # noqa: E402
from glm46.config.presets import PRESETS  # noqa: E402
from glm46.config.run_config import RunConfig  # noqa: E402
from glm46.config.text_recipe import TextRecipe  # noqa: E402
from glm46.engine.observe.hardware import process_bytes  # noqa: E402
from glm46.engine.observe.observers import observing  # noqa: E402
from glm46.engine.training.build import run  # noqa: E402
from glm46.storage.chats.chat import ChatOptions, render  # noqa: E402
from glm46.storage.chats.conversation import parse_conversation  # noqa: E402
from glm46.storage.data.tokenizer import load_tokenizer  # noqa: E402
from glm46.storage.huggingface.config_json import config_of  # noqa: E402
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights  # noqa: E402
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids  # noqa: E402
from glm46.storage.prepare.pipeline import prepare_text  # noqa: E402
from glm46.storage.prepare.workers import call_in_workers  # noqa: E402
from glm46.tasks.finetune.task import FineTuning  # noqa: E402
from glm46.tasks.weights.weight_folders import WeightFolders  # noqa: E402

_FILLED = 0.9
"""Share of the rows of a step that chats fill: both packings then have as many rows."""
_LR, _ALPHA, _WARM_UP = 1e-3, 32, 1
_TOLERANCE = 2e-3
"""Of the losses, relative: FP32 sums in another order, over some steps."""


class Measured(NamedTuple):
    """Steps of one trainer in a process of its own."""

    seconds: list[float]
    """Of each step behind the first one."""
    losses: list[float]
    peak_bytes: int


def main(argv: Sequence[str]) -> None:
    """Time both trainers, and print target tokens per second, memory and the medians of the ratios of the rounds.
    Exits with a message if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flavor", default="100M", choices=list(PRESETS), help="preset of the model")
    parser.add_argument("--rank", type=int, default=16, help="rank of all adapters")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round, after one that is not timed")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both trainers, in alternating order")
    parser.add_argument("--threads", type=int, help="threads of torch; absent: its own choice")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        targets = _write_work(folder, arguments)
        rounds: dict[str, list[Measured]] = {"glm46": [], "trl": []}
        for number in range(arguments.rounds):
            for one in sorted(rounds, reverse=bool(number % 2)):
                rounds[one].append(_measure(_TRAINERS[one], folder, arguments))
        require_equal(rounds)
    speeds = {one: [targets / statistics.median(of.seconds) for of in found] for one, found in rounds.items()}
    peaks = {one: max(of.peak_bytes for of in found) for one, found in rounds.items()}
    threads = counted(arguments.threads or torch.get_num_threads(), "thread")
    device = "GPU, BF16" if torch.cuda.is_available() else f"CPU, FP32, {threads}"
    print(
        f"fine-tuning of {arguments.flavor}, LoRA of rank {arguments.rank}, {arguments.rows} x {arguments.seq_len} "
        f"tokens in a step, {targets:,} of them targets; {device}, {arguments.rounds} rounds of {arguments.steps} steps"
    )
    print(f"  {'':<8} {'targets/s':>10} {'peak GiB':>9}  losses")
    for one, found in rounds.items():
        losses = " ".join(f"{loss:.4f}" for loss in found[0].losses)
        print(f"  {one:<8} {statistics.median(speeds[one]):10,.0f} {peaks[one] / 2**30:9.2f}  {losses}")
    ratios = [ours / theirs for ours, theirs in zip(speeds["glm46"], speeds["trl"], strict=True)]
    speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"  glm46 against trl: speed {speed}, peak memory {peaks['glm46'] / peaks['trl']:.2f}")


def _write_work(folder: Path, arguments: argparse.Namespace) -> int:
    """Write chats, base and adapters; returns the targets of a step."""
    shape = PRESETS[arguments.flavor].model_copy(update={"num_nextn_predict_layers": 0})
    tokenizer, random_, words = load_tokenizer("builtin"), random.Random(0), [*map(str, range(2000))]
    room, lines, targets = int(_FILLED * arguments.rows * arguments.seq_len), [], 0
    while True:
        user, answer = (" ".join(random_.choices(words, k=random_.randint(2, arguments.seq_len // 32))) for _ in "ab")
        line = {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
        (document,) = render(parse_conversation(line, "messages"), tokenizer, ChatOptions()).documents
        room -= len(document.ids)
        if room < 0:
            break
        lines.append(json.dumps(line))
        targets += int(document.is_target.sum())
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    prepare_text(
        TextRecipe(
            input=(str(folder / "chats.jsonl"),), output=str(folder / "chats"), format="messages",
            max_tokens=arguments.seq_len, held_out=0.0, processes=1,
        ), report=lambda line: None,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    initialise(model, 0)
    options = ExportOptions(torch.float32, other_files=files_beside_weights(tokenizer, max_length=arguments.seq_len))
    config = config_of(shape, None, eos_ids=stop_ids(tokenizer), dtype="float32")
    export_weights(folder / "base", shape, config, model.state_dict(), options=options)
    list(call_in_workers(1, torch.set_num_threads, (1,), _quietly, [(_write_adapters, folder, arguments.rank)]))
    return targets


def _write_adapters(folder: Path, rank: int) -> None:
    """New adapters by PEFT. Ours would have twice the rank there: PEFT trains gate and up of an expert as one."""
    quiet_libraries()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=rank, lora_alpha=_ALPHA, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=experts
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(str(folder / "adapters"))


def _measure(trainer: Callable, folder: Path, arguments: argparse.Namespace) -> Measured:
    given = {name: getattr(arguments, name) for name in ("flavor", "rank", "rows", "seq_len", "steps")}
    threads = arguments.threads or torch.get_num_threads()
    ((_, found),) = call_in_workers(1, torch.set_num_threads, (threads,), _quietly, [(trainer, folder, given)])
    return found


def _quietly(function: Callable[..., Any], *given: Any) -> Any:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*given)


def _train_own(folder: Path, given: dict[str, Any]) -> Measured:
    """A run of [finetune] as `python -m glm46 train` makes it."""
    with tempfile.TemporaryDirectory() as dump_folder:
        config = RunConfig.model_validate({
            "job": {"dump_folder": dump_folder}, "finetune": {},
            "model": {"flavor": given["flavor"], "shape": {"num_nextn_predict_layers": 0}},
            "data": {"sources": [{"name": "chats", "path": str(folder / "chats"), "packing": "best_fit"}]}
            | {"document_mask": True},
            "training": {"steps": given["steps"] + _WARM_UP, "seq_len": given["seq_len"], "local_batch_size": 1}
            | {"global_batch_size": given["rows"]}
            | {"mixed_precision_param": "bfloat16" if torch.cuda.is_available() else "float32"},
            "optimizer": {"name": "AdamW", "lr": _LR, "weight_decay": 0.0},
            "lr_scheduler": {"min_lr_factor": 1.0},
            "adapter": {"rank": given["rank"], "alpha": _ALPHA, "targets": ["attention", "experts"]}
            | {"initial_load_path": str(folder / "adapters")},
            "moe": {"balance": "none", "sequence_aux_loss_weight": 0.0},
            "checkpoint": {"enable": False, "initial_load_path": str(folder / "base"), "initial_load_in_hf": True},
            "metrics": {"log_freq": 1, "enable_tensorboard": False},
        })  # fmt: skip
        times: list[float] = []

        class Timed(FineTuning):
            """Notes when each step begins, and when the last one has ended."""

            def prepare(self, *arguments: Any) -> dict[str, float]:
                times.append(time.perf_counter())
                return super().prepare(*arguments)

            def close(self) -> None:
                times.append(time.perf_counter())
                super().close()

        run(config, Timed, WeightFolders(), observing)
        rows = map(json.loads, Path(dump_folder, "metrics.jsonl").read_text().splitlines())
        return _measured(times, [row["loss"] for row in rows if "loss" in row])


def _train_trl(folder: Path, given: dict[str, Any]) -> Measured:
    """SFTTrainer on the same documents, token by token."""
    quiet_libraries()
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer, documents = load_tokenizer("builtin"), []
    for line in (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines():
        (document,) = render(parse_conversation(json.loads(line), "messages"), tokenizer, ChatOptions()).documents
        labels = document.ids.astype("int64")
        labels[~document.is_target] = -100
        documents.append({"input_ids": document.ids.tolist(), "labels": labels.tolist()})
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, experts_implementation="grouped_mm")
    times: list[float] = []

    class Clock(TrainerCallback):
        """Notes when each step begins, and when the last one has ended."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=PeftModel.from_pretrained(model, folder / "adapters", is_trainable=True),
            args=SFTConfig(
                output, max_steps=given["steps"] + _WARM_UP, per_device_train_batch_size=1,
                gradient_accumulation_steps=given["rows"], max_length=given["seq_len"], packing=True,
                learning_rate=_LR, weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="constant",
                logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, gradient_checkpointing=False,
                bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Dataset.from_list(documents),
            processing_class=AutoTokenizer.from_pretrained(folder / "base"),
            callbacks=[Clock()],
        )  # fmt: skip
        packed: Any = trainer.train_dataset
        if (count := len(packed)) != given["rows"]:
            sys.exit(f"TRL packs the chats into {count} rows; give other --rows, --seq-len")
        trainer.train()
        return _measured(times, [row["loss"] for row in trainer.state.log_history if "loss" in row])


_TRAINERS: dict[str, Callable[[Path, dict[str, Any]], Measured]] = {"glm46": _train_own, "trl": _train_trl}


def _measured(times: list[float], losses: list[float]) -> Measured:
    seconds = [end - begin for begin, end in pairwise(times)][_WARM_UP : len(losses)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else process_bytes("VmHWM")
    return Measured(seconds, losses, peak)


def require_equal(rounds: dict[str, list[Measured]]) -> None:
    """Exit with a message if the trainers have other losses in some step."""
    ours, theirs = (found[0].losses for found in rounds.values())
    if any(abs(a / b - 1) > _TOLERANCE for a, b in zip(ours, theirs, strict=True)):
        sys.exit(f"losses differ, so speeds do not compare: glm46 {ours}, trl {theirs}")


if __name__ == "__main__":
    main(sys.argv[1:])
