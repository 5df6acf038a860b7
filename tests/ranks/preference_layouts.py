"""Compare DPO on layouts of a world size with one process; print one JSON object per layout.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/preference_layouts.py 2 [NAME ...]

The policy is moved away from its reference, so that every pair has a margin of its own. One process computes the loss
from single documents, in a plain loop; the layouts pack two pairs into a row and take the engine's step.
"""

import functools
import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process, join, leave
from glm46.compute.model.adapters import add_adapters, without_adapters
from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.compute.model.init import fill_normal
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.compute.parallelize.plan import initialise
from glm46.config.adapter import AdapterConfig
from glm46.config.finetune import PreferenceConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.training.network import build_network
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.run.plan import resolve_plan
from glm46.tasks.finetune.preference_loss import HALF, split_pairs
from glm46.tasks.finetune.task import PreferenceTuning
from tests.ranks.forked_ranks import run_cases
from tests.ranks.sharded_layouts import (
    ROWS,
    SEQ_LEN,
    VOCABULARY,
    Layout,
    begin_adapters,
    gradient_errors,
    held,
    make_config,
    relative,
    squares,
)

PREFERENCE = PreferenceConfig(beta=0.7, label_smoothing=0.1, sft_weight=0.3)
BEGIN = 0
_LAYOUTS = {
    2: [
        *(Layout(**axis, adapter=adapter) for adapter in ("", "lora") for axis in (
            {}, {"tensor": 2}, {"context": 2, "checkpointing": "full"}, {"experts_over": 2}
        )),
        Layout(pipeline=2), Layout(pipeline=2, schedule="Interleaved1F1B", micro_batches=4, adapter="lora"),
        Layout(compiled=True, adapter="lora"), Layout(experts_over=2, adapter="dora"),
    ],
    4: [
        Layout(tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(pipeline=2, context=2, experts_over=2, adapter="lora"),
    ],
}  # fmt: skip
LAYOUTS = {ranks: {layout.name: layout for layout in layouts} for ranks, layouts in _LAYOUTS.items()}
"""By number of ranks and name."""


def make_pairs() -> dict[str, Tensor]:
    """Rows of the loader: two pairs or one, unequal halves, padding behind them, and a row of nothing else."""
    generator = torch.Generator().manual_seed(0)
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


def move(parameters: dict[str, torch.nn.Parameter], adapted: bool) -> None:
    """Move the policy away from its reference."""
    if adapted:
        begin_adapters(parameters)
        return
    for name, parameter in parameters.items():
        noise = torch.empty(local_tensor(parameter).shape)
        fill_normal(noise, global_indices(parameter), tuple(parameter.shape), seed=7, name=name, std=0.02)
        local_tensor(parameter).data.add_(noise)


def config_of(layout: Layout) -> RunConfig:
    """That of the layout matrix without prediction layers and auxiliary losses, which are no part of a preference."""
    config = make_config(layout)
    model = config.model.model_copy(update={"num_nextn_predict_layers": 0})
    quiet = {"sequence_aux_loss_weight": 0.0, "z_loss_weight": 0.0, "balance": "none"}
    finetune = {"finetune": {"preference": PREFERENCE.model_dump()}}
    table = config.model_dump() | {"model": model.model_dump(exclude_none=True), "moe": quiet} | finetune
    return RunConfig.model_validate(table)


def run_reference(config: RunConfig) -> tuple[float, float, dict[str, Tensor]]:
    """Mean preference loss, accuracy, and gradients, of one process without any transform, packing or batch."""
    with torch.device("meta"):
        model = Transformer(resolve_shape(config.model))
        if config.adapter is not None:
            add_adapters(model, config.adapter)
    model.to_empty(device="cpu")
    initialise(model, config.debug.seed)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    magnitudes = Magnitudes(model, config.adapter or AdapterConfig(), None)
    magnitudes.start()
    batch = split_pairs(make_pairs(), BEGIN)
    chosen, halves = [], int(batch[HALF].max()) + 1
    rows = [(batch[HALF] == half).nonzero()[0, 0] for half in range(halves)]

    def half_logprobs(half: int) -> Tensor:
        row = rows[half]
        document = batch["document_ids"][row][batch[HALF][row] == half][0]
        here = batch["document_ids"][row] == document
        ids, labels = (batch[name][row][here].unsqueeze(0) for name in ("input_ids", "labels"))
        return model(ids, labels=labels, form=token_logprobs).logprobs[labels != IGNORE].double()

    with torch.no_grad():
        reference = [half_logprobs(half).sum() for half in range(halves)]
    move(parameters, config.adapter is not None)
    magnitudes.refresh()
    if config.adapter is not None:  # the reference is the policy without its adapters
        with torch.no_grad(), without_adapters([model]):
            assert torch.equal(
                torch.stack([half_logprobs(half).sum() for half in range(halves)]), torch.stack(reference)
            )
    losses, correct = [], []
    for pair in range(halves // 2):
        sums = [half_logprobs(2 * pair + side) for side in range(2)]
        chosen.append(sums[0])
        ratios = [logprobs.sum() - reference[2 * pair + side] for side, logprobs in enumerate(sums)]
        margin = PREFERENCE.beta * (ratios[0] - ratios[1])
        smooth = PREFERENCE.label_smoothing
        losses.append(-(1 - smooth) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin))
        correct.append(float(margin > 0))
    loss = torch.stack(losses).mean()
    (loss - PREFERENCE.sft_weight * torch.cat(chosen).mean()).backward()
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    factor = (config.training.max_norm / (norm + 1e-6)).clamp(max=1.0)  # the engine's gradients are clipped ones
    gradients = {name: p.grad * factor for name, p in parameters.items()}
    return loss.item(), sum(correct) / len(correct), gradients


def run_layout(process: Process, layout: Layout) -> tuple[dict[str, float], dict]:
    """Metrics and gradients of a step by the engine; collective."""
    torch.compiler.reset()
    plan = resolve_plan(config_of(layout), process.world_size)
    cluster = build_cluster(plan, process)
    policy = build_network(plan, cluster)
    policy.loaded(new_adapters=True)
    move(policy.parameters, bool(layout.adapter))
    policy.loaded(new_adapters=False)
    tokenizer = SimpleNamespace(special={"[gMASK]": BEGIN})
    learner = PreferenceTuning.__new__(PreferenceTuning)
    vars(learner).update(plan=plan, cluster=cluster, network=policy, networks={"model": policy}, tokenizer=tokenizer)
    learner._prefer(PREFERENCE)
    task = SimpleNamespace(plan=plan, cluster=cluster, networks=learner.networks, objectives=learner.objectives)
    whole, count = make_pairs(), layout.micro_batches
    share = ROWS // count // plan.layout.dp_degree
    first = [micro * (ROWS // count) + cluster.dp_rank * share for micro in range(count)]
    micro_batches = [{name: tensor[at : at + share] for name, tensor in whole.items()} for at in first]
    micro_batches = learner.complete([split_pairs(batch, BEGIN) for batch in micro_batches])
    totals = count_step(task, [split_pairs(whole, BEGIN)])
    outcome = train_step(task, micro_batches, totals, 0, 1.0).main
    gradients = {name: held(p.grad) for name, p in policy.parameters.items()}
    return learner.objectives["model"].metrics(outcome.sums, totals.main, 0), gradients


def compare(layout: Layout, found: tuple, reference: tuple) -> dict:
    """Differences between a layout and one process; collective."""
    (metrics, gradients), (loss, accuracy, gradients0) = found, reference
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, squares(gradients, gradients0))
    return {
        "name": layout.name,
        "loss_error": (relative(metrics["loss"], loss), f"{metrics['loss']} instead of {loss}"),
        "accuracy_error": (abs(metrics["reward_accuracy"] - accuracy), f"{metrics['reward_accuracy']}, {accuracy}"),
        "gradient_error": max(gradient_errors(ranks, gradients0)),
        "loss": loss,
    }


def main(world_size: int, *names: str) -> None:
    """Compare the named layouts of this world size, or all, with one process, which is this one."""
    torch.set_num_threads(1)
    layouts = {name: LAYOUTS[world_size][name] for name in names or LAYOUTS[world_size]}
    references = {layout.reference: run_reference(config_of(layout)) for layout in layouts.values()}

    def work(some: list[str]) -> None:
        process = join(300)
        for layout in (layouts[name] for name in some):
            with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=layout.backend)):
                row = compare(layout, run_layout(process, layout), references[layout.reference])
            if process.is_main:
                print(json.dumps(row), flush=True)
        leave()

    run_cases(world_size, list(layouts), work, len(layouts))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
