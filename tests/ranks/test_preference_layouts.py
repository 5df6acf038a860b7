"""Losses of preferences are the same on every layout, with all weights and with adapters, whose base may be in 4 bits:
loss, accuracy or divergence, gradients."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process, join, leave
from glm46.compute.model.adapters import without_adapters
from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.compute.model.init import fill_normal
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.config.adapter import AdapterConfig
from glm46.config.finetune import PreferenceConfig
from glm46.config.run_config import RunConfig
from glm46.engine.training.network import build_network
from glm46.engine.training.resume import read_weights
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.run.plan import resolve_plan
from glm46.tasks.finetune.halves import HALF, split_pairs
from glm46.tasks.finetune.task import PreferenceTuning
from glm46.tasks.rl.engines import last_values
from glm46.tasks.weights.weight_folders import ModelFiles
from tests.builders import with_shape
from tests.harness import differences
from tests.ranks.sharded_layouts import (
    ROWS,
    SEQ_LEN,
    VOCABULARY,
    Layout,
    base_of,
    begin_adapters,
    gradient_errors,
    held,
    make_config,
    new_model,
    relative,
    share_of,
    squares,
    write_base,
)
from tests.ranks.test_sharded_layouts import INTEGERS

PREFERENCES = {
    "sigmoid": PreferenceConfig(beta=0.7, sft_weight=0.3),
    "ipo": PreferenceConfig(loss_type="ipo", beta=0.4, sft_weight=0.3),
    "simpo": PreferenceConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.4),
    "orpo": PreferenceConfig(loss_type="orpo", beta=0.9),
    "reward": PreferenceConfig(loss_type="reward"),
    "kto": PreferenceConfig(loss_type="kto", beta=0.5, desirable_weight=1.25, undesirable_weight=0.75),
}
BEGIN = 0
_LAYOUTS = {
    2: [
        *(Layout(**axis, adapter=adapter) for adapter in ("", "lora") for axis in (
            {}, {"tensor": 2}, {"context": 2, "checkpointing": "full"}, {"experts_over": 2}
        )),
        Layout(pipeline=2), Layout(pipeline=2, schedule="Interleaved1F1B", micro_batches=4, adapter="lora"),
        Layout(compiled=True, adapter="lora"), Layout(experts_over=2, adapter="dora"),
        Layout(experts_over=2, adapter="lora", base="int4"), Layout(tensor=2, adapter="dora", base="nf4"),
    ],
    4: [
        Layout(tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(pipeline=2, context=2, experts_over=2, adapter="lora"),
    ],
}  # fmt: skip
_OTHERS = {
    2: [
        Layout(), Layout(tensor=2), Layout(context=2, checkpointing="full"), Layout(experts_over=2),
        Layout(pipeline=2), Layout(adapter="lora"),
    ],
    4: [Layout(pipeline=2, context=2, experts_over=2, adapter="lora")],
}  # fmt: skip
"""Of the losses other than DPO."""
CASES = {
    ranks: {layout.name: ("sigmoid", layout) for layout in layouts}
    | {
        f"{name}/{one.name}": (name, one)
        for name in PREFERENCES
        if name != "sigmoid"
        for one in _OTHERS[ranks]
        if name != "reward" or not one.adapter
    }
    for ranks, layouts in _LAYOUTS.items()
}
_FOUR = Layout(pipeline=2, context=2, experts_over=2)
CASES[4][f"reward/{_FOUR.name}"] = "reward", _FOUR
_KTO = Layout(checkpointing="full", adapter="lora", base="nf4")
CASES[2][f"kto/{_KTO.name}"] = "kto", _KTO
"""Loss type and layout by number of ranks and name."""


def make_pairs() -> dict[str, Tensor]:
    """Rows of the loader: two pairs or one, unequal halves, padding behind them, and a row of nothing else."""
    generator = torch.Generator().manual_seed(4)  # KTO has a divergence above 0
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    batch = {name: torch.full((ROWS, SEQ_LEN), IGNORE) for name in ("labels", "input_ids", "document_ids", "positions")}
    batch["document_ids"][:], batch["input_ids"][:], batch["positions"][:] = -1, 1, 0
    for row in range(ROWS - 1):
        at = 0
        for number in range(1 + row % 2):
            for _ in range(2):
                prompt, targets = draw(1, 3), draw(1, 4)
                end = at + prompt + targets
                ids = torch.randint(1, VOCABULARY, (end - at,), generator=generator)
                ids[0] = BEGIN
                batch["input_ids"][row, at:end] = ids
                batch["labels"][row, at + prompt - 1 : end - 1] = ids[prompt:]
                batch["document_ids"][row, at:end] = number
                at = end
    return batch


def answers(batch: dict[str, Tensor]) -> list[list[int]]:
    """The tokens of each half in its order, without the marker that ends it."""
    halves = split_pairs(batch, BEGIN)
    found = []
    for row in range(ROWS):
        documents = halves["document_ids"][row]
        found += [halves["input_ids"][row, documents == one][:-1].tolist() for one in range(int(documents.max()) + 1)]
    return found


def move(parameters: dict[str, torch.nn.Parameter], adapted: bool) -> None:
    """Move the policy away from its reference."""
    if adapted:
        begin_adapters(parameters)
        return
    for name, parameter in parameters.items():
        noise = torch.empty(local_tensor(parameter).shape)
        fill_normal(noise, global_indices(parameter), tuple(parameter.shape), seed=7, name=name, std=0.02)
        local_tensor(parameter).data.add_(noise)


def config_of(loss_type: str, layout: Layout) -> RunConfig:
    """That of the layout matrix without prediction layers and auxiliary losses, which are no part of a preference."""
    config = with_shape(make_config(layout), num_nextn_predict_layers=0)
    quiet = {"sequence_aux_loss_weight": 0.0, "z_loss_weight": 0.0, "balance": "none"}
    finetune = {"finetune": {"preference": PREFERENCES[loss_type].model_dump()}}
    table = config.model_dump() | {"model": config.model.model_dump(exclude_none=True), "moe": quiet} | finetune
    return RunConfig.model_validate(table)


def pair_loss(config: PreferenceConfig, sums: list, tokens: list[int], divergence: float) -> Tensor:
    """The loss of a pair, or of its two examples, by the formula of its paper.

    Args:
        sums: of chosen and rejected half, log-probabilities of policy and reference.
    """
    beta, ratios = config.beta, [policy - reference for policy, reference in sums]
    means = [policy / count for (policy, _), count in zip(sums, tokens, strict=True)]
    if config.loss_type == "ipo":
        return (ratios[0] / tokens[0] - ratios[1] / tokens[1] - 1 / (2 * beta)) ** 2
    if config.loss_type == "orpo":
        odds = [mean - torch.log(1 - mean.exp()) for mean in means]
        return -beta * F.logsigmoid(odds[0] - odds[1])
    if config.loss_type == "reward":
        return -F.logsigmoid(sums[0][0] - sums[1][0])
    if config.loss_type == "kto":
        desirable = 1 - torch.sigmoid(beta * (ratios[0] - divergence))
        undesirable = 1 - torch.sigmoid(beta * (divergence - ratios[1]))
        return config.desirable_weight * desirable + config.undesirable_weight * undesirable
    margin = beta * (ratios[0] - ratios[1])
    if config.loss_type == "simpo":
        margin = beta * (means[0] - means[1]) - config.simpo_gamma
    return -F.logsigmoid(margin)


def mismatched_halves(rows: list[int]) -> list[tuple[int, int]]:
    """The halves whose prompt and whose completion are put together, row by row: all chosen ones, then all rejected
    ones, each prompt with the completion before. A row of one pair has none."""
    found = []
    for row in sorted({*rows}):
        halves = [half for side in (0, 1) for half in range(side, len(rows), 2) if rows[half] == row]
        found += [(half, halves[place - 1]) for place, half in enumerate(halves)] if len(halves) > 2 else []
    return found


def run_reference(config: RunConfig, layout: Layout, base: Path | None) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients, of one process without any transform, packing or batch; ``base``: see `write_base`."""
    preference = config.preference
    model = new_model(config, head=config.head)
    if base is not None:
        write_base(model, base, layout.base)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    magnitudes = Magnitudes(model, config.adapter or AdapterConfig(), None)
    magnitudes.start()
    batch, is_reward = split_pairs(make_pairs(), BEGIN), config.head == "value"
    halves = int(batch[HALF].max()) + 1
    rows = [int((batch[HALF] == half).nonzero()[0, 0]) for half in range(halves)]

    def ids_of(half: int) -> tuple[Tensor, Tensor]:
        """The tokens of prompt and completion."""
        row, first = (batch[HALF] == half).nonzero()[0].tolist()
        places = (batch["document_ids"][row] == batch["document_ids"][row, first]).nonzero()
        ids = batch["input_ids"][row]
        return ids[int(places[0]) : first + 1], ids[first + 1 : int(places[-1]) + 1]

    def logprobs_of(prompt: Tensor, completion: Tensor) -> Tensor:
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        labels = torch.full_like(ids, IGNORE)
        labels[0, len(prompt) - 1 : -1] = completion
        if is_reward:  # of the last token before the marker that ends the answer
            return model(ids, labels=labels).values[0, -2:-1].double()
        return model(ids, labels=labels, form=token_logprobs).logprobs[labels != IGNORE].double()

    own = [ids_of(half) for half in range(halves)]
    others = [(own[prompt][0], own[completion][1]) for prompt, completion in mismatched_halves(rows)]

    @torch.no_grad()
    def sums_of(documents: list) -> Tensor:
        return torch.stack([logprobs_of(*one).sum() for one in documents])

    reference, other_reference = sums_of(own), sums_of(others)
    move(parameters, config.adapter is not None)
    magnitudes.refresh()
    if config.adapter is not None:  # the reference is the policy without its adapters
        with without_adapters([model]):
            assert torch.equal(sums_of(own), reference)
    divergence = max(float((sums_of(others) - other_reference).mean()), 0.0)
    losses, chosen, correct = [], [], []
    for pair in range(halves // 2):
        found = [logprobs_of(*own[2 * pair + side]) for side in range(2)]
        chosen.append(found[0])
        sums = [(logprobs.sum(), reference[2 * pair + side]) for side, logprobs in enumerate(found)]
        losses.append(pair_loss(preference, sums, [len(logprobs) for logprobs in found], divergence))
        scores = [one.mean() for one in found] if not preference.has_reference else [a - b for a, b in sums]
        correct.append(float(scores[0] > scores[1]))
    sft_weight = 1.0 if preference.loss_type == "orpo" else preference.sft_weight
    loss = torch.stack(losses).mean() / (2 if preference.loss_type == "kto" else 1)
    loss = loss - sft_weight * torch.cat(chosen).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    factor = (config.training.max_norm / (norm + 1e-6)).clamp(max=1.0)  # the engine's gradients are clipped ones
    gradients = {name: p.grad * factor for name, p in parameters.items()}
    other = {"kl": divergence} if preference.loss_type == "kto" else {"rewards/accuracies": sum(correct) / len(correct)}
    return {"loss": loss.item(), **other}, gradients


def run_layout(process: Process, loss_type: str, layout: Layout, base: Path | None) -> tuple[dict[str, float], dict]:
    """Metrics and gradients of a step by the engine; collective."""
    torch.compiler.reset()
    plan = resolve_plan(config_of(loss_type, layout), process.world_size)
    cluster = build_cluster(plan, process)
    policy = build_network(plan, cluster, head=plan.config.head)
    if base is not None:
        read_weights(policy, ModelFiles(policy, base))
    policy.loaded(new_adapters=True)
    move(policy.parameters, bool(layout.adapter))
    policy.loaded(new_adapters=False)
    tokenizer = SimpleNamespace(special={"[gMASK]": BEGIN})
    learner = PreferenceTuning.__new__(PreferenceTuning)
    vars(learner).update(plan=plan, cluster=cluster, network=policy, networks={"model": policy}, tokenizer=tokenizer)
    learner._prefer(PREFERENCES[loss_type])
    task = SimpleNamespace(plan=plan, cluster=cluster, networks=learner.networks, objectives=learner.objectives)
    whole = make_pairs()
    micro_batches = [learner._split(batch) for batch in share_of(whole, plan, cluster, layout.micro_batches)]
    micro_batches = learner.complete(micro_batches)
    totals = count_step(task, [learner._split(whole)])
    rewards = torch.tensor(last_values(policy, answers(whole)) if plan.config.head == "value" else [])
    outcome = train_step(task, micro_batches, totals, 0, 1.0).main
    if plan.config.head == "value":  # as RL reads them
        by_rewards = -F.logsigmoid(rewards.view(-1, 2) @ torch.tensor([1.0, -1.0])).mean().item()
        assert relative(by_rewards, outcome.objective["loss"].item() / totals.main["targets"]) < 2e-6, by_rewards
    gradients = {name: held(p.grad) for name, p in policy.parameters.items()}
    return learner.objectives["model"].metrics(outcome.objective, totals.main, 0), gradients


def compare(found: tuple, reference: tuple) -> dict:
    """Differences between a layout and one process; collective."""
    (metrics, gradients), (wanted, gradients0) = found, reference
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, squares(gradients, gradients0))
    (other,) = wanted.keys() - {"loss"}
    return {
        "loss_error": (relative(metrics["loss"], wanted["loss"]), f"{metrics['loss']} instead of {wanted['loss']}"),
        "other_error": (abs(metrics[other] - wanted[other]), f"{other} {metrics[other]}, {wanted[other]}"),
        "gradient_error": max(gradient_errors(ranks, gradients0)),
        **wanted,
    }


