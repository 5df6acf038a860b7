"""Groups that are drawn in the background: through updates of the weights, a stop and a kill, against a stub."""

import errno
import json
import os

import numpy as np
import pytest

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout import background, dispatch
from glm46.tasks.rl.rollout.background import BackgroundDrawing, continued, rest
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules, VersionSpan
from glm46.tasks.rl.rollout.server_pool import ServerPool
from glm46.tasks.rl.rollout.server_state import EngineError, Weights
from glm46.tasks.rl.rollout.vllm_server import VllmServer
from tests.processes import HANG_SECONDS, wait_until
from tests.unit.tasks.rl.rollout.stub_server import STOP, StubServer, draw, logprob, scores

RULES = SamplingRules(1.0, frozenset({STOP}), vocab_size=50)
PROBE = [[5, 6, 7, 8]]
LONG = [Request([3, 4], seed, 6) for seed in (1, 2)]  # neither ends with the stop token


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(dispatch, "_TICK_SECONDS", 0.02)
    made = StubServer()
    yield made
    made.stop()


@pytest.fixture
def pool(stub, tmp_path):
    servers = [VllmServer(stub.url, range(50, 52))]
    bounds = {"longest": 8, "most_running": 1024, "deadline": HANG_SECONDS, "restart": 0.2}
    pool = ServerPool(servers, rules=RULES, say=lambda line: None, **bounds)
    update(pool, tmp_path, 1)
    return pool


def update(pool, tmp_path, version: int) -> None:
    folder = tmp_path / str(version)
    folder.mkdir()
    (folder / "version.json").write_text(json.dumps({"version": version, "files": {}}))
    pool.update(Weights(version, folder, PROBE, scores(version, PROBE)))


def await_sent(stub, count: int) -> None:
    wait_until(lambda: len(stub.drawn) >= count)


def never() -> bool:
    return False


def test_samples_go_on_through_an_update_and_say_which_weights_drew_them(pool, stub, tmp_path):
    drawing = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=True)
    drawing.add(8, LONG, 0)
    stub.fault = "hang"
    drawing.start()
    await_sent(stub, 2)
    assert drawing.halt()
    assert not drawing.halt(), "it draws no more"
    stub.fault = ""
    update(pool, tmp_path, 2)
    drawing.start()
    (group,) = drawing.take(1, set(), never)
    for request, one in zip(LONG, group.completions, strict=True):
        first = draw(request.prompt, request.seed, 6)[:3]  # the stub returns half of what hangs
        then = draw(request.prompt + first, request.seed + 3, 3)
        assert one.tokens == first + then and one.spans == [(0, 1), (3, 2)]
        assert one.logprobs == [logprob(1 + (i >= 3), token) for i, token in enumerate(one.tokens)]
        assert one.finish in ("stop", "length")
    assert sorted(seed for _, seed in stub.drawn) == [1, 2, 4, 5]


def test_a_kill_loses_no_finished_group_and_no_token_that_was_aborted(pool, stub, tmp_path):
    drawing = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=True)
    drawing.add(0, LONG, 0)
    drawing.start()
    wait_until(lambda: list((tmp_path / "ahead").glob("prompt_*0.npz")))
    drawing.halt()
    drawing.add(1, LONG, 0)
    drawing.add(2, LONG, 0)
    stub.fault = "hang"
    drawing.start()
    await_sent(stub, 6)
    drawing.halt()
    # Another process begins with what is on the disk; group 2 was drawn by weights that are too old.
    stub.fault, stub.drawn[:] = "", []
    after = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=True)
    for number in range(3):
        after.add(number, LONG, 2 if number == 2 else 0)
    after.start()
    groups = after.take(3, set(), never)
    assert [group.number for group in groups] == [0, 1, 2]
    assert sorted((len(prompt), seed) for prompt, seed in stub.drawn) == [(2, 1), (2, 2), (5, 4), (5, 5)]
    assert groups[0].completions[0].tokens == groups[2].completions[0].tokens == draw([3, 4], 1, 6)
    after.keep([1], before=2)  # prompt 2 comes next
    assert {path.name for path in (tmp_path / "ahead").iterdir()} == {"prompt_00000001.npz", "prompt_00000002.npz"}
    after.keep([1], before=3)
    assert [path.name for path in (tmp_path / "ahead").iterdir()] == ["prompt_00000001.npz"]


