"""Calls and bytes of a rank in one micro-batch: layers, embedding and head, and the borders of a pipeline stage."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from glm46.config.model import ModelShape
from glm46.config.section import values_of
from glm46.operate.estimate.activations import EXPERT_NUMBER, FP32, INDEX, sent_of_key
from glm46.operate.estimate.plan_sizes import rows_of_hops
from glm46.operate.estimate.rank_parts import BlockRun, StagePart, StepFacts
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.context_keys import attended_keys
from glm46.run.plan import Plan
from glm46.run.sizes import loss_chunk_tokens
from glm46.run.stages import rank_of_stage

FP64 = 8

TOKENS = "experts of tokens", "weights of tokens", "tokens to experts", "tokens from experts"
"""`Traffic.what` of the exchanges of a layer with its experts, beside their numbers."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


class Call(NamedTuple):
    """Calls of equal size over one axis, whose number of ranks `groups` has; with one rank they are left out."""

    axis: str
    kind: Kind
    what: str
    calls: int
    size: int
    """Bytes of one call."""


def exchanges(plan: Plan, shape: ModelShape, tokens: float) -> list[tuple[str, int, int, int, int]]:
    """Axis and bytes of each of `TOKENS`, of the hops of so many tokens of a rank to their experts."""
    chosen, width = shape.num_experts_per_tok, WIDTHS[plan.config.training.mixed_precision_param]
    hops: list[tuple[str, float, int]] = [("ep", tokens * chosen, 1)]
    if (levels := plan.expert_levels) is not None:
        axes = [axis for axis, ranks in (("ep_hosts", levels.hosts), ("ep_host", levels.of_host)) if ranks > 1]
        hops = [(axis, tokens * rows, chosen) for axis, rows in zip(axes, rows_of_hops(plan, shape), strict=True)]
    found = []
    for axis, rows, of_row in hops:
        row = round(rows * shape.hidden_size * width)
        found.append((axis, round(rows * of_row * EXPERT_NUMBER), round(rows * of_row * FP32), row, row))
    return found


