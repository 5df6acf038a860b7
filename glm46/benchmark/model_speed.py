"""Forward and backward of our model against `transformers`: same weights, batch and threads, in alternation."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from glm46.benchmark.peer import build_peer
from glm46.benchmark.rounds import timed_rounds
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.model.transformer import Transformer
from glm46.observe.hardware import process_bytes
from glm46.parallelize import compile
from glm46.parallelize.plan import initialise
from glm46.prepare.workers import call_in_workers

_SEED = 0
_STEPS_FOR_PEAK = 2
_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative difference of the losses that the number formats and other orders of summation explain."""

CONTESTANTS = ("ours", "ours compiled", "transformers grouped_mm", "transformers default")


@dataclass(frozen=True)
class Workload:
    """What every contestant computes in one step."""

    flavor: str
    batch: int
    seq_len: int
    device: torch.device
    dtype: torch.dtype
    layers: int | None = None
    """Decoder layers; None: the preset's. A part of a large model fits where the whole does not."""
    prediction_layers: int = 0
    """Multi-token prediction layers: none, for the peer does not train them."""

    def shape(self) -> ModelShape:
        """The preset with these layers."""
        stated = {"num_nextn_predict_layers": self.prediction_layers}
        if self.layers is not None:
            stated["num_hidden_layers"] = self.layers
        return PRESETS[self.flavor].model_copy(update=stated)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


@dataclass
class Contestant:
    """A step to time, and what was measured of it."""

    name: str
    model: nn.Module
    loss: Callable[[], torch.Tensor]
    """Forward; returns the mean loss."""
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    def step(self) -> float:
        """Forward and backward with fresh gradients; returns the loss."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return loss.item()  # sync: on a GPU the work is done only now


def build_contestant(name: str, work: Workload, ours: Transformer) -> Contestant:
    """One of `CONTESTANTS` on a batch that is the same for all."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, work.shape().vocab_size, (work.batch, work.seq_len + 1), generator=generator)
    ids = ids.to(work.device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if name.startswith("transformers"):
        implementation = "grouped_mm" if name.endswith("grouped_mm") else "eager"
        peer = build_peer(ours, implementation).train()
        return Contestant(name, peer, lambda: peer(inputs, labels=inputs, shift_labels=labels).loss)
    model = ours
    if name == "ours compiled":
        model = Transformer(ours.shape).to(work.device).cast(work.dtype)
        model.load_state_dict(ours.state_dict())
        compile.apply(model, whole_graphs=True)
    return Contestant(name, model, lambda: model(inputs, labels=labels).loss / work.tokens)


def build_ours(work: Workload) -> Transformer:
    """Our model with its initial weights."""
    with torch.device("meta"):
        model = Transformer(work.shape())
    model.cast(work.dtype).to_empty(device=work.device)
    initialise(model, _SEED)
    return model


def race(work: Workload, names: tuple[str, ...], rounds: int | None, report: Callable[[str], None]) -> list[Contestant]:
    """Time one step of each contestant per round, in an order that turns, after untimed steps of each.

    Args:
        rounds: see `timed_rounds`.

    Raises:
        UserError: a contestant computes another loss, so that times would compare different work.
    """
    ours = build_ours(work)
    contestants = []
    for name in names:
        report(f"building {name}")
        contestants.append(build_contestant(name, work, ours))
    losses = {}
    for contestant in contestants:
        report(f"warming {contestant.name} up")
        before = _allocated(work.device)
        losses[contestant.name] = contestant.step()
        contestant.step()  # the second step runs compiled code and warm allocators
        contestant.peak_bytes = _peak_of_step(work.device, contestant, before)
        contestant.model.zero_grad(set_to_none=True)
    _require_equal(losses, _LOSS_TOLERANCE[work.dtype])
    for number in timed_rounds(rounds, report):
        turn = number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            start = time.perf_counter()
            contestant.step()
            contestant.seconds.append(time.perf_counter() - start)
            # Gradients of one must not squeeze another out of memory or cache.
            contestant.model.zero_grad(set_to_none=True)
    return contestants


def _require_equal(losses: dict[str, float], tolerance: float) -> None:
    first = next(iter(losses.values()))
    if any(abs(loss - first) > tolerance * abs(first) for loss in losses.values()):
        raise UserError(f"benchmark: the contestants compute different losses, {losses}; a comparison means nothing")


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _peak_of_step(device: torch.device, contestant: Contestant, before: int | None) -> int | None:
    """Bytes of a step on a GPU: its own weights, gradients and what it allocates on the way. None on a CPU, where
    torch keeps no such count; `peak_bytes_on_cpu` measures whole processes there."""
    if before is None:
        return None
    contestant.model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats(device)
    rest = torch.cuda.memory_allocated(device)
    contestant.step()
    weights = sum(parameter.nbytes for parameter in contestant.model.parameters())
    return torch.cuda.max_memory_allocated(device) - rest + weights


def median_ratio(contestant: Contestant, base: Contestant) -> float:
    """How many times the base's speed a contestant has: median over rounds of the ratio within a round."""
    pairs = zip(base.seconds, contestant.seconds, strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)


def peak_bytes_on_cpu(name: str, work: Workload, threads: int) -> int | None:
    """Peak resident memory of a fresh process that takes some steps of one contestant, program included.

    A process of its own, because torch does not count allocations on a CPU. None without /proc.
    """
    ((_, peak),) = call_in_workers(1, torch.set_num_threads, (threads,), _peak_of_this_process, [(name, work)])
    return peak


def _peak_of_this_process(name: str, work: Workload) -> int | None:
    ours = build_ours(work)
    contestant = build_contestant(name, work, ours)
    if contestant.model is not ours:
        ours.to("meta")  # its weights were copied and would count twice
    for _ in range(_STEPS_FOR_PEAK):
        contestant.step()
    # Not getrusage: its peak is inherited from the parent, which holds all contestants.
    return process_bytes("VmHWM")
