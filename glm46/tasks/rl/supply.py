"""The supply of a run's rollouts: its journal, labels, its engine at once, or groups that are generated ahead."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.compute.model.routes import compact_routes
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.checkpoint.integrity import published_steps
from glm46.tasks.rl.ahead import AheadSource
from glm46.tasks.rl.asking import Asking
from glm46.tasks.rl.drawing import InOrder, demonstrate, draw_rollout
from glm46.tasks.rl.journal import Journal
from glm46.tasks.rl.modes import steps_per_rollout
from glm46.tasks.rl.prompts import Prompt, answers_of_labels
from glm46.tasks.rl.rollouts import Rollout


class RolloutSupply:
    """The rollouts of a run, one after another. All methods are collective.

    Args:
        prompts: of the run.
        is_stopped: asked on the first rank while it waits for groups that are drawn ahead.
    """

    def __init__(
        self, plan: Plan, asking: Asking, prompts: Sequence[Prompt], journal: Journal, is_stopped: Callable[[], bool]
    ):
        self._plan, self._config, self._asking = plan, asking.config, asking
        self._prompts, self._journal = prompts, journal
        self.steps_made = 0
        """Optimizer steps that the policy's weights have made."""
        self._drawn_from = -1
        self._last: Rollout | None = None
        self._ahead: AheadSource | None = None
        section = plan.config.rollout
        self._staleness = section.max_staleness
        if section.kind != "local" and asking.environment is None:
            oldest = self._staleness * steps_per_rollout(plan)
            self._ahead = AheadSource(
                asking, prompts, oldest=oldest, version=lambda: self._drawn_from, is_stopped=is_stopped
            )
            asking.engine.draw_ahead(journal.drawn_ahead, goes_on=oldest > 0)

    def update_engine(self) -> None:
        """Give the engine the policy's weights, if it has others."""
        if self.steps_made != self._drawn_from:
            self._asking.engine.update(self.steps_made)
            self._drawn_from = self.steps_made

    def rollout(self, progress: Progress, first: int, *, is_inside: bool) -> Rollout | None:
        """The rollout that begins at a step, from the journal or a new one; None if a stop was requested.

        Args:
            is_inside: weights have been trained on it, so that no other one can take its place.

        Raises:
            UserError: its files are damaged or missing, or too many rewards failed.
        """
        find = partial(self._journal.read, first, is_inside=is_inside, first_prompt=progress.prompts)
        rollout = read_on_first_rank(find)
        if rollout is not None:
            rollout.figures |= dict.fromkeys(rollout.figures.keys() & {"rollout_seconds", "reward_seconds"}, 0.0)
        elif (rollout := self._draw(progress, first)) is not None:
            self._write(rollout)
        if rollout is not None and self._staleness and not rollout.is_demonstration:
            self._go_on_ahead(rollout)
        self._last = rollout
        return rollout

    def _draw(self, progress: Progress, first: int) -> Rollout | None:
        if first < self._config.warm_up_rollouts:
            answers = answers_of_labels(self._prompts, self._asking.tokenizer)
            return demonstrate(self._asking, self._prompts, answers, first, progress.prompts)
        if self._ahead is not None:
            return self._draw_from_ahead(progress, first)
        self.update_engine()
        source = InOrder(self._asking, self._prompts, progress.prompts)
        return draw_rollout(self._asking, self._prompts, source, first, progress.prompts)

    def _write(self, rollout: Rollout) -> None:
        if "routes" in rollout.arrays:
            routes = torch.from_numpy(rollout.arrays["routes"])
            rollout.arrays["routes"] = compact_routes(routes, (len(routes),), self._plan.shape).numpy()
        kept = published_steps(self._plan.config.checkpoint_folder)

        def write() -> None:
            self._journal.write(rollout, kept)
            if self._ahead is not None and not self._staleness:
                self._ahead.forget_taken()

        self._journal.writer.start(write)
        if self._staleness:  # `_go_on_ahead` forgets the groups of this rollout
            self._journal.writer.finish()

    def _draw_from_ahead(self, progress: Progress, first: int) -> Rollout | None:
        """The next rollout out of the groups that are on their way."""
        before = None if self._last is None else self._last.waiting
        if before is None:
            before = read_on_first_rank(lambda: self._journal.waiting_before(first))
        if self._drawn_from < 0 or not self._staleness:
            self.update_engine()
        self._ahead.begin(self.steps_made, progress.prompts, before)
        rollout = draw_rollout(self._asking, self._prompts, self._ahead, first, progress.prompts)
        if rollout is not None:
            later = min(self._staleness, self._later_rollouts(progress))
            self.update_engine()
            self._ahead.hand_out(later * self._config.prompts_per_rollout)
            rollout.next_prompt = self._ahead.next_prompt
            rollout.waiting = [list(pair) for pair in self._ahead.waiting.items()]
        return rollout

    def _go_on_ahead(self, rollout: Rollout) -> None:
        """Draw what later rollouts need, while this one trains."""
        following = rollout.step + steps_per_rollout(self._plan)
        find = partial(self._journal.read, following, is_inside=False, first_prompt=rollout.next_prompt)
        if read_on_first_rank(lambda: find() is not None):
            return  # the run was killed behind it: what waits on the disk was handed out with it, or after it
        self.update_engine()
        if self._ahead.waiting != dict(rollout.waiting):  # it was read from the journal
            self._ahead.begin(rollout.step, rollout.next_prompt, rollout.waiting)
        self._ahead.go_on()

    def _later_rollouts(self, progress: Progress) -> int:
        """Rollouts of the run after the one of this step."""
        training, per_rollout = self._plan.config.training, steps_per_rollout(self._plan)
        left = (self._plan.budget_tokens - progress.tokens) / (int(training.global_batch_size) * training.seq_len)
        return math.ceil((progress.step % per_rollout + math.ceil(left)) / per_rollout) - 1
