"""The process that forks ranks: real processes, without torch."""

import os
import signal
import time
from contextlib import closing

import pytest

from glm46.compute.distributed.environment import set_variables
from glm46.engine.observe.start_times import StartTimes
from glm46.operate.launch import rank_server
from glm46.operate.launch.rank_server import RankProcess, RankServer
from tests.processes import HANG_SECONDS, is_alive, is_rank, wait_until


def start(server: RankServer, *arguments: str, rank: int = 0) -> RankProcess:
    of_rank = {"RANK": str(rank), "WORLD_SIZE": "2", **set_variables(["PATH", "PYTHONPATH"])}
    return server.start(["python", "-m", "glm46", *arguments], of_rank, StartTimes("the command"))


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Its ranks run what a module of the test says, in place of the command line."""
    (tmp_path / "ranks.py").write_text(
        "import os, sys, time\n"
        "import glm46.__main__\n"
        "def run():\n"
        "    if sys.argv[1] == 'sleep':\n"
        "        time.sleep(1000)\n"
        "    return int(sys.argv[2])\n"
        "glm46.__main__.run = run\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with closing(RankServer(["ranks", "no_such_module"])) as one:
        yield one


def test_ranks_end_with_their_codes_at_once_and_others_may_follow_for_a_while(server, monkeypatch):
    monkeypatch.setattr(rank_server, "_FOLLOW_SECONDS", HANG_SECONDS)
    began = time.time()
    server.begin_start()
    waiting, failing = start(server, "sleep"), start(server, "exit", "7", rank=1)
    assert failing.wait(HANG_SECONDS) == 7 and waiting.poll() is None and server.first_failed == failing.pid
    wait_until(lambda: is_rank(waiting.pid), "a rank got no name")  # it gets it after the fork, maybe later than this
    assert 0 < server.seconds_to_follow() <= HANG_SECONDS and began <= server.failed_at <= time.time()
    os.kill(waiting.pid, signal.SIGKILL)
    assert waiting.wait(HANG_SECONDS) == -signal.SIGKILL and server.first_failed == failing.pid
    server.begin_start()
    assert server.failed_at is None and not server.first_failed
    assert start(server, "exit", "0").wait(HANG_SECONDS) == 0 and server.failed_at is None


def test_a_killed_server_takes_its_ranks_along_and_comes_again(server):
    server.begin_start()
    rank = start(server, "sleep")
    server._process.kill()
    assert rank.wait(HANG_SECONDS) == -signal.SIGKILL
    wait_until(lambda: not is_alive(rank.pid), "a rank outlived its server")
    with pytest.raises(RuntimeError, match="was killed"):
        start(server, "sleep")
    server.begin_start()
    assert start(server, "exit", "3").wait(HANG_SECONDS) == 3


def test_a_rank_has_its_own_interpreter_where_an_import_has_opened_the_driver_of_a_gpu(tmp_path, monkeypatch):
    """It could not use the GPU as a fork."""
    (tmp_path / "opens.py").write_text("import sys\nsys.modules['__main__']._driver_is_open = lambda: True\n")
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ: os._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with closing(RankServer(["opens"])) as server:
        server.begin_start()
        assert start(server, "--version").wait(HANG_SECONDS) == 9
