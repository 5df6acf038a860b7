"""The reasons for a low MFU: the shares of the planned step, and the batch where a larger one would help."""

import re
from pathlib import Path

import pytest

from glm46.config.loader import load_config
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.limits import limits
from glm46.operate.estimate.pipeline_order import pipeline_order
from glm46.operate.estimate.plan_sizes import batches_of
from glm46.operate.estimate.step_time import step_time
from glm46.operate.estimate.target_cluster import Efficiencies, TargetCluster
from glm46.run.plan import resolve_plan

RECIPES = Path(__file__).parents[4] / "train_configs"


def explained(recipe, options):
    plan = resolve_plan(load_config(RECIPES / f"{recipe}.toml", options))
    shares = Efficiencies(
        products=0.72, experts=0.60, experts_rows=0.0, attention=0.50, attention_rows=0.0, memory=0.80, network=0.75
    )
    cluster = TargetCluster(accelerator_of("H100"), plan.layout.world_size, efficiencies=shares)
    sequences = batches_of(plan, 0)[1]
    step = step_time(plan, 0, sequences, cluster, pipeline_order)
    larger = step_time(plan, 0, 16 * sequences, cluster, None).mfu / step_time(plan, 0, sequences, cluster, None).mfu
    return plan, step, larger, limits(plan, 0, step, cluster)


@pytest.mark.parametrize(("recipe", "options", "batch", "words"), [
    ("glm46_phase1", (), "a limit: 4.1943M tokens in a step leave 512 for each of 8,192 GPUs", [
        ("waiting for ep", "32 GPUs over nodes with 400 Gbit/s"), ("waiting for tp", "8 GPUs inside a node"),
        ("pipeline bubble", "32 micro-batches through 16 stages")]),
    ("glm46_phase1", ("--training.global_batch_size=32768",), "not the limit: 67.109M tokens", []),
    ("scaled_64gpu", (), "not the limit", [("recomputation", '"selective"')]),
    ("debug", (), "not the limit: 4.096k tokens in a step leave 4,096 for one GPU", [
        ("launches", "1,024 tokens of a micro-batch")]),
])  # fmt: skip
def test_the_largest_losses_are_explained(recipe, options, batch, words):
    plan, step, larger, (first, *losses) = explained(recipe, options)
    assert f"the batch is {batch}" in first and (larger >= 1.2) == ("a limit" in first)
    assert f"leave {step.tokens / plan.layout.world_size:,.0f} for " in first
    shares = [int(re.match(r"(\d+)%: ", line)[1]) for line in losses]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 100 - 100 * step.mfu + 2
    for cause, text in words:
        share = f"{step.parts[cause] / step.seconds:.0%}: "
        assert any(line.startswith(share) and text in line for line in losses), (cause, losses)
