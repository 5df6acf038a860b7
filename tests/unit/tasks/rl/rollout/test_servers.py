"""Servers of a run and the pool of servers against a stub: every fault ends in bounded time or in one message."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout import launched_servers, open_requests, servers
from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests, answers
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules
from glm46.tasks.rl.rollout.served_policy import EngineError, Weights
from glm46.tasks.rl.rollout.server import MAX_FAILURES
from glm46.tasks.rl.rollout.sglang_server import SglangServer
from glm46.tasks.rl.rollout.vllm_server import VllmServer
from tests.processes import is_alive, wait_until
from tests.unit.tasks.rl.rollout.stub_server import STOP, StubServer, generate, logprob, scores
from tests.unit.tasks.rl.rollout.waiting import run, servers_of

RULES = SamplingRules(1.0, frozenset({STOP}), vocab_size=50)
STOPPED = SamplingRules(1.0, frozenset({STOP, 7, 9}), vocab_size=50)
PROBE = [[5, 6, 7, 8], [9, 10, 11]]
REQUESTS = [Request([prompt, 4], seed, 6) for prompt in (3, 5, 7) for seed in range(1, 5)]

both_kinds = pytest.mark.parametrize("kind", [VllmServer, SglangServer])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(open_requests, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(servers, "_RESTART_TICK_SECONDS", 0.05)
    monkeypatch.setattr(open_requests, "_GRACE_SECONDS", 60.0)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def make_pool(stubs, tmp_path, lines):
    def make(kind=VllmServer, *, servers=stubs, rules=RULES, longest=8, most=1024, deadline=600.0, restart=0.2):
        made = [kind(stub.url, range(50, 52)) for stub in servers]
        bounds = {"max_tokens": longest, "max_running": most, "deadline": deadline, "restart": restart}
        return servers_of(made, rules=rules, say=lines.append, **bounds)

    return make


@pytest.fixture
def weights(tmp_path):
    def make(version):
        folder = tmp_path / str(version)
        folder.mkdir(exist_ok=True)
        (folder / "version.json").write_text(json.dumps({"version": version, "files": {}}))
        return Weights(version, folder, PROBE, scores(version, PROBE))

    return make


def check(completions, requests, version):
    for completion, request in zip(completions, requests, strict=True):
        assert completion.tokens == generate(request.prompt, request.seed, request.max_new_tokens)
        assert completion.logprobs == [logprob(version, token) for token in completion.tokens]
        assert completion.spans == [(0, version)]
        assert completion.finish == ("stop" if completion.tokens[-1] == STOP else "length")


@both_kinds
def test_completions_in_order_one_server_for_each_prompt(make_pool, weights, stubs, kind):
    pool = make_pool(kind)
    for version in (1, 2):
        run(pool.update(weights(version)))
        check(run(answers(pool, REQUESTS, RULES)), REQUESTS, version)
        first, second = ({prompt for prompt, _ in stub.generated[-12:]} for stub in stubs)
        assert first and second and len(first) + len(second) == 3
        for stub in stubs:
            stub.generated.clear()


@both_kinds
def test_a_server_gets_so_many_requests_at_a_time(make_pool, weights, stubs, kind):
    pool = make_pool(kind, servers=stubs[:1], most=8)
    run(pool.update(weights(1)))
    sample_one, running, seen = stubs[0]._sample, [], []

    def counted(*request):
        running.append(request)
        seen.append(len(running))
        wait_until(lambda: len(seen) >= 8)
        time.sleep(0.1)  # for one more than 8
        generated = sample_one(*request)
        running.remove(request)
        return generated

    stubs[0]._sample = counted
    assert len(run(answers(pool, REQUESTS, RULES))) == len(REQUESTS) == 12
    assert max(seen) == 8


def test_a_call_that_is_cancelled_before_it_begins_leaves_no_coroutine(make_pool, weights, recwarn):
    pool = make_pool()
    run(pool.update(weights(1)))

    async def begin_and_cancel() -> None:
        requests = OpenRequests(pool, RULES)
        requests._sent, requests._calls = {}, {}
        (server, *_) = await pool.ready()
        requests._begin(OpenRequest(REQUESTS[0]), server)
        for task in requests._calls.values():
            task.cancel()
        await asyncio.wait(requests._calls.values())

    run(begin_and_cancel())
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


def test_vllm_is_paused_before_a_load_and_resumed_after_it_was_named(make_pool, weights, stubs):
    run(make_pool().update(weights(3)))
    paths = stubs[0].paths()
    order = ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume", "/inference/v1/generate"]
    places = [len(paths) - 1 - paths[::-1].index(path) for path in order]
    assert places == sorted(places)


def test_vllm_gets_stop_ids_seed_padding_and_a_salt_of_the_version(make_pool, weights, stubs):
    pool = make_pool(servers=stubs[:1])
    for version in (1, 2):
        run(pool.update(weights(version)))
        run(answers(pool, REQUESTS[:1], RULES))
    first, second = [body for _, body in stubs[0].calls if body.get("cache_salt", "stop") != "stop"]
    sampling = first["sampling_params"]
    assert sampling["stop_token_ids"] == [STOP] and sampling["ignore_eos"] and sampling["seed"] == 1
    assert sampling["logit_bias"] == {"50": -100.0, "51": -100.0}
    assert first["cache_salt"] != second["cache_salt"] and first["request_id"] != second["request_id"]


@pytest.mark.parametrize("fault", ["500", "truncated", "other version", "bad logprobs", "restarted", "aborts"])
@both_kinds
def test_another_server_draws_what_a_failing_one_does_not(make_pool, weights, stubs, lines, fault, kind):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    stubs[0].fault = fault
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)
    assert [line for line in lines if f"{stubs[0].url} is excluded" in line]
    stubs[0].fault = ""
    run(pool.update(weights(2)))
    assert lines[-1] == f"rollout: {stubs[0].url} generates with version 2"
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "truncated", "aborts"])
@both_kinds
def test_only_server_that_fails_ends_in_one_message(make_pool, weights, stubs, fault, kind):
    pool = make_pool(kind, servers=stubs[:1])
    run(pool.update(weights(1)))
    stubs[0].fault = fault
    began = time.monotonic()
    with pytest.raises(EngineError) as error:
        run(answers(pool, REQUESTS, RULES))
    assert time.monotonic() - began < 60 and len(error.value.faults) == 1
    assert stubs[0].url in str(error.value) and "checkpoint" in str(error.value)


def test_failures_before_a_halt_do_not_count_behind_it(make_pool, weights, stubs):
    """A completion of hours may meet many servers that restart."""
    pool = make_pool(servers=stubs[:1])
    run(pool.update(weights(1)))
    found: list[Completion] = []
    asked = OpenRequest(REQUESTS[0], found.append, failed_on=[run(pool.ready())[0]] * (MAX_FAILURES - 1))
    run(OpenRequests(pool, RULES).run([asked], stays=False))
    assert asked.failed_on == []


@both_kinds
def test_slow_completion_is_aborted_at_its_deadline_and_kept(make_pool, weights, stubs, kind):
    pool = make_pool(kind, servers=stubs[:1])
    run(pool.update(weights(1)))
    stubs[0].fault, pool.deadline = "hang", 0.3
    began = time.monotonic()
    completions = run(answers(pool, REQUESTS[:3], RULES))
    assert 0.3 <= time.monotonic() - began < 60
    for completion, request in zip(completions, REQUESTS, strict=False):
        assert completion.finish == "abort" and len(completion.tokens) == len(completion.logprobs) > 0
        assert completion.tokens == generate(request.prompt, request.seed, 6)[: len(completion.tokens)]


@both_kinds
def test_server_that_dies_is_replaced_by_the_other_and_comes_back(make_pool, weights, stubs, lines, kind):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    stubs[0].dies_after = 2
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)
    assert any("is excluded" in line for line in lines)
    back = StubServer(port=stubs[0].port)
    try:
        check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)
        assert lines[-1] == f"rollout: {back.url} generates with version 1" and back.generated and back.name == "1"
    finally:
        back.stop()


@both_kinds
def test_no_server_left_names_each_with_its_reason(make_pool, weights, stubs, kind):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    for stub in stubs:
        stub.stop()
    with pytest.raises(EngineError) as error:
        run(answers(pool, REQUESTS, RULES))
    assert all(stub.url in str(error.value) for stub in stubs)
    assert "rollout.urls" in str(error.value) and "within 0.2 s" in str(error.value)


@both_kinds
def test_a_pool_says_at_once_and_again_which_server_it_waits_for(make_pool, weights, stubs, lines, monkeypatch, kind):
    monkeypatch.setattr(servers, "_WAITING_SECONDS", 0.1)
    stubs[0].stop()
    pool = make_pool(kind, servers=stubs[:1], restart=0.5)
    with pytest.raises(EngineError):
        run(pool.update(weights(1)))
    waiting = [line for line in lines if "waiting" in line]
    assert waiting[0] == f"rollout: waiting for {stubs[0].url}: connection refused (0 of 0.5 s)"
    assert len(waiting) >= 2


def test_lines_of_an_engine_are_written_at_once_to_a_pipe():
    """Standard output of a job is a file or a pipe, which Python buffers. The program ends without a flush."""
    program = """
