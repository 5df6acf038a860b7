#!/usr/bin/env python
"""Seconds from a fault in a real run to the notification at a webhook, by the shipped monitoring.

    python scripts/measure/measure_alerts.py

Starts Prometheus and Alertmanager with scripts/setup_monitoring.sh, a webhook, and three small runs of debug.toml on
one process each, whose learning rate is nearly 0, so that their losses stay where they are. One is killed, one is
halted in a step, one gets a loss that is not finite and later one that is 0.6 nats too high. Takes five minutes;
needs prometheus and prometheus-alertmanager.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOALS = {"TrainingDown": 145, "TrainingNotFinite": 15, "LossSpike": 45, "TrainingStalled": 150}
"""Seconds; the stall counts as one 120 s after the last step, and has 30 s from then."""
HISTORY_SECONDS = 80
"""Time before the spike: its alert compares with what is older than a minute."""
KEYS = {
    "model.shape.num_hidden_layers": 2,
    "training.seq_len": 64,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.tokens": 10**7,
    "optimizer.lr": 1e-9,
    "training.spike_sigmas": 0.0,  # the trainer itself would skip the spike
    "validation.enable": "false",
    "checkpoint.enable": "false",
    "checkpoint.last_save_in_hf": "false",
    "comm.hang_seconds": 0,  # the watchdog would end the stopped run before the alert
    "checkpoint.interval": None,
    "checkpoint.keep_latest_k": None,
    "validation.freq": None,
    "validation.steps": None,
}

# Runs in each rank, as sitecustomize: waits for the module of the step and wraps what brings its sums to the host.
INJECTOR = """
import math, os, sys, threading, time
fault = os.environ.get("GLM46_FAULT_FILE")

def install():
    name = "glm46.engine.training.step"
    while name not in sys.modules or not hasattr(sys.modules[name], "train_step"):
        time.sleep(0.1)
    step = sys.modules[name]
    original = step._losses_to_host
    if original.__module__ == __name__:  # wrapped before this process was forked
        return

    def losses_to_host(sums):
        time.sleep(float(os.environ["GLM46_STEP_SLEEP"]))
        host, kind = original(sums), open(fault).read()
        while kind == "stall":
            time.sleep(1.0)
        for network_sums in host.values():
            network_sums.objective["loss"] *= {"": 1.0, "spike": 1.07, "nan": math.nan}[kind]
        return host

    step._losses_to_host = losses_to_host

def begin():
    threading.Thread(target=install, daemon=True).start()

if fault:
    begin()
    os.register_at_fork(after_in_child=begin)
"""


class Webhook(BaseHTTPRequestHandler):
    """Keeps the time of the first notification of each alert and run."""

    seen: dict[tuple[str, str], float] = {}

    def do_POST(self) -> None:
        """Take a notification of Alertmanager."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in body["alerts"]:
            if alert["status"] == "firing":
                key = alert["labels"]["alertname"], alert["labels"].get("run", "")
                self.seen.setdefault(key, time.time())
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """No line for each notification."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start_run(
    name: str, folder: Path, keys: Mapping[str, object], *, processes: int = 1, sleep_seconds: float = 0.3
) -> subprocess.Popen:
    """A run of debug.toml in a session of its own. It reads its fault from NAME.fault in the folder, and writes its
    output to NAME.log.

    Args:
        keys: of the config; None takes a key out.
        sleep_seconds: added to each step.
    """
    if not (injector := folder / "sitecustomize.py").exists():
        injector.write_text(INJECTOR)
    (folder / f"{name}.fault").write_text("")
    keys = {"job.dump_folder": folder / name} | keys
    overrides = [f"--{key}={'' if value is None else value}" for key, value in keys.items()]
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT}",
        "GLM46_FAULT_FILE": str(folder / f"{name}.fault"),
        "GLM46_STEP_SLEEP": str(sleep_seconds),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "glm46", "launch", "--config", str(ROOT / "train_configs" / "debug.toml")]
    with (folder / f"{name}.log").open("a") as log:
        return subprocess.Popen(
            [*command, "--nproc", str(processes), *overrides],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=ROOT,
        )


def kill_run(process: subprocess.Popen) -> None:
    """End a run at once, if it has not ended; its ranks end with it."""
    for number in (signal.SIGCONT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    process.wait()


def exported(port: int) -> dict[str, float]:
    """The series of a run that have no label except the run's; empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    series = [line.partition(" ") for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in series if name.count("=") == 1}


def measure(folder: Path) -> dict[str, float]:
    """Inject the faults; returns the time of each by the name of its alert."""
    ports = dict(zip(("a", "b", "c"), free_ports(3), strict=True))
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports.values()]}]
    (folder / "state" / "runs" / "measured.json").write_text(json.dumps(targets))
    runs = {name: start_run(name, folder, KEYS | {"metrics.prometheus_port": port}) for name, port in ports.items()}
    faults: dict[str, float] = {}
    try:
        while not all(exported(port).get("training_steps_total", 0) >= 3 for port in ports.values()):
            for name, process in runs.items():
                if process.poll() is not None:
                    sys.exit((folder / f"{name}.log").read_text())
            time.sleep(0.2)
        began = time.time()
        time.sleep(40)  # until Prometheus has found all of them
        (folder / "b.fault").write_text("stall")
        faults["TrainingStalled"] = time.time()
        os.kill(runs["a"].pid, signal.SIGKILL)
        faults["TrainingDown"] = time.time()
        (folder / "c.fault").write_text("nan")
        while not exported(ports["c"]).get("training_not_finite_steps_total"):  # one step, however long it takes
            time.sleep(0.02)
        faults["TrainingNotFinite"] = time.time()
        (folder / "c.fault").write_text("")
        time.sleep(max(began + HISTORY_SECONDS - time.time(), 0))
        (folder / "c.fault").write_text("spike")
        faults["LossSpike"] = time.time()
        while {alert for alert, _ in Webhook.seen} < GOALS.keys() and time.time() < began + 290:
            time.sleep(0.2)
        return faults
    finally:
        for process in runs.values():
            kill_run(process)


def main() -> int:
    """Measure and print a table; returns 1 if a goal is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hook = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        programs = ("prometheus", "alertmanager", "grafana", "node-exporter", "dcgm-exporter")
        ports = [
            word for one, port in zip(programs, free_ports(5), strict=True) for word in (f"--{one}-port", str(port))
        ]
        script = ["bash", str(ROOT / "scripts" / "setup_monitoring.sh"), "--folder", str(folder / "state")]
        subprocess.run(
            [*script, "--start", *ports, "--webhook", f"http://127.0.0.1:{hook.server_port}/"],
            check=True,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            faults = measure(folder)
        finally:
            subprocess.run([*script, "--stop"], check=True, stdout=subprocess.DEVNULL)
            hook.shutdown()
        missed = 0
        for alert, goal in GOALS.items():
            times = [seen for (name, _), seen in Webhook.seen.items() if name == alert]
            seconds = min(times) - faults[alert] if times else float("inf")
            missed += seconds > goal
            print(f"{alert:<18} {seconds:6.1f} s   goal {goal} s")
        others = sorted({alert for alert, _ in Webhook.seen} - GOALS.keys())
        print(f"other alerts       {', '.join(others) or 'none'}")
        return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
