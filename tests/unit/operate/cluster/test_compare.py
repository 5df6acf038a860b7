"""Several hosts: what must be equal, the table, JSON, and the rank that others wait for."""

import io

import pytest
from rich.console import Console

from glm46.config.check import check_config
from glm46.operate.cluster import compare
from glm46.operate.cluster.compare import as_json, compare_hosts, from_json, print_table, worst
from glm46.operate.cluster.preflight_ranks import small_plan
from glm46.operate.cluster.ranks import min_copy_speed
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, HostReport, Result
from glm46.operate.estimate.plan_sizes import describe_layout


def hosts(**changed: str) -> list[HostReport]:
    facts = {"torch": "2.13.0", "kernel": "6.1", "variables": "none"}
    reports = [HostReport(f"n{number}", [Result("open files", PASS, "65,536")], dict(facts)) for number in range(3)]
    reports[1].facts |= changed
    compare_hosts(reports)
    return reports


def test_the_host_that_differs_from_most_is_named():
    assert [[r.verdict for r in report.results] for report in hosts()] == [[PASS, PASS]] * 3
    found = hosts(torch="2.11.0", kernel="5.15")
    assert [worst(report.results) for report in found] == [PASS, FAIL, PASS]
    assert [(r.check, r.verdict, r.value, r.limit) for r in found[1].results[1:]] == [
        ("equal torch", FAIL, "2.11.0", "2.13.0"),
        ("equal kernel", WARN, "5.15", "6.1"),
    ]


def test_json_holds_all_and_is_read_back():
    reports, group = hosts(torch="2.11.0"), [Result("all-reduce", PASS, "0.7 GB/s", ">= 0.02 GB/s")]
    line = as_json(reports, group, 12.34)
    assert line.startswith('{"preflight": "FAIL"') and "\n" not in line
    assert from_json(line) == (reports, group, 12.3)


def test_a_check_that_all_pass_is_one_row_and_a_fault_names_its_host():
    reports, output = hosts(torch="2.11.0"), io.StringIO()
    print_table(reports, [Result("shared [folder]", SKIP, "one host")], 9.0, Console(file=output, width=120))
    text = output.getvalue()
    assert text.count("open files") == 1 and "3 hosts" in text and "shared [folder]" in text
    assert "FAIL n1, equal torch: " in text and text.rstrip().endswith(
        "FAIL: 3 hosts, 5 PASS, 1 SKIP, 0 WARN, 1 FAIL, 9 s"
    )


def test_a_host_is_drained_for_what_is_broken_and_not_for_what_a_config_has_wrong(monkeypatch):
    monkeypatch.setattr(compare.shutil, "which", lambda name: "/usr/bin/" + name)
    broken = Result("kernel log", FAIL, "Xid 79", "none", "REBOOT the host: GPU has fallen off the bus")
    wrong = Result("layout", FAIL, "3 ranks", "2", "set degrees whose product is the number of ranks")
    reports = [HostReport("n1.cluster (node 0)", [broken, broken, wrong]), HostReport("n2", [wrong])]
    output = io.StringIO()
    print_table(reports, [], 9.0, Console(file=output, width=120))
    lines = [line for line in output.getvalue().splitlines() if line.startswith("drain: ")]
    assert lines == ["drain: scontrol update NodeName=n1 State=DRAIN Reason='preflight: kernel log'"]


@pytest.mark.parametrize(
    "speeds, gpu, least", [([55.0, 54.0], "H100", 49.5), ([20.0, 20.0], "H100", 38.4), ([9.0], "L4", 8.1)]
)
def test_copies_of_slow_hosts_alone_are_below_what_their_link_gives(speeds, gpu, least):
    assert min_copy_speed(speeds, gpu) == pytest.approx(least)


def test_the_small_model_keeps_the_degrees_that_fit_it(make_config):
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
def test_any_number_of_ranks_can_train_the_small_model(ranks, layout, make_config):
    """FSDP2 takes no uneven shards of experts, and so many hosts are neither the user's mistake nor a fault."""
    for config in (None, make_config()):
        plan = small_plan(config, ranks)
        assert describe_layout(plan.layout) == layout
        assert check_config(plan.config, world_size=ranks) == []