import inspect, os
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.rollout.background import BackgroundGeneration, read_ends
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.sampling import Sampler
for function in (CommandEpisodes, BackgroundGeneration, read_ends, ServerEngine, Sampler):
    inspect.signature(function).parameters["say"].default(function.__name__)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["CommandEpisodes", "BackgroundGeneration", "read_ends", "ServerEngine", "Sampler"]


@pytest.mark.parametrize("fault", ["stale", "half"])
@both_kinds
def test_server_with_other_weights_than_the_trainer_draws_nothing(make_pool, weights, stubs, lines, fault, kind):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    setattr(stubs[1], fault, True)
    run(pool.update(weights(2)))
    assert f"{stubs[1].url} is excluded" in lines[-1] and "version 2" in lines[-1]
    asked = len(stubs[1].calls)
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 2)
    assert len(stubs[1].calls) == asked  # it would take time from each rollout
    setattr(stubs[1], fault, False)
    run(pool.update(weights(3)))
    assert lines[-1] == f"rollout: {stubs[1].url} generates with version 3"


@both_kinds
def test_server_that_says_nothing_of_given_tokens_is_excluded(make_pool, weights, stubs, lines, kind):
    stubs[1].fault = "null scores"
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    assert [line for line in lines if "is excluded" in line and stubs[1].url in line]
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)


