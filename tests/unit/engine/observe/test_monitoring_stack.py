"""scripts/setup_monitoring.sh and the dashboards: wrong use changes nothing; the real programs start, find a run,
answer every query of the dashboards, and stop without a trace."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from glm46.engine.observe.exporter import Exporter, exported_names
from scripts import make_dashboards
from tests.processes import free_port, wait_until
from tests.unit.engine.observe.test_alerts import FOLDER, INSPECTOR, RECORDED, ROOT
from tests.unit.engine.observe.test_exporter import full_row

SCRIPT = ROOT / "scripts" / "setup_monitoring.sh"
NAMES = ("prometheus", "alertmanager", "grafana", "node-exporter", "dcgm-exporter")
PAGES = {name: make_dashboards.dashboard_json(name) for name in make_dashboards.DASHBOARDS}
QUERIES = [target["expr"] for page in PAGES.values() for panel in page["panels"] for target in panel["targets"]]


def test_the_files_are_those_of_the_script():
    """After a change, `python scripts/make_dashboards.py` writes the files again."""
    files = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "dashboards").iterdir()}
    assert files == PAGES


def test_queries_read_what_somebody_exports():
    dcgm = set(re.findall(r"^DCGM_\w+", (FOLDER / "dcgm-counters.csv").read_text(), re.M))
    found = {
        word for query in QUERIES for word in re.findall(r"\b(?:training|expert|dead|nvidia|nccl|DCGM)_\w+", query)
    }
    assert found <= exported_names() | RECORDED | dcgm


def setup(*options, folder, programs: Path | None = None):
    """The script with these options; programs of a folder come before those of the machine."""
    command = ["bash", str(SCRIPT), *options, "--folder", str(folder)]
    path = os.environ["PATH"] if programs is None else f"{programs}:{os.environ['PATH']}"
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PATH": path})


def ports_of() -> dict[str, int]:
    """A free port for each program."""
    return {name: free_port() for name in NAMES}


def port_options(ports: dict[str, int]) -> list[str]:
    return [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]


def program(folder: Path, name: str, text: str) -> None:
    """Put a program of this text into a folder of programs."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("options, words", [
    ([], ("--start",)), (["--start", "--stop"], ("--stop", "--start")), (["--start", "--start"], ("--start", "twice")),
    (["--start", "--prometheus-port"], ("--prometheus-port", "value")),
    (["--start", "--prometheus-port", "0"], ("--prometheus-port", "0", "65535")),
    (["--start", "--prometheus-port", "70000"], ("70000", "65535")),
    (["--start", "--grafana-port", "9090"], ("--grafana-port", "--prometheus-port", "9090")),
    (["--start", "--loki-port", "3100"], ("--loki-port", "unknown")), (["--start", "--fast"], ("--fast", "unknown")),
    (["--start", "--bind", "everywhere"], ("--bind", "everywhere", "127.0.0.1")),
    (["--start", "--bind", "203.0.113.9"], ("--bind", "203.0.113.9", "no address of this machine", "hostname -I")),
    (["--start", "--bind", "999.1.1.1"], ("--bind", "999.1.1.1", "no address of this machine")),
    (["--start", "--webhook", "example"], ("--webhook", "example", "https://")),
])  # fmt: skip
def test_wrong_use_has_one_message_and_changes_nothing(tmp_path, options, words):
    done = setup(*options, folder=tmp_path / "state")
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done
    assert all(word in lines[0] for word in words), lines
    assert not (tmp_path / "state").exists()


needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@needs_prometheus
def test_a_port_in_use_and_a_dry_run_change_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = setup("--start", "--prometheus-port", port, folder=tmp_path / "state")
    assert done.returncode == 2 and port in done.stderr and "free one" in done.stderr, done
    ports = port_options(ports_of())
    done = setup("--start", "--dry-run", *ports, folder=tmp_path / "state")
    assert done.returncode == 0 and f"127.0.0.1:{ports[1]}" in done.stdout, done
    assert not (tmp_path / "state").exists()
    (tmp_path / "file").write_text("")
    done = setup("--start", *ports, folder=tmp_path / "file" / "state")
    assert done.returncode == 2 and "--folder" in done.stderr and len(done.stderr.splitlines()) == 1, done


