"""Rollouts that are generated ahead: no sample is older than allowed, and each prompt is used once, resumed or not."""

import random
import threading
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest

from glm46.compute.distributed.process import join, leave
from glm46.config.rl import RLConfig
from glm46.tasks.rl.prompts import Prompt, prompt_at
from glm46.tasks.rl.rollout.background import BackgroundGeneration
from glm46.tasks.rl.rollout.records import Completion
from glm46.tasks.rl.rollouts import AheadSource, generate_rollout
from glm46.tasks.rl.sampling import Sampler

PROMPTS = [Prompt([5, number], "", None) for number in range(40)]
PER_ROLLOUT, GROUP, STEPS = 4, 2, 2


@pytest.fixture(autouse=True)
def process():
    join(60.0)
    yield
    leave()


class OneTokenAfterAnother:
    """`OpenRequests` that are answered with tokens of the version that the engine has, in any order."""

    goes_on, error = True, None

    def __init__(self, engine):
        self.engine, self.chance, self.open, self.thread = engine, random.Random(0), [], None
        self.lock, self.is_halted = threading.Lock(), threading.Event()

    def ask(self, asked) -> None:
        with self.lock:
            self.open += asked

    def drop(self, asked) -> None:
        with self.lock, suppress(ValueError):
            self.open.remove(asked)

    def start(self) -> None:
        if self.thread is None:
            self.is_halted.clear()
            self.engine.asked = self.open
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()

    def halt(self, seconds: float | None = None) -> bool:
        was_generating, self.thread = self.thread, None
        if was_generating is not None:
            self.is_halted.set()
            was_generating.join()
        return was_generating is not None

    def run(self) -> None:
        while not self.is_halted.wait(0.0005):
            with self.lock:
                moving = [one for one in self.open if one.request.prompt[1] not in self.engine.hangs]
                if not moving:
                    continue
                one = self.chance.choice(moving)
                token = Completion([9], [-1.0], "abort", [self.engine.version], None)
                one.generated = one.generated.extended([], token)
                if is_finished := len(one.generated.tokens) == one.request.max_new_tokens:
                    self.open.remove(one)
            if is_finished:
                one.done(one.generated._replace(finish="length"))


class Engine:
    """Generates samples of four tokens, with a version that grows when told."""

    def __init__(self, folder):
        self.version, self.hangs, self.asked = 0, set(), []
        self.background = BackgroundGeneration(OneTokenAfterAnother(self), folder)

    def update(self, version: int) -> None:
        is_generating = self.background.halt()
        self.version = version
        if is_generating:
            self.background.start()

    def take(self, count: int, due: set[int], is_stopped, *, waits: bool = True):
        self.background.start()
        groups = self.background.take(count, due, is_stopped, waits=waits)
        assert all(len(end.samples[0].tokens) == 4 for ends in groups.values() for end in ends)
        return groups


def source_of(engine: Engine, staleness: int, **options) -> AheadSource:
    sampler = Sampler(
        RLConfig(prompts_per_rollout=PER_ROLLOUT, group_size=GROUP), SimpleNamespace(max_new_tokens=4), None, engine,
        PROMPTS, None, 0, None,
    )  # fmt: skip
    options |= {"oldest": staleness * STEPS, "version": lambda: engine.version, "is_stopped": lambda: False}
    return AheadSource(sampler, engine, **options)


def roll_out(engine: Engine, source: AheadSource, step: int, waiting: list, staleness: int) -> tuple[list, list]:
    """One rollout as the task generates it; its groups, and those that wait."""
    source.begin(step, source.next_prompt, waiting)
    generated = source.take(0, PER_ROLLOUT)
    for completion in (one.completion for one in generated):
        assert step - staleness * STEPS <= min(completion.versions) <= step
    engine.update(step)
    source.hand_out(staleness * PER_ROLLOUT)
    source.go_on()
    return [one.group for one in generated][::GROUP], list(source.waiting.items())


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_sample_is_too_old_and_each_prompt_is_used_once(staleness, tmp_path):
    engine = Engine(tmp_path)
    source, used, waiting = source_of(engine, staleness), [], []
    for rollout in range(8):
        groups, waiting = roll_out(engine, source, STEPS * rollout, waiting, staleness)
        used += groups
        assert len(waiting) == staleness * PER_ROLLOUT
    engine.background.halt()
    assert set(Counter(used).values()) == {1} and sorted([*used, *(n for n, _ in waiting)]) == list(
        range(len(used) + len(waiting))
    )
    assert (used == sorted(used)) == (staleness == 1), "with more on their way, finished groups overtake"


