"""Builds the inference engine that [rollout] names, and evaluates networks on given sequences."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.router import Router, Routing
from glm46.compute.model.routes import moe_layers, no_routes
from glm46.compute.model.transformer import Transformer
from glm46.engine.evaluation.network_rows import batch_of_rows, tokens_at_once
from glm46.engine.evaluation.rows import share_of_rows
from glm46.engine.inference.model_mesh import build_model_mesh
from glm46.engine.training.network import Network
from glm46.files.local_disk import real_path
from glm46.run.layout import generation_layout
from glm46.run.parameters import named_rows
from glm46.storage.data.batches import Batch
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.schemes import FP8_SCHEMES
from glm46.tasks.rl.rollout.http_calls import require_http_client
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import SamplingRules
from glm46.tasks.rl.rollout.served_policy import ServedPolicy
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.rollout.weights import base_folder, served_tensors, write_adapters, write_policy

_ADDED = 0.05
"""Added to all weights of adapters for the check at the start; see `changed`."""


def build_engine(
    policy: Network,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    rules: SamplingRules,
    is_stopped: Callable[[], bool],
) -> LocalEngine | ServerEngine:
    """Build the engine of a policy. It has no weights before its first update.

    Args:
        is_stopped: polled on each rank before each token of a local engine; true ends its samples with "abort".
    """
    config = policy.plan.config
    rl, section = config.reinforcement
    if section.kind == "local":
        process = policy.cluster.process
        layout = generation_layout(section.degrees, process.world_size)
        mesh = build_model_mesh(layout, process.rank, process.device.type)
        return LocalEngine(
            policy,
            max_length=config.training.seq_len,
            mesh=mesh,
            rows=section.samples_at_once,
            speculative=section.speculative,
            routes=rl.routing_replay,
            is_stopped=is_stopped,
        )
    read_on_first_rank(require_http_client)
    dtype = getattr(torch, config.training.mixed_precision_param)
    scheme = FP8_SCHEMES.get(section.weights_dtype or "")
    weights = real_path(Path(config.job.dump_folder, "rollout_weights"))
    write = write_adapters if section.send_adapters else partial(write_policy, scheme=scheme)
    base = base_folder(policy, Path(section.weights_folder or weights)) if section.send_adapters else None
    served = ServedPolicy(
        export=lambda folder: write(policy, tokenizer, folder, dtype),
        tensors=lambda: served_tensors(policy, scheme),
        score=partial(score, policy),
        routed_score=partial(routed_score, policy),
        changed=lambda: changed(policy),
    )
    return ServerEngine(
        section,
        folder=weights,
        base=base,
        policy=served,
        prompts=prompts,
        rules=rules,
        padding=range(tokenizer.vocab_size, policy.plan.shape.vocab_size),
        routed=(moe_layers(policy.plan.shape), policy.plan.shape.num_experts_per_tok),
    )


@contextmanager
def changed(policy: Network) -> Iterator[None]:
    """Change the policy's weights inside this context, and restore them bit for bit after it.

    The first tensor of each kind (attention, experts, routers, norms, head and so on) is negated. With adapters, which
    are then the only weights that are exported again, all adapters change instead.
    """
    shape = policy.plan.shape.model_copy(update={"num_nextn_predict_layers": 0})
    kinds = {row.group: name for name, row in reversed(named_rows(shape).items()) if row.optimizer is not None}
    has_adapters = policy.plan.config.adapter is not None
    weights = policy.weights()
    names = policy.parameters if has_adapters else weights.keys() & set(kinds.values())
    originals = {name: local_tensor(weights[name]).clone() for name in names}
    for name in names:
        tensor = local_tensor(weights[name])
        tensor.add_(_ADDED) if has_adapters else tensor.neg_()  # adapters begin at 0
    try:
        yield
    finally:
        for name, tensor in originals.items():
            local_tensor(weights[name]).copy_(tensor)


def score(
    network: Network, sequences: Sequence[Sequence[int]], temperature: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Compute the log-probability of each token of sequences except the first, and the entropy of its distribution, at
    a temperature; equal on all ranks. Collective."""
    return _evaluated(network, sequences, temperature, _rows(sequences, network.plan.layout.sequence_pieces))


