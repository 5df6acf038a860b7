"""Files that keep a server running: a script with its command, a systemd unit, a compose file."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

IMAGES = {"vllm": "vllm/vllm-openai:v0.32.0", "sglang": "lmsysorg/sglang:v0.5.23"}
_STOP_SECONDS = 30
_GPUS = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def command_lines(words: Sequence[str]) -> str:
    """A command for a shell, one option a line."""
    lines, line = [], []
    for word in words:
        if word.startswith("--") and line:
            lines.append(shlex.join(line))
            line = []
        line.append(word)
    return " \\\n    ".join([*lines, shlex.join(line)])


def script_of(words: Sequence[str], environment: Path | None) -> str:
    """A script that becomes the server; its arguments are further options, and win over those that it has.

    Args:
        environment: Python environment in which the server is installed; None: the one of the caller.
    """
    path = "" if environment is None else f"export PATH={shlex.quote(str(environment / 'bin'))}:$PATH\n"
    return f'#!/usr/bin/env bash\nset -euo pipefail\n{path}exec {command_lines(words)} "$@"\n'


def systemd_unit(server: str, folder: Path, script: Path, user: str) -> str:
    """A unit that starts a server and starts it again whenever it ends.

    vLLM ends with exit code 0 after its engine has died, so only ``Restart=always`` helps. With a request running it
    waits for its client after SIGTERM, so it is killed after half a minute.
    """
    return f"""[Unit]
Description={folder.name} served by {server}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
ExecStart={_escaped(script)}
Restart=always
RestartSec=10
KillMode=mixed
TimeoutStopSec={_STOP_SECONDS}

[Install]
WantedBy=multi-user.target
"""


def compose_file(commands: dict[str, list[str]], folder: Path) -> str:
    """A compose file with a profile for each server. JSON is YAML too, and quotes every word safely.

    The containers use the network and the shared memory of the machine, as NCCL needs them, and read the folder under
    the same path.
    """
    services = {
        server: {
            "image": IMAGES[server],
            "profiles": [server],
            "entrypoint": [word.replace("$", "$$") for word in words],  # compose would take them for variables
            "network_mode": "host",
            "ipc": "host",
            "volumes": [{"type": "bind", "source": str(folder), "target": str(folder), "read_only": True}],
            "restart": "always",
            "stop_grace_period": f"{_STOP_SECONDS}s",
            "deploy": {
                "resources": {
                    "reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
                }
            },
        }
        for server, words in commands.items()
    }
    return json.dumps({"services": services}, indent=2) + "\n"


def _escaped(path: Path) -> str:
    """A path as the first word of a unit's command: ``%`` and ``$`` have a meaning there."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'
