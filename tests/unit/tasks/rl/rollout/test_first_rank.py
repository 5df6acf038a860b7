"""Completions survive the way from rank 0 to the others; an error between ends the work that waits for it."""

import io
import queue

import numpy as np
import pytest

from glm46.tasks.rl.rollout import first_rank
from glm46.tasks.rl.rollout.first_rank import CollectiveRequest, run_on_first_rank
from glm46.tasks.rl.rollout.records import (
    Completion,
    Episode,
    pack_groups,
    unpack_groups,
)
from tests.processes import HANG_SECONDS


def test_completions_are_the_same_after_the_way():
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    completions = [
        Completion([5, 2], [-0.1, -1 / 3], "stop", [7, 7], routes),
        Completion([], [], "abort", [], None),
        Completion(
            [9, 9, 9],
            [-1.0, 0.0, -2e-30],
            "length",
            [7, 7, 8],
            routes[:1].astype(np.uint16),
            ((1, 2),),
            contradicted=((0, 8),),
        ),
    ]
    first, *others = (one._replace(prompt=[7] * i) for i, one in enumerate(completions))
    ends = [
        Episode([], "a fault"), Episode([first], score=0.1), Episode(others, is_part=True), Episode([])
    ]  # fmt: skip
    groups = unpack_groups(pack_groups({5: ends[:1], 3: ends[1:]}))
    assert list(groups) == [5, 3]
    found = groups[5] + groups[3]
    assert [(end[1:], [s.prompt for s in end.samples]) for end in found] == [
        (end[1:], [s.prompt for s in end.samples]) for end in ends
    ]
    for before, after in zip(completions, (s._replace(prompt=()) for end in found for s in end.samples), strict=True):
        assert before[:4] == after[:4] and before[5:] == after[5:]
        assert (before.routes is None) == (after.routes is None)
        if before.routes is not None:
            assert after.routes.dtype == before.routes.dtype and np.array_equal(before.routes, after.routes)
    assert unpack_groups(pack_groups({})) == {}


def test_groups_that_an_older_release_stored_are_read_and_written_again_to_the_byte():
    line = (
        b'{"5":[[[[[7,7],[[5,2,9],[-0.5,0.0,-1.25],"stop",[[0,7],[2,8]],"behind the line",[[1,2]],4,3,[[0,8]]]],'
        b'[[3],[[6],[-2.0],"length",[[0,7]],null,[],0,0,[]]]],"",0.5,false,"",5,1.5,{"exact":1.0}]],'
        b'"3":[[[],"a fault",null,false,"",-1,null,{}],'
        b'[[[[11],[[6],[-2.0],"length",[[0,7]],null,[],0,0,[]]]],"",null,true,"",-1,null,{}]]}\n'
    )
    routes = io.BytesIO()
    np.save(routes, np.arange(6, dtype=np.uint8).reshape(3, 1, 2))
    groups = unpack_groups(line + routes.getvalue())
    assert groups[5][0].completion.versions == [7, 7, 8] and groups[3][1].completion.prompt == [11]
    assert pack_groups(groups) == line + routes.getvalue()


def test_work_that_asked_for_what_failed_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(first_rank.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(first_rank, "_send", lambda *_: None)
    ended: queue.SimpleQueue[RuntimeError] = queue.SimpleQueue()

    def fail() -> None:
        raise MemoryError

    def work() -> bytes:
        try:
            request.ask().result()
        except RuntimeError as error:
            ended.put(error)
        return b""

    request = CollectiveRequest(fail)
    with pytest.raises(MemoryError):
        run_on_first_rank(work, request)
    assert "failed" in str(ended.get(timeout=HANG_SECONDS))
