"""Samples that servers draw, also while the policy trains, with weights that are at most so many rollouts old."""

from collections.abc import Callable, Iterable, Sequence

from glm46.tasks.rl.asking import Asking
from glm46.tasks.rl.drawing import Drawn, requests_of
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout.first_rank import run_on_first_rank
from glm46.tasks.rl.rollout.server_engine import ServerEngine


class AheadSource:
    """A `Source` of groups that are drawn in the background. All methods are collective.

    A group that is handed out at version v of the weights is taken at the latest by the rollout that begins ``oldest``
    steps later: it is waited for, while younger ones that are finished may overtake. Samples that are older than that,
    because a run was resumed with a smaller bound, are drawn anew.

    Args:
        oldest: rollout.max_staleness in optimizer steps. 0: all groups of a rollout are drawn by the weights that it
            trains first, and none while these train.
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
        """Numbers of the groups that are handed out and not taken, with the oldest version that may draw them."""

    def begin(self, step: int, next_prompt: int, waiting: Iterable[Sequence[int]]) -> None:
        """Go on with these groups for the rollout of a step."""
        self._step, self.next_prompt = step, next_prompt
        known, self.waiting = self.waiting, {number: max(since, step - self._oldest) for number, since in waiting}
        new = [number for number, since in self.waiting.items() if known.get(number) != since]

        def join() -> bytes:
            background = self._engine.background
            if new:
                background.halt()
            background.keep(self.waiting, before=next_prompt)
            for number in new:
                background.add(number, self._requests(number), self.waiting[number])
            return b""

        run_on_first_rank(join)

    def take(self, count: int) -> Drawn | None:
        """See `Source.take`."""
        self.hand_out(count)
        due = [number for number, since in self.waiting.items() if since + self._oldest <= self._step][:count]
        taken = self._engine.take(count, set(due), self._is_stopped)
        if taken is None:
            return None
        numbers, completions = taken
        for number in numbers:
            del self.waiting[number]
        return Drawn([number for number in numbers for _ in range(self._asking.config.group_size)], completions, {})

    def hand_out(self, count: int) -> None:
        """Hand out prompts until so many groups wait; they are drawn from the next `go_on` or `take` on."""
        new = range(self.next_prompt, self.next_prompt + max(count - len(self.waiting), 0))
        self.next_prompt = new.stop
        self.waiting |= dict.fromkeys(new, self._version())

        def add() -> bytes:
            for number in new:
                self._engine.background.add(number, self._requests(number), self.waiting[number])
            return b""

        run_on_first_rank(add)

    def go_on(self) -> None:
        """Forget the groups that were taken, and draw the others, while the caller trains."""

        def start() -> bytes:
            self.forget_taken()
            self._engine.background.start()
            return b""

        run_on_first_rank(start)

    def forget_taken(self) -> None:
        """Remove the files of groups that were taken. On the first rank alone."""
        self._engine.background.keep(self.waiting, before=self.next_prompt)

    def _requests(self, number: int) -> list:
        return requests_of(self._asking, self._prompts, number)
