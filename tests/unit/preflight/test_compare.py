"""Several hosts: what must be equal, the table, JSON, and the rank that others wait for."""

import io

from rich.console import Console

from glm46.commands.preflight import _failed_ranks
from glm46.commands.preflight_ranks import small_plan
from glm46.commands.torchrun import End
from glm46.preflight.compare import as_json, compare_hosts, from_json, worst
from glm46.preflight.results import FAIL, PASS, SKIP, WAITS, WARN, HostReport, Result
from glm46.preflight.table import print_table


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


def test_the_rank_that_others_wait_for_is_named():
    stages = {0: f"all-reduce{WAITS}", 1: "products", 2: f"products{WAITS}"}
    found = _failed_ranks(stages, End(76, "a rank hung"))
    assert found.verdict == FAIL and found.value == "a rank hung; rank 1 in products"
    assert "rank 0 in meeting" in _failed_ranks({0: "meeting", 1: "meeting"}, End(1)).value
    assert "before they began" in _failed_ranks({}, End(1)).value


def test_the_small_model_keeps_the_degrees_that_fit_it(make_config):
    plan = small_plan(make_config(parallelism={"tensor_parallel_degree": 2}), 4)
    assert (plan.layout.tp, plan.layout.world_size) == (2, 4)
    assert small_plan(make_config(parallelism={"tensor_parallel_degree": 3}), 4).layout.tp == 1
    assert small_plan(None, 3).layout.world_size == 3