def test_another_process_goes_on_with_the_groups_that_wait(tmp_path):
    engine = Engine(tmp_path)
    source = source_of(engine, 3)
    _, waiting = roll_out(engine, source, 0, [], 3)
    engine.background.take(1, {waiting[0][0]}, lambda: False)  # wait until one is finished
    engine.background.halt()
    kept = {path.stem for path in tmp_path.iterdir()}
    assert f"prompt_{waiting[0][0]:08d}" in kept
    # With a bound of one rollout, samples of step 0 are too old for step 4.
    for staleness, step, is_kept in ((3, 2, True), (1, 4, False)):
        again = Engine(tmp_path)
        again.version, after = step, source_of(again, staleness)
        after.next_prompt = source.next_prompt
        after.begin(step, source.next_prompt, waiting)
        assert dict(after.waiting) == {number: 0 if is_kept else step - 1 * STEPS for number, _ in waiting}
        generated = after.take(0, PER_ROLLOUT)
        versions = {version for one in generated for version in one.completion.versions}
        assert (0 in versions) == is_kept
        again.background.halt()
        if is_kept:
            assert waiting[0][0] in {one.group for one in generated}


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_group_that_does_not_finish_is_dropped_and_another_prompt_takes_its_place(staleness, tmp_path):
    engine = Engine(tmp_path)
    source, used, stale, waiting = source_of(engine, staleness, drops=True), [], [], []
    engine.hangs = {PROMPTS[prompt_at(number, len(PROMPTS), 0)].tokens[1] for number in (5, 6)}
    for rollout in range(6):
        step = STEPS * rollout
        source.begin(step, source.next_prompt, waiting)
        stale += source.stale
        engine.update(step)
        source.hand_out((1 + staleness) * PER_ROLLOUT)
        generated = source.take(0, PER_ROLLOUT)
        for completion in (one.completion for one in generated):
            assert step - staleness * STEPS <= min(completion.versions) <= step
        used += [one.group for one in generated][::GROUP]
        engine.update(step)
        source.hand_out(staleness * PER_ROLLOUT)
        waiting = list(source.waiting.items())
        source.go_on()
    engine.background.halt()
    assert {5, 6} <= set(stale) and len(used) == 6 * PER_ROLLOUT
    every = [*used, *stale, *(number for number, _ in waiting)]
    assert sorted(every) == list(range(len(every))), "each prompt is used or dropped once"
    assert not {5, 6} & {int(path.stem.partition("_")[2]) for path in tmp_path.iterdir()}
    assert not engine.hangs & {one.request.prompt[1] for one in engine.asked}, "servers do not go on with them"


def test_over_sampling_has_the_same_samples_in_fewer_rounds(tmp_path):
    """Of every three prompts the rewards of one differ. The sampler's own choice, over groups of the background."""
    found = {}
    for factor in (1.0, 3.0):
        engine = Engine(tmp_path / str(factor))
        source, rounds, used = source_of(engine, 0), [], []
        sampler = source._sampler
        section = {"prompts_per_rollout": PER_ROLLOUT, "group_size": GROUP, "over_sampling": factor}
        sampler.config = RLConfig(**section, dynamic_sampling=True, rewards=[{"name": "exact"}]).resolved()
        sampler.score = lambda ends, prompts: [
            end._replace(reward=float(number % GROUP and end.group % 3 == 2), parts={"exact": 0.0})
            for number, end in enumerate(ends)
        ]

        def take(first, count, source=source, rounds=rounds):
            rounds.append(count)
            return source.take(first, count)

        first = 0
        for step in range(3):
            engine.update(step)
            source.begin(step, first, [])
            samples = generate_rollout(sampler, take, step, first)
            source.describe(samples)
            source.forget_taken()
            used.append((samples.group.tolist(), samples.versions.tolist()))
            assert first == samples.first_prompt and samples.next_prompt == samples.group.max() + 1
            first = samples.next_prompt
        engine.background.halt()
        found[factor] = used, rounds
    assert found[1.0][0] == found[3.0][0] and [group for group, _ in found[1.0][0]] == [
        [3 * number + 2 for number in range(4 * step, 4 * step + 4) for _ in range(GROUP)] for step in range(3)
    ]
    assert len(found[3.0][1]) == 3 < len(found[1.0][1]) and set(found[3.0][1]) == {3 * PER_ROLLOUT}
