"""The trainer's distributions over the tokens that the engine sampled from are the engine's, on layouts of both."""

import pytest
import torch

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import join, leave
from glm46.config.generation_degrees import Degrees
from glm46.engine.inference.model_mesh import build_model_mesh
from glm46.engine.training.network import Network, build_network
from glm46.run.layout import generation_layout
from glm46.run.plan import resolve_plan
from glm46.tasks.rl.objectives import PolicyGradient
from glm46.tasks.rl.packing import PackShape, build_batch, collect, items_of
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import Episode, SamplingRules
from glm46.tasks.rl.samples import Samples, to_samples
from glm46.tasks.rl.stepping import gathered
from tests.harness import run_ranks
from tests.ranks.sharded_layouts import SHAPE, VOCABULARY, Layout, make_config
from tests.ranks.test_policy_gradients import resolved
from tests.ranks.test_rollouts import LENGTH, REQUESTS, STOP, TEMPERATURE, spread

RULES = SamplingRules(TEMPERATURE, STOP, VOCABULARY, top_p=0.8, top_k=24)


def engine_samples(network: Network, degrees: Degrees, ranks: int, rank: int) -> Samples:
    """Generate all requests in few rows, with drafts if the model has prediction layers. Collective."""
    mesh = build_model_mesh(generation_layout(degrees, ranks), rank, "cpu")
    has_drafts = network.plan.shape.num_nextn_predict_layers > 0
    engine = LocalEngine(network, max_length=LENGTH, mesh=mesh, rows=5, speculative=has_drafts)
    engine.update(0)
    completions = engine.generate(REQUESTS, RULES)
    episodes = [
        Episode([completion._replace(prompt=request.prompt)], group=number, reward=0.0, parts={"exact": 0.0})
        for number, (request, completion) in enumerate(zip(REQUESTS, completions, strict=True))
    ]
    return to_samples(episodes, ["exact"], step=0, first_prompt=0, next_prompt=len(episodes))


def trainer_logprobs(network: Network, samples: Samples, *, restricts: bool) -> torch.Tensor:
    """Return what the policy's head computes for all targets, by the batches of a step. Collective."""
    shape = PackShape(LENGTH, len(samples), 1, None, 0, restricts=restricts)
    rows = [[number] for number in range(len(samples))]
    batch = build_batch(samples, rows, 0, shape, items_of(samples, range(len(samples)), shape), LENGTH)
    form = PolicyGradient(network, resolved("grpo_r3"), TEMPERATURE).form
    output = network.evaluate(batch, form)
    values = torch.full((len(samples.logprobs),), -torch.inf)
    if output is not None:  # of the pipeline's stages one has the head
        collect(network.whole_rows(output.logprobs.unsqueeze(0), batch)[0], batch, values)
    network.release()
    return gathered(values)


@torch.no_grad()
def generate_and_score(layout: Layout, degrees: Degrees) -> dict:
    """On each rank."""
    process = join(300)
    plan = resolve_plan(make_config(layout, SHAPE["num_hidden_layers"]), process.world_size)
    network = build_network(plan, build_cluster(plan, process))
    network.loaded(new_adapters=True)
    spread(network, 5.0)
    samples = engine_samples(network, degrees, process.world_size, process.rank)
    logprobs = torch.from_numpy(samples.logprobs)
    kept = trainer_logprobs(network, samples, restricts=True)
    whole = trainer_logprobs(network, samples, restricts=False)
    leave()
    return {
        "error": (kept - logprobs).abs().max().item(),
        "unrestricted": (whole - logprobs).abs().max().item(),
        "tokens": samples.tokens.tolist(),
        "counts": samples.kept_counts.tolist(),
        "ids": samples.kept_ids.tolist(),
    }


@pytest.mark.slow
def test_log_probabilities_over_the_kept_tokens_are_the_engine_s():
    alone = run_ranks(generate_and_score, 1, Layout(), Degrees())[0]
    assert 1 < min(alone["counts"]) < max(alone["counts"]) < RULES.top_k, "both filters exclude tokens"
    rows = [alone]
    for layout, degrees in (
        (Layout(tensor=2), Degrees(expert_parallel=2)),
        (Layout(context=2), Degrees(tensor_parallel=2)),
        (Layout(pipeline=2, schedule="DualPipeV"), Degrees(2, 1, 2)),
    ):
        rows.append(run_ranks(generate_and_score, 2, layout, degrees)[1])
    for row in rows:
        assert row["error"] < 1e-5, "FP32, logits of order 1 in sums of another order"
        assert row["unrestricted"] > 0.1
        assert all(row[key] == alone[key] for key in ("tokens", "counts", "ids"))
