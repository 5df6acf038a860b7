"""The optimizer steps of a rollout: micro-batches, and what networks compute for its tokens before the first one."""

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
"""For each optimizer step this rank's micro-batches."""


def samples_per_step(plan: Plan) -> int:
    """Samples of an optimizer step."""
    size = plan.config.training.global_batch_size
    assert isinstance(size, int | float), "[rl] has steps of one size"
    return int(size)


def steps_per_rollout(plan: Plan) -> int:
    """Optimizer steps of one rollout."""
    return plan.config.reinforcement[0].samples_per_rollout // samples_per_step(plan)


def step_ends(plan: Plan, samples: Samples) -> list[int]:
    """Of each step of a rollout the number of its last sample + 1: equally many episodes each, and all of them."""
    count, total = steps_per_rollout(plan), len(samples.group)
    return [int(np.searchsorted(samples.episode, total * number // count)) for number in range(1, count + 1)]


class StepBuilder:
    """Makes the steps of rollouts. Its networks are the policy, and the reference and the critic where there are;
    `form` is that of the policy's head, which its objective reads."""

    def __init__(
        self, plan: Plan, cluster: Cluster, config: ResolvedRL, networks: Mapping[str, Network], form: HeadForm
    ):
        self._plan, self._cluster, self._config, self._networks, self._form = plan, cluster, config, networks, form
        self._is_on_policy = config.is_on_policy(plan.config.training.global_batch_size)
        is_pipeline = cluster.meshes.pipeline is not None  # which computes every layer, on tensors of one shape
        self._has_fixed_rows = is_pipeline or cluster.meshes.sequence is not None  # which splits each row evenly
        training, layout = plan.config.training, plan.layout
        is_trained = any(values_of(plan.config.mtp.loss_weight))
        depth = plan.shape.num_nextn_predict_layers if is_trained or is_pipeline else 0
        self._shape = PackShape(
            seq_len=training.seq_len, rows=training.local_batch_size, ranks=layout.dp_degree, mtp_depth=depth,
            micro_batches=self._micro_batches if is_pipeline else None,
            model=plan.shape if config.routing_replay else None,
            # The second prediction layer would read completions at the end of a shared prompt.
            shares_prompts=layout.cp == 1 and networks["policy"].shape.sliding_window is None and depth <= 1,
        )  # fmt: skip

    def _micro_batches(self, least: int) -> int:
        """Those that a pipeline takes: more than a step has samples for if its episodes have several."""
        parallelism, planned = self._plan.config.parallelism, samples_per_step(self._plan)
        least = max(least, planned // self._plan.rows_per_micro_batch)
        return fitting_micro_batches(
            parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree, least
        )

    def route_at(self, clock: int) -> None:
        """Have samples be of the function that the first step on them learns with, at tokens of the curriculum."""
        for name in {"policy", "critic"} & self._networks.keys():
            self._networks[name].route_at(schedule_value(self._plan.config.moe.router_temperature, clock))

    def batches(self, samples: Samples) -> Steps:
        """This rank's micro-batches of each step."""
        shape, steps, first = self._shape, [], 0
        for end in step_ends(self._plan, samples):
            items = items_of(samples, range(first, end), shape)
            of_ranks, width = pack(items, shape), shape.seq_len
            if not self._has_fixed_rows:
                multiple = FP8_MULTIPLE * self._plan.layout.tp
                of_ranks, width = join(of_ranks, items, multiple, shape.rows * shape.seq_len)
            mine = of_ranks[self._cluster.dp_rank]
            steps.append([build_batch(samples, rows, first, shape, items, width) for rows in mine])
            first = end
        return steps

    def evaluate(self, samples: Samples, steps: Steps) -> tuple[dict[str, Tensor], float]:
        """Log-probabilities and values of all targets of a rollout by name, FP32 [G], equal on all ranks, and the
        seconds of the networks. Collective."""
        wanted: dict[str, tuple[str, HeadForm, str]] = {}
        if self._config.has_reference:
            holder = "reference" if "reference" in self._networks else "policy"  # without its adapters
            wanted["reference_logprobs"] = (holder, self._form, "logprobs")
        if self._config.has_critic:
            wanted["old_values"] = ("critic", summed_loss, "values")
        if (self._config.old_policy == "trainer" and not self._is_on_policy) or samples.is_demonstration:
            wanted["old_logprobs"] = ("policy", self._form, "logprobs")
        fields, began = {}, time.perf_counter()
        for name, (of, form, column) in wanted.items():
            network, record = self._networks[of], TokenRecord(len(samples.logprobs))
            for batch in chain(*steps):
                is_replayed = name == "old_logprobs" and self._config.routing_replay  # as in training
                is_adapted = name != "reference_logprobs"
                inputs: Any = batch
                if network.pipeline is None:  # prediction layers are not needed
                    inputs = {key: value for key, value in batch.items() if not key.startswith("mtp_")}
                output = network.evaluate(inputs, form, replay_routes=is_replayed, adapted=is_adapted)
                if output is not None:
                    record.add(batch, network.whole_rows(getattr(output, column).unsqueeze(0), batch)[0])
            network.release()
            fields[name] = record.of_all_ranks()
        seconds = time.perf_counter() - began
        of_engine = torch.from_numpy(samples.logprobs)
        fields["rollout_logprobs"] = fields["old_logprobs"] if samples.is_demonstration else of_engine
        return fields, seconds


class TokenRecord:
    """Values of the targets of a rollout that this rank's micro-batches have."""

    def __init__(self, targets: int):
        self._values = torch.full((targets,), -torch.inf)

    def add(self, batch: Batch, values: Tensor) -> None:
        """Record [B, S], whole rows on any device, of a micro-batch of `StepBuilder.batches`."""
        collect(values.cpu(), batch, self._values)

    def of_all_ranks(self) -> Tensor:
        """FP32 [G]. Collective."""
        # Each rank has the values of its own rows; those that compute the same rows may differ in the last bits.
        dist.all_reduce(self._values, dist.ReduceOp.MAX)
        return self._values
