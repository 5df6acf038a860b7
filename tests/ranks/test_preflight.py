"""`preflight` on two hosts of one rank each, both of which are this machine."""

import json
from pathlib import Path

from glm46.config.loader import dump_config
from glm46.operate.cluster.preflight import RESULTS_FILE
from glm46.operate.cluster.results import FAIL, PASS
from tests.processes import free_port


def start(server, port: str, node: int, *argv: str, **variables: str):
    environment = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    return server.start("preflights.preflight", "--nproc", "1", *argv, environment=environment)


def test_two_hosts_meet_and_the_one_with_a_fault_is_named(server, make_config, tmp_path):
    config = make_config(checkpoint={"interval": 2})
    (tmp_path / "run.toml").write_text(dump_config(config))
    port = str(free_port(behind=9))
    options = ("--config", str(tmp_path / "run.toml"), "--json", str(tmp_path / "found.json"))
    first, second = start(server, port, 0, *options), start(server, port, 1, *options, NCCL_ALGO="Tree")
    assert [first.wait(), second.wait()] == [1, 1], first.output.read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    # Other work on this machine may be a warning, and is no failure.
    kept = json.loads((Path(config.job.dump_folder) / RESULTS_FILE).read_text())
    assert kept["hosts"] == found["hosts"] and kept["group"] == found["group"]
    bad = [[r["check"] for r in host["results"] if r["verdict"] == FAIL] for host in found["hosts"]]
    assert bad == [[], ["NCCL variables", "equal variables"]], first.output.read_text()
    values = {r["check"]: r["value"] for host in found["hosts"] for r in host["results"]}
    assert values["shared folder"].endswith("2 of 2 hosts' files seen")
    group = {r["check"]: r["verdict"] for r in found["group"]}
    assert FAIL not in group.values() and {"all-reduce", "all-to-all sums", "small steps"} <= set(group)
    assert "(node 1), NCCL variables: unset it" in first.output.read_text()
    assert list(tmp_path.glob(".preflight*")) == []


def results(output, found: Path) -> tuple[list[dict], list[dict]]:
    """Of the only host, and of the group; the output has no traceback."""
    assert "Traceback" not in output.read_text()
    content = json.loads(found.read_text())
    [host] = content["hosts"]
    return host["results"], content["group"]


def test_a_number_of_ranks_that_fits_no_config_is_a_result_and_the_host_is_checked(server, make_config, tmp_path):
    (tmp_path / "run.toml").write_text(dump_config(make_config()))
    options = ["--config", str(tmp_path / "run.toml"), "--json", str(tmp_path / "found.json")]
    started = server.start("preflights.preflight", "--nproc", "3", *options)
    assert started.wait() == 1
    host, group = results(started.output, tmp_path / "found.json")
    [layout] = [r for r in host if r["check"] == "layout"]
    assert layout["verdict"] == FAIL and "4 experts of a layer sharded over 3 ranks" in layout["value"]
    small = {r["check"]: r for r in group}["small steps"]
    assert small["verdict"] == PASS and small["value"].endswith("ranks: 3 = replicate 3")


def test_the_error_of_a_rank_is_a_result_of_its_host_beside_what_was_found_before(server, tmp_path):
    options = ["--nproc", "2", "--json", str(tmp_path / "found.json")]
    started = server.start("preflights.preflight_with_broken_rank", *options)
    assert started.wait() == 1
    host, group = results(started.output, tmp_path / "found.json")
    [ranks] = [r for r in host if r["check"] == "ranks"]
    assert ranks["verdict"] == FAIL
    assert ranks["value"].startswith("rank 1 in small steps: NotImplementedError: uneven shards (preflights.py, line ")
    assert {r["check"]: r["verdict"] for r in host}["product sums"] == PASS
    assert {r["check"]: r["verdict"] for r in group}["all-to-all sums"] == PASS
    assert "error: rank 1 in small steps: NotImplementedError" in started.output.read_text()
