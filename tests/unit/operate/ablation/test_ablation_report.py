"""Figures, gaps and pages of an ablation, from made-up rows whose figures are known."""

import math
import random

import pytest

from glm46.operate.ablation.figures import Outcome, gap_rows, mean_rows, paired_test, run_figures, statistic
from glm46.operate.ablation.report import build_report, markdown, table

STEPS = 20


def rows(loss: float, norm: float = 1.0, speed: float = 100.0) -> list[dict]:
    """Rows of a run whose loss falls to ``loss`` and stays there for the last tenth."""
    return [
        {"step": step, "tokens": 10 * step, "loss": loss + 9.0, "loss_mean": loss + max(0, STEPS - 2 - step),
         "grad_norm": norm, "tokens_per_second": 1.0 if step == 1 else speed, "resident_memory_gib/max": step / STEPS,
         "skipped_steps": 0}
        for step in range(1, STEPS + 1)
    ]  # fmt: skip


def outcome(variant: str, seed: int, loss: float, **changes) -> Outcome:
    """A finished run."""
    usual = {"status": "finished", "seconds": 61.0, "train": rows(loss), "validation": [{"validation_loss": 2 * loss}]}
    return Outcome(variant, seed, f"out/{variant}/seed-{seed}", **{**usual, **changes})


def test_figures_of_a_run_and_its_gaps_in_per_cent():
    base = outcome("a", 0, 4.0)
    run = outcome("b", 0, 5.0, train=rows(5.0, norm=0.9, speed=150.0))
    assert run_figures(base, base) == {
        "final_loss": 4.0, "validation_loss": 8.0, "tokens_per_second": 100.0, "memory_gib": 1.0, "skipped_steps": 0,
    }  # fmt: skip
    found = run_figures(run, base)
    assert found["final_loss_gap"] == pytest.approx(25.0) and found["validation_loss_gap"] == pytest.approx(25.0)
    assert found["grad_norm_gap"] == pytest.approx(10.0) and found["tokens_per_second_gap"] == pytest.approx(50.0)
    assert found["memory_gib_gap"] == 0.0
    # Without a finished baseline there are no gaps.
    failed = outcome("a", 0, 4.0, status="failed")
    assert not any(name.endswith("_gap") for name in run_figures(run, failed) | run_figures(run, None))


def test_figures_that_the_rows_do_not_have_are_absent():
    """A loss that was not finite is None in its row; a run without validation has no validation loss."""
    run = outcome("a", 0, 4.0, validation=[])
    run.train[-1]["loss_mean"] = None
    for row in run.train:
        del row["resident_memory_gib/max"]
    assert run_figures(run, None) == {"tokens_per_second": 100.0, "skipped_steps": 0}


def test_rows_are_compared_at_the_same_tokens():
    base, run = rows(4.0), rows(5.0)[1::2]
    run[0]["tokens"] += 1
    gaps = gap_rows(outcome("b", 0, 5.0, train=run), outcome("a", 0, 4.0, train=base))
    assert "loss_gap" not in gaps[0] and len(gaps) == STEPS / 2
    assert gaps[-1]["loss_gap"] == pytest.approx(25.0) and gaps[-1]["grad_norm_gap"] == 0.0


def test_rows_of_several_seeds_are_averaged_where_all_have_them():
    one, two = rows(4.0), rows(6.0)[:-1]
    two[0]["grad_norm"] = None
    means = mean_rows([one, two])
    assert len(means) == STEPS - 1 and "grad_norm" not in means[0] and means[1]["grad_norm"] == 1.0
    assert means[-1]["loss_mean"] == pytest.approx(5.0) and means[-1]["tokens"] == 190
    assert mean_rows([]) == []


def test_mean_and_spread_over_seeds():
    assert statistic([]) is None
    assert statistic([3.0]).spread is None
    found = statistic([1.0, 2.0, 3.0])
    assert (found.mean, found.spread, found.count) == (2.0, 1.0, 3)


KEYS = {"a": {}, "b": {"optimizer.name": "AdamW", "optimizer.lr": 0.5}, "c": {"optimizer.lr": 9.0}}


def report():
    """Two seeds, three variants; one of them failed and was not started again."""
    outcomes = [outcome("a", 0, 4.0), outcome("a", 1, 4.4), outcome("b", 0, 5.0), outcome("b", 1, 4.84)]
    outcomes += [
        outcome("c", 0, 4.0, status="failed", error="diverged: a | b"),
        Outcome("c", 1, "out/c/seed-1", "missing"),
    ]
    return build_report(outcomes, KEYS, {"config": "x.toml", "command": "ablate it", "date": "today",
                                         "versions": "torch 9", "machine": "2 cores", "processes": "2"})  # fmt: skip


