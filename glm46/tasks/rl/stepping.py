"""The optimizer steps of a rollout: micro-batches, and network outputs for its tokens before the first step."""

import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.cross_entropy import HeadForm, summed_loss
from glm46.config.float8_layers import FP8_MULTIPLE
from glm46.config.rl import ResolvedRL
from glm46.config.rules_pipeline import fitting_micro_batches
from glm46.config.section import values_of
from glm46.engine.training.network import Network
from glm46.run.plan import Plan
from glm46.run.schedule import schedule_value
from glm46.storage.data.batches import Batch
from glm46.tasks.rl.packing import PackShape, build_batch, collect, items_of, join, pack
from glm46.tasks.rl.samples import Samples

Steps = list[list[Batch]]
"""This rank's micro-batches of each optimizer step."""


def samples_per_step(plan: Plan) -> int:
    """Return the number of samples in an optimizer step."""
    size = plan.config.training.global_batch_size
    assert isinstance(size, int | float), "[rl] has steps of one size"
    return int(size)


def steps_per_rollout(plan: Plan) -> int:
    """Return the number of optimizer steps per rollout."""
    return plan.config.reinforcement[0].samples_per_rollout // samples_per_step(plan)


def step_ends(plan: Plan, samples: Samples) -> list[int]:
    """Return for each step of a rollout the number of its last sample + 1. The steps share all episodes equally."""
    count = steps_per_rollout(plan)
    total = len(samples.group)
    return [int(np.searchsorted(samples.episode, total * number // count)) for number in range(1, count + 1)]


class StepBuilder:
    """Builds the optimizer steps of rollouts.

    Args:
        networks: the policy, and the reference and the critic if the run has them.
        form: form of the policy's head that its objective reads.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, config: ResolvedRL, networks: Mapping[str, Network], form: HeadForm
    ):
        self._plan = plan
        self._cluster = cluster
        self._config = config
        self._networks = networks
        self._form = form
        self._is_on_policy = config.is_on_policy(plan.config.training.global_batch_size)
        is_pipeline = cluster.meshes.pipeline is not None  # a pipeline computes every layer, on tensors of one shape
        self._has_fixed_rows = is_pipeline or cluster.meshes.sequence is not None  # the latter splits each row evenly
        training = plan.config.training
        layout = plan.layout
        is_trained = any(values_of(plan.config.mtp.loss_weight))
        depth = plan.mtp_depths if is_trained or is_pipeline else 0
        self._shape = PackShape(
            seq_len=training.seq_len,
            rows=training.local_batch_size,
            ranks=layout.dp_degree,
            mtp_depth=depth,
            micro_batches=self._micro_batches if is_pipeline else None,
            model=plan.shape if config.routing_replay else None,
            # The second prediction layer would read completions at the end of a shared prompt.
            shares_prompts=layout.cp == 1 and networks["policy"].shape.sliding_window is None and depth <= 1,
            restricts=plan.config.reinforcement[1].is_filtered,
        )

    def _micro_batches(self, min_count: int) -> int:
        """Return a number of micro-batches that the pipeline schedule supports, at least ``min_count``.

        It may exceed the planned number, because an episode can have several samples.
        """
        parallelism = self._plan.config.parallelism
        planned = samples_per_step(self._plan)
        min_count = max(min_count, planned // self._plan.rows_per_micro_batch)
        return fitting_micro_batches(
            parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree, min_count
        )

    def route_at(self, clock: int) -> None:
        """Set the router temperature of policy and critic to its value at ``clock`` tokens of the curriculum.

        Samples are then generated and evaluated with the same function that their first step trains.
        """
        for name in {"policy", "critic"} & self._networks.keys():
            self._networks[name].route_at(schedule_value(self._plan.config.moe.router_temperature, clock))

    def batches(self, samples: Samples) -> Steps:
        """Pack samples into this rank's micro-batches of each step."""
        shape = self._shape
        steps = []
        first = 0
        for end in step_ends(self._plan, samples):
            items = items_of(samples, range(first, end), shape)
            by_rank = pack(items, shape)
            width = shape.seq_len
            if not self._has_fixed_rows:
                multiple = FP8_MULTIPLE * self._plan.layout.tp
                by_rank, width = join(by_rank, items, multiple, shape.rows * shape.seq_len)
            local_batches = by_rank[self._cluster.dp_rank]
            steps.append([build_batch(samples, rows, first, shape, items, width) for rows in local_batches])
            first = end
        return steps

    def evaluate(self, samples: Samples, steps: Steps) -> tuple[dict[str, Tensor], float]:
        """Compute log-probabilities and values of all targets of a rollout before its first step. Collective.

        Returns:
            Fields by name, FP32 [G], equal on all ranks, and the seconds that the networks took.
        """
        evaluations: dict[str, tuple[str, HeadForm, str]] = {}
        if self._config.has_reference:
            holder = "reference" if "reference" in self._networks else "policy"  # without its adapters
            evaluations["reference_logprobs"] = (holder, self._form, "logprobs")
        if self._config.has_critic:
            evaluations["old_values"] = ("critic", summed_loss, "values")
        if (self._config.old_policy == "trainer" and not self._is_on_policy) or samples.is_demonstration:
            evaluations["old_logprobs"] = ("policy", self._form, "logprobs")
        fields = {}
        started = time.perf_counter()
        for name, (network_name, form, attribute) in evaluations.items():
            network = self._networks[network_name]
            values = torch.full((len(samples.logprobs),), -torch.inf)
            for batch in chain(*steps):
                is_replayed = name == "old_logprobs" and self._config.routing_replay  # as in training
                is_adapted = name != "reference_logprobs"
                inputs: Any = batch
                if network.pipeline is None:  # prediction layers are not needed
                    inputs = {key: value for key, value in batch.items() if not key.startswith("mtp_")}
                output = network.evaluate(inputs, form, replay_routes=is_replayed, adapted=is_adapted)
                if output is not None:
                    collect(network.whole_rows(getattr(output, attribute).unsqueeze(0), batch)[0], batch, values)
            network.release()
            fields[name] = gathered(values)
        seconds = time.perf_counter() - started
        engine_logprobs = torch.from_numpy(samples.logprobs)
        fields["rollout_logprobs"] = fields["old_logprobs"] if samples.is_demonstration else engine_logprobs
        return fields, seconds


def gathered(values: Tensor) -> Tensor:
    """Merge the values of a rollout's targets, FP32 [G], over all ranks, in place. Collective.

    Each rank has collected the values of its own rows; the others are minus infinity.
    """
    dist.all_reduce(values, dist.ReduceOp.MAX)  # ranks that compute the same rows may differ in the last bits
    return values
