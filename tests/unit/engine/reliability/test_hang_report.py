"""Hangs: the limit of the watchdog, the alarm in the store, and the report of all ranks."""

import faulthandler
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components.types import Op
from torch.torch_version import TorchVersion

from glm46.compat import flight_recorders
from glm46.compute.distributed.process import Process
from glm46.engine.reliability import hang_report
from glm46.engine.reliability import watchdog as watchdog_module
from glm46.engine.reliability.alarm import Alarm
from glm46.engine.reliability.hang_report import collectives_here, describe_hang, find_culprits
from glm46.engine.reliability.stack_frames import innermost_frames
from glm46.engine.reliability.stop import EXIT_HANG
from glm46.engine.reliability.watchdog import Watchdog, _within
from tests.processes import HANG_SECONDS

GUILTY = 3


def entry(
    group: str, name: str, number: int, state: str, *, p2p: int = 0, sizes=((1024,),), timed: bool = True
) -> dict:
    started = 5 * (timed and state != "scheduled")
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"] * len(sizes), "input_sizes": [list(s) for s in sizes],
        "is_p2p": "->" in name or "<-" in name, "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[1024]],
        "p2p_seq_id": p2p, "pg_id": 0, "process_group": [group, "mesh"], "profiling_name": name, "record_id": number,
        "retired": state == "completed", "state": state, "thread_id": "1", "thread_name": "python3",
        "time_created_ns": 4, "time_discovered_completed_ns": 6 * (state == "completed"),
        "time_discovered_started_ns": started, "timeout_ms": 1800000,
    }  # fmt: skip