@both_kinds
def test_change_below_the_tolerance_must_move_the_server(make_pool, weights, stubs, lines, kind):
    """Rounding in BF16 is larger than a small step: old weights show by bits that are the same as before."""

    def model(version, token):
        return logprob(0, token) - 0.01 * version

    pool = make_pool(kind)
    for stub in stubs:
        stub.dtype, stub.model = "bfloat16", model
    for version in (1, 2):
        expected = [[model(version, token) for token in tokens[1:]] for tokens in PROBE]
        run(pool.update(weights(version)._replace(expected=expected)))
        stubs[1].stale = True
    excluded = [line for line in lines if "is excluded" in line]
    assert len(excluded) == 1 and stubs[1].url in excluded[0] and "weights are old" in excluded[0]


@both_kinds
def test_context_below_the_longest_prompt_and_its_completion_is_refused_at_the_start(make_pool, weights, stubs, kind):
    stubs[0].context, stubs[1].context = 66, 65
    run(make_pool(kind, longest=65).update(weights(1)))
    with pytest.raises(UserError, match="rollout.max_new_tokens") as error:
        run(make_pool(kind, longest=66).update(weights(2)))
    assert "--max-model-len 66" in str(error.value) and stubs[1].url in str(error.value)
    assert not isinstance(error.value, EngineError) and not stubs[0].generated


def test_server_without_processed_logprobs_is_refused_at_the_start(make_pool, weights, stubs):
    stubs[1].logprobs_mode = "raw_logprobs"
    with pytest.raises(UserError, match="processed_logprobs") as error:
        run(make_pool().update(weights(1)))
    assert stubs[1].url in str(error.value) and not isinstance(error.value, EngineError)


def adapter(weights, version, *, rank=4, modules=("q_proj",)):
    made = weights(version)
    (made.folder / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": modules}))
    return made


def test_adapters_have_a_name_of_their_version_and_replace_those_before(make_pool, weights, stubs, lines):
    for stub in stubs:
        stub.lora_rank = 8
    pool = make_pool()
    for version in (1, 2):
        run(pool.update(adapter(weights, version)))
        check(run(answers(pool, REQUESTS, RULES)), REQUESTS, version)
        assert all(stub.adapters == [f"glm46-version-{version}"] for stub in stubs)
    assert not any(body.get("method") == "glm46_load" for stub in stubs for _, body in stub.calls)
    stubs[0].adapters.clear()  # it was started again
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 2)
    assert any(f"{stubs[0].url} is excluded" in line for line in lines)
    run(pool.update(adapter(weights, 3)))
    assert lines[-1] == f"rollout: {stubs[0].url} generates with version 3"


