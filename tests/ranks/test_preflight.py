"""`preflight` on two hosts of one rank each, both of which are this machine, and ranks that fail."""

import json
import time
from pathlib import Path

from glm46.compute.distributed.process import Process
from glm46.config.loader import dump_config
from glm46.operate.cluster import rank as rank_module
from glm46.operate.cluster.results import FAIL, PASS, Result, from_json
from glm46.run.plan import Plan
from tests.harness import start
from tests.processes import PROGRAM_SECONDS, free_port
from tests.ranks.forked_launch import preflight


def preflight_with_broken_rank(*argv: str) -> None:
    """As `preflight`; rank 1 raises in the small job, after it has joined the collectives before it."""

    def prepare(rank: int) -> None:
        if rank == 1:
            rank_module.small_job = _unfinished

    preflight(*argv, prepare=prepare)


def _unfinished(plan: Plan, process: Process) -> Result:
    raise NotImplementedError("uneven shards")


def preflight_with_rank_that_waits(*argv: str) -> None:
    """As `preflight`; rank 1 does not come to the end of its products, and the others wait for it for some seconds."""

    def prepare(rank: int) -> None:
        rank_module._WAIT_SECONDS = {False: 3}
        if rank == 1:
            rank_module.products = lambda ranks: time.sleep(PROGRAM_SECONDS)

    preflight(*argv, prepare=prepare)


def start_node(port: str, node: int, *argv: str, **variables: str):
    environment = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    return start(preflight, "--nproc", "1", *argv, environment=environment)


def results(output: Path, file: Path) -> dict[str, Result]:
    """The results by their check; the output has no traceback."""
    assert "Traceback" not in output.read_text()
    return {result.name: result for result in from_json(file.read_text())}


def test_two_hosts_meet_and_the_one_with_a_fault_is_named(make_config, tmp_path):
    config = make_config(checkpoint={"interval": 2})
    (tmp_path / "run.toml").write_text(dump_config(config))
    port = str(free_port(behind=9))
    options = ("--config", str(tmp_path / "run.toml"), "--json", str(tmp_path / "found.json"))
    first, second = start_node(port, 0, *options), start_node(port, 1, *options, NCCL_ALGO="Tree")
    assert [first.wait(), second.wait()] == [1, 1], first.output.read_text()
    rows = [Result(**row) for row in json.loads((tmp_path / "found.json").read_text())["results"]]
    # Other work on this machine may be a warning, and is no failure.
    bad = [(row.host.partition(" ")[2], row.name) for row in rows if row.status == FAIL]
    # With two hosts, the variables of the first are the usual ones.
    assert bad == [("(node 1)", "NCCL variables"), ("(node 1)", "equal hosts")], first.output.read_text()
    assert next(row for row in rows if row.name == "equal hosts").status == PASS
    shared = [row.value for row in rows if row.name == "shared folder"]
    assert len(shared) == 2 and all(value.endswith("2 of 2 hosts' files seen") for value in shared)
    checks = {"clock offset", "products", "pairs", "collectives", "small job", "inputs", "storage"}
    for node in ("(node 0)", "(node 1)"):
        assert checks <= {row.name for row in rows if row.host.endswith(node)}
    assert "(node 1), NCCL variables: unset it" in first.output.read_text()
    assert "small job" not in second.output.read_text()  # the first host shows the results
    assert list(tmp_path.glob(".preflight*")) == []


def test_a_number_of_ranks_that_fits_no_config_is_a_result_and_the_host_is_checked(make_config, tmp_path):
    (tmp_path / "run.toml").write_text(dump_config(make_config()))
    options = ["--config", str(tmp_path / "run.toml"), "--json", str(tmp_path / "found.json")]
    started = start(preflight, "--nproc", "3", *options)
    assert started.wait() == 1, started.output.read_text()
    found = results(started.output, tmp_path / "found.json")
    assert found["layout"].status == FAIL and "4 experts of a layer sharded over 3 ranks" in found["layout"].value
    small = found["small job"]
    assert small.status == PASS and small.value.endswith("ranks: 3 = replicate 3")


def test_the_error_of_a_rank_is_a_result_next_to_earlier_results(tmp_path):
    options = ["--nproc", "2", "--json", str(tmp_path / "found.json")]
    started = start(preflight_with_broken_rank, *options)
    assert started.wait() == 1
    found = results(started.output, tmp_path / "found.json")
    assert found["ranks"].status == FAIL and "ended with exit code 1" in found["ranks"].value
    assert found["products"].status == found["collectives"].status == PASS
    message = "error: rank 1: NotImplementedError: uneven shards, in small job"
    assert message in started.output.read_text()


def test_the_rank_that_the_others_wait_for_is_named(tmp_path):
    options = ["--nproc", "2", "--json", str(tmp_path / "found.json")]
    started = start(preflight_with_rank_that_waits, *options)
    assert started.wait() == 1
    found = results(started.output, tmp_path / "found.json")
    assert found["products"].status == FAIL and "Ranks 1 failed to pass monitoredBarrier" in found["products"].value
    assert found["ranks"].status == FAIL and "collectives" not in found
