"""The order in which torch's schedules run the micro-batches of a step, for plans of any number of ranks."""

from functools import cache
from types import SimpleNamespace

from glm46.config.parallelism import ParallelismConfig
from glm46.operate.estimate.timeline import Action, Kind, Order

_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input gradient",
    "BACKWARD_WEIGHT": "weight gradient",
}


def pipeline_order(parallelism: ParallelismConfig, micro_batches: int) -> Order:
    """The actions of each rank of the pipeline.

    Raises:
        ValueError: the schedule takes no such number of micro-batches.
    """
    ranks = parallelism.pipeline_parallel_degree
    return _order(parallelism.pipeline_parallel_schedule, ranks, parallelism.stages_per_rank, micro_batches)


@cache
def _order(name: str, ranks: int, each: int, micro_batches: int) -> Order:
    if name in ("GPipe", "1F1B"):
        return [_of_one_stage(rank, micro_batches, micro_batches if name == "GPipe" else ranks - rank)
                for rank in range(ranks)]  # fmt: skip
    from torch.distributed.pipelining.schedules import get_schedule_class  # torch, for these schedules alone

    # What the schedule reads of the stages of a rank; it runs none.
    stages = [
        SimpleNamespace(
            stage_index=turn * ranks, num_stages=ranks * each, group_size=ranks, group_rank=0, group=None,
            is_first=not turn, is_last=False, has_backward=False, submod=None, device="cpu",
            stage_index_to_group_rank={},
        )
        for turn in range(each)
    ]  # fmt: skip
    order = get_schedule_class(name)(stages, micro_batches, loss_fn=lambda x, y: x).pipeline_order
    return [
        [
            tuple(
                Action(_KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            )
            for action in order[rank]
            if action is not None
        ]
        for rank in range(ranks)
    ]


def _of_one_stage(rank: int, micro_batches: int, ahead: int) -> list[tuple[Action, ...]]:
    """GPipe and 1F1B have no table of actions: some forwards, then one backward and one forward in turn."""
    ahead = min(ahead, micro_batches)
    actions: list[tuple[Kind, int]] = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("backward", number))
        if ahead + number < micro_batches:
            actions.append(("forward", ahead + number))
    return [(Action(kind, rank, number),) for kind, number in actions]
