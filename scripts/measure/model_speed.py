"""Speed of forward and backward: models with the same weights and batch, interleaved."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import compile
from glm46.compute.parallelize.plan import initialise
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.engine.observe.hardware import device_peak_flops, process_bytes
from glm46.run.flops import training_flops
from glm46.storage.prepare.workers import call_in_workers
from scripts.measure.rounds import interleaved

_SEED = 0
_STEPS_FOR_PEAK = 2
_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative difference of the losses that comes from rounding and from the order of summation."""


@dataclass(frozen=True)
class Workload:
    """The work of every contestant in one step."""

    flavor: str
    batch: int
    seq_len: int
    device: torch.device
    dtype: torch.dtype
    layers: int | None = None
    """Decoder layers; None: the preset's. Fewer layers make a large model fit into memory."""
    prediction_layers: int = 0
    """Multi-token prediction layers: 0 in training steps, because `transformers` does not train them."""
    experts: int | None = None
    """Routed experts of a layer; None: the preset's. Fewer, like fewer tokens, make wide layers fit into memory."""
    vocabulary: int | None = None
    """Tokens of the vocabulary; None: the preset's."""

    def shape(self) -> ModelShape:
        """The preset with these numbers."""
        stated = {
            "num_nextn_predict_layers": self.prediction_layers,
            "num_hidden_layers": self.layers,
            "n_routed_experts": self.experts,
            "vocab_size": self.vocabulary,
        }
        return PRESETS[self.flavor].model_copy(update={key: n for key, n in stated.items() if n is not None})

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


@dataclass
class Contestant:
    """A step to time, and its measurements."""

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
        return loss.item()  # sync: waits for the GPU, so that the time is that of the work


Build = Callable[[str, Workload, Transformer], Contestant]
"""Makes a contestant of a name, with the weights of our model; a function of a module, for processes of its own."""


def contestant_of(name: str, work: Workload, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
    """A model on the batch that is the same for all; ``loss`` takes inputs and labels, each [B, S]."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, work.shape().vocab_size, (work.batch, work.seq_len + 1), generator=generator)
    ids = ids.to(work.device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return Contestant(name, model, lambda: loss(inputs, labels))


def build_own(name: str, work: Workload, ours: Transformer) -> Contestant:
    """Our model; one of its own, compiled, if the name says so."""
    model = ours
    if name == "ours compiled":
        model = build_ours(work)
        compile.apply(model, whole_graphs=True)
    return contestant_of(name, work, model, lambda inputs, labels: model(inputs, labels=labels).loss / work.tokens)


OWN: dict[str, Build] = {"ours": build_own, "ours compiled": build_own}


def build_ours(work: Workload) -> Transformer:
    """Build our model with its initial weights."""
    with torch.device("meta"):
        model = Transformer(work.shape())
    model.cast(work.dtype).to_empty(device=work.device)
    initialise(model, _SEED)
    return model


def race(
    work: Workload, builders: Mapping[str, Build], rounds: int | None, report: Callable[[str], None]
) -> list[Contestant]:
    """Time one step of each contestant per round, in an order that rotates, after two untimed steps of each.

    Args:
        builders: of the contestants by name.
        rounds: see `timed_rounds`.

    Raises:
        UserError: the contestants compute different losses, so their times are not comparable.
    """
    ours = build_ours(work)
    contestants = []
    for name, build in builders.items():
        report(f"building {name}")
        contestants.append(build(name, work, ours))
    losses = {}
    for contestant in contestants:
        report(f"warming {contestant.name} up")
        losses[contestant.name] = contestant.step()
        contestant.step()  # the second step runs compiled code and warm allocators
        contestant.peak_bytes = _peak_of_step(work.device, contestant)
        contestant.model.zero_grad(set_to_none=True)
    _require_equal(losses, _LOSS_TOLERANCE[work.dtype])
    for contestant in interleaved(contestants, rounds, report):
        start = time.perf_counter()
        contestant.step()
        contestant.seconds.append(time.perf_counter() - start)
        # Gradients of one contestant must not take memory or cache from the next.
        contestant.model.zero_grad(set_to_none=True)
    return contestants


def _require_equal(losses: dict[str, float], tolerance: float) -> None:
    first = next(iter(losses.values()))
    if any(abs(loss - first) > tolerance * abs(first) for loss in losses.values()):
        raise UserError(f"benchmark: the contestants compute different losses, {losses}, so times are not comparable")


def _peak_of_step(device: torch.device, contestant: Contestant) -> int | None:
    """Peak bytes of a step on a GPU: its weights, gradients and temporary tensors. None on a CPU, where torch does not
    count allocations; see `peak_bytes_on_cpu`."""
    if device.type != "cuda":
        return None
    contestant.model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats(device)
    rest = torch.cuda.memory_allocated(device)
    contestant.step()
    weights = sum(parameter.nbytes for parameter in contestant.model.parameters())
    return torch.cuda.max_memory_allocated(device) - rest + weights


def median_ratio(contestant: Contestant, base: Contestant) -> float:
    """Speed of a contestant relative to the base: median over rounds of the ratio within a round."""
    pairs = zip(base.seconds, contestant.seconds, strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)


def peak_bytes_on_cpu(name: str, build: Build, work: Workload, threads: int) -> int:
    """Peak resident memory of a fresh process that takes some steps of one contestant, program included.

    A process of its own, because torch does not count allocations on a CPU.
    """
    ((_, peak),) = call_in_workers(1, torch.set_num_threads, (threads,), _peak_of_this_process, [(name, build, work)])
    return peak


def _peak_of_this_process(name: str, build: Build, work: Workload) -> int:
    ours = build_ours(work)
    contestant = build(name, work, ours)
    if contestant.model is not ours:
        ours.to("meta")  # its weights were copied and would count twice
    for _ in range(_STEPS_FOR_PEAK):
        contestant.step()
    # Not getrusage: its peak is inherited from the parent, which holds all contestants.
    return process_bytes("VmHWM")


def speed_table(work: Workload, contestants: list[Contestant], base: Contestant) -> list[str]:
    """Lines of the result of a race: speeds, shares of the peak, and the ratio to one of the contestants."""
    flops = training_flops(work.shape(), work.seq_len).total * work.tokens
    peak = device_peak_flops(work.device, work.dtype)
    lines = [
        f"training step (forward, backward) of {work.flavor}, {counted(work.shape().num_hidden_layers, 'layer')}, "
        f"without MTP, {work.batch} x {work.seq_len} tokens, {str(work.dtype).removeprefix('torch.')}",
        f"{flops / 1e9:,.1f} GFLOP per step; peak "
        + (f"{peak / 1e9:,.0f} GFLOP/s" if peak else "unknown")
        + (" (measured: square product of this type)" if work.device.type == "cpu" else " (table)"),
        f"speed against {base.name}: median over {len(base.seconds)} interleaved rounds of the ratio in each",
        "",
        f"  {'':<24} {'ms/step':>9} {'tokens/s':>10} {'GFLOP/s':>9} {'of peak':>8} {'speed':>7} {'peak GiB':>9}",
    ]
    for contestant in contestants:
        seconds = statistics.median(contestant.seconds)
        speed = flops / seconds
        share = f"{speed / peak:.1%}" if peak else "?"
        memory = f"{contestant.peak_bytes / 2**30:.2f}" if contestant.peak_bytes is not None else "?"
        lines.append(
            f"  {contestant.name:<24} {seconds * 1e3:9.1f} {work.tokens / seconds:10,.0f} {speed / 1e9:9,.0f} "
            f"{share:>8} {median_ratio(contestant, base):7.3f} {memory:>9}"
        )
    return lines
