"""Rules about pipelines: stages and micro-batches that a schedule needs."""

from collections.abc import Iterator
from itertools import count, pairwise

from glm46.config.faults import counted, show
from glm46.config.model import ModelShape
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.config.rules import Faults, fault, rule
from glm46.config.rules_layout import data_parallel_degree
from glm46.config.run_config import RunConfig
from glm46.config.section import Schedule


@rule
def every_stage_has_a_layer(config: RunConfig, shape: ModelShape) -> Faults:
    """Every pipeline stage has at least one layer."""
    layout = config.parallelism
    if layout.pipeline_parallel_degree > 1 and layout.stages > shape.num_hidden_layers:
        note = f" with {layout.stages_per_rank} stages each" if layout.stages_per_rank > 1 else ""
        noun = counted(shape.num_hidden_layers, "layer").partition(" ")[2]
        yield fault(
            f"`parallelism.pipeline_parallel_degree`{note}: there are only "
            f"`model.shape.num_hidden_layers` {noun}; lower it"
        )


@rule
def every_stage_starts_with_an_indexer(config: RunConfig, shape: ModelShape) -> Faults:
    """Under sparse attention each pipeline stage starts with a layer that chooses keys: no choice is sent."""
    layout = config.parallelism
    starts = sum(shape.has_indexer(index) for index in range(shape.num_hidden_layers))
    if shape.is_sparse and layout.pipeline_parallel_degree > 1 and starts < layout.stages <= shape.num_hidden_layers:
        yield fault(
            f"`parallelism.pipeline_parallel_degree`: makes {layout.stages} stages; only {counted(starts, 'layer')} "
            'of `model.shape.indexer_types` can start one, those that are "full"; lower it',
            "model.shape.indexer_types",
        )


@rule
def steps_of_recomputation_fit_a_stage(config: RunConfig, shape: ModelShape) -> Faults:
    """every_n_layers is not above the number of layers of a pipeline stage."""
    layout = config.parallelism
    key = "activation_checkpoint.every_n_layers"
    stages = layout.stages if layout.pipeline_parallel_degree > 1 else 1
    layers = -(-(shape.num_hidden_layers + shape.num_nextn_predict_layers) // stages)
    if config.activation_checkpoint.every_n_layers > layers:
        has = ("a pipeline stage has" if stages > 1 else "the model has") + f" {counted(layers, 'layer')}"
        yield fault(f"`{key}`: {has}, of which it would recompute one; take at most {layers}")


@rule
def stages_fit_the_schedule(config: RunConfig) -> Faults:
    """The stages per rank fit the schedule: V-shaped schedules have two, some others have one."""
    name = config.parallelism.pipeline_parallel_schedule
    configured = config.parallelism.pipeline_parallel_stages_per_rank
    schedule = PIPELINE_SCHEDULES[name]
    if configured not in (None, schedule.stages_per_rank) and (schedule.has_one_stage or schedule.is_v_shaped):
        yield fault(
            f"`parallelism.pipeline_parallel_stages_per_rank`: schedule {name} needs {schedule.stages_per_rank}; "
            "remove the key, or use Interleaved1F1B or InterleavedZeroBubble"
        )


@rule
def shared_depths_have_a_whole_backward(config: RunConfig, shape: ModelShape) -> Faults:
    """A layer that runs more than once has one backward: torch's halves would add its gradients again."""
    layout = config.parallelism
    splits = PIPELINE_SCHEDULES[layout.pipeline_parallel_schedule].splits_backward
    depths = config.mtp.depths or 0
    if layout.pipeline_parallel_degree > 1 and splits and depths > shape.num_nextn_predict_layers > 0:
        yield fault(
            "`mtp.depths`: is above `model.shape.num_nextn_predict_layers`, so a layer runs more than once, and "
            "`parallelism.pipeline_parallel_schedule` computes gradients of weights apart, which is wrong for such a "
            'layer; set parallelism.pipeline_parallel_schedule = "Interleaved1F1B"'
        )


@rule
def drafts_alone_have_no_pipeline(config: RunConfig) -> Faults:
    """Prediction layers are on the last stage, so the other ranks of a pipeline would have nothing to train."""
    if config.trains_only_drafts and config.parallelism.pipeline_parallel_degree > 1:
        yield fault(
            "`parallelism.pipeline_parallel_degree`: only the last stage has prediction layers "
            "(`finetune.train_only`), and the others would have nothing to train; set "
            "parallelism.pipeline_parallel_degree = 1"
        )


@rule
def micro_batches_fit_the_schedule(config: RunConfig, world_size: int | None) -> Faults:
    """The number of micro-batches of every step fits the schedule."""
    ranks = config.parallelism.pipeline_parallel_degree
    degree = data_parallel_degree(config, world_size)
    if ranks == 1 or degree is None:
        return
    rows = config.training.local_batch_size * degree
    name = config.parallelism.pipeline_parallel_schedule
    key = "training.global_batch_size"
    batch = config.training.global_batch_size
    counts = _micro_batch_counts(batch, rows, 2 * ranks)
    wrong = next((number for number in counts if _wanted(name, ranks, number)), None)
    if wrong is not None:
        configured = "absent" if batch is None else show(batch) if isinstance(batch, tuple) else f"{batch:g}"
        fitting = rows * -(-max(wrong, _least(name, ranks)) // ranks) * ranks
        yield fault(
            f"{key} = {configured}: a step of {counted(wrong, 'micro-batch')} of {counted(rows, 'sequence')}; schedule "
            f"{name} over {ranks} ranks needs {_wanted(name, ranks, wrong)}; "
            + ("change the ramp" if isinstance(batch, tuple) else f"take {fitting}"),
            key,
            "training.local_batch_size",
            "parallelism",
        )


def _micro_batch_counts(batch: Schedule | None, rows: int, most: int) -> Iterator[int]:
    """Yield numbers of micro-batches of ``rows`` sequences in a step: for each value of the schedule, and the smallest
    ``most`` numbers of each ramp, which passes every number between two values. If any number of a ramp breaks the
    rule, one of these does."""
    points = batch if isinstance(batch, tuple) else ((0, rows if batch is None else batch),)
    ramps = [(begin, end) for (start, begin), (stop, end) in pairwise(points) if start < stop]
    for low, high in [*((value, value) for _, value in points), *(sorted(ramp) for ramp in ramps)]:
        first = max(int(low // rows), 1)
        yield from range(first, min(int(high // rows), first + most) + 1)


def _least(schedule: str, ranks: int) -> int:
    """Return the smallest number of micro-batches that a schedule accepts."""
    return {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(schedule, 1)


def fitting_micro_batches(schedule: str, ranks: int, least: int) -> int:
    """Return the smallest number of micro-batches, at least ``least``, that a schedule accepts."""
    return next(number for number in count(least) if _wanted(schedule, ranks, number) is None)


def _wanted(schedule: str, ranks: int, micro_batches: int) -> str | None:
    """Return the rule that a number of micro-batches breaks; None if it fits the schedule."""
    if micro_batches < _least(schedule, ranks):
        return f"at least {_least(schedule, ranks)}"
    if schedule.startswith("Interleaved") and micro_batches % max(micro_batches // ranks, 1):
        return f"a number that divides into {micro_batches // ranks} equal rounds"
    return None