def test_services_of_the_system_on_the_ports_are_named_with_the_command_that_ends_them(tmp_path):
    bin = tmp_path / "bin"
    for name in ("prometheus", "prometheus-alertmanager", "prometheus-node-exporter"):
        program(bin, name, "#!/bin/sh\n")
    program(
        bin, "systemctl", "#!/bin/sh\ncase $3 in prometheus | prometheus-node-exporter) exit 0 ;; *) exit 3 ;; esac\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        of_service, of_other = (
            setup("--start", *port_options(ports_of() | {name: port}), folder=tmp_path / "state", programs=bin)
            for name in ("prometheus", "alertmanager")
        )
    assert of_service.returncode == of_other.returncode == 2
    remedy = "systemctl disable --now prometheus prometheus-node-exporter"
    assert f"--prometheus-port {port}: the service prometheus" in of_service.stderr and remedy in of_service.stderr
    assert f"--alertmanager-port {port}: another program" in of_other.stderr, of_other
    assert not (tmp_path / "state").exists()


@needs_prometheus
def test_rules_and_dashboards_that_cannot_be_read_are_named_and_nothing_is_changed(tmp_path):
    (tmp_path / "prometheus.yml").write_text("rule_files: [alerts.yml]\n")
    rules = "groups: [{name: mine, rules: [{alert: Mine, expr: 'training_loss >'}]}]\n"
    (tmp_path / "alerts.yml").write_text(rules)
    options = port_options(ports_of())
    done = setup("--start", *options, folder=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert all(word in done.stderr for word in (str(tmp_path), "alerts.yml", "Mine", "remove")), done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alerts.yml", "prometheus.yml"]
    (tmp_path / "alerts.yml").write_text(rules.replace(" >", " > 5"))
    (tmp_path / "dashboards").mkdir()
    (tmp_path / "dashboards" / "mine.json").write_text('{"panels": [],}')
    done = setup("--start", *options, folder=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert all(word in done.stderr for word in ("dashboards/mine.json", "not JSON", "column", "remove")), done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alerts.yml", "dashboards", "prometheus.yml"]


STUB = f"""#!{sys.executable}
import json, os, pathlib, re, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Prometheus reads its rules again
grafana = {{name: value for name, value in os.environ.items() if name.startswith("GF_")}}
seen = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "variables": grafana}}
pathlib.Path(sys.argv[0] + ".json").write_text(json.dumps(seen))
found = re.search(r"--(?:web.listen-address=|address )([0-9.]+):([0-9]+)", " ".join(sys.argv))
address = found.groups() if found else (grafana["GF_SERVER_HTTP_ADDR"], grafana["GF_SERVER_HTTP_PORT"])
ThreadingHTTPServer((address[0], int(address[1])), Ready).serve_forever()
"""
"""A program that notes how it was started, and answers on the address that it was given."""


@pytest.mark.slow
@pytest.mark.parametrize("grafana", ["grafana-server", "grafana", "podman", None])
def test_grafana_and_dcgm_exporter_start_with_these_arguments(tmp_path, grafana):
    """Programs of the test in their place: neither a Grafana nor a GPU is at hand."""
    bin, state, ports = tmp_path / "bin", tmp_path / "state", ports_of()
    options = port_options(ports)
    started = {"docker": "started", "podman": "started"}.get(grafana, grafana)
    programs = ("prometheus", "prometheus-alertmanager", "prometheus-node-exporter", "dcgm-exporter", started)
    for name in filter(None, programs):
        program(bin, name, STUB)
    program(bin, "nvidia-smi", "#!/bin/sh\n")
    for name in ("docker", "podman"):
        has_image = f'[ "$*" = "image inspect grafana/grafana" ] || exec {bin}/started "$@"'
        program(bin, name, f"#!/bin/sh\n{has_image if name == grafana else 'exit 1'}\n")
    try:
        done = setup("--start", *options, folder=state, programs=bin)
        assert done.returncode == 0, done
        again = setup("--start", folder=state, programs=bin)
        assert again.stdout.count("runs already") == len([*filter(None, programs)]), again
    finally:
        stopped = setup("--stop", folder=state, programs=bin)
    assert stopped.stdout.count(": stopped") == len([*filter(None, programs)]) and not list((state / "run").iterdir())

    def seen(name: str) -> dict:
        return json.loads((bin / f"{name}.json").read_text())

    address = f"127.0.0.1:{ports['dcgm-exporter']}"
    assert seen("dcgm-exporter")["arguments"] == ["--address", address, "--collectors", "dcgm-counters.csv"]
    assert (Path(seen("dcgm-exporter")["folder"]) / "dcgm-counters.csv").read_text() == (
        FOLDER / "dcgm-counters.csv"
    ).read_text()
    assert json.loads((state / "gpus" / "here.json").read_text()) == [{"targets": [address]}]
    for name in ("prometheus", "prometheus-alertmanager", "prometheus-node-exporter"):
        assert any(word.startswith("--web.listen-address=127.0.0.1:") for word in seen(name)["arguments"])
    if grafana is None:
        assert "grafana/grafana of docker or podman" in done.stderr and str(state / "provisioning") in done.stderr
        return
    found = seen(started)
    variables = {
        "GF_SECURITY_ADMIN_PASSWORD__FILE": str(state / "grafana-password"),
        "GF_PATHS_PROVISIONING": str(state / "provisioning"), "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(ports["grafana"]), "GF_PATHS_DATA": str(state / "data" / "grafana"),
        "GF_ANALYTICS_REPORTING_ENABLED": "false", "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }  # fmt: skip
    arguments = {
        "grafana-server": ["--homepath", "/usr/share/grafana"],
        "grafana": ["server", "--homepath", "/usr/share/grafana"],
    }
    in_container = ["run", "--rm", "--network", "host", "--user", f"{os.getuid()}:0", "--volume", f"{state}:{state}"]
    in_container += [*(f"--env={name}={value}" for name, value in variables.items()), "grafana/grafana"]
    assert found["variables"] == variables and found["arguments"] == arguments.get(grafana, in_container)
    password = state / "grafana-password"
    assert password.stat().st_mode & 0o777 == 0o600 and len(password.read_text().strip()) == 24
    (source,) = yaml.safe_load((state / "provisioning/datasources/datasource.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((state / "provisioning/dashboards/dashboards.yml").read_text())["providers"]
    assert source["url"] == f"http://127.0.0.1:{ports['prometheus']}" and source["uid"] == "prometheus"
    assert {path.name for path in Path(provider["options"]["path"]).iterdir()} == {f"{name}.json" for name in PAGES}


def test_files_that_cannot_be_checked_are_said(tmp_path):
    """On a machine without promtool, amtool and python3."""
    bin = tmp_path / "bin"
    for name in ("bash", "dirname", "readlink", "sed", "grep", "cat", "seq", "basename", "timeout"):
        program(bin, name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
    program(bin, "prometheus", "#!/bin/sh\n")
    (tmp_path / "state" / "dashboards").mkdir(parents=True)
    for name in ("prometheus.yml", "alertmanager.yml", "dashboards/mine.json"):
        (tmp_path / "state" / name).write_text("{}")
    command = ["bash", str(SCRIPT), "--start", "--dry-run", "--folder", str(tmp_path / "state")]
    options = port_options(ports_of())
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, env={"PATH": str(bin)})
    assert done.returncode == 0, done
    for words in ("promtool: not found", "prometheus.yml is not", "amtool: not found", "python3: not found"):
        assert words in done.stderr, (words, done)


class Gpus(BaseHTTPRequestHandler):
    """What dcgm-exporter answers, for two GPUs, and node exporter from the files of NCCL's Inspector plugin."""

    def do_GET(self):
        more = {"DCGM_EXP_CLOCK_EVENTS_COUNT": ',clock_event="sw_power_cap"', "DCGM_EXP_XID_ERRORS_COUNT": ',xid="13"'}
        names = re.findall(r"^DCGM_\w+", (FOLDER / "dcgm-counters.csv").read_text(), re.M)
        lines = [f'{name}{{gpu="{gpu}",Hostname="n7"{more.get(name, "")}}} 1\n' for name in names for gpu in (0, 1)]
        lines += [f'{name}{{collective="AllReduce",message_size="1-2MB",gpu="GPU0"}} 1\n' for name in INSPECTOR]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_program_that_reads_its_data_for_long_is_not_ended(tmp_path):
    """Prometheus answers 503 until it has, which takes minutes with the data of weeks."""
    bin, state, ports = tmp_path / "bin", tmp_path / "state", ports_of()
    options = port_options(ports)
    late = "self.send_response(200 if next(asked) > 110 else 503)"  # it is asked ten times a second
    text = STUB.replace("self.send_response(200)", late)
    program(bin, "prometheus", text.replace("class Ready", "asked = iter(range(10**6))\n\nclass Ready"))
    for name in ("prometheus-alertmanager", "prometheus-node-exporter"):
        program(bin, name, STUB)
    try:
        done = setup("--start", *options, folder=state, programs=bin)
        assert done.returncode == 0 and "prometheus: reads its data" in done.stdout, done
        assert f"prometheus: http://127.0.0.1:{ports['prometheus']}" in done.stdout
    finally:
        assert "prometheus: stopped" in setup("--stop", folder=state, programs=bin).stdout


@needs_prometheus
@pytest.mark.slow
def test_the_stack_starts_shows_a_run_on_every_dashboard_and_stops(tmp_path):
    state, ports = tmp_path / "state", ports_of()
    options = port_options(ports)
    port = free_port()
    exporter = Exporter("r", port, print)
    exporter.begins(step=1, tokens=10, budget=1000, save_interval=50, info={"task": "pretrain"})
    exporter.row(full_row())
    gpus = ThreadingHTTPServer(("127.0.0.1", 0), Gpus)
    threading.Thread(target=gpus.serve_forever, daemon=True).start()
    try:
        first = setup("--start", *options, folder=state)
        assert first.returncode == 0, first
        pids = {path.name: path.read_text() for path in (state / "run").glob("*.pid")}
        assert "prometheus.pid" in pids
        (state / "alerts.yml").write_text((state / "alerts.yml").read_text() + "# mine\n")
        again = setup("--start", folder=state)  # with the ports of before
        assert f"127.0.0.1:{ports['alertmanager']}" in (state / "prometheus.yml").read_text()
        assert "alerts.yml: edited by hand" in again.stderr and "# mine" in (state / "alerts.yml").read_text()
        assert again.returncode == 0 and "prometheus: runs already" in again.stdout, again
        assert {path.name: path.read_text() for path in (state / "run").glob("*.pid")} == pids
        (state / "runs" / "here.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"]}]))
        (state / "gpus" / "here.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{gpus.server_port}"]}]))
        # Not 5 s, which a test would have to wait for twice.
        file = state / "prometheus.yml"
        file.write_text(file.read_text().replace("interval: 5s", "interval: 500ms"))
        subprocess.run(["kill", "-HUP", pids["prometheus.pid"].strip()], check=True)
        wait_for_answers(ports["prometheus"], QUERIES)
        assert ask(ports["prometheus"], "training_step")[0]["metric"]["run"] == "r"
        listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True).stdout.split()
        for port in ports.values():
            assert not {word for word in listening if word.endswith(f":{port}")} - {f"127.0.0.1:{port}"}
        mine = PAGES["training"] | {
            "panels": [panel_of("training_step"), panel_of("training_los"), panel_of("rate(up)")]
        }
        (state / "dashboards" / "mine.json").write_text(json.dumps(mine))
        status = setup("--status", folder=state)
        assert (
            f"prometheus: runs on port {ports['prometheus']}" in status.stdout and len(status.stderr.splitlines()) == 1
        ), status
        assert "mine.json: no data now for training_los; rate(up) (" in status.stderr, status
    finally:
        stopped = setup("--stop", folder=state)
        exporter.close(has_failed=True)
        gpus.shutdown()
        gpus.server_close()
    assert "prometheus: stopped" in stopped.stdout, stopped
    for port in ports.values():
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
    assert not list((state / "run").iterdir())


def panel_of(query: str) -> dict:
    return {"targets": [{"expr": query}]}


def ask(port: int, query: str) -> list[dict]:
    # What Grafana fills in.
    query = re.sub(r"\$(run|Hostname|instance)\b", ".*", query.replace("$__rate_interval", "10s"))
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)["data"]["result"]


def wait_for_answers(port: int, queries: list[str]) -> None:
    # A machine of a test may have no disk or network of its own.
    left = [query for query in queries if not re.search("node_(disk|network|filesystem)_", query)]

    def all_answered() -> bool:
        left[:] = [query for query in left if not ask(port, query)]
        return not left

    wait_until(all_answered, lambda: str(left))