def gloo(number: int, *, waits: bool) -> dict:
    """gloo never changes a state, and fills pg_config with nothing: in torch 2.13 with the group that has no name."""
    entries = [entry("0", "gloo:all_reduce", n, "scheduled", timed=False) for n in range(1, number + 1)]
    for each in entries:
        each["retired"] = not waits or each is not entries[-1]
    entries.insert(0, entry("", "gloo:all_reduce", 1, "scheduled", timed=False) | {"retired": True})
    return {"pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}}, "entries": entries, "version": "2.10"}


class Rank:
    """A rank of nodes of 8: `ep` inside a node, `shard` over the nodes; groups of one axis share their name."""

    def __init__(self, rank: int, size: int):
        node = rank // 8
        self.rank, self.gloo = rank, gloo(12, waits=False)
        self.stack = ["glm46/engine/training/rank_sums.py:57 to_host waits for the device"]
        self.groups = {"1": [*range(8 * node, 8 * node + 8)], "2": [*range(rank % 8, size, 8)], "3": [*range(size)]}
        self.entries = [entry(group, "nccl:all_gather", n, "completed") for group in self.groups for n in (1, 2)]

    def launch(self, group: str, name: str, number: int, state: str, **options) -> None:
        self.entries.append(entry(group, name, number, state, **options))

    def answer(self, monkeypatch) -> dict:
        config = {
            str(i): {"name": n, "desc": "mesh", "ranks": json.dumps(r)} for i, (n, r) in enumerate(self.groups.items())
        }
        nccl = {"pg_config": config, "entries": self.entries, "version": "2.10"}
        traces = {"gloo": json.dumps(self.gloo), "nccl": json.dumps(nccl)}
        monkeypatch.setattr(hang_report, "flight_recorders", lambda: traces)
        return {"operation": "training step", "step": 7, "stack": self.stack} | collectives_here()[0]


def stuck_kernel(rank: Rank) -> None:
    """All hosts have launched the same; on one GPU a kernel in front of the exchange does not end."""
    peers = GUILTY in rank.groups["1"]
    rank.launch("1", "nccl:all_to_all", 3, "scheduled" if rank.rank == GUILTY else "started" if peers else "completed")
    rank.launch("3", "nccl:all_reduce", 3, "scheduled" if peers else "started")


def stuck_port(rank: Rank) -> None:
    """Both collectives that the GPU with a dead port runs at once: inside its node, and over the nodes."""
    for group in ("1", "2"):
        rank.launch(group, "nccl:_all_gather_base", 3, "started" if GUILTY in rank.groups[group] else "completed")
    rank.launch("3", "nccl:all_reduce", 3, "scheduled" if GUILTY in rank.groups["1"] + rank.groups["2"] else "started")


def other_collective(rank: Rank) -> None:
    rank.launch("3", "nccl:_reduce_scatter_base" if rank.rank == GUILTY else "nccl:all_reduce", 3, "started")


def other_size(rank: Rank) -> None:
    rank.launch("3", "nccl:all_reduce", 3, "started", sizes=((7,),) if rank.rank == GUILTY else ((8,),))


def dead_loader(rank: Rank) -> None:
    """The others wait in the agreement on the step, in gloo, with nothing left to do on the GPU."""
    rank.gloo = gloo(12 if rank.rank == GUILTY else 13, waits=rank.rank != GUILTY)
    rank.stack = (
        ["glm46/storage/data/loader.py:9 next"] if rank.rank == GUILTY else ["torch/distributed/x.py:9 all_reduce"]
    )


def in_python(rank: Rank) -> None:
    """One rank's host launches nothing more; the other GPUs of its node run the exchange and wait."""
    if rank.rank == GUILTY:
        rank.stack = ["glm46/compute/model/block.py:9 forward"]
        return
    peers = GUILTY in rank.groups["1"]
    rank.launch("1", "nccl:all_to_all", 3, "started" if peers else "completed")
    rank.launch("3", "nccl:all_reduce", 3, "scheduled" if peers else "started")


def pipeline(rank: Rank, *, batched: bool = False) -> None:
    """Each rank of a node receives from the one before it, up to the guilty one, which sends nothing."""
    place, node = rank.rank % 8, rank.rank - rank.rank % 8
    if node or place <= GUILTY:
        return
    name, state = f"nccl:recv {place}<-{place - 1}", "started"
    rank.launch("1", name, 2, "scheduled" if batched else state, p2p=1)
    if batched:
        rank.launch("1", "nccl:coalesced", 2, state, p2p=1, sizes=())


def batched_pipeline(rank: Rank) -> None:
    pipeline(rank, batched=True)


FAULTS = (stuck_kernel, stuck_port, other_collective, other_size, dead_loader, in_python, pipeline, batched_pipeline)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_the_rank_at_fault_is_named(fault, size, monkeypatch):
    answers = {}
    for number in range(size):
        rank = Rank(number, size)
        fault(rank)
        answers[number] = rank.answer(monkeypatch)
    # On one node the collective over nodes has one rank: what is stuck is one group, of eight equal ranks.
    found = [] if fault is stuck_port and size == 8 else [GUILTY]
    assert find_culprits(answers, size) == found
    if not found:
        text = describe_hang(answers, [], {}, 9.0, "hang")
        assert "no rank can be told" in text and "8 ranks, the first is 0, are all in nccl:_all_gather_base" in text
    hidden = {number: answer | {"collectives": {}, "peers": []} for number, answer in answers.items()}
    seen = [GUILTY] if fault in (dead_loader, in_python) else []
    assert find_culprits(hidden, size) == seen  # by the frames: who waits for the device is not accused


def test_without_timing_what_the_host_has_launched_counts(monkeypatch):
    """All GPUs look alike behind a stuck kernel then, and none is named; a host that launches nothing still is."""
    for fault, found in ((stuck_kernel, []), (in_python, [GUILTY])):
        answers = {}
        for number in range(8):
            rank = Rank(number, 8)
            fault(rank)
            for each in rank.entries:
                each["time_discovered_started_ns"] = 0
                each["state"] = {"started": "scheduled"}.get(each["state"], each["state"])
            answers[number] = rank.answer(monkeypatch)
        assert find_culprits(answers, 8) == found


def test_gloos_collectives_are_read_without_the_ranks_of_its_groups(monkeypatch):
    text = json.dumps(gloo(12, waits=True))
    monkeypatch.setattr(hang_report, "flight_recorders", lambda: {"gloo": text})
    collectives = collectives_here()[0]["collectives"]
    assert collectives["gloo 0 from rank 0"] == [12, "gloo:all_reduce", 11, [[1024]]]


def test_more_than_half_are_not_accused():
    answers = {rank: {"stack": ["glm46/compute/model/block.py:9 forward"], "collectives": {}} for rank in range(4)}
    assert find_culprits(answers, 4) == []
    answers |= {rank: {"stack": ["torch/x.py:1 wait"], "collectives": {}} for rank in (0, 1)}
    assert find_culprits(answers, 4) == [2, 3]


def test_torch_reads_the_dumps_of_these_tests():
    """Its own analyser names the fields that this module writes. That of torch 2.11 knows no gloo."""
    dumps = {"nccl:all_reduce": {}, "nccl:send 0->1": {"p2p": 1}}
    if TorchVersion(torch.__version__) >= (2, 13):
        dumps["gloo:all_reduce"] = {"timed": False}
    for name, options in dumps.items():
        event = entry("1", name, 3, "started", **options)
        op = Op(event, {"1": {0, 1}}, "1")
        assert op.state == "started" and op.collective_seq_id == 3
    assert flight_recorders().keys() == {"gloo", *(["nccl"] if dist.is_nccl_available() else [])}


@pytest.mark.parametrize("method", ["cpu", "item", "tolist", "synchronize", "numel"])
def test_a_frame_that_waits_for_the_device_says_so(method):
    """A method in C has no frame: the code of its caller names it, also within other calls and several lines."""
    begun, end = threading.Event(), threading.Lock()

    class Blocks:
        cpu = item = tolist = synchronize = numel = property(lambda self: end.acquire)

    calls = {name: compile(f"x = [1, (\nt.{name}())]", "glm46/a.py", "exec") for name in dir(Blocks) if name[0] != "_"}

    def work() -> None:
        begun.set()
        exec(calls[method], {"t": Blocks()})

    end.acquire()
    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while not (frames := innermost_frames(sys._current_frames()[thread.ident]))[0].startswith("glm46/a.py:2"):
        pass
    end.release()
    thread.join()
    assert frames[0] == "glm46/a.py:2 <module>" + " waits for the device" * (method != "numel")


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


def test_a_step_of_another_size_gets_the_limit_of_the_start(tmp_path):
    """It may compile again, which takes longer than five steps of the old size."""
    # 0 starts no thread; the limits are computed all the same.
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=0.0, start_seconds=300.0)

    def run_steps(seq_len: int) -> None:
        for step in range(30):
            watchdog.step_begins(step)
            watchdog.operation("training step", size=(8, seq_len))

    run_steps(128)
    assert watchdog.limit_seconds() < 100.0
    watchdog.operation("training step", size=(8, 256))
    assert watchdog.limit_seconds() == 300.0
    run_steps(256)
    assert watchdog.limit_seconds() < 100.0


