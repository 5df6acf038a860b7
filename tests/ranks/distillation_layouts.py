"""Compare distillation on layouts of a world size with one process; print one JSON object per case.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/distillation_layouts.py 2 [NAME ...]

One process computes each document alone, with all logits of student and teacher at once, by the formula; the layouts
pack documents into rows and take the engine's step. The teacher has a shape of its own, or, ``self/LAYOUT``, is the
student without its adapters; or, ``stored/LAYOUT``, it was asked before and no layout loads it.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process
from glm46.compute.model.adapters import without_adapters
from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.config.adapter import AdapterConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.training.hf_weights import load_weights
from glm46.engine.training.network import build_network
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.run.plan import resolve_plan
from glm46.tasks.finetune.distillation import TEACHER
from glm46.tasks.finetune.task import Distillation
from glm46.tasks.finetune.teacher_values import TeacherValues
from tests.ranks.preference_layouts import make_pairs, run_against_one
from tests.ranks.sharded_layouts import Layout, begin_adapters, held, make_config, new_model, share_of, write_base
from tests.teacher_folder import answer_of, logits_of, write_answers

WIDE = "teacher of tests"
OF_OTHER = {"load_path": "folder", "flavor": WIDE, "top_k": 5, "beta": 0.3, "temperature": 1.5, "sft_weight": 0.4}
OF_ITSELF = {"top_k": 4}
SHARP = 30.0
"""Factor of the head of a teacher, whose distributions would be flat, and near those of the student."""
_LAYOUTS = {
    2: [
        Layout(), Layout(tensor=2), Layout(context=2, checkpointing="full"), Layout(experts_over=2), Layout(pipeline=2),
        Layout(pipeline=2, schedule="Interleaved1F1B", micro_batches=4, adapter="lora"),
        Layout(compiled=True, adapter="lora"), Layout(tensor=2, adapter="dora", base="nf4"),
        Layout(experts_over=2, adapter="lora", base="int4"),
    ],
    4: [
        Layout(tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(pipeline=2, context=2, experts_over=2, adapter="lora"),
    ],
}  # fmt: skip
_STORED = {
    2: [
        Layout(), Layout(tensor=2), Layout(context=2, checkpointing="full"), Layout(pipeline=2),
        Layout(pipeline=2, schedule="Interleaved1F1B", micro_batches=4, adapter="lora"),
    ],
    4: [Layout(tensor=2, context=2, experts_over=4, num_experts=12)],
}  # fmt: skip
CASES = {
    ranks: {layout.name: (OF_OTHER, layout) for layout in layouts}
    | {f"stored/{layout.name}": (OF_OTHER | {"stored_path": "values"}, layout) for layout in _STORED[ranks]}
    | {f"self/{layout.name}": (OF_ITSELF, layout) for layout in layouts if layout.adapter}
    for ranks, layouts in _LAYOUTS.items()
}
"""Keys of the section and layout by number of ranks and name."""


def make_rows() -> dict[str, Tensor]:
    """The rows of `make_pairs`, whose documents have positions."""
    batch = make_pairs()
    ids, places = batch["document_ids"], torch.arange(batch["document_ids"].shape[1])
    begins = torch.where(ids != torch.cat([torch.full_like(ids[:, :1], -2), ids[:, :-1]], 1), places, 0).cummax(1)
    return batch | {"positions": torch.where(ids >= 0, places - begins.values, 0)}


def config_of(keys: dict, layout: Layout) -> RunConfig:
    """That of the layout matrix without prediction layers and auxiliary losses."""
    config = make_config(layout)
    model = config.model.model_copy(update={"num_nextn_predict_layers": 0})
    shape = resolve_shape(model).model_dump()
    # More layers and heads and a wider stream than the student has: what depends on these must be the teacher's.
    wider = {"hidden_size": 2 * shape["hidden_size"], "num_hidden_layers": shape["num_hidden_layers"] + 1}
    PRESETS[WIDE] = type(resolve_shape(model))(**shape | wider)
    resolve_shape.cache_clear()
    quiet = {"sequence_aux_loss_weight": 0.0, "z_loss_weight": 0.0, "balance": "none"}
    finetune = {"finetune": {"distillation": {k: v for k, v in keys.items() if k != "stored_path"}}}
    table = config.model_dump() | {"model": model.model_dump(exclude_none=True), "moe": quiet} | finetune
    return RunConfig.model_validate(table)


def run_reference(config: RunConfig, layout: Layout, base: Path | None) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients, of one process without any transform, packing or chunk."""
    of = config.distillation
    model = new_model(config)
    if base is not None:
        write_base(model, base, layout.base)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    magnitudes = Magnitudes(model, config.adapter or AdapterConfig(), None)
    magnitudes.start()
    if config.adapter is not None:
        begin_adapters(parameters)
        magnitudes.refresh()
    teacher = None if config.teacher is None else new_model(config.teacher)
    if teacher is not None:
        teacher.lm_head.weight.data.mul_(SHARP)
    batch, kls, nlls = make_rows(), [], []
    for ids, labels, documents in zip(*(batch[n] for n in ("input_ids", "labels", "document_ids")), strict=True):
        for document in range(int(documents.max()) + 1):
            here = documents == document
            is_target = labels[here] != IGNORE
            targets, tokens = labels[here][is_target], ids[here].unsqueeze(0)
            logits = model(tokens)[0, is_target].double()
            with torch.no_grad(), without_adapters([model]):
                of_teacher = (teacher or model)(tokens)[0, is_target].double()
            kls.append(divergence(logits / of.temperature, of_teacher / of.temperature, of.beta, of.top_k))
            nlls.append(-logits.log_softmax(-1).gather(1, targets.unsqueeze(1)))
    kl = torch.cat(kls).mean()
    loss = kl + of.sft_weight * torch.cat(nlls).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    factor = (config.training.max_norm / (norm + 1e-6)).clamp(max=1.0)  # the engine's gradients are clipped ones
    return {"loss": loss.item(), "kl": kl.item()}, {name: p.grad * factor for name, p in parameters.items()}


