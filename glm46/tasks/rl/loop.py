"""One rollout after another: prompts -> samples -> scores -> fields -> steps -> journal -> weights."""

import math
from collections.abc import Callable
from functools import partial

import torch

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.compute.model.routes import compact_routes
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.checkpoint.integrity import published_steps
from glm46.tasks.rl.ahead import AheadSource
from glm46.tasks.rl.fields import training_fields
from glm46.tasks.rl.journal import Journal
from glm46.tasks.rl.objectives import PolicyGradient
from glm46.tasks.rl.packing import spread
from glm46.tasks.rl.rollout.background import begin_samples
from glm46.tasks.rl.rollouts import Rollout
from glm46.tasks.rl.sampling import Sampler, demonstrate, generate_rollout
from glm46.tasks.rl.stepping import StepBuilder, Steps, TokenRecord, micro_batches, step_ends, steps_per_rollout


class RolloutLoop:
    """The rollouts of a run. All methods are collective.

    Args:
        is_stopped: asked on the first rank while it waits for groups that are generated ahead.
    """

    def __init__(
        self,
        plan: Plan,
        sampler: Sampler,
        policy: PolicyGradient,
        builder: StepBuilder,
        journal: Journal,
        is_stopped: Callable[[], bool],
    ):
        self._plan, self._config, self._sampler = plan, sampler.config, sampler
        self._policy, self._builder, self._journal = policy, builder, journal
        self._is_on_policy = self._config.is_on_policy(plan.config.training.global_batch_size)
        self.rollout: Rollout | None = None
        """Of the next step; None before the first one and after a stop."""
        self.steps: Steps = []
        self.columns: dict[str, float] = {}
        """Of metrics, of the rollout."""
        self._unwritten: tuple[dict[str, torch.Tensor], TokenRecord] | None = None
        """Fields of a rollout whose only step computes the old log-probabilities."""
        self._version = -1
        section = plan.config.rollout
        self._staleness, self._drops = section.max_staleness, section.when_stale == "drop"
        self._ahead: AheadSource | None = None
        if section.kind != "local" and (sampler.environment is None or sampler.episodes is not None):
            oldest = self._staleness * steps_per_rollout(plan)
            self._ahead = AheadSource(
                sampler, oldest=oldest, version=lambda: self._version, is_stopped=is_stopped, drops=self._drops
            )
            of = sampler.episodes
            begin = begin_samples if of is None else partial(of.begin, sampler.prompt)
            sampler.engine.generate_ahead(journal.ahead_folder, begin, goes_on=oldest > 0)

    def begin(self, progress: Progress, first: int) -> bool:
        """Make the rollout that begins at a step the present one, and its steps; false if a stop was requested.

        Raises:
            UserError: its files are damaged or missing, or too many rewards failed.
        """
        within = progress.step - first  # steps that were made on it before this start of the run
        self._journal.finish()
        self.write_fields()  # of the rollout before, while the next one is generated
        before, self.rollout = self.rollout, None

        # 1 samples, 2 scores
        rollout = read_on_first_rank(partial(self._read, first, progress, is_inside=within > 0))
        if rollout is None:
            rollout = self._generate(progress, first, before)
            if rollout is None:
                return False
            self._write(rollout)
        else:
            rollout.figures |= dict.fromkeys(rollout.figures.keys() & {"rollout_seconds", "reward_seconds"}, 0.0)
        if self._staleness and not rollout.is_demonstration:
            self._generate_ahead(progress, rollout)

        # 3 fields: what networks say of these tokens before the first step, and what follows from rewards
        self.steps = self._builder.batches(rollout)
        if within:
            given, seconds = read_on_first_rank(partial(self._journal.read_fields, first)), 0.0
        else:
            given, seconds = self._builder.evaluate(rollout, self.steps)
        fields, columns = self._training_fields(rollout, given)
        if rollout.is_demonstration:
            fields["advantages"] = (rollout.sample_of_tokens() >= 0).float()
        fields = given | fields

        # 4 steps
        for batch in micro_batches(self.steps):
            batch |= {name: spread(values, batch) for name, values in fields.items()}

        # 5 journal
        if not within and self._is_on_policy and not rollout.is_demonstration:
            self._unwritten = fields, TokenRecord(rollout)
            self._policy.record = self._unwritten[1].add
        elif not within:
            self._journal.write_fields(rollout.step, fields)
        self.rollout, self.columns = rollout, rollout.figures | {"logprob_seconds": seconds} | columns
        return True

    def write_fields(self) -> None:
        """Begin to write the fields of the present rollout, if they waited for its step."""
        if self._unwritten is None:
            return
        (fields, record), self._unwritten = self._unwritten, None
        old = record.of_all_ranks()
        given = {"old_logprobs": old, "rollout_logprobs": torch.from_numpy(self.rollout.arrays["logprobs"])}
        found, _ = self._training_fields(self.rollout, fields | given)
        fields |= {"old_logprobs": old, "correction": found["correction"]}
        self._journal.write_fields(self.rollout.step, fields)

    def _training_fields(
        self, rollout: Rollout, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        rewards, groups = (torch.from_numpy(rollout.arrays[name]) for name in ("rewards", "groups"))
        sample, ends = rollout.sample_of_tokens(), step_ends(self._plan, rollout)
        longest = self._plan.config.rollout.max_new_tokens
        episodes = torch.from_numpy(rollout.arrays["episodes"])
        return training_fields(given, sample, rewards, groups, ends, self._config, longest, episodes)

    def update_weights(self, version: int) -> None:
        """6 weights: give the engine those of the policy, if it has others.

        Args:
            version: optimizer steps that the policy has made.
        """
        if version != self._version:
            self._sampler.engine.update(version)
            self._version = version

    def _read(self, first: int, progress: Progress, *, is_inside: bool) -> Rollout | None:
        return self._journal.read(first, is_inside=is_inside, first_prompt=progress.prompts)

    def _generate(self, progress: Progress, first: int, before: Rollout | None) -> Rollout | None:
        """The rollout of a step: labels, samples of the present weights, or groups that are on their way."""
        prompts = progress.prompts
        if first < self._config.warm_up_rollouts:
            return demonstrate(self._sampler, first, prompts)
        if self._ahead is None or self._version < 0 or not self._staleness:
            self.update_weights(progress.step)
        if self._ahead is None:
            return generate_rollout(self._sampler, self._sampler.generate_groups, first, prompts)
        waiting = read_on_first_rank(lambda: self._journal.waiting_before(first)) if before is None else before.waiting
        self._ahead.begin(progress.step, prompts, waiting)
        each, later = self._config.prompts_per_rollout, min(self._staleness, self._later_rollouts(progress))
        if self._drops:  # a slow group is overtaken from the begin on
            self.update_weights(progress.step)
            self._ahead.hand_out((1 + later) * each)
        rollout = generate_rollout(self._sampler, self._ahead.take, first, prompts)
        if rollout is not None:
            self.update_weights(progress.step)
            self._ahead.hand_out(later * each)
            rollout.next_prompt = self._ahead.next_prompt
            rollout.waiting = [list(pair) for pair in self._ahead.waiting.items()]
            rollout.stale = self._ahead.stale
            if self._drops:
                rollout.figures["stale_groups"] = len(rollout.stale)
        return rollout

    def _write(self, rollout: Rollout) -> None:
        if "routes" in rollout.arrays:
            routes = torch.from_numpy(rollout.arrays["routes"])
            rollout.arrays["routes"] = compact_routes(routes, (len(routes),), self._plan.shape).numpy()
        kept = published_steps(self._plan.config.checkpoint_folder)
        if self._ahead is not None and not self._staleness:
            self._journal.write(rollout, kept, self._ahead.forget_taken)
            return
        self._journal.write(rollout, kept)
        if self._staleness:  # `_generate_ahead` forgets the groups of this rollout
            self._journal.finish()

    def _generate_ahead(self, progress: Progress, rollout: Rollout) -> None:
        """Generate what later rollouts need, while this one trains."""
        following = rollout.step + steps_per_rollout(self._plan)
        find = partial(self._journal.read, following, is_inside=False, first_prompt=rollout.next_prompt)
        if read_on_first_rank(lambda: find() is not None):
            return  # the run was killed after it: what waits on the disk was handed out with it, or after it
        self.update_weights(progress.step)
        if self._ahead.waiting != dict(rollout.waiting):  # it was read from the journal
            self._ahead.begin(rollout.step, rollout.next_prompt, rollout.waiting)
        self._ahead.go_on()

    def _later_rollouts(self, progress: Progress) -> int:
        """Rollouts of the run after the one of this step."""
        training, per_rollout = self._plan.config.training, steps_per_rollout(self._plan)
        left = (self._plan.budget_tokens - progress.tokens) / (int(training.global_batch_size) * training.seq_len)
        return math.ceil((progress.step % per_rollout + math.ceil(left)) / per_rollout) - 1
