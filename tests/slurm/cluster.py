"""A real Slurm on this machine: each node has a network, a host name and mounts of its own, so that it can be lost as a
machine is lost. Needs root and Debian's packages slurm-wlm, munge, iproute2 and bindfs; ends all that it starts.

The controller and the nodes n1, n2, … are network namespaces that are joined by a bridge. No interface, address or file
of the machine itself is changed.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "ip", "nsenter", "unshare", "bindfs")
_PORT = 6818
"""On which the daemon of a node listens, by Slurm's default."""
_GPUS = 8
"""Of each node: plain files, which Slurm counts as it counts devices."""


def missing() -> str:
    """Why no cluster can be started here; '' if one can."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge iproute2 bindfs"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    probe = f"glm46-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class SlurmCluster:
    """A controller and nodes n1 to nN, from `start` to `stop`.

    Args:
        folder: for all files; on storage that all processes of the machine see.
    """

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.nodes = folder, [f"n{number + 1}" for number in range(nodes)]
        self._log = (folder / "cluster.log").open("w")
        self._names = {host: f"g{os.getpid()}{host}" for host in ("c", *self.nodes)}
        self._started: list[subprocess.Popen] = []
        self._daemons: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        for name in ("state", "log", "run", "dev", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._write_files()
        self._join_networks()
        run = self.folder / "run"
        munge = ["munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}"]
        munge += [f"--socket={run / 'munge.sock'}", f"--pid-file={run / 'munged.pid'}"]
        munge += [f"--log-file={self.folder / 'log/munged.log'}", f"--seed-file={run / 'seed'}"]
        self._wait_for(self.begin("c", munge), (run / "munge.sock").exists)
        self.begin("c", ["slurmctld", "-D", "-c"])
        for host in self.nodes:
            self.begin_node(host)
        self.wait_until_idle()

    def begin_node(self, host: str) -> None:
        """Start the daemon of a node, and wait until it listens."""
        (self.folder / "spool" / host).mkdir(exist_ok=True)
        self._daemons[host] = daemon = self.begin(host, ["slurmd", "-D", "-N", host])
        connections, listening = Path(f"/proc/{daemon.pid}/net/tcp"), f":{_PORT:04X} 00000000:0000 0A"
        self._wait_for(daemon, lambda: listening in connections.read_text())

    def wait_until_idle(self, seconds: float = 240) -> None:
        """Wait until all nodes are idle."""
        end = time.monotonic() + seconds
        while (found := self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip()) != str(len(self.nodes)):
            assert time.monotonic() < end, f"{found or 0} nodes are idle: {self.call('sinfo', '-R')}"
            time.sleep(0.1)

    def restore(self) -> None:
        """Cancel all jobs, connect and start the nodes that were lost, and wait until all are idle."""
        self.call("scancel", "--user=root")
        for host, daemon in self._daemons.items():
            self.set_link(host, "up")
            if daemon.poll() is not None:
                self.begin_node(host)
        self.wait_until_idle()

    def begin(self, host: str, command: Sequence[str], **variables: str) -> subprocess.Popen:
        """Start a program on a node, or on the controller, "c"."""
        words = f'mount --bind {self.folder / "hosts"} /etc/hosts && hostname {host} && exec "$@"'
        inside = ["nsenter", f"--net=/run/netns/{self._names[host]}", "unshare", "-u", "-m", "bash", "-c", words, "-"]
        process = subprocess.Popen(
            [*inside, *command], env={**self._environment(), **variables}, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def call(self, *command: str, seconds: float = 240, cwd: Path | None = None, **variables: str) -> str:
        """What a command prints, run on the controller."""
        inside = ["nsenter", f"--net=/run/netns/{self._names['c']}", *command]
        environment = {**self._environment(), **variables}
        done = subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=seconds, cwd=cwd)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self, host: str) -> list[int]:
        """Process ids of all that runs on a node."""
        out = subprocess.run(["ip", "netns", "pids", self._names[host]], capture_output=True, text=True).stdout
        return [int(word) for word in out.split()]

    def kill_node(self, host: str) -> None:
        """End all processes of a node at once, its daemon too."""
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def set_link(self, host: str, state: str) -> None:
        """Cut a node off from the network, or connect it: "down" or "up". Its processes go on."""
        self._inside("c", "ip", "link", "set", f"v{host}", state)

    def mount(self, host: str, folder: Path, point: Path) -> subprocess.Popen:
        """Show a folder to a node at another place, as a network disk is shown. Returns the server: access fails when
        it has ended, and hangs while it is stopped."""
        inside = self._mounts_of(host)
        options = "attr_timeout=0,entry_timeout=0,negative_timeout=0"
        server = subprocess.Popen(
            [*inside, "bindfs", "-f", "-o", options, str(folder), str(point)], stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=self._log,
        )  # fmt: skip
        self._started.append(server)
        self._wait_for(server, lambda: self._is_mounted(host, point))
        return server

    def unmount(self, host: str, point: Path) -> None:
        """Remove the place, also while files of it are open: an empty folder is there afterwards."""
        if self._is_mounted(host, point):
            subprocess.run([*self._mounts_of(host), "umount", "--lazy", str(point)], check=True)

    def _is_mounted(self, host: str, point: Path) -> bool:
        return f" {point} " in Path(f"/proc/{self._daemons[host].pid}/mounts").read_text()

    def _wait_for(self, process: subprocess.Popen, is_ready: Callable[[], bool]) -> None:
        while process.poll() is None:
            if is_ready():
                return
            time.sleep(0.02)
        raise AssertionError(f"{process.args} has ended: {(self.folder / 'cluster.log').read_text()}")

    def _mounts_of(self, host: str) -> list[str]:
        return ["nsenter", f"--target={self._daemons[host].pid}", "--mount", "--net"]

    def stop(self) -> None:
        """End all processes of all nodes, and remove their networks."""
        try:
            for host in self._names:
                for _ in range(3):  # a killed daemon may leave a child that was just started
                    self.kill_node(host)
                    time.sleep(0.05)
            for process in self._started:
                process.wait(60)
        finally:
            for name in self._names.values():
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
            self._log.close()

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def _inside(self, host: str, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self._names[host], *command], check=True, capture_output=True)

    def _join_networks(self) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "add", name], check=True)
        for host in self._names:
            self._inside(host, "ip", "link", "set", "lo", "up")
        self._inside("c", "ip", "link", "add", "bridge", "type", "bridge")
        self._inside("c", "ip", "addr", "add", "10.77.0.1/24", "dev", "bridge")
        self._inside("c", "ip", "link", "set", "bridge", "up")
        for number, host in enumerate(self.nodes):
            pair = ["ip", "link", "add", f"v{host}", "type", "veth", "peer", "name", "eth0"]
            self._inside("c", *pair, "netns", self._names[host])
            self._inside("c", "ip", "link", "set", f"v{host}", "master", "bridge", "up")
            self._inside(host, "ip", "addr", "add", f"10.77.0.{11 + number}/24", "dev", "eth0")
            self._inside(host, "ip", "link", "set", "eth0", "up")

    def _write_files(self) -> None:
        folder, count = self.folder, len(self.nodes)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        names = [f"10.77.0.{11 + number} {host}" for number, host in enumerate(self.nodes)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "10.77.0.1 c", *names, ""]))
        for gpu in range(_GPUS):
            (folder / "dev" / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(f"NodeName=n[1-{count}] Name=gpu File={folder}/dev/gpu[0-{_GPUS - 1}]\n")
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\nIgnoreSystemd=yes\n")
        settings = {
            "ClusterName": "trial", "SlurmctldHost": "c(10.77.0.1)", "SlurmUser": "root", "AuthType": "auth/munge",
            # A short life of credentials lets a requeued job start after seconds instead of two minutes.
            "AuthInfo": f"socket={folder}/run/munge.sock,cred_expire=5", "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none", "MpiDefault": "none",
            "AccountingStorageType": "accounting_storage/none", "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core", "ReturnToService": "2", "SlurmdTimeout": "10", "KillWait": "5",
            "MinJobAge": "3600",  # after its end, the state of a job is known for so many seconds
            "SlurmdParameters": "config_overrides", "JobRequeue": "1", "StateSaveLocation": f"{folder}/state",
            "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0",
            "SlurmdSpoolDir": f"{folder}/spool/%n", "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/run/slurmd-%n.pid", "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
            "SlurmdLogFile": f"{folder}/log/slurmd-%n.log", "GresTypes": "gpu",
        }  # fmt: skip
        node = f"NodeName=n[1-{count}] NodeAddr=10.77.0.[11-{10 + count}] CPUs=8 RealMemory=2000 Gres=gpu:{_GPUS}"
        # Jobs of the second partition take nodes of the first, whose jobs have a minute to save.
        partitions = [
            "PartitionName=gpu Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60",
            "PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF",
        ]
        lines = [f"{name}={value}" for name, value in settings.items()]
        (folder / "slurm.conf").write_text("\n".join([*lines, node, *partitions, ""]))
