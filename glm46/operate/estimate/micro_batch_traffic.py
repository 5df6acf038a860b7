"""Computes calls and bytes of a rank in one micro-batch: layers, embedding, head, and borders of a pipeline stage."""

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
"""`Traffic.what` of the exchanges of a layer with its experts, other than their counts."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


class Call(NamedTuple):
    """Calls of equal size over one axis. Calls over an axis with one rank (see `groups`) are omitted later."""

    axis: str
    kind: Kind
    what: str
    calls: int
    size: int
    """Bytes of one call."""


def exchanges(plan: Plan, shape: ModelShape, tokens: float) -> list[tuple[str, int, int, int, int]]:
    """Return the axis and the bytes of each of `TOKENS`, for the hops of this many tokens of a rank to their
    experts."""
    chosen = shape.num_experts_per_tok
    width = WIDTHS[plan.config.training.mixed_precision_param]
    hops: list[tuple[str, float, int]] = [("ep", tokens * chosen, 1)]
    if (levels := plan.expert_levels) is not None:
        axes = [axis for axis, ranks in (("ep_hosts", levels.hosts), ("ep_host", levels.ranks_per_host)) if ranks > 1]
        hops = [(axis, tokens * rows, chosen) for axis, rows in zip(axes, rows_of_hops(plan, shape), strict=True)]
    call_sizes = []
    for axis, rows, row_choices in hops:
        row = round(rows * shape.hidden_size * width)
        call_sizes.append((axis, round(rows * row_choices * EXPERT_NUMBER), round(rows * row_choices * FP32), row, row))
    return call_sizes


class MicroBatchTraffic(StepFacts):
    """The calls of a micro-batch in one stage of text, forward and backward, or of a forward pass only."""

    def __init__(self, plan: Plan, stage_index: int, micro_batches: int | None, has_backward: bool = True):
        super().__init__(plan, stage_index, micro_batches)
        self.has_backward = has_backward
        self.hidden = self.tokens * self.shape.hidden_size * self.width

    def of_micro_batch(self, rank: int, part: StagePart) -> Iterator[Call]:
        """Yield the calls of a stage for one micro-batch."""
        blocks = Counter[BlockRun]()
        choices = 0
        for index, run in enumerate(part.runs(self.config.activation_checkpoint)):
            is_trained = self.has_backward and run.has_backward
            choices += part.has_indexer(index, self.shape) * (1 + (is_trained and run.mode != "none"))
            blocks[BlockRun(run.block, None, *(run[2:] if is_trained else (False, "none", False)))] += 1
        for run, number in blocks.items():
            for call in self._of_block(run):
                yield call._replace(calls=call.calls * number)
        if self.form != "dense":
            size = self.rows * self.length * (self.shape.index_head_dim or 0) * self.width
            yield Call("cp", "all_gather", "index keys", choices, size)
        yield from self._vocabulary(part)
        if part.has_head:
            yield from self._whole_rows()
        for what in self.borders(rank, part):
            for copies in filter(None, (1, self.depths)):
                yield Call("pp", "send", what, 1, copies * self.hidden)

    def _of_block(self, run: BlockRun) -> Iterator[Call]:
        shape = self.shape
        whole = self.hidden * self.layout.tp
        forward = 1 + (run.mode != "none")
        backward = int(run.has_backward)
        if self.layout.cp > 1:
            yield from self._keys(forward, backward)
        # Attention, and a dense network or the shared experts: gather before, reduce-scatter after. Recomputation of a
        # dense layer ends before its last reduce-scatter, whose result backward does not need.
        calls = (2 if run.block == "dense" or shape.n_shared_experts else 1) * (forward + backward)
        spared = (run.block == "dense" and forward > 1) + run.is_first
        yield Call("tp", "all_gather", "rows of the sequence", calls, whole)
        yield Call("tp", "reduce_scatter", "rows of the sequence", calls - spared, whole)
        # With more tp ranks than key heads: the parts of a head's keys and values, and their gradients.
        size = self.tokens * self.layout.tp * shape.head_dim * self.width
        yield Call("tp_head", "all_gather", "parts of a key head", 2 * forward, size)
        yield Call("tp_head", "reduce_scatter", "parts of a key head", 2 * backward, size)
        if run.block == "dense":
            return
        if self.has_backward and max(values_of(self.config.moe.sequence_aux_loss_weight), default=0.0) > 0.0:
            size = self.rows * (2 * shape.n_routed_experts + 1) * FP32  # over the ranks that share a sequence
            yield Call("cp", "all_reduce", "balance of experts", forward + backward, size)
            yield Call("tp", "all_reduce", "balance of experts", forward + backward, size)
        if self.layout.ep > 1:
            yield from self._tokens_to_experts(run, backward)

    def _keys(self, forward: int, backward: int) -> Iterator[Call]:
        """Yield the calls for keys and values of one layer, and their gradients."""
        layout = self.layout
        shape = self.shape
        cp = self.layout.cp
        token_elements = int(sent_of_key(shape, layout.tp))
        calls = 1 if shape.is_latent else 2
        if self.plan.keys_travel(shape, (self.rows, self.length)):
            part = 2 * self.rows * self.length // cp * token_elements
            yield Call("cp", "send", "keys", (forward + backward) * (cp - 1), part * self.width)
            yield Call("cp", "send", "gradients of keys", backward * cp, part * FP32)
            return
        kinds: tuple[Kind, Kind] = "all_gather", "reduce_scatter"
        size = self.rows * self.length * token_elements * self.width
        if shape.sliding_window is not None:
            _, received = attended_keys(shape.sliding_window, self.length, cp)
            kinds = ("all_to_all", "all_to_all")
            size = int(self.rows * received) * token_elements * self.width
        yield Call("cp", kinds[0], "keys", calls * forward, size)
        yield Call("cp", kinds[1], "gradients of keys", calls * backward, size)

    def _tokens_to_experts(self, run: BlockRun, backward: int) -> Iterator[Call]:
        """Yield the exchange with experts: sizes, rows and weights to the experts, rows back; in backward the gradients
        of all but the sizes. A recomputation reuses the counts, and selective checkpointing keeps what was received."""
        ep = self.layout.ep
        chunks = self.plan.exchange_chunks
        again = int(self.config.activation_checkpoint.sends_again(run.mode))
        # Recomputation needs the returned rows only if a norm follows, which "selective" does not recompute.
        back = 1 + backward + (run.block == "mtp" and run.mode == "full")
        sizes = self.shape.n_routed_experts
        numbers = 0
        if (levels := self.plan.expert_levels) is not None:
            sizes = ep * (levels.hosts + 2 * ep)
            numbers = 1 + again
        yield Call("ep", "all_to_all", "numbers of tokens", 1, sizes * chunks * INDEX)
        sends = 1 + backward + again
        for axis, *sizes_of_chunk in exchanges(self.plan, self.shape, self.tokens / chunks):
            for what, calls, size in zip(TOKENS, (numbers, sends, sends, back), sizes_of_chunk, strict=True):
                yield Call(axis, "all_to_all", what, calls * chunks, size)

    def _vocabulary(self, part: StagePart) -> Iterator[Call]:
        """Yield the calls of embedding and head, each for the main model and every prediction depth."""
        tp = self.layout.tp
        calls = 1 + self.depths
        whole = self.hidden * self.layout.tp
        is_trained = self.has_backward and part.frozen is None
        if part.has_embedding:
            yield Call("tp", "all_gather", "embeddings", calls * is_trained, whole)
            yield Call("tp", "reduce_scatter", "embeddings", calls, whole)
        if not part.has_head or tp == 1:
            return
        yield Call("tp", "all_gather", "rows of the sequence for the head", calls, whole)
        yield Call(
            "tp", "reduce_scatter", "rows of the sequence for the head", self.gradient_heads * self.has_backward, whole
        )
        tokens = self.tokens * tp
        chunk = loss_chunk_tokens(is_trained=is_trained)
        # Largest logit, logarithm of the sum, log-probability of the label and prediction of each token.
        for start in range(0, tokens, chunk):
            size = min(chunk, tokens - start) * 4 * FP64 * tp
            yield Call("tp", "all_gather", "softmax over parts of the vocabulary", calls, size)

    def _whole_rows(self) -> Iterator[Call]:
        """Yield the gathers and sums over complete rows: for accepted drafts, or for the halves of pairs."""
        tokens = self.rows * self.length
        if self.config.preference is None:
            yield Call("cp", "all_gather", "predictions", 1, (1 + self.depths) * tokens * INDEX)
        else:
            yield Call("cp", "all_gather", "log-probabilities", 1, tokens * FP32)
            # Three sums, of at most as many halves as a row has tokens, and their gradients.
            yield Call("cp", "all_reduce", "sums of pairs", 2 * self.has_backward, 3 * 2 * tokens * FP64)

    def borders(self, rank: int, part: StagePart) -> list[str]:
        """Return the tensors that a stage sends to other ranks: hidden states and embeddings for prediction depths to
        the next stage, gradients to the previous one."""
        parallelism = self.config.parallelism
        borders = [(part.index + 1, "hidden states")] * (part.index + 1 < parallelism.stages)
        borders += [(part.index - 1, "gradients of hidden states")] * (self.has_backward and part.index > 0)
        return [what for other, what in borders if rank_of_stage(parallelism, other) != rank]
