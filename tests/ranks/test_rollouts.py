"""Samples and their log-probabilities are the same on every layout, and those of the trainer."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import join, leave
from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.config.generation_degrees import Degrees
from glm46.engine.inference.model_mesh import build_model_mesh
from glm46.engine.training.network import Network, build_frozen_network, build_network
from glm46.engine.training.resume import read_weights
from glm46.run.layout import generation_layout
from glm46.run.plan import resolve_plan
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.schemes import FP8_SCHEMES
from glm46.tasks.rl.engines import routed_score, score
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules
from glm46.tasks.rl.rollout.weights import served_tensors, whole_weights, write_policy
from glm46.tasks.weights.weight_folders import ModelFiles
from tests.harness import Cases
from tests.ranks.sharded_layouts import SHAPE, VOCABULARY, Layout, make_config

# Of training, and of the second engine.
LAYOUTS = {
    1: [
        (Layout(), Degrees()), (Layout(adapter="lora"), Degrees()), (Layout(adapter="dora"), Degrees()),
        (Layout(num_experts=12, key_heads=1), Degrees()), (Layout(latent=True), Degrees()),
        (Layout(latent=True, adapter="lora"), Degrees()), (Layout(sparse=True), Degrees()),
    ],
    2: [
        (Layout(), Degrees(tensor_parallel=2)), (Layout(tensor=2), Degrees(expert_parallel=2)),
        (Layout(experts_over=2), Degrees(pipeline_parallel=2)), (Layout(context=2), Degrees(2, 1, 2)),
        (Layout(pipeline=2, schedule="DualPipeV"), Degrees(tensor_parallel=2)),
        (Layout(experts_over=2, adapter="lora"), Degrees(2, 1, 2)),
        (Layout(pipeline=2, adapter="dora"), Degrees(expert_parallel=2)),
        (Layout(latent=True, tensor=2), Degrees(expert_parallel=2)),
        (Layout(latent=True, context=2), Degrees(tensor_parallel=2)),
        (Layout(latent=True, pipeline=2, schedule="DualPipeV"), Degrees(2, 1, 2)),
        (Layout(latent=True, experts_over=2, adapter="lora"), Degrees(pipeline_parallel=2)),
        (Layout(sparse=True, tensor=2), Degrees(tensor_parallel=2)),
        (Layout(sparse=True, context=2), Degrees(2, 1, 2)),
    ],
    4: [
        (Layout(tensor=2), Degrees(pipeline_parallel=2, expert_parallel=2)),
        (Layout(replicate=2, experts_over=2), Degrees(2, 1, 2)),
        (Layout(num_experts=12, key_heads=1), Degrees(tensor_parallel=2, expert_parallel=4)),
    ],
}  # fmt: skip
TOKENIZER = load_tokenizer(str(Path(__file__).parents[2] / "train_configs" / "bytes.tiktoken"))
TEMPERATURE, LENGTH = 0.7, 24
STOP = frozenset(range(0, VOCABULARY, 40))
PROMPTS = [[5], [7, 9, 1, 300, 12], [2, 2, 3], [77, 5, 6, 8, 9, 10, 11, 400]]
REQUESTS = [Request(PROMPTS[i % 4], 1000 + i, 4 + i % 7) for i in range(18)]


def spread(network: Network, factor: float) -> None:
    """Multiply all matrices, so that distributions are far from uniform; the same on every layout."""
    for name, tensor in network.weights().items():
        if name.endswith("correction_bias"):
            tensor.copy_(torch.sin(torch.arange(len(tensor)).float()) * 0.1 * factor)
        elif name.endswith("lora_B"):
            local_tensor(tensor).fill_(0.01 * factor)
        elif tensor.ndim > 1 and "lora" not in name:
            local_tensor(tensor).mul_(factor)
    network.loaded(new_adapters=False)


def trained_logprobs(network: Network, completions: list[Completion]) -> list[torch.Tensor]:
    """What the trainer computes for the tokens of each completion. Collective."""
    rows = [[*request.prompt, *completion.tokens] for request, completion in zip(REQUESTS, completions, strict=True)]
    places = torch.arange(LENGTH).expand(len(rows), LENGTH)
    is_real = places < torch.tensor([[len(row) - 1] for row in rows])
    ids, labels = torch.zeros(2, len(rows), LENGTH, dtype=torch.int64)
    ids[is_real] = torch.tensor([token for row in rows for token in row[:-1]])
    labels[is_real] = torch.tensor([token for row in rows for token in row[1:]])
    batch = {
        "input_ids": ids, "positions": places.where(is_real, 0), "document_ids": torch.where(is_real, 0, -1),
        "labels": labels.where(is_real, IGNORE),
    }  # fmt: skip
    output = network.evaluate(batch, partial(token_logprobs, temperature=TEMPERATURE))
    found = torch.full(ids.shape, -torch.inf)
    if output is not None:
        found = network.whole_rows(output.logprobs.unsqueeze(0), batch)[0]
    network.release()
    dist.all_reduce(found, dist.ReduceOp.MAX)  # of the pipeline's stages one has the head
    starts = [len(request.prompt) - 1 for request in REQUESTS]
    return [row[start : start + len(c.tokens)] for row, start, c in zip(found, starts, completions, strict=True)]


def admitted(engine: LocalEngine, rules: SamplingRules, gap: int) -> list[Completion]:
    """Completions, on rank 0, of the requests as programs ask: each some tokens behind the one before it. Others are
    dropped in front of their end. Collective."""
    found, calls = dict[int, Completion](), 0
    unwanted = {len(REQUESTS) + n: Request(prompt, n, 16) for n, prompt in enumerate(PROMPTS)}

    def exchange(ended):
        nonlocal calls
        found.update(ended)
        assert not unwanted.keys() & ended.keys() or calls < 3
        number, calls = calls, calls + 1
        if len(found.keys() - unwanted.keys()) == len(REQUESTS):
            return None
        begun = number // gap
        new = [(begun, REQUESTS[begun])] if number % gap == 0 and begun < len(REQUESTS) else []
        return [*new, *(unwanted.items() if number == 0 else ())], list(unwanted) if number == 2 else []

    engine.serve(exchange, rules)
    return [found[number] for number in range(len(REQUESTS))] if dist.get_rank() == 0 else []


def replayed(network: Network, completions: list[Completion]) -> dict:
    """The share of experts that differ from the trainer's, before and after its selection biases changed, and how far
    its log-probabilities with given experts move. Collective."""
    rows = [[*request.prompt, *one.tokens] for request, one in zip(REQUESTS, completions, strict=True)]
    routes = [one.routes for one in completions]
    before, share = routed_score(network, rows, routes, TEMPERATURE)
    kept = {name: tensor.clone() for name, tensor in network.weights().items() if name.endswith("correction_bias")}
    for name, tensor in kept.items():
        network.weights()[name].add_(torch.linspace(-1, 1, len(tensor)))
    after, share_after = routed_score(network, rows, routes, TEMPERATURE)
    alone, _ = score(network, rows, TEMPERATURE)
    for name, tensor in kept.items():
        network.weights()[name].copy_(tensor)
    moved = [max(abs(a - b) for one, two in zip(before, other, strict=True) for a, b in zip(one, two, strict=True))
             for other in (after, alone)]  # fmt: skip
    return {"shares": [share, share_after], "moved": moved}


def one_folder() -> Path:
    """A new folder of all ranks. Collective."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


