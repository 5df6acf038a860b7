"""Cost of a run: effective time, energy, efficiencies, and prices."""

import random
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.config.loader import load_config
from glm46.engine.observe.peaks import ACCELERATORS, accelerator_of
from glm46.operate.estimate import run_cost as page
from glm46.operate.estimate.prices import PRICES, price_of
from glm46.operate.estimate.run_cost import RunCost, StageCost, effective_ratio, effective_time, run_cost, sensitivity
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.plan import resolve_plan

HOUR = 3600.0
TRAIN_CONFIGS = Path(__file__).parents[4] / "train_configs"


def cost(steps: int, step_seconds: float, gpus: int) -> RunCost:
    stage = StageCost(steps, steps * step_seconds, None)
    return RunCost(TargetCluster(accelerator_of("H100"), gpus), [stage], 10**9, 1e20)


def test_an_interval_of_1000_steps_of_30_s_loses_half_of_the_time_on_8192_gpus(make_config):
    plan = resolve_plan(make_config(checkpoint={"interval": 1000}), 1)
    found = effective_time(plan, cost(100_000, 30.0, 8192))
    assert found.failure_seconds / HOUR == pytest.approx(6.2, abs=0.05) and found.interval_seconds == 30_000
    assert found.ratio == pytest.approx(0.47, abs=0.01)
    # sqrt(2 x 5 s x 6.2 h) are 472 s, 16 steps.
    assert found.best_steps == 16 and found.best_ratio == pytest.approx(0.965, abs=0.002)
    for steps in (8, 32):
        assert effective_ratio(30.0 * steps, found.failure_seconds) < found.best_ratio


def test_failures_at_random_cost_what_the_formula_says():
    draw = random.Random(3)
    for interval, between in ((600.0, 2 * HOUR), (2 * HOUR, HOUR)):
        clock, failure, done = 0.0, draw.expovariate(1 / between), 0
        while done < 4000:
            end = clock + interval + page.STALL_SECONDS
            if end <= failure:
                clock, done = end, done + 1
                continue
            clock = failure
            while True:  # a restart may fail, too
                failure = clock + draw.expovariate(1 / between)
                if clock + page.RESTART_SECONDS <= failure:
                    clock += page.RESTART_SECONDS
                    break
                clock = failure
        assert done * interval / clock == pytest.approx(effective_ratio(interval, between), rel=0.03)


def test_an_interval_ends_with_the_run_and_may_never_end(make_config):
    plan = resolve_plan(make_config(checkpoint={"interval": 1000}), 1)
    found = effective_time(plan, cost(20, 1.0, 8))
    assert found.interval_seconds == 20 and found.best_steps == 20 and found.ratio == found.best_ratio > 0.79
    spent = cost(20, 1.0, 8)
    assert (found.days, found.gpu_hours) == pytest.approx((spent.days / found.ratio, spent.gpu_hours / found.ratio))
    assert effective_ratio(1e9, HOUR) == 0.0


def test_runs_without_checkpoints_have_none(make_config):
    plan = resolve_plan(make_config(checkpoint={"enable": False}), 1)
    assert effective_time(plan, cost(20, 1.0, 8)) is None


def test_energy_is_that_of_hosts_and_of_the_data_centre_too():
    """Eight H100 with their host at work take between their own 5.6 kW and the 10.2 kW of a DGX H100."""
    of_a_day = cost(1, 86_400.0, 8).megawatt_hours
    assert of_a_day == pytest.approx(8 * 24 * 700 * (1 + page.HOST_SHARE) * page.PUE / 1e6)
    assert 5.6 < of_a_day / 24 / page.PUE * 1000 < 10.2
    named = TargetCluster(accelerator_of("MI300X:bf16=1307,memory=191,bandwidth=5300,link=448"), 8)
    assert RunCost(named, [StageCost(1, 1.0, None)], 1, 1.0).megawatt_hours is None


def test_a_lower_efficiency_takes_longer_and_a_share_ends_at_1():
    config = load_config(TRAIN_CONFIGS / "glm45_air_pretrain.toml")
    plan, cluster = resolve_plan(config, 32, host_ranks=8), TargetCluster(accelerator_of("H100"), 32)
    whole = run_cost(plan, cluster)
    days = sensitivity(plan, whole)
    assert all(less >= whole.days >= more for less, more in days.values())
    assert days["experts"][0] > whole.days > days["experts"][1]
    assert cluster.efficiencies.overlap == 1.0 and days["overlap"][1] == whole.days


def test_every_price_is_of_a_known_gpu_and_falls_with_what_one_gives_up():
    assert {gpu.name for gpu in ACCELERATORS} >= PRICES.keys()
    for price in PRICES.values():
        assert price.on_demand > 0
        assert all(0 < less < price.on_demand for less in price[1:] if less)
    h100 = PRICES["H100"]
    assert h100.on_demand > h100.reserved > h100.spot > 0


@pytest.mark.slow
def test_a_plan_takes_prices_of_the_table(capsys):
    command = ["plan", "--config", "train_configs/air_lora.toml", "--gpu", "H100", "--price"]
    costs = {}
    for price in ("on-demand", str(PRICES["H100"].on_demand), "spot"):
        assert main([*command, price]) == 0
        costs[price] = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  cost"))
    first, second, spot = costs.values()
    assert first == second != spot and f"(at ${PRICES['H100'].spot:.2f})" in spot


@pytest.mark.parametrize(
    ("gpu", "kind", "known"), [("B200", "spot", "has on-demand of B200"), ("L4", "spot", "none of L4")]
)
def test_a_price_that_is_not_known_is_refused(gpu, kind, known, capsys):
    with pytest.raises(ValueError, match=known):
        price_of(accelerator_of(gpu), kind)
    assert main(["plan", "--config", "train_configs/debug.toml", "--gpu", gpu, "--price", kind]) == 2
    assert f"--price {kind}: the table of prices" in capsys.readouterr().err