def test_samples_that_do_not_go_on_are_those_of_one_version_and_are_drawn_whole(pool, stub, tmp_path):
    drawing = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=False)
    drawing.add(0, LONG, 1)
    drawing.start()
    drawing.take(1, set(), never)
    drawing.add(1, LONG, 1)
    stub.fault = "hang"
    drawing.start()
    await_sent(stub, 4)
    drawing.halt()
    assert [path.name for path in (tmp_path / "ahead").iterdir()] == ["prompt_00000000.npz"]
    # Another process.
    stub.fault, stub.drawn[:] = "", []
    after = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=False)
    for number in (0, 1):
        after.add(number, LONG, 1)
    after.start()
    for group in after.take(2, set(), never):
        assert [one.tokens for one in group.completions] == [draw(request.prompt, request.seed, 6) for request in LONG]
    assert sorted(seed for _, seed in stub.drawn) == [1, 2], "the finished group is read"
    after.add(0, LONG, 2)
    after.start()
    after.take(1, set(), never)
    assert len(stub.drawn) == 4, "it was drawn by other weights"


def test_due_groups_are_waited_for_and_others_overtake(tmp_path):
    finished = []

    def draw_one(requests, rules, halt, finish):
        finish(1, Completion([STOP], [-1.0], "stop", [VersionSpan(0, 0)], None))
        finished.append(halt.wait(HANG_SECONDS))
        return [Completion([], [], "abort", [], None)] * 2

    drawing = BackgroundDrawing(draw_one, RULES, tmp_path, goes_on=True)
    for number in (0, 1):
        drawing.add(number, [Request([number], 0, 4)], 0)
    drawing.start()
    assert [group.number for group in drawing.take(1, set(), never)] == [1]
    asked = []
    assert drawing.take(1, {0}, lambda: asked.append(1) or len(asked) > 1) is None, "the stop ends the wait"
    drawing.halt()
    assert finished == [True]


def test_an_error_reaches_the_one_who_waits(pool, stub, tmp_path):
    drawing = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=True)
    drawing.add(0, LONG, 0)
    stub.stop()
    drawing.start()
    with pytest.raises(EngineError, match="no server is left"):
        drawing.take(1, set(), never)


def test_a_full_disk_is_a_mistake_of_the_user_whose_folder_is_named(pool, tmp_path, monkeypatch):
    def fail(path, blocks):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(background, "replace_durably", fail)
    drawing = BackgroundDrawing(pool.generate, RULES, tmp_path / "ahead", goes_on=True)
    drawing.add(0, LONG, 0)
    drawing.start()
    with pytest.raises(UserError, match=r"ahead.*No space left on device"):
        drawing.take(1, set(), never)


def test_turns_and_parts_of_a_sample_keep_the_routes_that_drew_them():
    first = Completion([5, 6], [-1.0, -2.0], "abort", [VersionSpan(0, 3)], np.full((4, 1, 1), 1, np.uint8))
    then = Completion([7], [-3.0], "stop", [VersionSpan(0, 3)], np.full((5, 1, 1), 2, np.uint8))
    whole = continued(first, then)
    assert whole.tokens == [5, 6, 7] and whole.spans == [(0, 3)] and whole.finish == "stop"
    assert whole.routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2]
    turn = then._replace(routes=np.full((7, 1, 1), 2, np.uint8))  # of 3 prompt tokens, 2 drawn, 2 replied and 1 drawn
    conversation = first.extended([30, 31], turn)
    assert conversation.tokens == [5, 6, 30, 31, 7] and conversation.replies == ((2, 4),)
    assert conversation.routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert rest(Request([8, 9, 9], 40, 6), first) == Request([8, 9, 9, 5, 6], 42, 4)
    stopped = continued(first, Completion([], [], "abort", [], np.full((5, 1, 1), 2, np.uint8)))
    assert stopped.tokens == first.tokens and stopped.routes.tolist() == first.routes.tolist()
