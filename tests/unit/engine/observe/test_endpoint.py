"""The endpoint over real sockets: ports, silent clients, and the file by which Prometheus finds it."""

import json
import socket
import subprocess
import sys
import urllib.request

import pytest

from glm46.cli import main
from glm46.config.checkpoint import MetricsConfig
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.engine.observe import endpoint as endpoint_module
from glm46.engine.observe.endpoint import Endpoint
from glm46.engine.observe.exporter import RunCollector
from glm46.engine.reliability.stop import before_exit
from glm46.operate.launch.exporting import exporting
from tests.processes import HANG_SECONDS, free_port
from tests.unit.engine.observe.test_exporter import begin


@pytest.fixture
def serve(tmp_path):
    """A function that serves the folder ``run`` with keys of [metrics]; returns the endpoint and what it said."""
    started = []

    def start(folder="run", **keys):
        said = []
        keys = {"prometheus_port": free_port(), "prometheus_sd_folder": str(tmp_path / "targets")} | keys
        (tmp_path / folder).mkdir(exist_ok=True)
        endpoint = Endpoint(MetricsConfig(**keys), tmp_path / folder, RunCollector(tmp_path / folder), said.append)
        started.append(endpoint)
        return endpoint, said

    yield start
    for endpoint in started:
        endpoint.close(has_failed=False)


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.read().decode()


def targets(folder):
    return {path.name: json.loads(path.read_text())[0] for path in sorted((folder / "targets").iterdir())}


@pytest.mark.slow
def test_a_taken_port_gives_another_one_and_prometheus_is_told(serve, tmp_path):
    first, _ = serve()
    second, said = serve("other", prometheus_port=first.port)
    assert second.port != first.port and f"{first.port} is taken" in said[0] and str(second.port) in said[1]
    assert not (tmp_path / "targets").exists()
    first.announce()
    second.announce()
    found = targets(tmp_path)
    assert [entry["labels"] for entry in found.values()] == [{"run": "other"}, {"run": "run"}]
    assert [entry["targets"] for entry in found.values()] == [[f"127.0.0.1:{one.port}"] for one in (second, first)]
    for endpoint in (first, second):
        assert "training_restarts_total 0.0" in get(endpoint.port)
    with pytest.raises(OSError):  # loopback alone
        socket.create_connection((socket.gethostbyname(socket.gethostname()), first.port), timeout=0.2).close()
        if socket.gethostbyname(socket.gethostname()).startswith("127."):
            raise OSError


@pytest.mark.slow
@pytest.mark.parametrize("address, warns", [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_loopback_address_in_a_shared_folder_is_said(serve, monkeypatch, address, warns):
    monkeypatch.setattr(endpoint_module, "network_file_system", lambda folder: "nfs4")
    endpoint, said = serve(prometheus_address=address)
    endpoint.announce()
    assert len(said) == 1 + warns and ("nfs4" in said[-1] and "metrics.prometheus_address" in said[-1]) == warns


@pytest.mark.slow
def test_a_client_that_says_nothing_holds_up_no_scrape(serve):
    endpoint, _ = serve()
    with socket.create_connection(("127.0.0.1", endpoint.port)):
        assert "training_restarts_total" in get(endpoint.port)


@pytest.mark.parametrize("keys, words", [
    ({"prometheus_address": "192.0.2.1"}, ("prometheus_address", "192.0.2.1", "address of this machine")),
    ({"prometheus_address": "no.such.host.invalid"}, ("prometheus_address", "invalid", "address of this machine")),
])  # fmt: skip
def test_mistakes_are_refused_with_key_value_and_remedy(serve, keys, words):
    with pytest.raises(UserError) as fault:
        serve(**keys)
    assert all(word in str(fault.value) for word in words), fault.value


@pytest.mark.slow
def test_a_folder_of_targets_that_cannot_be_written(serve, tmp_path):
    (tmp_path / "file").write_text("")
    endpoint, _ = serve(prometheus_sd_folder=str(tmp_path / "file" / "targets"))
    with pytest.raises(UserError, match="prometheus_sd_folder.*another folder"):
        endpoint.announce()


@pytest.mark.slow
@pytest.mark.parametrize("code, stays", [(0, False), (2, False), (75, False), (1, True), (76, True), (77, True)])
def test_prometheus_goes_on_asking_for_a_run_that_failed(make_config, tmp_path, capsys, code, stays):
    port = free_port()
    keys = {"prometheus_port": port, "prometheus_sd_folder": str(tmp_path / "targets")}
    with exporting(make_config(metrics=keys)) as exporter:
        assert not (tmp_path / "targets").exists()
        exporter.starts(0)
        assert len(targets(tmp_path)) == 1
        exporter.starts(1)
        assert "training_restarts_total 1.0" in get(port)
        assert exporter.ends(code) == code
    assert bool(targets(tmp_path)) is stays
    with pytest.raises(OSError):
        get(port)
    assert f"127.0.0.1:{port}/metrics" in capsys.readouterr().out


@pytest.mark.slow
def test_a_signal_while_no_rank_runs_leaves_no_target_behind(make_config, tmp_path):
    """It ends the launcher by `exit_now`, which leaves no context; the missing target would raise TrainingDown."""
    keys = {"prometheus_port": 9400, "prometheus_sd_folder": str(tmp_path / "targets")}
    with exporting(make_config(metrics=keys)) as exporter:
        exporter.announce()
        assert len(targets(tmp_path)) == len(before_exit) == 1
        before_exit[0]()
        assert not targets(tmp_path)
    assert not before_exit


@pytest.mark.slow
def test_metrics_shows_a_run_that_somebody_else_has_started(make_config, tmp_path):
    config = make_config(metrics={"prometheus_port": 9400, "prometheus_sd_folder": str(tmp_path / "targets")})
    folder = tmp_path / "out"
    folder.mkdir()
    begin(folder)
    (folder / "config.toml").write_text(dump_config(config))
    process = subprocess.Popen([sys.executable, "-m", "glm46", "metrics", str(folder)], stdout=subprocess.PIPE)
    try:
        port = int(process.stdout.readline().rpartition(b":")[2].partition(b"/")[0])
        assert 'training_phase{phase="train"} 1.0' in get(port)
    finally:
        process.terminate()
    assert process.wait(HANG_SECONDS) == 0 and not list((tmp_path / "targets").iterdir())
    process.stdout.close()


def test_metrics_refuses_a_folder_without_a_run(tmp_path, capsys):
    assert main(["metrics", str(tmp_path)]) == 2
    assert "config.toml" in capsys.readouterr().err