def fp8_fault(network: Network) -> str:
    """A tensor of an FP8 folder that differs from what a broadcast sends, or that is read as anything but its rounded
    weight. Collective."""
    folder, scheme = one_folder(), FP8_SCHEMES["fp8-channel"]
    write_policy(network, TOKENIZER, folder / "version", torch.float32, scheme)
    sent = {name: tensor.clone() for name, tensor in served_tensors(network, scheme)}
    stored = load_file(folder / "version/model.safetensors")
    if stored.keys() != sent.keys() or not any(tensor.dtype == torch.float8_e4m3fn for tensor in sent.values()):
        return f"names {sorted(stored.keys() ^ sent.keys())}"
    config = network.plan.config.model_copy(update={"adapter": None})
    read = build_frozen_network(replace(network.plan, config=config), network.cluster)
    read_weights(read, ModelFiles(read, folder / "version"))
    fault = ""
    for name, value in served_tensors(read, None):
        parts = {suffix: sent[name + suffix] for suffix in scheme.suffixes if name + suffix in sent}
        same = all(
            stored[name + suffix].view(torch.uint8).equal(part.view(torch.uint8)) for suffix, part in parts.items()
        )
        shape = tuple(value.shape)
        rounded = scheme.dequantise(parts, shape, tuple((0, n) for n in shape)) if len(parts) > 1 else parts[""]
        if not same or not torch.equal(rounded, value):
            fault = name
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return fault


def merged_error(network: Network) -> float:
    """The largest difference of the weights that servers get from those that the engine in the job gets. Collective."""
    plan, folder = network.plan, one_folder()
    for version in ("version-1", "version-2"):  # the base is written once
        write_policy(network, TOKENIZER, folder / version, torch.float32)
    config = plan.config.model_copy(update={"adapter": None})
    read = build_frozen_network(replace(plan, config=config), network.cluster)
    read_weights(read, ModelFiles(read, folder / "version-2"))
    pairs = zip(whole_weights(network, plan.shape), whole_weights(read, plan.shape), strict=True)
    error = max((one - other).abs().max().item() for (_, one), (_, other) in pairs)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return error


