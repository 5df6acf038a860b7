"""The engine that [rollout] names, for the policy of a run, and the values of networks for given sequences."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.router import Router, Routing
from glm46.compute.model.routes import moe_layers, no_routes
from glm46.compute.model.transformer import Transformer
from glm46.engine.evaluation.rows import share_of_rows
from glm46.engine.inference.model_mesh import build_model_mesh
from glm46.engine.training.network import Network
from glm46.files.local_disk import real_path
from glm46.run.layout import generation_layout
from glm46.run.parameters import named_rows
from glm46.storage.data.batches import Batch
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.schemes import FP8_SCHEMES
from glm46.tasks.pretrain.network_rows import batch_of_rows, tokens_at_once
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import SamplingRules
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.rollout.server_state import ServedPolicy
from glm46.tasks.rl.rollout.weights import base_folder, served_tensors, write_adapters, write_policy

_ADDED = 0.05
"""To the numbers of adapters, for the check of the start."""


def build_engine(
    policy: Network, tokenizer: Tokenizer, prompts: Sequence[list[int]], rules: SamplingRules,
    is_stopped: Callable[[], bool],
) -> LocalEngine | ServerEngine:  # fmt: skip
    """The engine of a policy, without weights before its first update.

    Args:
        is_stopped: asked on each rank before each token of a local engine; true ends its samples with "abort".
    """
    config, (rl, section) = policy.plan.config, policy.plan.config.reinforcement
    if section.kind == "local":
        process = policy.cluster.process
        layout = generation_layout(section.degrees, process.world_size)
        mesh = build_model_mesh(layout, process.rank, process.device.type)
        return LocalEngine(
            policy, max_length=config.training.seq_len, mesh=mesh, rows=section.samples_at_once,
            speculative=section.speculative, routes=rl.routing_replay, is_stopped=is_stopped,
        )  # fmt: skip
    dtype, scheme = getattr(torch, config.training.mixed_precision_param), FP8_SCHEMES.get(section.weights_dtype or "")
    weights = real_path(Path(config.job.dump_folder, "rollout_weights"))
    write = write_adapters if section.send_adapters else partial(write_policy, scheme=scheme)
    base = base_folder(policy, Path(section.weights_folder or weights)) if section.send_adapters else None
    served = ServedPolicy(
        export=lambda folder: write(policy, tokenizer, folder, dtype), tensors=lambda: served_tensors(policy, scheme),
        score=partial(score, policy), routed_score=partial(routed_score, policy), changed=lambda: changed(policy),
    )  # fmt: skip
    return ServerEngine(
        section, folder=weights, base=base, policy=served, prompts=prompts, rules=rules,
        padding=range(tokenizer.vocab_size, policy.plan.shape.vocab_size),
        routed=(moe_layers(policy.plan.shape), policy.plan.shape.num_experts_per_tok),
    )  # fmt: skip


@contextmanager
def changed(policy: Network) -> Iterator[None]:
    """While it is open, the first tensor of each kind has the other sign: attention, experts, routers, norms, head and
    so on; of a policy with adapters, which alone are exported anew, all adapters are other ones. Then all are what they
    were, bit for bit."""
    shape = policy.plan.shape.model_copy(update={"num_nextn_predict_layers": 0})
    kinds = {row.group: name for name, row in reversed(named_rows(shape).items()) if row.optimizer is not None}
    has_adapters, weights = policy.plan.config.adapter is not None, policy.weights()
    names = policy.parameters if has_adapters else weights.keys() & set(kinds.values())
    before = {name: local_tensor(weights[name]).clone() for name in names}
    for name in names:
        tensor = local_tensor(weights[name])
        tensor.add_(_ADDED) if has_adapters else tensor.neg_()  # adapters begin at 0
    try:
        yield
    finally:
        for name, tensor in before.items():
            local_tensor(weights[name]).copy_(tensor)


def score(
    network: Network, sequences: Sequence[Sequence[int]], temperature: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probability of each token but the first of sequences, and the entropy of the distribution that it is one of,
    at a temperature, equal on all ranks. Collective."""
    return _evaluated(network, sequences, temperature, _rows(sequences, network.plan.layout.sequence_pieces))


