"""``launch --hostfile``: the launchers of all hosts, again on others after a host was lost, or with fewer replicas."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from glm46.compute.distributed.environment import set_variables, variables_that_begin
from glm46.config.check import check_config
from glm46.config.command_line import replace_overrides
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED, code_before_training
from glm46.operate.launch.host_group import PASSED_VARIABLES, module_command, places
from glm46.operate.launch.hostfile import Host, read_hostfile
from glm46.operate.launch.hosts import HostNodes, describe_nodes
from glm46.operate.launch.nodes import VARIABLES, refuse_hosts
from glm46.operate.launch.restarts import StorageLost, keep_running, known_step, write_state
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK, End
from glm46.run.plan import resolve_plan

_ADVICE = (
    "the same command goes on from the newest checkpoint when the hostfile names enough hosts. Hosts beyond --nodes "
    "are spares; with fault_tolerance.min_replicas a run goes on with fewer replicas"
)

Load = Callable[[argparse.Namespace, Sequence[str], int | None], RunConfig]


def launch_hosts(arguments: argparse.Namespace, overrides: Sequence[str], load: Load) -> int:
    """Start this command on hosts of the hostfile. What can be refused without them is refused first.

    Args:
        arguments: of the verb ``launch``.
        load: reads the config, with overrides and for a number of processes.

    Returns:
        0, or the exit code of the node that failed first in the last start.

    Raises:
        UserError: hostfile or config have faults, or hosts cannot train it.
    """
    hosts = read_hostfile(arguments.hostfile)
    refuse_hosts(hosts, arguments.nproc, set_variables(VARIABLES), arguments.hostfile)
    count = arguments.nodes or len(hosts)
    if count > len(hosts):
        raise UserError(
            f"command line: --nodes {count}: {arguments.hostfile} has {counted(len(hosts), 'host')}; add hosts, or "
            "state at most that number"
        )
    nproc = hosts[0].slots or arguments.nproc
    config = load(arguments, overrides, None)
    if nproc is not None and check_config(config, world_size=nproc * count):
        load(arguments, overrides, nproc * count)  # raises the faults, with their origin
    starts = _Starts(arguments, overrides, load, Places(hosts[:count], hosts[count:]), nproc)
    starts.nodes.newest_step = known_step()
    starts.write_state()  # hosts that an earlier call has lost are forgotten, a checkpoint is not
    try:
        return keep_running(starts.start, lambda: starts.nodes.newest_step, arguments.max_restarts).code
    finally:
        starts.nodes.close()


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


class _Starts:
    """One start of all nodes after another, each on the hosts that are left."""

    def __init__(
        self, arguments: argparse.Namespace, overrides: Sequence[str], load: Load, places: Places, processes: int | None
    ):
        self._arguments, self._overrides, self._load, self._places = arguments, overrides, load, places
        self._processes = processes
        """Of each node; None until the first nodes have answered, if they choose the number."""
        self._full = self._count = len(places.training)
        self._replicas: dict[str, str] = {}
        self._code, self._lost = EXIT_FAILED_RANK, list[str]()
        self._failed: tuple[Host, int] | None = None
        """The host that failed first in the start before, and the newest checkpoint then."""
        self.nodes = HostNodes(arguments.connect, restarts=arguments.max_restarts > 0)

    def start(self, number: int, times: StartTimes) -> End:
        """Start all nodes for the n-th time, counted from 0, and wait for their end."""
        while True:
            if len(self._places.training) < self._count and not self._use_fewer_replicas():
                cause = f"hosts left: {len(self._places.training)} of {self._count}"
                print(f"error: {cause}, and no spare; {_ADVICE}", file=sys.stderr)
                return End(self._code, cause, is_final=True)
            unfit, why = self._connect(number)
            if not unfit:
                break
            self._remove(unfit, why)
        training = list(self._places.training)
        self._code = self.nodes.run(times)
        self.write_state()
        if self.nodes.signal_number is not None and self._code in (EXIT_FAILED_RANK, EXIT_HANG):
            return End(code_before_training(self.nodes.signal_number))
        if self._code in (EXIT_FAILED_RANK, EXIT_HANG) and self._arguments.max_restarts:
            self._sort_out(training)
        is_final = self.nodes.signal_number is not None or self._code == EXIT_STOPPED and self.nodes.is_final
        cause = f"a node ended with exit code {self._code}"
        return End(self._code, cause, is_final, self.nodes.failed_at)

    def _connect(self, number: int) -> tuple[list[Host], str]:
        """Connect to the hosts that are to train.

        Returns:
            The hosts that cannot train, and why; none if all can.

        Raises:
            UserError: hosts cannot train, and others would not help.
        """
        training = self._places.training
        overrides = replace_overrides(self._overrides, self._replicas) if self._replicas else self._overrides
        options = ["--config", str(self._arguments.config), "--nproc", str(self._processes or "auto")]
        options += ["--hostfile", str(self._arguments.hostfile), "--max-restarts", str(self._arguments.max_restarts)]
        variables = variables_that_begin(*PASSED_VARIABLES)
        command = module_command(variables, ["launch", *options, *self._overrides, "--from-hostfile"])
        order = {"number": number, "overrides": overrides, "newest_step": self.nodes.newest_step}
        orders = [{**order, "variables": place} for place in places(training, variables)]
        self.nodes.connect(training, self._places.spares, command, orders)
        faults = self.nodes.faults(is_restart=number > 0)
        if not faults:
            self._processes = self._processes or self.nodes.processes()
            return [], ""
        texts = [f"{describe_nodes(nodes)}: {fault}" for fault, nodes in faults.items()]
        # At the first start a fault that a launcher has found is one of the config or the installation.
        found = {node for nodes in faults.values() for node in nodes}
        is_replaceable = number > 0 or bool(self._places.spares) and not any(node.answer for node in found)
        if not is_replaceable or len(found) == len(training):
            raise (StorageLost if all(node.answer.get("is_stopped") for node in found) else UserError)(*texts)
        return [node.host for node in found], "; ".join(texts)

    def _sort_out(self, training: Sequence[Host]) -> None:
        """Replace the hosts that were lost, and those that may have caused the failure, after a start on `training`.

        A rank that ends with an error may do so by chance, or because of another rank. A host that fails first in two
        starts in a row, without a checkpoint between them, is exchanged: the third start, the last one without a
        checkpoint, runs without it. After a fault of the program the exchange changes nothing.
        """
        if lost := self.nodes.lost_hosts():
            self._remove(lost, "no answer")
        hung = [training[rank // cast(int, self._processes)] for rank in self.nodes.hung_ranks]
        suspects: list[Host] = [*self.nodes.disconnected_hosts(), *hung]
        first = self.nodes.first_failed_host()
        failed = (first, self.nodes.newest_step) if first is not None and not lost and not suspects else None
        if first is not None and failed is not None and failed == self._failed:
            suspects, failed = [first], None
        self._failed = failed
        for host in self._places.exchange([host for host in dict.fromkeys(suspects) if host not in lost]):
            print(f"{host.name} changes its place with a spare host", file=sys.stderr, flush=True)

    def _remove(self, hosts: Sequence[Host], why: str) -> None:
        """Train on these hosts no more."""
        before = len(self._places.spares)
        self._places.remove(hosts)
        names = " ".join(host.name for host in hosts)
        replaced = counted(before - len(self._places.spares), "spare host")
        print(f"without {names} from now on, {replaced} in place: {why}", file=sys.stderr, flush=True)
        self._lost += [host.name for host in hosts]
        self.write_state()

    def write_state(self) -> None:
        """Tell a job script the newest checkpoint and the hosts that are lost."""
        with suppress(OSError):  # storage that is read only
            write_state(state_file(self._arguments.hostfile), self.nodes.newest_step, self._lost)

    def _use_fewer_replicas(self) -> bool:
        """Choose fewer replicas of the model, as the config allows; False if too few hosts are left."""
        if (of_node := self._processes) is None:
            return False
        config = self._load(self._arguments, self._overrides, None)

        def accepts(values: dict[str, str], processes: int) -> bool:
            if processes % of_node:
                return False
            try:
                self._load(self._arguments, replace_overrides(self._overrides, values), processes)
            except UserError:
                return False
            return True

        left = len(self._places.training) * of_node
        found = fewer_replicas(config, self._full * of_node, left, accepts)
        if found is None:
            return False
        self._replicas, processes = found
        self._count = processes // of_node
        self._places.keep(self._count)
        replicas = self._replicas["parallelism.data_parallel_replicate_degree"]
        names = " ".join(host.name for host in self._places.training)
        print(f"goes on with {counted(int(replicas), 'replica')} of the model, on {names}", file=sys.stderr, flush=True)
        return True


def state_file(hostfile: Path) -> Path:
    """The file that tells a job script what the last start has left, as variables of a shell."""
    return hostfile.with_name(f"{hostfile.name}.state")


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
