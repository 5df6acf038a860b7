"""Several hosts: facts that must be equal, the table, JSON, and the plan of the small model."""

import io

import pytest
from rich.console import Console

from glm46.config.check import check_config
from glm46.operate.cluster.equal_hosts import compare_hosts
from glm46.operate.cluster.rank_checks import min_copy_speed
from glm46.operate.cluster.report import as_json, from_json, print_table
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, Result, worst
from glm46.operate.cluster.small_steps import small_plan
from glm46.operate.estimate.plan_sizes import describe_layout

HOSTS = ("n0", "n1", "n2")


def compared(**changed: str) -> list[Result]:
    """Results of three hosts, the second of which has changed facts."""
    facts = {host: {"torch": "2.13.0", "kernel": "6.1", "variables": "none"} for host in HOSTS}
    facts["n1"] |= changed
    return [*(Result("open files", PASS, "65,536", host=host) for host in HOSTS), *compare_hosts(facts)]


def test_the_host_that_differs_from_most_is_named():
    assert [(r.host, r.verdict) for r in compared()] == [(host, PASS) for host in HOSTS] * 2
    results = compared(torch="2.11.0", kernel="5.15")
    assert [worst(r for r in results if r.host == host) for host in HOSTS] == [PASS, FAIL, PASS]
    assert [(r.check, r.verdict, r.value, r.limit) for r in results if r.host == "n1"][1:] == [
        ("equal torch", FAIL, "2.11.0", "2.13.0"),
        ("equal kernel", WARN, "5.15", "6.1"),
    ]


def test_json_holds_all_and_is_read_back():
    results = [*compared(torch="2.11.0"), Result("all-reduce", PASS, "0.7 GB/s", ">= 0.02 GB/s")]
    line = as_json(results, 12.34)
    assert line.startswith('{"preflight": "FAIL", "seconds": 12.3') and "\n" not in line
    assert from_json(line) == results


def test_a_check_that_all_pass_is_one_row_and_a_fault_names_its_host():
    results = [*compared(torch="2.11.0"), Result("shared [folder]", SKIP, "one host")]
    output = io.StringIO()
    print_table(results, 9.0, Console(file=output, width=120))
    text = output.getvalue()
    assert text.count("open files") == 1 and "3 hosts" in text and "shared [folder]" in text
    assert "FAIL n1, equal torch: " in text and text.rstrip().endswith(
        "FAIL: 3 hosts, 5 PASS, 1 SKIP, 0 WARN, 1 FAIL, 9 s"
    )


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
