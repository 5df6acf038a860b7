"""A small job: a few optimizer steps of a small model on all ranks, by the engine that trains large ones."""

import math
from itertools import pairwise
from typing import Any

import torch

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process
from glm46.config.check import check_config
from glm46.config.run_config import RunConfig
from glm46.engine.training.network import build_network
from glm46.engine.training.rank_sums import sum_on_host
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.operate.cluster.results import FAIL, Defect, Result, judge
from glm46.operate.estimate.plan_sizes import describe_layout
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.data.batches import Batch
from glm46.tasks.pretrain.next_token import NextToken

_STEPS = 3
_NEW_LOSS_TOLERANCE = 0.1
"""Relative tolerance. New weights predict all tokens with about the same probability, so the first loss is near the
logarithm of the vocabulary's size."""

_SMALL_RUN = """{
    "job": {"dump_folder": "none"}, "model": {"flavor": "debug"},
    "data": {"document_mask": true, "sources": [{"name": "random", "path": "none"}]},
    "training": {"seq_len": 64, "local_batch_size": 1, "steps": 4, "mixed_precision_param": "float32"},
    "optimizer": {"name": "AdamW", "lr": 1e-3}
}"""


def small_plan(config: RunConfig | None, world_size: int, host_ranks: int | None = None) -> Plan:
    """Return the plan of a small model on these ranks.

    It has the config's degrees if they fit the model, so that its groups of ranks are the groups that the run will
    make. Otherwise it has the fewest replicas with even shards. Any number of ranks has such a plan: as many replicas
    as ranks is the last resort.
    """
    kept = (
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
    )
    degrees = {key: getattr(config.parallelism, key) for key in kept} if config is not None else {}
    replicas = (count for count in range(1, world_size + 1) if world_size % count == 0)
    for parallelism in (degrees, *({"data_parallel_replicate_degree": count} for count in replicas)):
        small = RunConfig.model_validate_json(_SMALL_RUN).model_copy()
        small = small.model_copy(update={"parallelism": small.parallelism.model_copy(update=parallelism)})
        if not check_config(small, world_size=world_size):
            break
    return resolve_plan(small, world_size, host_ranks=host_ranks)


class _SmallTask:
    """The parts of a `Task` that a step uses."""

    def __init__(self, plan: Plan, process: Process):
        self.plan = plan
        self.cluster = build_cluster(plan, process)
        network = build_network(plan, self.cluster)
        self.networks = {"model": network}
        self.objectives = {"model": NextToken(network)}


def small_job(plan: Plan, process: Process) -> Result:
    """Train steps on one batch of random tokens, the same on all ranks: losses must be finite and fall. Collective."""
    task: Any = _SmallTask(plan, process)
    batch = _batch(plan)
    losses = []
    skips = set()
    for step in range(_STEPS):
        totals = sum_on_host(count_step(task, [batch])).divided_by(plan.layout.non_dp_degree)
        outcome = train_step(task, [batch], totals, clock=step * totals.real, lr_factor=1.0)
        losses.append(outcome.main.objective["loss"].item() / max(totals.main["targets"], 1))
        if outcome.fault is not None:  # the step was skipped, and its weights did not change
            skips.add(outcome.fault)
    expected = math.log(plan.shape.vocab_size)
    is_near_expected = abs(losses[0] / expected - 1) < _NEW_LOSS_TOLERANCE
    is_falling = all(later < earlier for earlier, later in pairwise(losses))  # false if a loss is NaN
    losses_text = ", ".join(f"{loss:.4f}" for loss in losses)
    value = "; ".join([f"losses {losses_text}", f"ranks: {describe_layout(plan.layout)}", *sorted(skips)])
    remedy = "products and collectives above show which part is wrong; else report it with the output of --json"
    faults = [] if is_near_expected and is_falling and not skips else [Defect(FAIL, value, remedy)]
    return judge("small job", faults, value, f"near {expected:.2f} at first, then falling")


def _batch(plan: Plan) -> Batch:
    """Make a batch like the loader's, the same on all ranks."""
    length = plan.config.training.seq_len
    depth = plan.mtp_depths
    rows = plan.config.training.local_batch_size
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, plan.shape.vocab_size, (rows, length + 1 + depth), generator=generator)
    ahead = [text[:, k : k + length] for k in range(1, depth + 2)]
    return {
        "input_ids": text[:, :length],
        "labels": ahead[0],
        "positions": torch.arange(length, dtype=torch.int32).expand(rows, -1).contiguous(),
        "document_ids": torch.zeros(rows, length, dtype=torch.int32),
        "mtp_input_ids": torch.stack(ahead[:depth], 1),
        "mtp_labels": torch.stack(ahead[1:], 1),
    }
