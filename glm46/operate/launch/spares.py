"""Choice of the hosts of a hostfile that train and those that are spare, when some are lost; and of the replicas."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from glm46.compute.distributed.hostfile import Host
from glm46.config.run_config import RunConfig
from glm46.run.plan import resolve_plan


@dataclass
class Places:
    """The hosts that train, in the order of their nodes, and the spare ones, in the order in which they are used."""

    training: list[Host]
    spares: list[Host]

    def remove(self, lost: Collection[Host]) -> None:
        """Remove hosts for good. A spare takes the place of each, so that the others keep theirs, as long as there is
        one."""
        self.spares = [host for host in self.spares if host not in lost]
        for host in [host for host in self.training if host in lost]:
            place = self.training.index(host)
            self.training[place : place + 1] = [self.spares.pop(0)] if self.spares else []

    def exchange(self, suspects: Sequence[Host]) -> list[Host]:
        """Exchange hosts that may have caused a failure with spares, as far as there are some. They become the last
        spares. Returns the hosts that were exchanged."""
        exchanged = [host for host in suspects if host in self.training][: len(self.spares)]
        for host in exchanged:
            self.training[self.training.index(host)] = self.spares.pop(0)
            self.spares.append(host)
        return exchanged

    def keep(self, count: int) -> None:
        """Train on the first hosts only; the others become the first spares."""
        self.spares = self.training[count:] + self.spares
        self.training = self.training[:count]


def fewer_replicas(
    config: RunConfig, world_size: int, most: int, accepts: Callable[[dict[str, str], int], bool]
) -> tuple[dict[str, str], int] | None:
    """The most replicas of the model that fit on fewer processes, at least ``fault_tolerance.min_replicas``.

    The batch of a step stays that of all replicas, so that the same samples come in the same order.

    Args:
        world_size: processes of the whole run, with all replicas.
        most: processes that are left.
        accepts: whether values of keys are without faults for a number of processes.

    Returns:
        The keys to override with their values, and the processes; None if too few are left.
    """
    replicas = config.parallelism.data_parallel_replicate_degree
    for count, processes in _sizes(replicas, config.fault_tolerance.min_replicas, world_size):
        # The nodes need not know the least number, which would have no effect on one replica.
        values = {"parallelism.data_parallel_replicate_degree": str(count), "fault_tolerance.min_replicas": "0"}
        if config.training.global_batch_size is None:
            values["training.global_batch_size"] = str(resolve_plan(config, world_size).rows_per_micro_batch)
        if processes <= most and accepts(values, processes):
            return values, processes
    return None


def _sizes(replicas: int, least: int, world_size: int) -> Iterator[tuple[int, int]]:
    for count in range(replicas - 1, max(least, 1) - 1, -1) if least else ():
        yield count, world_size * count // replicas
