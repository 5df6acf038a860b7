"""The alarm of a hung run in the store: what each rank asks, and what the rank that speaks for all finds."""

import os
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch.distributed as dist

from glm46.engine.reliability.alarm import Alarm
from glm46.engine.reliability.hang_report import describe_hang, find_culprits
from tests.processes import HANG_SECONDS

SILENT = 3
SECONDS = 1.0


class CountingStore:
    """A store that counts the calls of one rank, and the keys of each."""

    def __init__(self, store: dist.Store):
        self._store, self.calls, self.most_keys, self.bytes_read = store, Counter(), 0, 0

    def __getattr__(self, name: str):
        def call(keys, *value):
            self.calls[name] += 1
            self.most_keys = max(self.most_keys, 1 if isinstance(keys, str) else len(keys))
            result = getattr(self._store, name)(keys, *value)
            self.bytes_read += len(result) if isinstance(result, bytes) else 0
            return result

        return call


def hang(size: int) -> tuple[list[CountingStore], tuple, list[list[int]]]:
    """All ranks but one answer; returns the stores, what the rank that speaks has read, and what the others have."""
    shared = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stores = [CountingStore(shared.clone()) for _ in range(size)]
    alarms = [Alarm(store, rank, size) for rank, store in enumerate(stores)]
    all_there, began = Barrier(size - 1), time.monotonic()

    def work(rank: int):
        all_there.wait()
        number = alarms[rank].answer({"stack": [], "collectives": {}, "operation": "training step", "step": rank})
        all_there.wait()  # on a busy machine an answer takes seconds
        if number > 1:
            return alarms[rank].hung_here(time.monotonic() + HANG_SECONDS)
        read = alarms[rank].answers(time.monotonic() + SECONDS)
        alarms[rank].report([read[1][SILENT]])
        return read

    with ThreadPoolExecutor(size) as pool:
        said = [*pool.map(work, [rank for rank in range(size) if rank != SILENT])]
    (spoken,) = [one for one in said if isinstance(one, tuple)]
    return stores, spoken, [one for one in said if isinstance(one, list)], time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 64])
def test_what_a_rank_asks_does_not_grow_with_the_number_of_ranks(size):
    """With 8,192 ranks that each ask for the answers of all, the store would compute for minutes."""
    stores, (answers, processes), heard, seconds = hang(size)
    assert sorted(answers) == [rank for rank in range(size) if rank != SILENT]
    assert answers[size - 1]["step"] == size - 1
    assert processes[SILENT] == [socket.gethostname(), os.getpid()]
    assert heard == [[os.getpid()]] * (size - 2), "each rank of the host learns which process to kill"
    assert max(store.most_keys for store in stores) == 1
    by_bytes = sorted(stores, key=lambda store: store.bytes_read)
    others = [store for store in by_bytes[:-1] if store.calls["add"]]
    # Beside the polls: registered; set, answered, counted; reported?; and the processes of the own host.
    assert {(store.calls["append"], store.calls["set"], store.calls["add"]) for store in others} == {(2, 1, 1)}
    assert {store.calls["get"] for store in others} == {1}
    assert max(store.bytes_read for store in others) < 20
    polls = [store.calls["check"] for store in others]
    assert max(polls) <= seconds / 0.1 + 10, "ten a second"


def test_many_hung_ranks_are_counted_in_the_message_and_all_are_culprits():
    answers = {0: {"stack": [], "collectives": {}, "operation": "training step", "step": 7}}
    culprits = find_culprits(answers, 8192)
    assert len(culprits) == 8191
    said = describe_hang(answers, culprits, {5: "node5"}, 10.0, "hang").splitlines()
    assert len(said) == 12 and "rank 5 on node5 does not answer" in said[5]
    assert said[9] == "  and 8183 more like these"
    assert said[10] == "  rank 0 on an unknown host waits: training step, step 7"
