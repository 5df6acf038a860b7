"""The optimizer steps of a rollout: micro-batches with the fields that the objectives read."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.cross_entropy import HeadForm, summed_loss
from glm46.config.float8_layers import FP8_MULTIPLE
from glm46.config.rl import ResolvedRL
from glm46.config.section import values_of
from glm46.engine.training.network import Network
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch
from glm46.tasks.rl.fields import Rewards, prepare_fields, sum_over_replicas
from glm46.tasks.rl.journal import Writer
from glm46.tasks.rl.packing import PackShape, build_batch, collect, items_of, join, pack, spread
from glm46.tasks.rl.rollouts import Rollout, read_fields, write_fields

Steps = list[list[Batch]]
"""For each optimizer step this rank's micro-batches."""


class StepBuilder:
    """Makes the steps of rollouts.

    Args:
        config: resolved.
        networks: by name: the policy, and the reference and the critic where there are.
        form: of the policy's head, which its objective reads.
        writer: of the journal.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        config: ResolvedRL,
        networks: Mapping[str, Network],
        form: HeadForm,
        writer: Writer,
    ):
        self._plan, self._cluster, self._config = plan, cluster, config
        self._networks, self._form, self._writer = networks, form, writer
        self.seconds = 0.0
        """In which the networks computed for the last rollout."""
        self.columns: dict[str, float] = {}
        """Columns of metrics of the last rollout."""
        self._unwritten: tuple[Rollout, Steps, dict[str, Tensor]] | None = None
        self._is_on_policy = config.is_on_policy(plan.config.training.global_batch_size)
        is_pipeline = cluster.meshes.pipeline is not None  # which computes every layer, on tensors of one shape
        self._has_fixed_rows = is_pipeline or cluster.meshes.sequence is not None  # which splits each row evenly
        is_trained = any(values_of(plan.config.mtp.loss_weight))
        self._mtp_depth = plan.shape.num_nextn_predict_layers if is_trained or is_pipeline else 0

    def build(self, rollout: Rollout, *, is_inside: bool) -> Steps:
        """The steps of a rollout. Collective.

        Args:
            is_inside: the run was resumed inside of it: networks have changed since its first step, so that what they
                computed is read from the journal.

        Raises:
            UserError: the journal lacks it.
        """
        self.seconds = 0.0
        steps = self._batches(rollout)
        self._add_fields(rollout, steps, is_inside=is_inside)
        return steps

    def _batches(self, rollout: Rollout) -> list[list[Batch]]:
        """This rank's micro-batches of each step."""
        training, layout, depth = self._plan.config.training, self._plan.layout, self._mtp_depth
        is_pipeline = self._cluster.meshes.pipeline is not None
        shape = PackShape(
            seq_len=training.seq_len,
            rows=training.local_batch_size,
            ranks=layout.dp_degree,
            micro_batches=int(training.global_batch_size) // self._plan.rows_per_micro_batch if is_pipeline else None,
            mtp_depth=depth,
            model=self._plan.shape if self._config.routing_replay else None,
            # The second prediction layer would read completions at the end of a shared prompt.
            shares_prompts=layout.cp == 1 and self._networks["policy"].shape.sliding_window is None and depth <= 1,
        )
        steps = []
        for first, end in self._step_bounds(rollout):
            items = items_of(rollout, range(first, end), shape)
            of_ranks, width = pack(items, shape), shape.seq_len
            if not self._has_fixed_rows:
                multiple = FP8_MULTIPLE * layout.tp
                of_ranks, width = join(of_ranks, items, multiple, shape.rows * shape.seq_len)
            mine = of_ranks[self._cluster.dp_rank]
            steps.append([build_batch(rollout, rows, first, shape, items, width) for rows in mine])
        return steps

    def _step_bounds(self, rollout: Rollout) -> list[tuple[int, int]]:
        """First and end of the samples of each step: equally many, and all of them."""
        count = self._config.samples_per_rollout // int(self._plan.config.training.global_batch_size)
        bounds = [len(rollout) * number // count for number in range(count + 1)]
        return list(zip(bounds, bounds[1:], strict=False))

    def _add_fields(self, rollout: Rollout, steps: Steps, *, is_inside: bool) -> None:
        """Add to the batches what the objectives read. Collective."""
        if is_inside:  # the networks have been updated since
            fields = read_on_first_rank(lambda: read_fields(self._writer.folder, rollout.step))
        else:
            fields = self._computed(rollout, steps)
        for batch in (batch for step in steps for batch in step):
            for name, values in fields.items():
                batch[name] = spread(values, batch)
        rewards, groups = (torch.from_numpy(rollout.arrays[name]) for name in ("rewards", "groups"))
        of_steps = [Rewards(rewards[first:end], groups[first:end]) for first, end in self._step_bounds(rollout)]
        longest = self._plan.config.rollout.max_new_tokens
        columns = prepare_fields(steps, of_steps, self._config, longest, sum_over_replicas(self._cluster))
        self.columns = {"logprob_seconds": self.seconds} | columns
        if rollout.is_demonstration:
            for batch in (batch for step in steps for batch in step):
                batch["advantages"] = (batch["place"] >= 0).float()
        if not is_inside:
            self._unwritten = rollout, steps, fields
            if rollout.is_demonstration or not self._is_on_policy:
                self.write_fields()

    def write_fields(self) -> None:
        """Begin to write the fields of the tokens of the last rollout, if that is left to do. Where its only step has
        the old log-probabilities, they are added to the batches by `PolicyGradient.sums`: call it after the step.
        Collective."""
        if self._unwritten is None:
            return
        (rollout, steps, fields), self._unwritten = self._unwritten, None
        batches = [batch for step in steps for batch in step]
        names = [name for name in ("advantages", "correction", "returns") if name in batches[0]]
        if self._is_on_policy and not rollout.is_demonstration:  # pipeline stages without the head do not have them
            names = sorted({*names, "correction", "old_logprobs"})  # in the same order on all stages
        values = torch.full((len(names), rollout.tokens), -torch.inf)
        for batch in batches:
            for name, row in zip(names, values, strict=True):
                if name in batch:
                    collect(batch[name].cpu(), batch, row)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        fields |= dict(zip(names, values, strict=True))
        self._writer.start(lambda: write_fields(self._writer.folder, rollout.step, fields))

    def _computed(self, rollout: Rollout, steps: Steps) -> dict[str, Tensor]:
        """Log-probabilities and values of all tokens of a rollout by name, FP32 [T], equal on all ranks. Collective."""
        form = self._form
        wanted: dict[str, tuple[str, HeadForm, str]] = {}
        if self._config.has_reference:
            holder = "reference" if "reference" in self._networks else "policy"  # without its adapters
            wanted["reference_logprobs"] = (holder, form, "logprobs")
        if self._config.has_critic:
            wanted["old_values"] = ("critic", summed_loss, "values")
        if (self._config.old_policy == "trainer" and not self._is_on_policy) or rollout.is_demonstration:
            wanted["old_logprobs"] = ("policy", form, "logprobs")
        fields, began = {}, time.perf_counter()
        for name, (of, form, column) in wanted.items():
            network = self._networks[of]
            fields[name] = torch.full((rollout.tokens,), -torch.inf)
            for batch in (batch for step in steps for batch in step):
                is_replayed = name == "old_logprobs" and self._config.routing_replay  # as in training
                is_adapted = name != "reference_logprobs"
                inputs = batch
                if network.pipeline is None:  # prediction layers are not needed
                    inputs = {key: value for key, value in batch.items() if not key.startswith("mtp_")}
                output = network.evaluate(inputs, form, replay_routes=is_replayed, adapted=is_adapted)
                if output is not None:
                    values = network.whole_rows(getattr(output, column).unsqueeze(0), batch)[0]
                    collect(values.cpu(), batch, fields[name])
            network.release()
            # Each rank has the values of its own rows; those that compute the same rows may differ in the last bits.
            dist.all_reduce(fields[name], dist.ReduceOp.MAX)
        self.seconds = time.perf_counter() - began
        of_engine = torch.from_numpy(rollout.arrays["logprobs"])
        fields["rollout_logprobs"] = fields["old_logprobs"] if rollout.is_demonstration else of_engine
        return fields
