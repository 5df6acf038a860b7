"""Estimates the activation memory of a rank in bytes, by formula: what forward keeps for backward, and buffers of
both."""

from collections.abc import Set
from functools import cached_property
from itertools import pairwise
from math import ceil

from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.operate.estimate.activations import (
    CHOSEN_KEY,
    FP32,
    INDEX,
    Frozen,
    LayerBytes,
    attention_backward_bytes,
    sent_of_key,
    travelling_key_bytes,
)
from glm46.operate.estimate.plan_sizes import rows_of_hops
from glm46.operate.estimate.rank_parts import BlockRun, StagePart, StepFacts
from glm46.operate.estimate.sparse_choices import kept_choices
from glm46.run.context_keys import (
    SHARED_KEYS,
    attended_keys,
    gathered_key_bytes,
    kept_of_key,
    kernel_runs,
    keys_travel,
)
from glm46.run.parameters import part_rows
from glm46.run.plan import Plan
from glm46.run.sizes import loss_chunk_tokens


def pinned(size: float) -> int:
    """Return the bytes that torch's pinned allocator takes for a tensor: the next power of two."""
    return 1 << max(ceil(size) - 1, 0).bit_length()


class ActivationMemory(StepFacts):
    """Activations of the largest step of a plan in one stage of text."""

    def __init__(self, plan: Plan, stage_index: int, device: str):
        """``device``: "gpu" or "cpu"."""
        super().__init__(plan, stage_index)
        self.device = device
        self.checkpointing = plan.config.activation_checkpoint
        layout = self.layout
        hops = rows_of_hops(plan, self.shape)
        recompute = self.checkpointing.recompute
        self.bytes = LayerBytes(plan.unrolled(self.shape), self.width, layout.tp, layout.ep, hops, recompute, self.form)
        self._row_sizes = {"rows": self.rows, "length": self.length, "cp": layout.cp, "tp": layout.tp}
        self._bytes_by_run: dict[tuple[str, Frozen | None, str], float] = {}

    def of_micro_batch(self, part: StagePart, rank_stages: Set[int]) -> float:
        """Return the bytes that a stage keeps of the forward of a micro-batch.

        Args:
            rank_stages: indices of all stages on the same rank.
        """
        shape = self.shape
        layout = self.layout
        heads = 1 + self.depths
        token_bytes = sum(self._layer(run, run.mode) for run in self._backward_runs(part))
        if self.form != "dense":
            token_bytes += (
                layout.tp * kept_choices(part, shape, self.checkpointing) * (shape.index_topk or 0) * CHOSEN_KEY
            )
        rotated = shape.qk_rope_head_dim or shape.head_dim * shape.partial_rotary_factor
        token_bytes += rotated * self.width * layout.tp  # cosines and sines
        if part.has_embedding:
            token_bytes += heads * INDEX * layout.tp * (part.frozen is None)
        elif self.width == FP32 or self.checkpointing.mode != "none":
            # The input from the previous stage is in a receive buffer already, unless it is kept as an FP32 copy. The
            # first layer of a stage is checkpointed if any is; prediction layers keep embeddings as they were received.
            modes = [run.mode for run in part.runs(self.checkpointing) if run.block == "mtp"]
            embeddings = len(modes) if self.width == FP32 else modes.count("full")
            token_bytes -= (1 + embeddings) * shape.hidden_size * self.width
        if self.config.trains_only_drafts:
            # The hidden states of the model and embeddings have no gradient, so norms do not keep them.
            modes = [run.mode for run in part.runs(self.checkpointing) if run.block == "mtp"]
            norms = len(modes) - modes.count("full")
            token_bytes -= (norms + (norms > 0)) * shape.hidden_size * FP32
        if not part.has_head:  # the output is kept until backward; on the same rank, in the next stage's buffer
            is_sent = part.index + 1 not in rank_stages
            return self.tokens * (token_bytes + is_sent * heads * shape.hidden_size * self.width)
        return self.tokens * (token_bytes + self._head(part))

    def _head(self, part: StagePart) -> float:
        """Return the bytes that the last norm and the head keep, per token of a rank."""
        kept = self.bytes.head(None if part.frozen is None else Frozen())
        return kept if self.gradient_heads > self.depths else self.bytes.head_inputs(self.depths)

    def in_host(self, parts: list[StagePart], counts: dict[int, int]) -> tuple[float, float]:
        """Return the bytes that leave the device for host memory, and the bytes that they take there. Two layers of
        each stage stay on the device; torch's pinned allocator rounds each tensor up to a power of two."""
        freed = 0.0
        held = 0.0
        for part in parts:
            layers = self.offloaded(part)
            sizes = [*map(sum, layers), 0.0]  # 0 makes a pair of a single layer
            freed += counts[part.index] * sum(sizes) - max(map(sum, pairwise(sizes)), default=0.0)
            if self.device == "gpu":
                layers = [[*map(pinned, tensors)] for tensors in layers]
            held += counts[part.index] * sum(map(sum, layers))
        return freed, held

    def offloaded(self, part: StagePart) -> list[list[float]]:
        """Return the bytes of the tensors of each checkpointed layer of a stage that are offloaded to host memory."""
        by_layer = []
        for index, run in enumerate(part.runs(self.checkpointing)) if self.checkpointing.cpu_checkpointing else ():
            if run.has_backward and run.mode != "none":
                # Receive buffers of a stage stay on the device.
                stays = (not part.has_embedding) * ((index == 0) + ((run.block, run.mode) == ("mtp", "full")))
                tensors = self.bytes.kept_tensors(run.block, run.mode, run.frozen)[stays:]
                by_layer.append([self.tokens * size for size in tensors])
        return by_layer

    def output_gradients(self, part: StagePart) -> float:
        """Return the bytes that a schedule with a split backward keeps for a stage's blocks and head."""
        block_bytes = sum(self.bytes.output_gradients(run.block) for run in part.runs(self.checkpointing))
        return self.tokens * (block_bytes + part.has_head * self.shape.hidden_size * self.width)

    def buffers(self, parts: list[StagePart]) -> float:
        """Return the bytes of the layer that is recomputed and, with a pipeline, of each micro-batch's token data and
        receive buffers."""
        size = 0.0
        if self.checkpointing.mode != "none":
            recomputed = (run for part in parts for run in self._backward_runs(part) if run.mode != "none")
            size = self.tokens * max((self._layer(run, "none") for run in recomputed), default=0.0)
        if self.layout.pp > 1:
            depths = self.depths
            schedule = self.config.parallelism.pipeline_parallel_schedule
            is_v_shaped = PIPELINE_SCHEDULES[schedule].is_v_shaped
            sent = (1 + depths) * self.shape.hidden_size * self.width
            received = sent * sum((not part.has_embedding) + (not part.has_head) for part in parts)
            if schedule != "GPipe" and (is_v_shaped or not parts[0].has_embedding):
                size += self.tokens * sent  # gradients that are sent to the previous stage
            text = (3 + 2 * depths) * INDEX * self.layout.tp  # token data of all micro-batches as one tensor
            size += self.micro_batches * self.tokens * (received + text)
        return size

    def _layer(self, run: BlockRun, mode: str) -> float:
        """Return the bytes that a block keeps, per token of a rank."""
        key = (run.block, run.frozen, mode)
        if key not in self._bytes_by_run:
            self._bytes_by_run[key] = self.bytes.layer(*key)
        # The input of the first norm has no gradient.
        return self._bytes_by_run[key] - (run.is_first and mode == "none") * self.shape.hidden_size * FP32

    def _backward_runs(self, part: StagePart) -> list[BlockRun]:
        return [run for run in part.runs(self.checkpointing) if run.has_backward]

    def gathered_keys(self, parts: list[StagePart], counts: dict[int, int]) -> float:
        """Return the bytes of gathered keys and values that layers keep for backward, and of the gather buffers of one
        layer."""
        layout = self.layout
        shape = self.shape
        heads = max(shape.num_key_value_heads / layout.tp, 1)
        modes = {part.index: [run.mode for run in part.runs(self.checkpointing)] for part in parts}
        layers = sum(counts[index] * stage_modes.count("none") for index, stage_modes in modes.items()) + (
            self.checkpointing.mode != "none"
        )
        if layout.cp == 1:
            if self.config.rl is None or shape.sliding_window is not None:
                return 0.0
            # Keys and values of shared prompts, once for each sample.
            return layers * (SHARED_KEYS - 1) * 2 * self.rows * self.length * heads * shape.head_dim * self.width
        if keys_travel(shape, self.width, **self._row_sizes):
            return travelling_key_bytes(shape, self.width, **self._row_sizes)
        kept = gathered_key_bytes(shape, self.width, **self._row_sizes, form=self.form)
        # The rank's own keys are counted with its layers; only the tensors made from them stay here.
        kept -= self.rows * self.length / layout.cp * kept_of_key(shape, layout.tp, self.form) * self.width
        # Keys and values are gathered one after the other.
        _, received = attended_keys(shape.sliding_window, self.length, layout.cp)
        gathered = self.rows * received * sent_of_key(shape, layout.tp) * self.width
        return layers * kept + gathered  # with checkpointing, of the layer that is computed or recomputed

    def attention_backward(self, parts: list[StagePart]) -> float:
        """Return `MemoryPlan.attention` of a rank with these stages. Attention in FP32 has no flash kernel."""
        if self.width == FP32:
            return 0.0
        layout = self.layout
        shape = self.shape
        schedule = self.config.parallelism.pipeline_parallel_schedule
        blocks = dict.fromkeys((run.block, run.frozen) for part in parts for run in self._backward_runs(part))
        # The MTP layer's own norms and projection are freed before both.
        freed = [self.bytes.network(*block_key) for block_key in blocks]
        if not freed:
            return 0.0
        splits = layout.pp > 1 and self.checkpointing.mode == "none" and PIPELINE_SCHEDULES[schedule].splits_backward
        queries = self.tokens * layout.tp
        keys: float = queries
        if layout.cp == 1:
            keys *= SHARED_KEYS if self.config.rl is not None and shape.sliding_window is None else 1
        elif not keys_travel(shape, self.width, **self._row_sizes):
            keys = self.rows * attended_keys(shape.sliding_window, self.length, layout.cp)[0]
        # A rank of context parallelism has two chunks of each row.
        runs = kernel_runs(max(self.rows * min(layout.cp, 2), queries / (self.plan.document_tokens or self.length)))
        needed = attention_backward_bytes(shape, self.width, queries=queries, keys=keys, runs=runs, tp=layout.tp)
        # A split backward computes gradients of weights later, so the tensors that they need are not freed yet.
        return max(needed - self.tokens * max(freed) * (not splits), 0.0)

    def loss(self, micro_batches: int) -> float:
        """Return the bytes of the gradients of the head's weight for the main model and each depth. Preference training
        uses `token_logprobs`, which computes them in backward, so they are 0 there."""
        if not self.is_head_trained or self.config.preference is not None:
            return 0.0
        heads = 1 + self.depths
        return micro_batches * heads * self._head_elements * self.width

    def loss_buffers(self) -> float:
        """Return the bytes of the logits of one chunk, their softmax, and the head's weight gradient summed over
        chunks."""
        head = self._head_elements
        tokens = self.tokens * self.layout.tp
        is_cast = self.width != FP32
        is_trained = self.is_head_trained
        has_gpu = self.device == "gpu"
        chunk = loss_chunk_tokens(is_trained=is_trained, device=self.device)
        logits = min(chunk, tokens) * head / self.shape.hidden_size * (FP32 + self.width * is_cast)
        sums = is_cast * head * (FP32 + self.width * (not has_gpu and tokens > chunk))
        return logits + sums * is_trained

    @cached_property
    def _head_elements(self) -> int:
        head = next(row for row in part_rows(self.shape, "head") if row.name == "lm_head.weight")
        return self.elements(head)
