"""One process at a time holds the lock, and the end of the process releases it."""

import os
import subprocess
import sys

from glm46.files.lock import FileLock

_HOLD = """
import sys, time
from pathlib import Path
from glm46.files.lock import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire(0.0)
child = None
if sys.argv[2] == "fork":
    import os
    child = os.fork()
    if not child:
        time.sleep(600)
print(child or "held", flush=True)
time.sleep(600)
"""


def hold(path, how="alone"):
    """A process that holds the lock, and what it printed."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path), how], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_one_process_at_a_time_holds_it_and_is_named(tmp_path):
    process, _ = hold(tmp_path / "lock")
    lock = FileLock(tmp_path / "lock")
    try:
        assert not lock.acquire(0.2)
        assert f"process {process.pid} on " in lock.holder()
    finally:
        process.kill()
        process.wait()
    assert lock.acquire(300.0)
    lock.release()


def test_a_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path):
    process, child = hold(tmp_path / "lock", "fork")
    process.kill()
    process.wait()
    try:
        lock = FileLock(tmp_path / "lock")
        assert lock.acquire(300.0)
        lock.release()
    finally:
        os.kill(int(child), 9)


def test_a_process_that_waited_for_a_removed_file_locks_the_new_one(tmp_path):
    path = tmp_path / "lock"
    first = FileLock(path)
    assert first.acquire(0.0)
    program = _HOLD.replace("acquire(0.0)", 'acquire(0.0) or print("waits", flush=True) or lock.acquire(300.0)')
    waiting = subprocess.Popen([sys.executable, "-c", program, path, "alone"], stdout=subprocess.PIPE, text=True)
    assert waiting.stdout.readline() == "waits\n"
    first.release(remove=True)
    try:
        assert waiting.stdout.readline().strip() == "held"
        assert path.exists() and not FileLock(path).acquire(0.2)
    finally:
        waiting.kill()
        waiting.wait()


def test_only_its_owner_may_read_it(tmp_path):
    """Whoever can read a file can hold a shared lock on it, with which nobody gets the exclusive one."""
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(0.0)
    assert lock.path.stat().st_mode & 0o777 == 0o600
    lock.release()