def routed_score(
    network: Network, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray], temperature: float
) -> tuple[list[list[float]], float]:
    """Compute log-probabilities like `score`, with given experts, and the share of tokens and layers where the
    network's own routers choose differently. Collective.

    The share is NaN under torch.compile, because compiled blocks call no hooks.

    Args:
        routes: for each sequence, integer [tokens except the last, MoE layers, top_k].
    """
    batch = _rows(sequences, network.plan.layout.sequence_pieces)
    shape = network.plan.shape
    batch["routes"] = no_routes(tuple(batch["input_ids"].shape), shape)
    for row, experts in zip(batch["routes"], routes, strict=True):
        row[: len(experts)] = torch.from_numpy(experts.astype(np.int32))
    with _compared_routes(network.models) as counts:
        logprobs, _ = _evaluated(network, sequences, temperature, batch, replay_routes=True)
    dist.all_reduce(counts)
    return logprobs, counts[0].item() / counts[1].item() if counts[1] else math.nan


@contextmanager
def _compared_routes(models: Sequence[Transformer]) -> Iterator[torch.Tensor]:
    """Compare given routes with the routers' own choice inside this context.

    Yields int64 [2], summed over all MoE layers of this rank: tokens whose given experts differ from the router's
    choice, and all tokens with given experts.
    """
    counts = torch.zeros(2, dtype=torch.int64)

    def compare(router: Router, inputs: tuple[Any, ...], _: Routing) -> None:
        x, is_real, options, *replayed = inputs
        if not replayed:  # a prediction layer
            return
        chosen = router.forward(x, is_real, options).experts
        experts = replayed[0].reshape(chosen.shape).to(torch.int64)
        has_route = (experts < router.shape.n_routed_experts).all(-1) & (experts >= 0).all(-1)
        differs = (experts.sort(-1).values != chosen.sort(-1).values).any(-1)
        counts.add_(torch.stack([(differs & has_route).sum(), has_route.sum()]).cpu())

    routers = [module for model in models for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(compare) for router in routers]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _evaluated(
    network: Network,
    sequences: Sequence[Sequence[int]],
    temperature: float,
    batch: Batch,
    *,
    replay_routes: bool = False,
) -> tuple[list[list[float]], list[list[float]]]:
    form = partial(token_logprobs, entropy=True, temperature=temperature)
    output = network.evaluate(batch, form, replay_routes=replay_routes)
    values = torch.full((2, *batch["labels"].shape), -torch.inf)
    if output is not None and output.logprobs is not None and output.entropy is not None:  # other stages have no head
        values = network.whole_rows(torch.stack([output.logprobs, output.entropy]), batch).cpu()
    network.release()
    # The maximum gives all ranks the same values: ranks that compute the same rows may differ in the last bits.
    dist.all_reduce(values, dist.ReduceOp.MAX)
    logprobs, entropies = (
        [row[: len(sequence) - 1].tolist() for row, sequence in zip(rows, sequences, strict=True)] for rows in values
    )
    return logprobs, entropies


def _rows(sequences: Sequence[Sequence[int]], multiple: int) -> Batch:
    """Build a batch with one sequence in each row, padded to a length that the mesh splits evenly."""
    length = -(-max(map(len, sequences)) // multiple) * multiple
    batch = batch_of_rows(sequences, length)
    for labels, sequence in zip(batch["labels"], sequences, strict=True):
        labels[: len(sequence) - 1] = torch.tensor(sequence[1:])
    return batch


def last_values(network: Network, rows: Sequence[Sequence[int]]) -> list[float]:
    """Compute the value of the last token of each row, the output that `PreferenceLoss` trains. Collective.

    Args:
        rows: token ids without the marker that ends an answer; the same on all ranks.
    """
    rank = network.cluster.dp_rank
    ranks = network.plan.layout.dp_degree
    pieces = network.plan.layout.sequence_pieces
    length = -(-max(map(len, rows), default=1) // pieces) * pieces
    rows_per_batch = max(1, tokens_at_once(network.plan) // length) * ranks
    results = torch.full((len(rows),), -torch.inf)
    for first in range(0, len(rows), rows_per_batch):
        indices, local_rows = share_of_rows(list(rows[first : first + rows_per_batch]), rank, ranks)
        batch = batch_of_rows(local_rows, length)
        output = network.evaluate(batch)
        if output is not None and output.values is not None:  # other stages of a pipeline have no head
            ends = [len(row) - 1 for row in local_rows]
            values = network.whole_rows(output.values.unsqueeze(0), batch)[0, range(len(local_rows)), ends].cpu()
            results[[first + place for place in indices]] = values[: len(indices)]
    network.release()
    # Ranks that compute the same row may differ in the last bits.
    dist.all_reduce(results, dist.ReduceOp.MAX)
    return results.tolist()