@pytest.mark.parametrize(
    ("outages", "steps", "limit"),
    [
        ({10}, 23, 5.0),  # of the fewest steps that set the limit, in the longest one: it would be 300 s
        ({40}, 60, 5.0),
        ({30, 31, 50}, 65, 5.0),
        (set(range(30, 40)), 60, 300.0),  # so many are no outage: the steps are slow, up to the bound
    ],
)
def test_the_limit_does_not_learn_from_outages(outages, steps, limit, tmp_path, monkeypatch):
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=0.0, start_seconds=300.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(steps):
        watchdog.step_begins(step)
        now += 131.0 if step in outages else 1.0
    assert watchdog.limit_seconds() == pytest.approx(limit)  # sums of seconds on a clock that is large


def test_a_folder_that_is_deleted_while_a_run_stops_is_no_error(tmp_path, capfd):
    folder = tmp_path / "hang"
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), folder, shortest_seconds=10.0, start_seconds=300.0)
    shutil.rmtree(folder)
    watchdog.close()
    assert capfd.readouterr().err == ""


WAITS = "for _ in $(seq 600); do [ -e $1 ] && break; sleep 0.1; done; exec cat > /dev/null"


def test_stacks_that_the_disk_does_not_take_hold_the_interpreter_up_for_no_moment(tmp_path):
    """Otherwise a rank whose storage hangs could not end by its own clock. A full pipe is the disk; it answers after
    a minute at most, so that a failure of this test ends."""
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=10.0, start_seconds=300.0)
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    with suppress(BlockingIOError):
        while True:
            os.write(sender, b"x")
    os.set_blocking(sender, True)
    with subprocess.Popen(["sh", "-c", WAITS, "sh", str(tmp_path / "answers")], stdin=receiver):
        os.close(receiver)
        stacks, began = watchdog._stacks, time.monotonic()
        with os.fdopen(sender, "w") as watchdog._stacks:
            assert _within(0.1, watchdog._keep_stacks) is None
            assert time.monotonic() - began < 30
            (tmp_path / "answers").touch()
        watchdog._stacks = stacks
    watchdog._keep_stacks()
    assert "test_stacks_that_the_disk" in (tmp_path / "stacks-rank0.txt").read_text()
    watchdog.close()


def test_a_report_that_takes_too_long_is_said_before_the_rank_ends(tmp_path, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(watchdog_module, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set() if code == EXIT_HANG else None)
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=10.0, start_seconds=300.0)
    watchdog._end_for_sure()
    assert ended.wait(HANG_SECONDS)
    watchdog.close()
    assert re.fullmatch(r"error: rank 0 ends, \d+ s after the alarm\n", capfd.readouterr().err)


@pytest.mark.parametrize(
    "text", ['{"entries": [{}]}', '{"entries": [{"process_group": []}]}', '{"entries": 1}', "[]", "no JSON"]
)
def test_a_report_does_not_depend_on_the_format_of_the_flight_recorder(text, monkeypatch):
    monkeypatch.setattr(hang_report, "flight_recorders", lambda: {"gloo": text})
    assert hang_report.collectives_here() == ({"collectives": {}, "peers": []}, f'{{"gloo": {text}}}')
