"""Detection of slow ranks on synthetic step times with noise, hiccups and real delays."""

import random

import pytest

from glm46.engine.reliability import stragglers
from glm46.engine.reliability.stragglers import Pace, Stragglers, find_slowest

SLOW_RANK = 1


def steps_until_named(monkeypatch, ranks: int, steps: int, *, slowed: float, seed: int, noise: float) -> list[int]:
    """The steps at which some rank was named, and a wrong one as a negative number.

    Every step takes about 100 ms, with normally distributed noise; one in fifty takes up to three times as long, on one
    rank alone. One rank takes `slowed` times as long from the first step on.
    """
    chance, clock = random.Random(seed), [0.0]
    monkeypatch.setattr(stragglers, "own_clock", lambda: clock[0])
    watchers, named = [Stragglers(rank, ranks, 1) for rank in range(ranks)], []
    for step in range(1, steps + 1):
        shared = [sum(numbers) for numbers in zip(*(w.shared_paces() for w in watchers), strict=True)]
        said = {watcher.update(shared) for watcher in watchers}
        assert len(said) == 1, "all ranks say the same"
        if (text := said.pop()) is not None:
            named.append(step if text.startswith(f"rank {SLOW_RANK} is slow") and slowed > 1 else -step)
        for rank, watcher in enumerate(watchers):
            watcher.step_begins()
            seconds = 0.1 * max(chance.gauss(1.0, noise), 0.2) * (1 + 2 * chance.random() * (chance.random() < 0.02))
            watcher.gradients_ready(clock[0] + seconds * (slowed if rank == SLOW_RANK else 1.0))
    return named


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_no_rank_is_named_in_a_thousand_clean_steps(monkeypatch, ranks):
    for seed in range(10):
        assert steps_until_named(monkeypatch, ranks, 1000, slowed=1.0, seed=seed, noise=0.05) == []


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_rank_slowed_by_a_fifth_is_named_within_fifty_steps(monkeypatch, ranks):
    for seed in range(50):
        named = steps_until_named(monkeypatch, ranks, 50, slowed=1.2, seed=seed, noise=0.05)
        assert named and min(named) > 0, (seed, named)


def test_ranks_are_compared_with_those_of_the_same_layers():
    fast, slow, slower = Pace(0.10, 0.0001), Pace(0.20, 0.0001), Pace(0.25, 0.0001)
    # The second stage has more to do; in it, the last rank stands out.
    found = find_slowest([fast] * 4 + [slow] * 3 + [slower], stages=2)
    assert (found.rank, found.stands_out) == (7, True) and found.ratio == pytest.approx(1.25)
    assert not find_slowest([fast] * 4 + [slow] * 4, stages=2).stands_out
    assert find_slowest([fast, slow], stages=2) is None  # alone in its stage


def test_no_rank_is_named_where_ranks_differ_by_nature():
    # As where experts get unequal numbers of tokens: an eighth between the fast and the slow, and one beyond.
    paces = [Pace(0.1 + 0.0125 * (rank % 8) / 7, 0.0001) for rank in range(32)] + [Pace(0.12, 0.0001)]
    assert not find_slowest(paces, stages=1).stands_out


def test_a_recovery_is_reported(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(stragglers, "own_clock", lambda: clock[0])
    watchers, said = [Stragglers(rank, 2, 1) for rank in range(2)], []
    for step in range(200):
        shared = [sum(numbers) for numbers in zip(*(w.shared_paces() for w in watchers), strict=True)]
        said += [text for text in (watchers[0].update(shared), watchers[1].update(shared)) if text]
        for rank, watcher in enumerate(watchers):
            watcher.step_begins()
            watcher.gradients_ready(clock[0] + (0.2 if rank == 0 and 60 <= step < 120 else 0.1))
    assert [text[:12] for text in said[::2]] == ["rank 0 is sl", "rank 0 is as"] and said[::2] == said[1::2]
    assert "0.2 s of its own per step, the others 0.1 s (2.00 times as long)" in said[0]
    assert watchers[1].metrics()["slowest_rank_ratio"] == pytest.approx(1.0)


class Device:
    """In place of `OwnDeviceTime`: seconds that a test sets."""

    def __init__(self):
        self.now = 0.0

    def step_begins(self) -> None:
        pass

    def seconds(self) -> float:
        return self.now


def test_a_slow_gpu_is_named_though_all_hosts_wait_equally_long(monkeypatch):
    clock, chance = [0.0], random.Random(0)
    monkeypatch.setattr(stragglers, "own_clock", lambda: clock[0])
    devices = [Device() for _ in range(4)]
    watchers = [Stragglers(rank, 4, 1, device) for rank, device in enumerate(devices)]
    said = []
    for _ in range(60):
        for watcher in watchers:
            watcher.step_begins()
        clock[0] += 0.001  # to read text
        shared = [sum(numbers) for numbers in zip(*(w.shared_paces() for w in watchers), strict=True)]
        said += [text for watcher in watchers if (text := watcher.update(shared))]
        clock[0] += 0.5
        for rank, (device, watcher) in enumerate(zip(devices, watchers, strict=True)):
            device.now = chance.gauss(0.1, 0.002) * (1.3 if rank == SLOW_RANK else 1.0)
            watcher.gradients_ready(clock[0])
    assert len(said) == 4 and len(set(said)) == 1
    assert said[0].startswith("rank 1 is slow: 0.13") and "to read and compute forward of a micro-batch" in said[0]
    assert watchers[0].metrics()["slowest_rank_ratio"] == pytest.approx(1.3, abs=0.03)


def test_steps_that_are_not_typical_count_for_nothing(monkeypatch):
    """Half of the steps of rank 0 are profiled, and take three times as long."""
    clock = [0.0]
    monkeypatch.setattr(stragglers, "own_clock", lambda: clock[0])
    watchers = [Stragglers(rank, 2, 1) for rank in range(2)]
    for step in range(200):
        shared = [sum(numbers) for numbers in zip(*(w.shared_paces() for w in watchers), strict=True)]
        assert {watcher.update(shared) for watcher in watchers} == {None}
        for rank, watcher in enumerate(watchers):
            watcher.step_begins()
            is_profiled = step % 10 > 3
            watcher.gradients_ready(0.3 if is_profiled and rank == 0 else 0.1, is_typical=not is_profiled)
    assert watchers[0].metrics()["slowest_rank_ratio"] == pytest.approx(1.0)
