"""The effective time of a run against the figures of the requirement's guide and a simulation of failures."""

import random

import pytest

from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate import run_cost as page
from glm46.operate.estimate.run_cost import RunCost, StageCost, effective_ratio, effective_time
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.plan import resolve_plan

HOUR = 3600.0


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
