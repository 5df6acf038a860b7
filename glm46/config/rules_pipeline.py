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
        each = f" with {layout.stages_per_rank} stages each" if layout.stages_per_rank > 1 else ""
        noun = counted(shape.num_hidden_layers, "layer").partition(" ")[2]
        yield fault(
            f"`parallelism.pipeline_parallel_degree`{each}: there are only `model.num_hidden_layers` {noun}; lower it"
        )


@rule
def steps_of_recomputation_fit_a_stage(config: RunConfig, shape: ModelShape) -> Faults:
    """Every n-th layer is one of a pipeline stage."""
    layout, key = config.parallelism, "activation_checkpoint.every_n_layers"
    stages = layout.stages if layout.pipeline_parallel_degree > 1 else 1
    layers = -(-(shape.num_hidden_layers + shape.num_nextn_predict_layers) // stages)
    if config.activation_checkpoint.every_n_layers > layers:
        has = ("a pipeline stage has" if stages > 1 else "the model has") + f" {counted(layers, 'layer')}"
        yield fault(f"`{key}`: {has}, of which it would recompute one; take at most {layers}")


@rule
def recomputed_results_exist(config: RunConfig) -> Faults:
    """Each result that is recomputed by name is named once, and exists."""
    key, named = "activation_checkpoint.recompute", config.activation_checkpoint.recompute
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        yield fault(f'`{key}`: "{twice}" is there twice; remove one')
    if "exchange" in named and config.parallelism.expert_parallel_degree == 1:
        other = "parallelism.expert_parallel_degree"
        yield fault(f'`{key}`: no rows come from other ranks with `{other}`; remove "exchange"', other)


@rule
def stages_fit_the_schedule(config: RunConfig) -> Faults:
    """The stages per rank fit the schedule: V-shaped schedules have two, some others one."""
    name, stated = config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_stages_per_rank
    schedule = PIPELINE_SCHEDULES[name]
    if stated not in (None, schedule.stages_per_rank) and (schedule.has_one_stage or schedule.is_v_shaped):
        yield fault(
            f"`parallelism.pipeline_parallel_stages_per_rank`: schedule {name} needs {schedule.stages_per_rank}; "
            "remove the key, or use Interleaved1F1B or InterleavedZeroBubble"
        )


@rule
def split_backward_keeps_weights(config: RunConfig) -> Faults:
    """Schedules that split backward keep gathered weights: its second half finds no gradient for weights that were
    freed after forward, without an error."""
    layout = config.parallelism
    name = layout.pipeline_parallel_schedule
    splits_backward = layout.pipeline_parallel_degree > 1 and PIPELINE_SCHEDULES[name].splits_backward
    if splits_backward and layout.fsdp_reshard_after_forward == "always":
        yield fault(
            f"`parallelism.fsdp_reshard_after_forward`: schedule {name} splits backward, which loses gradients of "
            'weights that are freed after forward; use "default" or "never"'
        )


@rule
def micro_batches_fit_the_schedule(config: RunConfig, world_size: int | None) -> Faults:
    """The number of micro-batches of every step fits the schedule."""
    ranks, degree = config.parallelism.pipeline_parallel_degree, data_parallel_degree(config, world_size)
    if ranks == 1 or degree is None:
        return
    rows, name = config.training.local_batch_size * degree, config.parallelism.pipeline_parallel_schedule
    key, batch = "training.global_batch_size", config.training.global_batch_size
    counts = _micro_batch_counts(batch, rows, 2 * ranks)
    wrong = next((number for number in counts if _wanted(name, ranks, number)), None)
    if wrong is not None:
        stated = "absent" if batch is None else show(batch) if isinstance(batch, tuple) else f"{batch:g}"
        fitting = rows * -(-max(wrong, _least(name, ranks)) // ranks) * ranks
        yield fault(
            f"{key} = {stated}: a step of {counted(wrong, 'micro-batch')} of {counted(rows, 'sequence')}; schedule "
            f"{name} over {ranks} ranks needs {_wanted(name, ranks, wrong)}; "
            + ("change the ramp" if isinstance(batch, tuple) else f"take {fitting}"),
            key, "training.local_batch_size", "parallelism",
        )  # fmt: skip


def _micro_batch_counts(batch: Schedule | None, rows: int, most: int) -> Iterator[int]:
    """Numbers of micro-batches of ``rows`` sequences in a step: at each value, and the smallest ``most`` of each ramp,
    which takes every number between two values. If a number of a ramp breaks the rule, one of these does."""
    points = batch if isinstance(batch, tuple) else ((0, rows if batch is None else batch),)
    ramps = [(one, other) for (start, one), (stop, other) in pairwise(points) if start < stop]
    for low, high in [*((value, value) for _, value in points), *(sorted(ramp) for ramp in ramps)]:
        first = max(int(low // rows), 1)
        yield from range(first, min(int(high // rows), first + most) + 1)


def _least(schedule: str, ranks: int) -> int:
    """The fewest micro-batches that a schedule takes."""
    return {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(schedule, 1)


def fitting_micro_batches(schedule: str, ranks: int, least: int) -> int:
    """The fewest micro-batches, at least so many, that a schedule takes."""
    return next(number for number in count(least) if _wanted(schedule, ranks, number) is None)


def _wanted(schedule: str, ranks: int, micro_batches: int) -> str | None:
    """The rule for the number of micro-batches that this number breaks; None if it breaks none."""
    if micro_batches < _least(schedule, ranks):
        return f"at least {_least(schedule, ranks)}"
    if schedule.startswith("Interleaved") and micro_batches % max(micro_batches // ranks, 1):
        return f"a number that divides into {micro_batches // ranks} equal rounds"
    return None
