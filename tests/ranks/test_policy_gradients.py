"""Policy and critic on fixed samples have the gradients and metrics of one process, on every kind of layout."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process, join, leave
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.model.routes import compact_routes
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.plan import initialise
from glm46.config.presets import resolve_shape
from glm46.config.rl import RLConfig
from glm46.engine.training.network import build_network
from glm46.engine.training.rank_sums import sum_on_host, sum_over_all_ranks
from glm46.engine.training.totals import count_step
from glm46.run.plan import resolve_plan
from glm46.tasks.rl.objectives import PolicyGradient, ValueLoss
from tests.ranks.sharded_layouts import (
    AUX_WEIGHTS,
    OPTIONS,
    ROWS,
    SEQ_LEN,
    VOCABULARY,
    Layout,
    gradient_errors,
    held,
    make_batch,
    make_config,
    make_routes,
    share_of,
    squares,
)
from tests.ranks.test_sharded_layouts import layout_case
from tests.unit.tasks.rl.samples import LAYOUT, prepared

ALGORITHMS = {
    # Samples that lie on several ranks of context parallelism have one ratio.
    "gspo": {
        "algorithm": "gspo", "clip": {"low": 0.03, "high": 0.03}, "kl": {"weight": 0.1}, "entropy_weight": 0.01,
        "correction": {"level": "sequence", "reject_level": "token", "reject_high": 1.3},
    },
    "grpo_r3": {
        "algorithm": "grpo", "reduction": "token_mean", "clip": {"low": 0.1, "high": 0.1}, "routing_replay": True,
    },
    # Its old policy is that of the step, whose weights are sums over samples on several ranks, too.
    "on_policy": {
        "algorithm": "gspo",
        "correction": {"level": "geometric", "high": 1.05, "reject_level": "sequence"},
    },
    # Distributions over the tokens that the engine kept.
    "kept": {"algorithm": "dr_grpo", "entropy_weight": 0.1},
    "ppo": {"algorithm": "ppo", "kl": {"weight": 0.1, "where": "reward"}},
}  # fmt: skip
_LAYOUTS = {
    2: [
        Layout(micro_batches=4), Layout(experts_over=2), Layout(context=2, checkpointing="selective"),
        Layout(tensor=2), Layout(pipeline=2, micro_batches=4), Layout(tensor=2, latent=True),
        Layout(context=2, checkpointing="selective", latent=True),
    ],
    4: [
        Layout(tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(pipeline=2, context=2, schedule="ZBVZeroBubble", micro_batches=4),
    ],
}  # fmt: skip
LAYOUTS = {ranks: {layout.name: layout for layout in layouts} for ranks, layouts in _LAYOUTS.items()}
TEMPERATURE, LONGEST = 0.7, 20


def make_samples(layout: Layout) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """All rows of a step: each document with labels is a sample, whose missing labels are tokens of a tool. The old
    policy is near that of new weights, where all tokens are about equally likely. The first document of a row comes
    before the second and the third too, where samples share prompts: without context parallelism."""
    generator = torch.Generator().manual_seed(7)
    batch = make_batch(0)
    if layout.context == 1:
        goes_on = (batch["document_ids"] == 1) | (batch["document_ids"] == 2)
        batch["prefix_ids"] = torch.where(goes_on, 0, -1)
        batch["positions"] += (batch["document_ids"] == 0).sum(1, keepdim=True) * goes_on
    is_target = batch["labels"] != IGNORE
    document = batch["document_ids"] + torch.arange(ROWS).unsqueeze(1) * SEQ_LEN
    numbers = torch.full((ROWS * SEQ_LEN,), -1)
    used = document[is_target].unique()
    numbers[used] = torch.randperm(len(used), generator=generator)

    def near(middle: Tensor | float, scale: float) -> Tensor:
        return (middle + scale * torch.randn(ROWS, SEQ_LEN, generator=generator)).where(is_target, torch.tensor(0.0))

    old = near(-6.3, 0.1)
    fields = {
        "sample": numbers[document].where(is_target, -1), "episode": numbers[document].where(is_target, -1),
        "old_logprobs": old, "rollout_logprobs": near(old, 0.15),
        "reference_logprobs": near(old, 0.3), "old_values": near(0.0, 0.1),
    }  # fmt: skip
    rewards = torch.randn(len(used), generator=generator, dtype=torch.float64)
    others = torch.randint(0, VOCABULARY, (ROWS, 3, SEQ_LEN), generator=generator)
    kept = torch.cat([batch["labels"].unsqueeze(1), others], 1).int()
    places = torch.arange(SEQ_LEN)
    kept[:, :, places % 4 == 0] = -1  # the whole vocabulary
    kept[:, 1:, places % 4 == 1] = -1  # the label alone, which has no gradient
    fields["kept"] = kept.where(is_target.unsqueeze(1), -1)
    return batch | fields, (rewards, torch.arange(len(used)) % 7)


def resolved(name: str) -> RLConfig:
    return RLConfig.model_validate({"prompts_per_rollout": 1} | ALGORITHMS[name]).resolved()


def objectives_of(networks: dict, rl: RLConfig) -> dict:
    """The objectives of an algorithm by the names of its networks."""
    is_on_policy = rl in (resolved("on_policy"), resolved("kept"))
    is_restricted = rl == resolved("kept")
    policy = PolicyGradient(networks["policy"], rl, TEMPERATURE, is_on_policy=is_on_policy, is_restricted=is_restricted)
    of = {"policy": policy}
    return of | ({"critic": ValueLoss(networks["critic"])} if rl.advantage == "gae" else {})


def reference_of(layout: Layout) -> tuple:
    """What decides what one process computes."""
    return layout.reference, layout.context == 1


def run_reference(layout: Layout) -> dict[str, tuple[dict, dict[str, Tensor]]]:
    """Of one process without any transform: metrics and gradients by algorithm and network."""
    config, found = make_config(layout), {}
    shape = resolve_shape(config.model)
    models = {}
    with torch.device("meta"):
        models["policy"] = Transformer(shape)
        models["critic"] = Transformer(shape.model_copy(update={"num_nextn_predict_layers": 0}), head="value")
    plan = SimpleNamespace(config=config, shape=shape, mtp_depths=shape.num_nextn_predict_layers)
    cluster = SimpleNamespace(meshes=SimpleNamespace(sequence=None), layout=LAYOUT)
    network = SimpleNamespace(plan=plan, cluster=cluster, whole_rows=lambda values, batch: values.detach())
    for model in models.values():
        model.to_empty(device="cpu")
        initialise(model, config.debug.seed)
        model.mtp_alone = True  # as in a run with [rl]
    for name in ALGORITHMS:
        rl = resolved(name)
        batch, rewards = make_samples(layout)
        (batch,) = prepared([batch], *rewards, rl, LONGEST)
        is_real = batch["document_ids"] >= 0
        weights = torch.tensor([*AUX_WEIGHTS[0], 1.0, 0.0]) / int(is_real.sum())  # no index losses here
        for of, objective in objectives_of(dict.fromkeys(models, network), rl).items():
            model = models[of]
            names = ["input_ids", "positions", "labels"]
            names += ["mtp_input_ids", "mtp_labels"] if of == "policy" else []
            attention = attention_layout(
                batch["document_ids"], (ROWS, SEQ_LEN), None, prefix_ids=batch.get("prefix_ids")
            )
            arguments = {"options": OPTIONS, "form": objective.form, "is_real": is_real, "layout": attention}
            if "routes" in objective.fields:
                arguments["routes"] = compact_routes(make_routes(0, shape), (ROWS, SEQ_LEN), shape)
            if "kept" in objective.fields:
                arguments["kept"] = batch["kept"]
            output = model(**{key: batch[key] for key in names}, **arguments)
            totals = objective.count([batch])
            loss = objective.loss(output, batch, totals, 0) + (weights * output.aux_losses).sum()
            model.zero_grad()
            loss.backward()
            sums = objective.empty_sums() | objective.sums(output, batch)
            gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
            found[f"{name}/{of}"] = objective.metrics(sums, totals, 0), gradients
    return found


def run_layout(process: Process, layout: Layout) -> dict[str, tuple[dict, dict]]:
    """The same by the engine, of the parts that this rank holds. Collective."""
    plan = resolve_plan(make_config(layout), process.world_size)
    cluster, found = build_cluster(plan, process), {}
    networks = {"policy": build_network(plan, cluster), "critic": build_network(plan, cluster, head="value")}
    for model in networks["policy"].models:
        model.mtp_alone = True
    for name in ALGORITHMS:
        rl = resolved(name)
        rows, rewards = make_samples(layout)
        (rows,) = prepared([rows], *rewards, rl, LONGEST)
        rows["routes"] = make_routes(0, plan.shape)
        batches = share_of(rows, plan, cluster, layout.micro_batches)
        objectives = objectives_of(networks, rl)
        task = SimpleNamespace(plan=plan, cluster=cluster, networks=networks, objectives=objectives)
        totals = sum_on_host(count_step(task, batches)).divided_by(plan.layout.non_dp_degree)
        for of, objective in objectives.items():
            network = networks[of]
            local_sums = network.compute(objective, batches, totals.objective_counts[of], totals.real, 0)
            sums = sum_over_all_ranks(local_sums.objective)
            gradients = {key: held(p.grad) for key, p in network.parameters.items()}
            found[f"{name}/{of}"] = objective.metrics(sums, totals.objective_counts[of], 0), gradients
    return found


def references(names: list[str], ranks: int, folder: Path) -> dict[tuple, dict]:
    """What one process computes, by `reference_of`."""
    return {reference_of(layout): run_reference(layout) for layout in (LAYOUTS[ranks][name] for name in names)}


def compare_layouts(names: list[str], expected: dict[tuple, dict]) -> Iterator[dict[str, dict]]:
    """On each rank."""
    process = join(300)
    for name in names:
        layout = LAYOUTS[process.world_size][name]
        found, reference = run_layout(process, layout), expected[reference_of(layout)]
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, {key: squares(of, reference[key][1]) for key, (_, of) in found.items()})
        yield {
            key: {
                "metrics": metrics,
                "expected": reference[key][0],
                "gradient_error": max(gradient_errors([rank[key] for rank in ranks], reference[key][1])),
            }
            for key, (metrics, _) in found.items()
        }
    leave()


GRADIENT_BOUND = 1e-5
"""FP32 sums in another order."""
METRIC_BOUND = {"rel": 2e-6, "abs": 2e-7}
"""The same; a loss is a small sum of larger terms of both signs."""


@pytest.mark.parametrize(
    ("ranks", "case"), [layout_case(ranks, *row) for ranks, layouts in LAYOUTS.items() for row in layouts.items()]
)
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row(compare_layouts, ranks, case=case, prepare=references, at_once=5)
    assert row.keys() == {*(f"{name}/policy" for name in ALGORITHMS), "ppo/critic"}
    for name, of in row.items():
        error, place = of["gradient_error"]
        assert error < GRADIENT_BOUND, f"{name}: {place}"
        assert of["metrics"] == pytest.approx(of["expected"], **METRIC_BOUND), name
    # The case tests something: some tokens are clipped, some are dropped by the correction, and others are not.
    gspo, on_policy = (row[f"{name}/policy"]["expected"] for name in ("gspo", "on_policy"))
    assert 0.05 < gspo["clip_fraction"] < 0.95 and 0.05 < gspo["correction_dropped"] < 0.5
    assert on_policy["clip_fraction"] == 0 and 0.05 < on_policy["correction_dropped"] < 0.9
