"""The processes of ``rl-servers --run``: they end together, and with the command that has started them."""

import queue
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

from glm46.operate.launch.host_group import HostGroup
from glm46.operate.launch.nodes import is_loopback
from glm46.operate.launch.rl_servers import Command, ServerPlan

_STOP_SECONDS = 20


def run_servers(servers: ServerPlan, group: HostGroup) -> int:
    """Start all servers, show their output by host, and end all when one ends; returns its exit code.

    Raises:
        UserError: the client of hosts is not installed.
    """
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    events: queue.SimpleQueue[tuple[str, str | int]] = queue.SimpleQueue()
    clients = list[Any]()

    def read(name: str, client: Any) -> None:
        for line in client.stdout:
            events.put((name, line.decode(errors="replace").rstrip()))
        events.put((name, client.wait()))

    try:
        for name, commands in servers.blocks().items():
            for command in commands:
                text = watched(command)
                if is_loopback(name):
                    client = subprocess.Popen(["sh", "-c", text], start_new_session=True, **pipes)
                else:
                    client = group.start(servers.host(name), text, **pipes)
                clients.append(client)
                threading.Thread(target=read, args=(name, client), daemon=True).start()
        while True:
            name, event = events.get()
            print(f"{name} | {event}" if isinstance(event, str) else f"{name}: ended with code {event}", flush=True)
            if isinstance(event, int):
                return event
    finally:
        for client in clients:
            client.stdin.close()
        for client in clients:
            client.wait()


def watched(command: Command) -> str:
    """A command for the shell of a host that ends with its input: the client's end, or that of its machine, ends it."""
    script = (
        f"exec 3<&0; setsid env {command.text} </dev/null 3<&- & server=$!; "
        f"{{ cat <&3 >/dev/null; kill -TERM -$server; sleep {_STOP_SECONDS}; kill -KILL -$server; }} "
        ">/dev/null 2>&1 & watch=$!; wait $server; code=$?; kill $watch 2>/dev/null; exit $code"
    )
    return f"cd {shlex.quote(str(Path.cwd()))} && exec sh -c {shlex.quote(script)}"
