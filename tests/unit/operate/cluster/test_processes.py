"""Ranks of each host, and ports that several hosts need."""

from argparse import Namespace
from pathlib import Path

import pytest

from glm46.commands.preflight import preflight_command
from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config
from glm46.operate.cluster import preflight
from glm46.operate.cluster.preflight import Preflight
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.launch.nodes import Nodes

GIB = 2**30
CONFIGS = Path(__file__).parents[4] / "train_configs"
LAPTOP = {"cores": 8, "memory_bytes": 16 * GIB, "free_bytes": 12 * GIB}
SERVER = {"cores": 64, "memory_bytes": 999 * GIB, "free_bytes": 900 * GIB, "gpus": (Gpu("NVIDIA H100", 79 * GIB),) * 8}


@pytest.mark.parametrize(
    ("machine", "nodes", "config", "overrides", "ranks"),
    [
        (LAPTOP, 1, None, [], 2),
        (LAPTOP, 3, None, [], 2),
        (SERVER, 2, None, [], 8),
        (LAPTOP, 2, "debug.toml", [], 2),
        (
            SERVER,
            2,
            "debug.toml",
            ["--parallelism.data_parallel_replicate_degree=3", "--training.global_batch_size=12"],
            6,
        ),
        (LAPTOP, 2, "debug.toml", ["--parallelism.data_parallel_shard_degree=8", "--training.global_batch_size=32"], 4),
        # Refused by `launch`: the hosts are checked on what they have.
        (LAPTOP, 2, "glm46_phase3.toml", [], 2),
        (SERVER, 2, "glm46_phase1.toml", [], 8),
    ],
)
def test_a_host_has_as_many_ranks_as_a_node_of_the_run(machine, nodes, config, overrides, ranks):
    config = load_config(CONFIGS / config, overrides) if config else None
    host = Preflight(Namespace(nproc=None), (), config, Nodes(nodes, 0, "node0"))
    assert host.processes(Machine(**machine, nodes=nodes)) == ranks


@pytest.mark.parametrize(("stated", "of_job", "ranks"), [(5, None, 5), (None, 3, 3), (5, 3, 5)])
def test_a_number_that_is_stated_goes_before(stated, of_job, ranks):
    host = Preflight(Namespace(nproc=stated), (), None, Nodes(processes=of_job))
    assert host.processes(Machine(**LAPTOP)) == ranks


def test_an_exporter_on_the_port_where_ranks_meet_is_refused_before_any_check(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "run_checks", lambda *_: pytest.fail("a check has run"))
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.toml").write_text(dump_config(make_config(metrics={"prometheus_port": 29777})))
    with pytest.raises(UserError, match="metrics.prometheus_port = 29777: ranks meet at .*; state a port outside"):
        preflight_command(["--config", str(tmp_path / "run.toml")])
