"""Results of ranks, hosts and all hosts: merged, as a table and as JSON; the plan of the small job; equal hosts.

The rehearsal of recovery: runs of the small model, and a run that cannot begin.
"""

import io

import pytest
from rich.console import Console

from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.operate.cluster import recovery
from glm46.operate.cluster.equal_hosts import equal_hosts, host_facts
from glm46.operate.cluster.results import (
    FAIL,
    PASS,
    SKIP,
    WARN,
    Defect,
    Result,
    as_json,
    from_json,
    judge,
    merge_ranks,
    print_table,
    run_check,
    write_results,
)
from glm46.operate.cluster.small_job import small_plan
from glm46.operate.estimate.plan_sizes import describe_layout

HOSTS = ("n0", "n1", "n2")
RESULTS = [
    *(Result("limits", PASS, "65,536 open files", host=host) for host in HOSTS),
    Result("equal hosts", FAIL, "torch: 2.11.0, not 2.13.0", "equal", "install the same", "n1"),
    Result("shared [folder]", SKIP, "one host", host="n0"),
]


def test_faults_of_a_check_are_one_result():
    assert judge("ports", [], "80", "free") == Result("ports", PASS, "80", "free")
    faults = [Defect(WARN, "a", "wait"), Defect(FAIL, "b", "end it"), Defect(WARN, "c", "wait")]
    assert judge("ports", faults, "80", "free") == Result("ports", FAIL, "a; b; c", "free", "wait; end it")


def test_the_ranks_of_a_host_that_have_a_fault_are_named():
    def products(status, value):
        return Result("products", status, value, ">= 5")

    hosts = ["n0", "n0", "n1", "n1"]
    ranks = [products(PASS, "9"), products(PASS, "8"), products(PASS, "7"), products(FAIL, "1")]
    good, bad = merge_ranks(hosts, ranks)
    assert (good.host, good.status) == ("n0", PASS) and (bad.host, bad.status, bad.value) == ("n1", FAIL, "1")
    both = merge_ranks(hosts, [products(FAIL, "2"), products(WARN, "3"), None, products(SKIP, "none")])
    assert both[0].status == FAIL and both[0].value == "rank 0: 2; rank 1: 3"
    assert both[1].status == SKIP


@pytest.mark.parametrize(
    ("error", "value"),
    [
        (UserError("key = 1: wrong"), "UserError: key = 1: wrong"),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (NotImplementedError("no uneven shards"), "NotImplementedError: no uneven shards"),
    ],
)
def test_the_error_of_a_check_is_a_result(error, value):
    def check():
        raise error

    result = run_check("limits", check)
    assert (result.name, result.status, result.value) == ("limits", FAIL, value) and "report" in result.remedy


def test_json_holds_all_and_is_read_back(tmp_path):
    line = as_json(RESULTS, 12.34)
    assert line.startswith('{"preflight": "FAIL", "seconds": 12.3') and "\n" not in line
    assert from_json(line) == RESULTS
    write_results(tmp_path / "results.json", RESULTS)
    assert from_json((tmp_path / "results.json").read_text()) == RESULTS


def test_a_check_that_all_pass_is_one_row_and_a_fault_names_its_host():
    output = io.StringIO()
    print_table(RESULTS, 9.0, Console(file=output, width=120))
    text = output.getvalue()
    assert text.count("limits") == 1 and "3 hosts" in text and "shared [folder]" in text
    assert "FAIL n1, equal hosts: install the same" in text
    assert text.rstrip().endswith("FAIL: 3 hosts, 3 PASS, 1 SKIP, 0 WARN, 1 FAIL, 9 s")


class GatheredRanks:
    """Ranks of three hosts, the others of which have the usual facts."""

    def __init__(self, usual):
        self._usual = usual

    def gather(self, value):
        return [self._usual, value, self._usual]


@pytest.mark.parametrize(
    ("changed", "status", "value"),
    [
        ({}, PASS, "3 facts as most hosts have them"),
        ({"torch": "2.11.0"}, FAIL, "torch: 2.11.0, not 2.13.0"),
        ({"kernel": "5.15"}, WARN, "kernel: 5.15, not 6.1"),
    ],
)
def test_a_host_that_differs_from_most_is_named(changed, status, value):
    usual = {"torch": "2.13.0", "kernel": "6.1", "variables": "none"}
    result = equal_hosts(GatheredRanks(usual), usual | changed)
    assert (result.status, result.value) == (status, value)


def test_facts_of_a_host_follow_its_config_and_variables(monkeypatch):
    facts = host_facts("a")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    changed = host_facts("b")
    different = {name for name, value in facts.items() if changed[name] != value}
    assert different == {"config", "variables"} and "NCCL_ALGO=Tree" in changed["variables"]


def test_the_small_job_keeps_the_degrees_that_fit_it(make_config):
    plan = small_plan(make_config(parallelism={"tensor_parallel_degree": 2}), 4)
    assert (plan.layout.tp, plan.layout.world_size) == (2, 4)
    assert small_plan(make_config(parallelism={"tensor_parallel_degree": 3}), 4).layout.tp == 1
    assert describe_layout(small_plan(None, 2).layout) == "2 = shard 2"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, "3 = replicate 3"),
        (6, "6 = replicate 3 x shard 2"),
        (24, "24 = replicate 3 x shard 8"),
        (1024, "1,024 = replicate 4 x shard 256"),
    ],
)
def test_any_number_of_ranks_can_train_the_small_job(ranks, layout, make_config):
    """FSDP2 takes no uneven shards of experts, and this many hosts are neither the user's mistake nor a fault."""
    for config in (None, make_config()):
        plan = small_plan(config, ranks)
        assert describe_layout(plan.layout) == layout
        assert check_config(plan.config, world_size=ranks) == []


@pytest.mark.long
def test_a_run_that_loses_a_rank_has_the_losses_of_an_undisturbed_one():
    result = recovery.recovery(2, has_gpu=False)
    assert result.status == PASS and "16 losses within 0e+00" in result.value, result


@pytest.mark.slow
def test_a_run_that_cannot_begin_is_a_failure_with_its_message(monkeypatch):
    monkeypatch.setattr(recovery, "_CONFIG", recovery._CONFIG.replace("seq_len = 64", "seq_len = 0"))
    result = recovery.recovery(2, has_gpu=False)
    assert result.status == FAIL and "exit code 2" in result.value and "training.seq_len" in result.value


@pytest.mark.parametrize(
    ("losses", "status"),
    [({1: 9.0, 16: 8.0}, FAIL), (dict.fromkeys(range(1, 17), 9.0), PASS)],
    ids=["steps are missing", "equal"],
)
def test_all_losses_must_be_there_and_equal(losses, status, monkeypatch):
    expected = dict.fromkeys(range(1, 17), 9.0)
    monkeypatch.setattr(recovery, "_train", lambda _, name, __, killed_at=None: losses if killed_at else expected)
    assert recovery.recovery(2, has_gpu=False).status == status
    changed = expected | {16: float("nan")}
    monkeypatch.setattr(recovery, "_train", lambda _, name, __, killed_at=None: changed if killed_at else expected)
    assert recovery.recovery(2, has_gpu=True).status == FAIL