@torch.no_grad()
def draw_on(layout: Layout, of_engine: Degrees, process) -> dict:
    """Generate the same requests before and after the policy changed: by a whole model on each rank; and in groups, in
    few rows and with drafts; all at once, and as they come."""
    plan = resolve_plan(make_config(layout, SHAPE["num_hidden_layers"]), process.world_size)
    network = build_network(plan, build_cluster(plan, process))
    network.loaded(new_adapters=True)
    if not layout.adapter:
        network.route_at(1.7)  # which engines compute with, and folders have in their gates
    has_drafts = plan.shape.num_nextn_predict_layers > 0
    whole, split = (
        build_model_mesh(generation_layout(degrees, process.world_size), process.rank, "cpu")
        for degrees in (Degrees(), of_engine)
    )
    engines = [
        LocalEngine(network, max_length=LENGTH, mesh=whole, rows=16, routes=True),
        LocalEngine(network, max_length=LENGTH, mesh=split, rows=5, routes=True, speculative=has_drafts),
    ]
    found = {"name": f"{process.world_size} {layout.name}", "generated": []}
    errors, rules = [], SamplingRules(TEMPERATURE, STOP, VOCABULARY, routes=True)
    for version, factor in enumerate((5.0, 1.2)):
        spread(network, factor)
        of_engines, as_they_come = [], []
        for gap, engine in enumerate(engines, 1):
            engine.update(version)
            of_engines.append(engine.generate(REQUESTS, rules))
            as_they_come.append(admitted(engine, rules, gap))
        tokens, finishes = ([getattr(c, key) for c in of_engines[0]] for key in ("tokens", "finish"))
        for completions in of_engines:
            for completion, wanted in zip(completions, trained_logprobs(network, completions), strict=True):
                errors.append((torch.tensor(completion.logprobs) - wanted).abs().max().item())
                assert set(completion.versions) == {version}
        experts, of_groups = ([np.sort(c.routes, -1).tolist() for c in completions] for completions in of_engines)
        found["generated"].append({"tokens": tokens, "finishes": finishes, "experts": experts})
        found.setdefault("engines_agree", []).append([c.tokens for c in of_engines[1]] == tokens)
        for one, other in zip(sum(as_they_come, []), sum(of_engines, []), strict=False):
            assert (one.tokens, one.finish, one.spans) == (other.tokens, other.finish, other.spans)
            assert np.array_equal(np.sort(one.routes), np.sort(other.routes))
            errors.append(max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)))
        found.setdefault("routes_agree", []).append(of_groups == experts)
    found["error"] = max(errors)
    found["replayed"] = replayed(network, of_engines[0])
    if layout.adapter:
        found["merged_error"] = merged_error(network)
    found["fp8_fault"] = fp8_fault(network)
    layouts = [engine._mesh.layout for engine in engines]
    found["held"] = [
        [engine._rows, engine._decoder.max_length, [of.tp, of.ep, of.pp], engine._copied_bytes()]
        for engine, of in zip(engines, layouts, strict=True)
    ]
    return found


def named(ranks: int) -> dict[str, tuple[Layout, Degrees]]:
    return {f"{ranks} {layout.name}": (layout, of_engine) for layout, of_engine in LAYOUTS[ranks]}


def draw_layouts(names: list[str], shared: None) -> Iterator[dict]:
    """On each rank."""
    process = join(300)
    for name in names:
        yield draw_on(*named(process.world_size)[name], process)
    leave()


# FP32, logits of order 1 in sums of another order; log-probabilities are about -6.
BOUND = 1e-5


def test_every_layout_draws_what_one_rank_draws_with_the_trainers_logprobs():
    rows = []
    for ranks in LAYOUTS:
        cases = Cases(draw_layouts, ranks, [*named(ranks)], None, at_once=20)
        rows += [cases.row(name) for name in named(ranks)]
        cases.close()
    alone = {row["name"].split(" ", 1)[1]: row for row in rows if row["name"].startswith("1 ")}
    assert len(rows) == 23 and len(alone) == 7
    for row in rows:
        assert row["error"] < BOUND, row["name"]
        # Tensor, expert and pipeline parallel groups, fewer rows and drafts of the prediction layers change nothing.
        assert row["engines_agree"] == row["routes_agree"] == [True, True], row["name"]
        kind = next((key for key in ("dora", "lora") if key in row["name"]), "")
        kinds = [
            kind,
            "experts12-keys1" if "keys1" in row["name"] else "",
            *(key if key in row["name"] else "" for key in ("latent", "sparse")),
        ]
        wanted = alone["-".join(filter(None, ["fsdp", *kinds]))]
        assert row["generated"] == wanted["generated"], row["name"]
        assert all(len(experts[0]) == 4 and len(experts[0][0]) == 2 for experts in row["generated"][0]["experts"])
        assert row["generated"][0] != row["generated"][1]
        # Sums of an adapter and its base in FP32, of weights of order 1.
        assert ("merged_error" in row) == bool(kind in ("lora", "dora")) and row.get("merged_error", 0.0) < 1e-6
        # The same experts as the engine's; other selection biases change the choice, and nothing with given experts.
        (same, other), (moved, unrouted) = row["replayed"]["shares"], row["replayed"]["moved"]
        assert same == 0.0 and other > 0.2 and moved < BOUND < unrouted, (row["name"], row["replayed"])
        assert row["fp8_fault"] == "", row["name"]
        finishes = row["generated"][0]["finishes"]
        assert {"stop", "length"} == set(finishes), finishes
    held = {row["name"]: row["held"] for row in rows}
    assert held["1 fsdp"][0] == [16, 24, [1, 1, 1], 0], "nothing is copied"
    assert held["2 fsdp"][0][-1] > 0 and held["4 fsdp-experts12-keys1"][1][2] == [2, 4, 1]
