"""The agent of torchrun, which starts the ranks of this node in this process and waits for them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import get_args_parser, run

from glm46.operate.launch.local_rendezvous import register

_MONITOR_SECONDS = 0.02
"""Time between two checks of torchrun whether its ranks run. A short one tells the first rank that fails from the ranks
that fail because of it."""


class FailedRank(NamedTuple):
    """End of a rank that failed."""

    exit_code: int
    """Negative for a signal."""
    failed_at: float
    """`time.time` of its end."""


class RendezvousFailed(Exception):
    """Raised if the nodes do not meet, or lose each other."""


def run_agent(words: Sequence[str]) -> dict[int, FailedRank]:
    """Start the ranks and wait for all of them. Returns those that failed, in the order in which torchrun found them.

    Args:
        words: options of torchrun, then the command of the ranks.

    Raises:
        RendezvousFailed: another node left or did not join.
    """
    register()
    arguments = get_args_parser().parse_args([f"--monitor-interval={_MONITOR_SECONDS}", *words])
    # Torchrun's signal handlers stay off: they raise in the main thread, which may be in code that no exception
    # interrupts, and a second signal would end it while ranks save.
    arguments.signals_to_handle = ""
    try:
        run(arguments)
    except (RendezvousError, DistError) as error:
        raise RendezvousFailed(str(error)) from error
    except ChildFailedError as error:
        return {rank: FailedRank(failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()}
    return {}