def divergence(student: Tensor, teacher: Tensor, beta: float, top_k: int) -> Tensor:
    """Of each row of logits, from probabilities of the teacher's tokens and of all others."""
    ids = teacher.topk(top_k, -1).indices
    p, q = (x.softmax(-1).gather(-1, ids) for x in (teacher, student))
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    mixture = q if beta == 0 else beta * p + (1 - beta) * q
    of_teacher, of_student = ((x * (x / mixture).log()).sum(-1) for x in (p, q))
    return of_teacher if beta == 0 else beta * of_teacher + (1 - beta) * of_student


def store_answers(config: RunConfig, folder: Path) -> None:
    """What the teacher says of each document alone, in three parts and another order than that of the rows; of more
    tokens than the student reads."""
    teacher, of, batch, found = new_model(config.teacher), config.distillation, make_rows(), []
    teacher.lm_head.weight.data.mul_(SHARP)
    for ids, labels, numbers in zip(*(batch[n] for n in ("input_ids", "labels", "document_ids")), strict=True):
        for here in (numbers == number for number in range(int(numbers.max()) + 1)):
            tokens = ids[here]
            found.append(answer_of(tokens, labels[here], logits_of(teacher, tokens), of.top_k + 2, of.temperature))
    write_answers(folder, sorted(found, key=lambda one: one[0].key), 3)


def run_layout(
    process: Process, keys: dict, layout: Layout, base: Path | None, values: Path | None
) -> tuple[dict, dict]:
    """Metrics and gradients of a step by the engine; collective."""
    torch.compiler.reset()
    config = config_of(keys, layout)
    if is_stored := "stored_path" in keys:
        section = {"load_path": None, "flavor": None, "stored_path": str(values)}
        of = config.distillation.model_copy(update=section)
        config = config.model_copy(update={"finetune": config.finetune.model_copy(update={"distillation": of})})
    plan = resolve_plan(config, process.world_size)
    cluster = build_cluster(plan, process)
    student = build_network(plan, cluster)
    if base is not None:
        load_weights(student, base)
    student.loaded(new_adapters=True)
    if layout.adapter:
        begin_adapters(student.parameters)
    student.loaded(new_adapters=False)
    learner = Distillation.__new__(Distillation)
    vars(learner).update(plan=plan, cluster=cluster, network=student, networks={"model": student})
    learner._stored = TeacherValues(values) if is_stored else None
    learner._learn_from_teacher()
    assert ("teacher" in learner.networks) == ("load_path" in keys and not is_stored)
    if (head := learner._teacher.frozen.get("lm_head.weight")) is not None and "teacher" in learner.networks:
        local_tensor(head).data.mul_(SHARP)
    task = SimpleNamespace(plan=plan, cluster=cluster, networks=learner.networks, objectives=learner.objectives)
    whole = make_rows()
    totals = count_step(task, [whole])
    micro_batches = learner.complete(share_of(whole, plan, cluster, layout.micro_batches))
    assert all(batch[TEACHER].shape == batch["labels"][:, 1:].shape for batch in micro_batches)
    outcome = train_step(task, micro_batches, totals, 0, 1.0).main
    gradients = {name: held(p.grad) for name, p in student.parameters.items()}
    return learner.objectives["model"].metrics(outcome.sums, totals.main, 0), gradients


def main(world_size: int, *names: str) -> None:
    """Compare the named cases of this world size, or all, with one process, which is this one."""
    with tempfile.TemporaryDirectory() as folder:
        values: dict[tuple, Path] = {}
        for number, (keys, layout) in enumerate(CASES[world_size][name] for name in names or CASES[world_size]):
            if "stored_path" in keys and (str(keys), layout.reference) not in values:
                values[str(keys), layout.reference] = Path(folder, str(number))
                store_answers(config_of(keys, layout), Path(folder, str(number)))

        def run(process: Process, keys: dict, layout: Layout, base: Path | None) -> tuple[dict, dict]:
            return run_layout(process, keys, layout, base, values.get((str(keys), layout.reference)))

        run_against_one(CASES[world_size], world_size, names, config_of, run_reference, run)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