@pytest.mark.parametrize(("lora_rank", "made", "said"), [
    (0, {}, ["--enable-lora --max-lora-rank 4", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"]),
    (2, {}, ["up to rank 2", "--max-lora-rank 4"]),
    (8, {"modules": ("q_proj", "down_proj")}, ["adapter.targets", '"experts"', "CPU"]),
])  # fmt: skip
def test_server_without_room_for_the_adapters_is_refused(make_pool, weights, stubs, lora_rank, made, said):
    for stub in stubs:
        stub.lora_rank = lora_rank
    with pytest.raises(UserError) as error:
        run(make_pool().update(adapter(weights, 1, **made)))
    assert all(part in str(error.value) for part in ["rollout.send_adapters", *said])
    assert "/pause?mode=keep" not in stubs[0].paths()


def test_routes_of_vllm_itself_have_no_rows_of_dense_layers(make_pool, weights, stubs):
    routes = np.arange(9 * 3 * 2, dtype=np.uint8).reshape(9, 3, 2)
    for stub in stubs:
        stub.routes = routes
    rules = RULES._replace(routes=True)
    pool = make_pool(rules=rules)
    run(pool.update(weights(1)))
    for request, one in zip(REQUESTS, run(answers(pool, REQUESTS, rules)), strict=True):
        assert (one.routes == routes[: len(request.prompt) + len(one.tokens) - 1, 1:]).all()


def test_routes_need_a_server_without_prefix_cache(make_pool, weights):
    with pytest.raises(UserError, match="--no-enable-prefix-caching"):
        run(make_pool(rules=RULES._replace(routes=True)).update(weights(1)))


@both_kinds
def test_server_that_goes_on_behind_a_stop_token_is_refused_before_it_draws(make_pool, weights, stubs, kind):
    stubs[1].goes_on_behind = (9,)
    with pytest.raises(UserError, match=r"rollout.urls: .* stop token 9: .*\[9, 9\].*start it"):
        run(make_pool(kind, rules=STOPPED).update(weights(1)))
    assert not stubs[0].generated and not stubs[1].generated


def test_server_that_refuses_a_bias_draws_unasked(make_pool, weights, stubs):
    """As vLLM with drafts does."""
    stubs[1].fault = "400 at stop"
    pool = make_pool(VllmServer, servers=stubs[1:], rules=STOPPED)
    run(pool.update(weights(1)))
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)


@both_kinds
def test_server_that_comes_back_is_asked_for_its_stop_tokens_again(make_pool, weights, stubs, lines, kind):
    pool = make_pool(kind, rules=STOPPED)
    run(pool.update(weights(1)))
    stubs[1].stop()
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)
    back = StubServer(port=stubs[1].port)
    back.goes_on_behind = (9,)
    try:
        check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)
        assert not back.generated and "stop token 9" in lines[-1] and back.url in lines[-1]
        back.goes_on_behind, back.fault = (), "500 at stop"
        run(pool.update(weights(2)))
        assert "/generate answered 500" in lines[-1]
        back.fault = ""
        run(pool.update(weights(3)))
        assert lines[-1] == f"rollout: {back.url} generates with version 3"
    finally:
        back.stop()


@both_kinds
def test_servers_that_have_joined_generate_the_same_requests_before_all_others(make_pool, weights, stubs, lines, kind):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    found = run(pool.first_samples(REQUESTS, at_start=True))
    assert [server.url for server in found] == [stub.url for stub in stubs]
    for (server, completions), is_right in zip(found.items(), (True, False), strict=True):
        check(completions, REQUESTS, 1)
        pool.judge(server, "it differs", is_right=is_right)
    assert f"{stubs[0].url}: it differs" in lines[-2] and f"{stubs[1].url} is excluded: it differs" in lines[-1]
    assert not run(pool.first_samples(REQUESTS, at_start=False))
    asked = len(stubs[1].calls)
    run(pool.update(weights(2)))
    stubs[0].stop()
    with pytest.raises(EngineError, match=f"{stubs[1].url}: it differs"):
        run(answers(pool, REQUESTS, RULES))
    assert len(stubs[1].calls) == asked, "a server that samples from another distribution is not asked again"
    back = StubServer(port=stubs[0].port)
    try:
        run(pool.join_again())
        back.fault = "500"  # it is asked: it was started again, perhaps with other options
        assert not run(pool.first_samples(REQUESTS, at_start=False)) and "is excluded" in lines[-1]
    finally:
        back.stop()


