"""Speed of fine-tuning on one device: all weights, LoRA and DoRA on the same weights and batch, interleaved."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from glm46.compute.model.adapters import add_adapters
from glm46.compute.model.transformer import Transformer
from glm46.compute.optim.optimizers import build_optimizers
from glm46.compute.parallelize import activation_checkpoint
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.compute.parallelize.plan import initialise
from glm46.config.adapter import AdapterConfig
from glm46.config.optimizer import OptimizerConfig
from glm46.run.flops import training_flops
from scripts.measure.model_speed import Workload
from scripts.measure.rounds import interleaved

_SEED = 0
TRAINED = {"all weights": "all weights", "lora": "LoRA", "dora": "DoRA"}
"""What is trained, and its name in the table."""
ADAPTED = ("lora", "dora")
RECOMPUTED = ("none", "full")
FORWARD = ("all weights", "lora")


@dataclass
class Timed:
    """Something to time, and its seconds per call."""

    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)


class FineTuningWork:
    """A model whose weights, or whose adapters, AdamW trains on one batch, with any recomputation."""

    def __init__(self, work: Workload, trained: str, adapter: AdapterConfig):
        with torch.device("meta"):
            self.model = Transformer(work.shape())
        self.model.cast(work.dtype)
        if trained in ADAPTED:
            adapter = adapter.model_copy(update={"name": trained})
            add_adapters(self.model, adapter)
        self.model.to_empty(device=work.device)
        initialise(self.model, _SEED)
        self._magnitudes = Magnitudes(self.model, adapter, None) if trained == "dora" else None
        if self._magnitudes is not None:
            self._magnitudes.start()
        named = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self._optimizer = build_optimizers(named, OptimizerConfig(name="AdamW", lr=1e-5))
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, work.shape().vocab_size, (work.batch, work.seq_len + 1), generator=generator)
        ids = ids.to(work.device)
        self._inputs, self._labels, self._tokens = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), work.tokens

    def step(self, recomputed: str) -> float:
        """Forward, backward and update; returns the mean loss."""
        for layer in self.model.layers.values():
            vars(layer).pop("forward", None)  # a checkpointed one
        if recomputed != "none":
            activation_checkpoint.apply(self.model, recomputed)
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


def finetune_speed(work: Workload, adapter: AdapterConfig, rounds: int | None, report: Callable[[str], None]) -> str:
    """Time a step of each way to train, without and with full recomputation, and forward without gradients.

    Args:
        work: without prediction layers.
        adapter: its name is not read.
        rounds: see `timed_rounds`.

    Returns:
        A table with the ratio to all weights, measured and of FLOPs alone, and of DoRA to LoRA: medians over rounds of
        the ratio in each.
    """
    timed: dict[tuple[str, str], Timed] = {}
    for trained in TRAINED:
        report(f"building {trained}")
        run = FineTuningWork(work, trained, adapter)
        for recomputed in RECOMPUTED:
            timed[trained, recomputed] = Timed(partial(run.step, recomputed))
        if trained in FORWARD:
            timed[trained, "forward"] = Timed(run.forward)
    for one in timed.values():
        one.run()  # allocates states and warms kernels
    for one in interleaved(list(timed.values()), rounds, report):
        started = time.perf_counter()
        one.run()
        one.seconds.append(time.perf_counter() - started)
    lines = [f"  {'':<30} {'ms':>9} {'tokens/s':>10} {'against all':>12} {'by FLOPs':>9} {'against LoRA':>13}"]
    for (trained, what), one in timed.items():
        milliseconds = statistics.median(one.seconds) * 1e3
        name = f"{TRAINED[trained]}, {what if what == 'forward' else f'recomputation {what}'}"
        against = [_ratio(one, timed[base, what]) if (base, what) in timed else "" for base in ("all weights", "lora")]
        by_flops = _flops(work, None, what) / _flops(work, adapter if trained in ADAPTED else None, what)
        lines.append(
            f"  {name:<30} {milliseconds:9.1f} {work.tokens / milliseconds * 1e3:10,.0f} {against[0]:>12} "
            f"{by_flops:9.3f} {against[1] if trained == 'dora' else '':>13}"
        )
    return "\n".join(lines)


def _flops(work: Workload, adapter: AdapterConfig | None, what: str) -> float:
    """FLOPs per token of a step with this recomputation, or of forward."""
    step = training_flops(work.shape(), work.seq_len, adapter=adapter)
    forward = (training_flops(work.shape(), work.seq_len).total + step.adapters) / 3
    return {"none": step.total, "full": step.total + forward, "forward": forward}[what]


def _ratio(one: Timed, base: Timed) -> str:
    """Speed relative to the base."""
    return f"{statistics.median(b / a for a, b in zip(one.seconds, base.seconds, strict=True)):.3f}"
