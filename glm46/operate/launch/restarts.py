"""Starts of all ranks after failed ones, from the newest checkpoint."""

import sys
from collections.abc import Callable

from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK, End

_FRUITLESS_STARTS = 3
"""Starts in a row without a new checkpoint after which no other is tried."""


def keep_running(start: Callable[[int, StartTimes], End], newest_step: Callable[[], int], max_restarts: int) -> End:
    """Start all ranks, and restart them after a failure, or where they ask for it, as after failed saves.

    Gives up after `_FRUITLESS_STARTS` starts in a row without a new checkpoint. Torchrun's own restarts are not used:
    its restarted ranks connected to addresses of the start before and hung. Here each start has a new store and port.
    The launchers of several nodes count the starts alike, because a failed rank ends the ranks of all nodes.

    Args:
        start: starts all ranks for the n-th time, counted from 0, and waits for their end. It takes the times of this
            start, too.
        newest_step: returns the step of the newest checkpoint, 0 if there is none.
        max_restarts: starts after the first.

    Returns:
        The end of the last start.
    """
    best, fruitless = newest_step(), 0
    times = StartTimes("the command")
    for number in range(max_restarts + 1):
        end = start(number, times)
        if end.code not in (EXIT_FAILED_RANK, EXIT_HANG, EXIT_STOPPED) or not max_restarts or end.is_final:
            return end
        times = StartTimes("the failure", end.failed_at)
        times.ends("end of all ranks")
        newest = newest_step()
        fruitless, best = (0, newest) if newest > best else (fruitless + 1, best)
        where = f"the checkpoint of step {newest}" if newest else "step 0, there is no checkpoint"
        if fruitless == _FRUITLESS_STARTS:
            print(
                f"error: giving up after {fruitless} starts in a row without a new checkpoint; the last one: "
                f"{end.cause.rstrip('.')}. The same command goes on from {where}; a smaller checkpoint.interval saves "
                "more of a run that fails often.",
                file=sys.stderr,
            )
            return end
        if number < max_restarts:
            print(f"restart {number + 1} of {max_restarts}, from {where}", file=sys.stderr, flush=True)
    print(f"error: no restart is left of {max_restarts}; the same command goes on from {where}", file=sys.stderr)
    return end