@pytest.mark.parametrize("fault", ["400", "no choices", "null logprobs"])
@both_kinds
def test_server_that_comes_back_with_a_fault_does_not_end_the_run(make_pool, weights, stubs, lines, fault, kind):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    for server in run(pool.first_samples(REQUESTS, at_start=True)):
        pool.judge(server, "as the policy", is_right=True)
    stubs[1].stop()
    check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)
    back = StubServer(port=stubs[1].port)
    back.fault = fault
    try:
        run(pool.join_again())
        assert not run(pool.first_samples(REQUESTS, at_start=False))
        assert f"{back.url} is excluded" in lines[-1]
        check(run(answers(pool, REQUESTS, RULES)), REQUESTS, 1)  # it is asked again, and fails in the rollout
        assert f"{back.url} is excluded" in lines[-1]
    finally:
        back.stop()


@both_kinds
def test_requests_that_all_servers_refuse_and_a_server_that_refuses_at_the_start_end_the_run(
    make_pool, weights, stubs, lines, kind
):
    pool = make_pool(kind)
    run(pool.update(weights(1)))
    stubs[1].fault = "400"
    with pytest.raises(UserError, match=f"{stubs[1].url} refuses a request"):
        run(pool.first_samples(REQUESTS, at_start=True))
    assert not lines[2:]
    stubs[0].fault = "400"
    with pytest.raises(UserError, match=r"rollout.urls: .* refuses a request") as error:
        run(answers(pool, REQUESTS, RULES))
    assert not isinstance(error.value, EngineError) and len([line for line in lines if "is excluded" in line]) == 1
    with pytest.raises(UserError, match="refuses a request"):
        run(pool.first_samples(REQUESTS, at_start=False))


PROGRAM = (
    "import os, sys, time; print(os.getpid(), *sys.argv[1:], os.environ.get('WORLD_SIZE'), flush=True); time.sleep(600)"
)
COMMAND = (sys.executable, "-c", PROGRAM, "--model={folder}", "{port}")


def words(log, count=4):
    wait_until(lambda: log.exists() and len(log.read_text().split()) >= count)
    return log.read_text().split()


def test_one_server_for_each_address_and_again_after_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of the run's own ranks
    lines = []
    servers = LaunchedServers(COMMAND, ["http://127.0.0.1:81", "http://127.0.0.1:82"], tmp_path / "logs", lines.append)
    servers.ensure(tmp_path / "a")
    first, second = (words(tmp_path / f"logs/server-{port}.log") for port in (81, 82))
    assert first[1:] == [f"--model={tmp_path / 'a'}", "81", "None"] and second[2] == "82" and len(lines) == 2
    servers.require_running()
    os.kill(int(first[0]), signal.SIGKILL)
    servers._running[81].wait()
    servers.ensure(tmp_path / "b")
    assert words(tmp_path / "logs/server-81.log")[1] == f"--model={tmp_path / 'b'}" and len(lines) == 3
    servers.stop()
    wait_until(lambda: not is_alive(int(second[0])))


def test_command_that_fails_is_one_message_with_its_output(tmp_path):
    command = (sys.executable, "-c", "raise SystemExit('no such option: --moddel')")
    servers = LaunchedServers(command, ["http://127.0.0.1:81"], tmp_path, print)
    servers.ensure(tmp_path)
    servers._running[81].wait()
    with pytest.raises(EngineError, match="rollout.launch") as error:
        servers.require_running()
    assert "--moddel" in str(error.value) and "exit code 1" in str(error.value)


@pytest.mark.slow
def test_server_ends_with_a_run_that_is_killed(tmp_path):
    run = f"""
import time
from pathlib import Path
from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
LaunchedServers({COMMAND!r}, ["http://127.0.0.1:81"], Path({str(tmp_path)!r}), print).ensure(Path("a"))
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", run]) as process:
        server = words(tmp_path / "server-81.log")[0]
        process.kill()
    wait_until(lambda: not is_alive(int(server)))


def test_the_end_does_not_wait_for_a_process_that_a_driver_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(launched_servers, "_STOP_SECONDS", 0.1)
    servers = LaunchedServers(COMMAND, ["http://127.0.0.1:81"], tmp_path, print)
    ended = subprocess.Popen(["true"])
    ended.wait()

    def wait(seconds: float | None) -> None:
        assert seconds is not None, "it would wait for ever"
        raise subprocess.TimeoutExpired("server", seconds)

    servers._running[81] = SimpleNamespace(pid=ended.pid, wait=wait)
    servers.stop()