class MicroBatchTraffic(StepFacts):
    """The calls of a micro-batch in one stage of text, forward and backward, or of a forward pass alone."""

    def __init__(
        self, plan: Plan, stage_index: int, micro_batches: int | None, has_backward: bool = True, top_k: int = 0
    ):
        """``top_k``: tokens of each position that a forward pass looks for, or a step learns from."""
        super().__init__(plan, stage_index, micro_batches)
        learned = 0 if self.config.distillation is None else self.config.distillation.top_k
        self.has_backward, self.top_k = has_backward, top_k or learned
        self.depths, self.hidden = (
            self.shape.num_nextn_predict_layers,
            self.tokens * self.shape.hidden_size * self.width,
        )

    def of_micro_batch(self, rank: int, part: StagePart) -> Iterator[Call]:
        """The calls of a stage for one micro-batch."""
        blocks = Counter[BlockRun]()
        for run in part.runs(self.config.activation_checkpoint):
            is_trained = self.has_backward and run.has_backward
            blocks[BlockRun(run.block, None, *(run[2:] if is_trained else (False, "none", False)))] += 1
        for run, number in blocks.items():
            for call in self._of_block(run):
                yield call._replace(calls=call.calls * number)
        yield from self._vocabulary(part)
        if part.has_head:
            yield from self._whole_rows()
        for what in self.borders(rank, part):
            for copies in filter(None, (1, self.depths)):
                yield Call("pp", "send", what, 1, copies * self.hidden)

    def _of_block(self, run: BlockRun) -> Iterator[Call]:
        shape, whole = self.shape, self.hidden * self.layout.tp
        forward, backward = 1 + (run.mode != "none"), int(run.has_backward)
        if self.layout.cp > 1:
            yield from self._keys(forward, backward)
        # Attention, and a dense network or the shared experts: gather before, reduce-scatter after. Recomputation of a
        # dense layer ends before its last reduce-scatter, whose result backward does not need.
        calls = (2 if run.block == "dense" or shape.n_shared_experts else 1) * (forward + backward)
        spared = (run.block == "dense" and forward > 1) + run.is_first
        yield Call("tp", "all_gather", "rows of the sequence", calls, whole)
        yield Call("tp", "reduce_scatter", "rows of the sequence", calls - spared, whole)
        # Beyond the number of key heads: the parts of a head's keys and values, and their gradients.
        size = self.tokens * self.layout.tp * shape.head_dim * self.width
        yield Call("tp_head", "all_gather", "parts of a key head", 2 * forward, size)
        yield Call("tp_head", "reduce_scatter", "parts of a key head", 2 * backward, size)
        if run.block == "dense":
            return
        if self.has_backward and max(values_of(self.config.moe.sequence_aux_loss_weight), default=0.0) > 0.0:
            size = self.rows * (2 * shape.n_routed_experts + 1) * FP32  # over the ranks that share a sequence
            yield Call("cp", "all_reduce", "balance of experts", forward + 1, size)
            yield Call("tp", "all_reduce", "balance of experts", forward + 1, size)
        if self.layout.ep > 1:
            yield from self._tokens_to_experts(run, backward)

    def _keys(self, forward: int, backward: int) -> Iterator[Call]:
        """Keys and values of one layer, and their gradients."""
        layout, shape, cp = self.layout, self.shape, self.layout.cp
        of_token, calls = int(sent_of_key(shape, layout.tp)), 1 if shape.is_latent else 2
        if self.plan.keys_travel(shape, (self.rows, self.length)):
            part = 2 * self.rows * self.length // cp * of_token
            yield Call("cp", "send", "keys", (forward + backward) * (cp - 1), part * self.width)
            yield Call("cp", "send", "gradients of keys", backward * cp, part * FP32)
            return
        kinds: tuple[Kind, Kind] = "all_gather", "reduce_scatter"
        size = self.rows * self.length * of_token * self.width
        if shape.sliding_window is not None:
            _, received = attended_keys(shape.sliding_window, self.length, cp)
            kinds, size = ("all_to_all", "all_to_all"), int(self.rows * received) * of_token * self.width
        yield Call("cp", kinds[0], "keys", calls * forward, size)
        yield Call("cp", kinds[1], "gradients of keys", calls * backward, size)

    def _tokens_to_experts(self, run: BlockRun, backward: int) -> Iterator[Call]:
        """Sizes, rows and weights to the experts, rows back; in backward the gradients of all but the sizes. A
        recomputation has the numbers, and selective checkpointing keeps what was received."""
        ep, chunks = self.layout.ep, self.plan.exchange_chunks
        again = int(self.config.activation_checkpoint.sends_again(run.mode))
        # Recomputation needs the rows that come back only where a norm follows, which "selective" does not recompute.
        back = 1 + backward + (run.block == "mtp" and run.mode == "full")
        sizes, numbers = self.shape.n_routed_experts, 0
        if (levels := self.plan.expert_levels) is not None:
            sizes, numbers = ep * (levels.hosts + 2 * ep), 1 + again
        yield Call("ep", "all_to_all", "numbers of tokens", 1, sizes * chunks * INDEX)
        there = 1 + backward + again
        for axis, *sizes_of_chunk in exchanges(self.plan, self.shape, self.tokens / chunks):
            for what, calls, size in zip(TOKENS, (numbers, there, there, back), sizes_of_chunk, strict=True):
                yield Call(axis, "all_to_all", what, calls * chunks, size)

    def _vocabulary(self, part: StagePart) -> Iterator[Call]:
        """Embedding and head, each for the main model and every prediction depth."""
        tp, calls, whole = self.layout.tp, 1 + self.depths, self.hidden * self.layout.tp
        is_trained = self.has_backward and part.frozen is None
        if part.has_embedding:
            yield Call("tp", "all_gather", "embeddings", calls * is_trained, whole)
            yield Call("tp", "reduce_scatter", "embeddings", calls, whole)
        if not part.has_head or tp == 1:
            return
        yield Call("tp", "all_gather", "rows of the sequence for the head", calls, whole)
        yield Call("tp", "reduce_scatter", "rows of the sequence for the head", calls * self.has_backward, whole)
        tokens, chunk = self.tokens * tp, loss_chunk_tokens(is_trained=is_trained)
        runs_twice = (of := self.config.distillation) is not None and of.runs_head_twice
        # Largest logit, logarithm of the sum, log-probability of the label and prediction of each token. A student has
        # the last of more tokens, a teacher of these alone, and looks for them by their logits.
        first = 4 * runs_twice if self.has_backward else 2 * self.top_k
        for start in range(0, tokens, chunk):
            for figures in (first, 3 + self.top_k) if first else (4 + self.top_k,):
                size = min(chunk, tokens - start) * figures * FP64 * tp
                yield Call("tp", "all_gather", "softmax over parts of the vocabulary", calls, size)

    def _whole_rows(self) -> Iterator[Call]:
        """Sums over whole rows: accepted drafts, or the halves of pairs."""
        tokens = self.rows * self.length
        if self.top_k:
            of_all = [(1 + self.top_k) * FP32] if self.has_backward else [self.top_k * FP32, self.top_k * INDEX]
            for width in of_all:
                yield Call("cp", "all_gather", "likely tokens", 1, tokens * width)
        elif self.config.preference is None:
            yield Call("cp", "all_gather", "predictions", 1, (1 + self.depths) * tokens * INDEX)
        else:
            yield Call("cp", "all_gather", "log-probabilities", 1, tokens * FP32)
            # Three sums of as many halves as a row has tokens, at most; and their gradients.
            yield Call("cp", "all_reduce", "sums of pairs", 2 * self.has_backward, 3 * 2 * tokens * FP64)

    def borders(self, rank: int, part: StagePart) -> list[str]:
        """The tensors that a stage sends to other ranks: hidden states and embeddings for prediction depths to the next
        stage, gradients to the one before."""
        parallelism = self.config.parallelism
        borders = [(part.index + 1, "hidden states")] * (part.index + 1 < parallelism.stages)
        borders += [(part.index - 1, "gradients of hidden states")] * (self.has_backward and part.index > 0)
        return [what for other, what in borders if rank_of_stage(parallelism, other) != rank]
