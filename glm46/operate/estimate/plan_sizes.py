"""Computes sizes from a plan that only its estimate needs: of steps, bubbles, exchanges, folders and complete runs."""

from glm46.config.model import ModelShape
from glm46.config.parallelism import ParallelismConfig
from glm46.config.presets import REPEATING
from glm46.run.context_keys import SparseForm, rounded_run, sparse_form
from glm46.run.layout import Layout
from glm46.run.parameters import adapter_rows, named_rows
from glm46.run.plan import Plan, places_of_token
from glm46.run.schedule import batch_sequences
from glm46.run.tree import WIDTH

_HF_BYTES = 2
"""Bytes of an element in a Hugging Face folder: BF16."""


def batches_of(plan: Plan, index: int) -> tuple[int, int]:
    """Return the smallest and the largest number of sequences of a step in one of `Plan.text_stages`."""
    batch = plan.config.training.global_batch_size
    rows = plan.rows_per_micro_batch
    first = plan.config.lr_scheduler.start_tokens + sum(plan.stage_tokens[:index])
    last = max(first, first + plan.stage_tokens[index] - plan.text_stages[index].seq_len)  # clock of the last sample
    points = [tokens for tokens, _ in batch] if isinstance(batch, tuple) else []
    clocks = {first, last, *(clock for point in points for clock in (point - 1, point) if first < clock <= last)}
    sizes = [batch_sequences(batch, clock, rows) for clock in clocks]
    return min(sizes), max(sizes)


def step_tokens(plan: Plan) -> int | None:
    """Return the tokens of one optimizer step; None if steps differ."""
    batch = plan.config.training.global_batch_size
    lengths = {stage.seq_len for stage in plan.text_stages}
    if isinstance(batch, tuple) or len(lengths) > 1:
        return None
    return batch_sequences(batch, 0, plan.rows_per_micro_batch) * lengths.pop()


def rows_of_hops(plan: Plan, shape: ModelShape) -> tuple[float, ...]:
    """Return the rows per token in each exchange of `Plan.expert_levels`: one per host, then one per rank."""
    if plan.expert_levels is None:
        return ()
    hosts, host_ranks = plan.expert_levels
    parts = ([hosts] if hosts > 1 else []) + ([hosts * host_ranks] if host_ranks > 1 else [])
    return tuple(places_of_token(shape, count) for count in parts)


def run_flops(plan: Plan) -> float:
    """Return the FLOPs of the complete run."""
    per_token = (plan.training_flops(stage).total for stage in plan.text_stages)
    return sum(tokens * flops for tokens, flops in zip(plan.stage_tokens, per_token, strict=True))


def bubble(parallelism: ParallelismConfig, micro_batches: int) -> float:
    """Return the share of a step in which the ranks of a pipeline wait for each other.

    All stages are assumed equal, with a backward twice as long as forward. The result is exact for these schedules,
    except InterleavedZeroBubble with fewer micro-batches than ranks, for which it is an upper bound.
    """
    ranks = parallelism.pipeline_parallel_degree
    stages_per_rank = parallelism.stages_per_rank
    missing = max(ranks - micro_batches, 0) * (stages_per_rank - 1)
    # Idle time of a rank, in units of one stage's forward.
    idle = {
        "InterleavedZeroBubble": ranks - 1 + 3 * missing,
        "ZBVZeroBubble": max(ranks - 1, 4 * ranks - 2 - 2 * micro_batches),
        "DualPipeV": 2 * (ranks - 1),
    }.get(parallelism.pipeline_parallel_schedule, 3 * (ranks - 1 + missing))
    return idle / (3 * micro_batches * stages_per_rank + idle) if ranks > 1 else 0.0


def experts_have_own_mesh(layout: Layout) -> bool:
    """True if FSDP shards experts over other ranks than the other parameters, in separate units."""
    return layout.ep > 1 or layout.tp > 1


def describe_layout(layout: Layout) -> str:
    """Format the degrees above 1 as a product: ``8,192 = pipeline 8 x context 128 x tensor 8, experts over 32``."""
    degrees = {
        "pipeline": layout.pp,
        "replicate": layout.dp_replicate,
        "shard": layout.dp_shard,
        "context": layout.cp,
        "tensor": layout.tp,
    }
    named = " x ".join(f"{name} {degree:,}" for name, degree in degrees.items() if degree > 1) or "one process"
    experts = f", experts over {layout.ep:,}" if layout.ep > 1 else ""
    return f"{layout.world_size:,} = {named}{experts}"


def tree_rounds(ranks: int) -> int:
    """Return the number of sequential messages in the tree of `run/tree.py`, to rank 0 and back."""
    levels = 0
    while WIDTH**levels < ranks:
        levels += 1
    return 2 * levels


def hugging_face_bytes(plan: Plan) -> float:
    """Return the bytes of a folder with the weights, without a critic's; with [adapter], with the adapters only."""
    shape = plan.shape
    adapter = plan.config.adapter
    rows = named_rows(shape, plan.config.head) if adapter is None else adapter_rows(shape, adapter)
    weights = sum(row.numel(shape) for row in rows.values() if row.optimizer is not None)
    if plan.config.model.flavor in REPEATING and adapter is None:
        weights += shape.num_nextn_predict_layers * 2 * shape.vocab_size * shape.hidden_size
    return weights * _HF_BYTES


def longest_form(plan: Plan, stage_index: int) -> SparseForm:
    """Return the form of attention in a stage of text, for a micro-batch with a document of a whole row."""
    stage = plan.text_stages[stage_index]
    config = plan.config
    has_layout = config.data.document_mask or plan.layout.cp > 1 or config.rl is not None
    return sparse_form(stage.shape, rounded_run(stage.seq_len) if has_layout else stage.seq_len)
