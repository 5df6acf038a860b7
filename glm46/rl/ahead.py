"""Samples that servers draw while the policy trains, with weights that are at most so many rollouts old."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from glm46.rl.asking import Asking
from glm46.rl.drawing import Drawn, requests_of
from glm46.rl.prompts import Prompt
from glm46.rollout.first_rank import pack, run_on_first_rank, unpack
from glm46.rollout.server_engine import ServerEngine


class AheadSource:
    """A `Source` of groups that are drawn in the background. All methods are collective.

    A group that is handed out at version v of the weights is taken at the latest by the rollout that begins ``oldest``
    steps later: it is waited for, while younger ones that are finished may overtake. Groups that are older than that,
    because a run was resumed with a smaller bound, are drawn anew.

    Args:
        oldest: rollout.max_staleness in optimizer steps.
        version: of the weights that the engine has.
        is_stopped: asked on the first rank.
    """

    def __init__(
        self,
        asking: Asking,
        prompts: Sequence[Prompt],
        *,
        oldest: int,
        version: Callable[[], int],
        is_stopped: Callable[[], bool],
    ):
        self._asking, self._prompts, self._oldest = asking, prompts, oldest
        self._engine: ServerEngine = asking.engine
        self._version, self._is_stopped = version, is_stopped
        self._step = 0
        self.next_prompt = 0
        self.waiting: dict[int, int] = {}
        """Numbers of the groups that are handed out and not taken, with the version at that time."""

    def begin(self, step: int, next_prompt: int, waiting: Iterable[Sequence[int]]) -> None:
        """Go on with these groups for the rollout of a step."""
        self._step, self.next_prompt = step, next_prompt
        known, self.waiting = set(self.waiting), {number: since for number, since in waiting}
        stale = {number for number, since in self.waiting.items() if since + self._oldest < step}
        self.waiting |= dict.fromkeys(stale, self._version())

        def join() -> bytes:
            self._engine.background.keep(self.waiting)
            for number in self.waiting:
                if number not in known or number in stale:
                    self._engine.background.add(number, self._requests(number), anew=number in stale)
            return b""

        run_on_first_rank(join)

    def take(self, count: int) -> Drawn | None:
        """See `Source.take`."""
        self.hand_out(count)
        due = [number for number, since in self.waiting.items() if since + self._oldest <= self._step][:count]

        def wait() -> bytes:
            self._engine.background.start()
            groups = self._engine.background.take(count, set(due), self._is_stopped)
            if groups is None:
                return b""
            numbers = np.array([len(groups), *(group.number for group in groups)], np.int64)
            return numbers.tobytes() + pack([one for group in groups for one in group.completions])

        content = run_on_first_rank(wait)
        if not content:
            return None
        taken = int(np.frombuffer(content[:8], np.int64)[0])
        numbers = np.frombuffer(content[8 : 8 * (taken + 1)], np.int64).tolist()
        for number in numbers:
            del self.waiting[number]
        completions = unpack(content[8 * (taken + 1) :])
        return Drawn([number for number in numbers for _ in range(self._asking.config.group_size)], completions, {})

    def hand_out(self, count: int) -> None:
        """Hand out prompts until so many groups wait; they are drawn from the next `go_on` or `take` on."""
        new = range(self.next_prompt, self.next_prompt + max(count - len(self.waiting), 0))
        self.next_prompt = new.stop
        self.waiting |= dict.fromkeys(new, self._version())

        def add() -> bytes:
            for number in new:
                self._engine.background.add(number, self._requests(number))
            return b""

        run_on_first_rank(add)

    def go_on(self) -> None:
        """Forget the groups that were taken, and draw the others, while the caller trains."""

        def start() -> bytes:
            self._engine.background.keep(self.waiting)
            self._engine.background.start()
            return b""

        run_on_first_rank(start)

    def _requests(self, number: int) -> list:
        return requests_of(self._asking, self._prompts, number)