def test_report_has_mean_and_spread_of_paired_gaps():
    found = report()
    assert (found["baseline"], found["seeds"]) == ("a", [0, 1])
    a, b, c = found["variants"]
    gap = b["figures"]["final_loss_gap"]
    # 25 % and 10 %: each seed is compared with the baseline's run of this seed.
    assert gap["mean"] == pytest.approx(17.5) and gap["spread"] == pytest.approx(15 / math.sqrt(2))
    assert gap["count"] == 2 and "final_loss_gap" not in a["figures"]
    assert c["figures"] == {} and [run["status"] for run in c["runs"]] == ["failed", "missing"]
    assert b["keys"] == KEYS["b"] and "train" not in b["runs"][0]


def test_table_and_page_name_variants_gaps_errors_and_folders():
    header, _, a, b, c = table(report())
    assert header.startswith("| variant | final loss | gap, % | validation loss |")
    assert a.startswith("| a | 4.2000 ± 0.2828 |  | 8.4000") and a.endswith("| 2 of 2 |")
    assert "| +17.500 ± 10.607 |" in b and c.endswith("| 0 of 2 |")
    page = markdown(report(), ["ablation.png"])
    for text in (
        "# Ablation of x.toml", "`ablate it`", "torch 9", "Baseline: a", "![ablation](ablation.png)",
        '| b | `optimizer.name = "AdamW"`, `optimizer.lr = 0.5` |', "| a | as the file |",
        "| c, seed 0 | failed: diverged: a \\| b | 1m 01s | out/c/seed-0 |", "| c, seed 1 | missing | 0s |",
    ):  # fmt: skip
        assert text in page
    assert "![" not in markdown(report(), [])


def test_the_paired_test_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats", reason="not installed")
    generator = random.Random(3)
    for count in range(2, 12):
        gaps = [generator.gauss(0.3, 0.5) for _ in range(count)]
        half, p = paired_test(statistic(gaps))
        judge = stats.ttest_1samp(gaps, 0.0)
        low, high = judge.confidence_interval(0.95)
        assert (p, half) == pytest.approx((judge.pvalue, (high - low) / 2), rel=1e-6)
    assert paired_test(statistic([1.0])) is None and paired_test(statistic([1.0, 1.0])) is None


def test_the_page_says_whether_gaps_are_more_than_noise():
    page = markdown(report(), [])
    # 17.5 +- 12.706 x 7.5, and the baseline's 0.2828 of 4.2.
    assert "| b | final loss | -77.797 to +112.797 | 0.258 |" in page and "by 6.734 % in final loss" in page
    single = build_report([outcome("a", 3, 4.0), outcome("b", 3, 4.1)], KEYS, {k: "" for k in (
        "config", "command", "date", "versions", "machine", "processes")})  # fmt: skip
    assert "t-test" not in markdown(single, [])


def test_one_seed_has_no_spread():
    single = build_report([outcome("a", 3, 4.0), outcome("b", 3, 4.1)], {"a": {}, "b": {"x.y": 1}}, {})
    assert "±" not in "".join(table(single)) and "+2.500" in table(single)[-1]


def test_steps_that_were_skipped_are_named():
    run = outcome("b", 0, 4.0)
    run.train[-1]["skipped_steps"] = 3
    about = dict.fromkeys(("config", "command", "date", "versions", "machine", "processes"), "")
    page = markdown(build_report([outcome("a", 0, 4.0), run], {"a": {}, "b": {"x.y": 1}}, about), [])
    assert "finished, 3 steps skipped" in page


def test_errors_of_fp8_products_are_shown_by_kind_with_the_worst_layer():
    names = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "mtp.0.block.mlp.experts.down")
    errors = {name: {"output": 0.01 * (number + 1), "input_gradient": 0.04, "weight_gradient": 0.0}
              for number, name in enumerate(names)}  # fmt: skip
    about = dict.fromkeys(("config", "command", "date", "versions", "machine", "processes"), "")
    runs = [outcome("a", 0, 4.0), outcome("b", 0, 4.0, fp8_errors=errors)]
    found = build_report(runs, {"a": {}, "b": {"x.y": 1}}, about)
    assert found["variants"][1]["runs"][0]["fp8_errors"] == errors
    assert "| 2.00 | 4.00 | 0.00 | 1 of 1 |" in table(found)[-1] and "FP8 error: output, %" in table(found)[0]
    page = markdown(found, [])
    assert (
        "| b | self_attn.q_proj | 1.50 (2.00 at layers.1) | 4.00 (4.00 at layers.0) | 0.00 (0.00 at layers.0) |" in page
    )
    assert "| b | mlp.experts.down | 3.00 (3.00 at mtp.0) |" in page
    assert "FP8" not in markdown(build_report(runs[:1], {"a": {}}, about), [])