def routed_score(
    network: Network, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray], temperature: float
) -> tuple[list[list[float]], float]:
    """Log-probabilities as of `score`, with given experts, and the share of tokens and layers for which the network's
    own routers choose other ones; NaN under torch.compile, whose blocks call no hooks. Collective.

    Args:
        routes: of each sequence, integer [tokens but the last, MoE layers, top_k].
    """
    batch, shape = _rows(sequences, network.plan.layout.sequence_pieces), network.plan.shape
    batch["routes"] = no_routes(tuple(batch["input_ids"].shape), shape)
    for row, given in zip(batch["routes"], routes, strict=True):
        row[: len(given)] = torch.from_numpy(given.astype(np.int32))
    with _compared_routes(network.models) as counts:
        logprobs, _ = _evaluated(network, sequences, temperature, batch, replay_routes=True)
    dist.all_reduce(counts)
    return logprobs, counts[0].item() / counts[1].item() if counts[1] else math.nan


@contextmanager
def _compared_routes(models: Sequence[Transformer]) -> Iterator[torch.Tensor]:
    """int64 [2]: of the tokens that were given routes while it was open, how many differ from the router's choice, and
    their number, over all layers of this rank."""
    counts = torch.zeros(2, dtype=torch.int64)

    def compare(router: Router, inputs: tuple, _: Routing) -> None:
        x, is_real, options, *given = inputs
        if not given:  # a prediction layer
            return
        own = router.forward(x, is_real, options).experts
        found = given[0].reshape(own.shape).to(torch.int64)
        has_route = (found < router.shape.n_routed_experts).all(-1) & (found >= 0).all(-1)
        differs = (found.sort(-1).values != own.sort(-1).values).any(-1)
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
    found = torch.full((2, *batch["labels"].shape), -torch.inf)
    if output is not None and output.logprobs is not None and output.entropy is not None:  # other stages have no head
        found = network.whole_rows(torch.stack([output.logprobs, output.entropy]), batch).cpu()
    network.release()
    # The largest, not one rank's: ranks that compute the same rows may differ in the last bits.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    logprobs, entropies = (
        [row[: len(sequence) - 1].tolist() for row, sequence in zip(rows, sequences, strict=True)] for rows in found
    )
    return logprobs, entropies


def _rows(sequences: Sequence[Sequence[int]], multiple: int) -> Batch:
    """A batch with one sequence in each row, of a length that the mesh splits evenly."""
    length = -(-max(map(len, sequences)) // multiple) * multiple
    batch = batch_of_rows(sequences, length)
    for labels, sequence in zip(batch["labels"], sequences, strict=True):
        labels[: len(sequence) - 1] = torch.tensor(sequence[1:])
    return batch


def last_values(network: Network, rows: Sequence[Sequence[int]]) -> list[float]:
    """The value of the last token of each row, as `PreferenceLoss` trains it. Rows are token ids without the marker
    that ends an answer, the same on all ranks. Collective."""
    rank, ranks, pieces = network.cluster.dp_rank, network.plan.layout.dp_degree, network.plan.layout.sequence_pieces
    length = -(-max(map(len, rows), default=1) // pieces) * pieces
    at_once = max(1, tokens_at_once(network.plan) // length) * ranks
    found = torch.full((len(rows),), -torch.inf)
    for first in range(0, len(rows), at_once):
        places, mine = share_of_rows(list(rows[first : first + at_once]), rank, ranks)
        batch = batch_of_rows(mine, length)
        output = network.evaluate(batch)
        if output is not None and output.values is not None:  # other stages of a pipeline have no head
            last = [len(row) - 1 for row in mine]
            values = network.whole_rows(output.values.unsqueeze(0), batch)[0, range(len(mine)), last].cpu()
            found[[first + place for place in places]] = values[: len(places)]
    network.release()
    # Ranks that compute the same row may differ in the last bits.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