def references(names: list[str], ranks: int, folder: Path) -> dict[tuple, tuple]:
    """By loss and `Layout.reference`: the base folder of a case, and what one process computes."""
    cases = [CASES[ranks][name] for name in names]
    by_reference = {(loss_type, layout.reference): (loss_type, layout) for loss_type, layout in cases}
    found = {}
    for number, (key, (loss_type, layout)) in enumerate(by_reference.items()):
        base = base_of(folder / str(number), layout)
        found[key] = base, run_reference(config_of(loss_type, layout), layout, base)
    return found


def compare_layouts(names: list[str], expected: dict[tuple, tuple]) -> Iterator[dict]:
    """On each rank."""
    process = join(300)
    for name in names:
        loss_type, layout = CASES[process.world_size][name]
        base, reference = expected[loss_type, layout.reference]
        with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=layout.backend)):
            yield compare(run_layout(process, loss_type, layout, base), reference)
    leave()


BOUNDS = {
    # FP32 log-probabilities, of which some tens make a margin; the sums are in FP64.
    "loss_error": 2e-6,
    "other_error": 1e-12,
    "gradient_error": 1e-5,
}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, name, marks=[INTEGERS] if layout.base else [])
        for ranks, cases in CASES.items() for name, (_, layout) in cases.items()
    ],
)  # fmt: skip
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row(compare_layouts, ranks, case=case, prepare=references, at_once=len(CASES[ranks]))
    assert abs(row["loss"] - math.log(2)) > 1e-3  # the policy is not its reference
    # The divergence is a mean of log-ratios of FP32 log-probabilities, of size 1.
    bounds = BOUNDS | {"other_error": 1e-6} if "kl" in row else BOUNDS
    assert row.get("kl", 1.0) > 0.0
    assert differences(row, bounds) == []
