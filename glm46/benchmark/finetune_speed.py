"""Speed of fine-tuning on one device: all weights, LoRA and DoRA on the same weights and batch, interleaved."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch

from glm46.benchmark.model_speed import Workload
from glm46.benchmark.rounds import interleaved
from glm46.config.adapter import Adapter
from glm46.config.optimizer import Optimizer
from glm46.model.adapters import add_adapters
from glm46.model.transformer import Transformer
from glm46.optim.optimizers import build_optimizers
from glm46.parallelize import activation_checkpoint
from glm46.parallelize.magnitudes import Magnitudes
from glm46.parallelize.plan import initialise

_SEED = 0
TRAINED = {"all weights": "all weights", "lora": "LoRA", "dora": "DoRA"}
"""What is trained, and its name in the table."""
RECOMPUTED = ("none", "full")
FORWARD = ("all weights", "lora")


@dataclass
class Timed:
    """Something to time, and its seconds per call."""

    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)


class FineTuning:
    """A model whose weights, or whose adapters, AdamW trains on one batch."""

    def __init__(self, work: Workload, trained: str, adapter: Adapter, recomputed: str):
        with torch.device("meta"):
            self.model = Transformer(work.shape())
        self.model.cast(work.dtype)
        is_adapted = trained != "all weights"
        if is_adapted:
            adapter = adapter.model_copy(update={"name": trained})
            add_adapters(self.model, adapter)
        if recomputed != "none":
            activation_checkpoint.apply(self.model, recomputed)
        self.model.to_empty(device=work.device)
        initialise(self.model, _SEED)
        self._magnitudes = Magnitudes(self.model, adapter, None) if trained == "dora" else None
        if self._magnitudes is not None:
            self._magnitudes.start()
        named = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self._optimizer = build_optimizers(named, Optimizer(name="AdamW", lr=1e-5))
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, work.shape().vocab_size, (work.batch, work.seq_len + 1), generator=generator)
        ids = ids.to(work.device)
        self._inputs, self._labels, self._tokens = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), work.tokens

    def step(self) -> float:
        """Forward, backward and update; returns the mean loss."""
        loss = self.model(self._inputs, labels=self._labels).loss / self._tokens
        loss.backward()
        self._optimizer.step(1.0)
        if self._magnitudes is not None:
            self._magnitudes.refresh()
        self._optimizer.zero_grad()
        return loss.item()  # sync: waits for the GPU, so that the time is that of the work

    @torch.no_grad()
    def forward(self) -> float:
        """Forward alone; returns the mean loss."""
        return self.model(self._inputs, labels=self._labels).loss.item() / self._tokens


def finetune_speed(work: Workload, adapter: Adapter, rounds: int | None, report: Callable[[str], None]) -> str:
    """Time a step of each way to train, without and with full recomputation, and forward without gradients.

    Args:
        work: without prediction layers.
        adapter: its name is not read.
        rounds: see `timed_rounds`.

    Returns:
        A table with the ratio to all weights, and of DoRA to LoRA: medians over rounds of the ratio in each.
    """
    timed: dict[tuple[str, str], Timed] = {}
    for trained, recomputed in product(TRAINED, RECOMPUTED):
        report(f"building {trained}, recomputation {recomputed}")
        run = FineTuning(work, trained, adapter, recomputed)
        timed[trained, recomputed] = Timed(run.step)
        if recomputed == "none" and trained in FORWARD:
            timed[trained, "forward"] = Timed(run.forward)
    for one in timed.values():
        one.run()  # allocates states and warms kernels
    for one in interleaved(list(timed.values()), rounds, report):
        started = time.perf_counter()
        one.run()
        one.seconds.append(time.perf_counter() - started)
    lines = [f"  {'':<30} {'ms':>9} {'tokens/s':>10} {'against all':>12} {'against LoRA':>13}"]
    for (trained, what), one in timed.items():
        milliseconds = statistics.median(one.seconds) * 1e3
        name = f"{TRAINED[trained]}, {what if what == 'forward' else f'recomputation {what}'}"
        against = [_ratio(one, timed[base, what]) if (base, what) in timed else "" for base in ("all weights", "lora")]
        lines.append(
            f"  {name:<30} {milliseconds:9.1f} {work.tokens / milliseconds * 1e3:10,.0f} "
            f"{against[0]:>12} {against[1] if trained == 'dora' else '':>13}"
        )
    return "\n".join(lines)


def _ratio(one: Timed, base: Timed) -> str:
    """Speed relative to the base."""
    return f"{statistics.median(b / a for a, b in zip(one.seconds, base.seconds, strict=True)):.3f}"
