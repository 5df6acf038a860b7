"""The engine that [rollout] names, for the policy of a run."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from glm46.data.tokenizer import Tokenizer
from glm46.distributed.collective_errors import run_on_all_ranks
from glm46.distributed.local_tensor import local_tensor
from glm46.huggingface.merge_adapter import merge_adapter
from glm46.huggingface.peft_export import export_adapter
from glm46.inference.model_mesh import build_model_mesh
from glm46.model.cross_entropy import token_logprobs
from glm46.planner.layout import generation_layout
from glm46.planner.parameters import named_rows
from glm46.rl.packing import empty_batch
from glm46.rollout.local import LocalEngine
from glm46.rollout.records import Engine
from glm46.rollout.server_engine import ServedPolicy, ServerEngine
from glm46.training.hf_weights import write_weights
from glm46.training.network import Batch, Network

_PROBES = 4
_ADDED = 0.05
"""To the numbers of adapters, for the check of the start."""


def build_engine(
    policy: Network, tokenizer: Tokenizer, prompts: Sequence[list[int]], is_stopped: Callable[[], bool]
) -> Engine:
    """The engine of a policy, without weights before its first update.

    Args:
        prompts: of the run, the first of which probe servers after each update.
        is_stopped: asked on each rank before each token of a local engine; true ends its samples with "abort".
    """
    config = policy.plan.config
    section = config.rollout
    if section.kind == "local":
        process = policy.cluster.process
        layout = generation_layout(section.degrees, process.world_size)
        mesh = build_model_mesh(layout, process.rank, process.device.type)
        length, routes = config.training.seq_len, config.rl.routing_replay
        rows = section.max_num_seqs
        return LocalEngine(policy, max_length=length, mesh=mesh, rows=rows, routes=routes, is_stopped=is_stopped)
    dtype = getattr(torch, config.training.mixed_precision_param)
    weights = Path(config.job.dump_folder, "rollout_weights").resolve()
    write = write_adapters if section.send_adapters else write_policy
    return ServerEngine(
        section,
        folder=weights,
        base=_base(policy, Path(section.weights_folder or weights)) if section.send_adapters else None,
        policy=ServedPolicy(
            export=lambda folder: write(policy, tokenizer, folder, dtype),
            score=lambda sequences: score(policy, sequences),
            changed=lambda: changed(policy),
        ),
        probe=list(prompts[:_PROBES]),
        padding=range(tokenizer.vocab_size, policy.plan.shape.vocab_size),
    )


def write_policy(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the policy as a Hugging Face folder, its adapters merged as `whole_weights` does. Collective.

    Servers take merged weights of any adapter, those of experts and DoRA too, which they refuse beside a base.
    """
    if policy.plan.config.adapter is None:
        write_weights(policy, tokenizer, folder, dtype)
        return
    adapter = folder.with_name(f"{folder.name}-adapter")
    if dist.get_rank() == 0 and adapter.exists():  # of a run that was killed; export begins with a collective
        shutil.rmtree(adapter)
    write_adapters(policy, tokenizer, adapter, dtype)
    merge_adapter(_base(policy, folder.parent), adapter, folder, target=dtype)


def write_adapters(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapters of the policy as a PEFT folder. Collective.

    A base in another format than Hugging Face's is written beside the versions, once.
    """
    base = _base(policy, folder.parent)
    if not run_on_all_ranks(base.exists):
        write_weights(policy, tokenizer, base, dtype)
    scale = policy.plan.config.adapter.scale
    export_adapter(folder, policy.plan.shape, policy.parameters, scale=scale, base=str(base))


def _base(policy: Network, versions: Path) -> Path:
    """The Hugging Face folder of the base, in the folder of versions if the run began with another format."""
    start = policy.plan.config.checkpoint
    return Path(start.initial_load_path) if start.initial_load_in_hf else versions / "base"


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


def score(network: Network, sequences: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probability of each token but the first of sequences, and the entropy of the distribution that it is one of,
    at temperature 1, equal on all ranks. Collective."""
    batch = _rows(sequences, network.plan.layout.sequence_pieces)
    output = network.evaluate(batch, partial(token_logprobs, entropy=True))
    found = torch.full((2, *batch["labels"].shape), -torch.inf)
    if output is not None:  # other stages of a pipeline have no head
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
    batch = empty_batch(len(sequences), length)
    for row, sequence in enumerate(sequences):
        tokens = torch.tensor(sequence)
        batch["input_ids"][row, : len(tokens)] = tokens
        batch["positions"][row, : len(tokens)] = torch.arange(len(tokens))
        batch["document_ids"][row, : len(tokens)] = 0
        batch["labels"][row, : len(tokens) - 1] = tokens[1:]
    return batch
