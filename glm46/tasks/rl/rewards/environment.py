"""Replies to the turns of a policy, in processes that can be killed."""

from collections.abc import Mapping, Sequence
from typing import Any

from glm46.tasks.rl.rewards.answer import Answer, RewardRule
from glm46.tasks.rl.rewards.scorer import Reply, Scorer


class Environment:
    """A function that gets the `Answer` of a turn and the options, and returns the text of the reply, or None at the
    end of the conversation.

    Args:
        function: ``package.module:function``.
        seconds: longest time for one reply.
        max_turns: of the policy in one conversation.

    Raises:
        UserError: the function cannot be loaded.
    """

    def __init__(self, function: str, options: Mapping[str, Any], seconds: float, max_turns: int):
        self.max_turns, self._function = max_turns, function
        self._processes = Scorer(
            [RewardRule(function, seconds=seconds, options=options, is_environment=True)], key="rl.environment"
        )

    def replies(self, answers: Sequence[Answer]) -> list[Reply | str]:
        """Replies to each turn, or as a text the reason for none: it raised, hung or returned no text. A turn that
        says nothing behind its thought, or never closed it, ends the conversation: calls in a thought are drafts."""
        replies = iter(self._processes.values(self._function, [answer for answer in answers if answer.spoken]))
        return [next(replies) if answer.spoken else Reply(None) for answer in answers]

    def close(self) -> None:
        """End the processes."""
        self._processes.close()
