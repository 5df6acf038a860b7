"""The end of a process by a signal: nothing that follows from it changes its exit code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
# A signal ends the process while its main thread sees that a process of it was killed, and makes an error of that.
PROGRAM = """
import threading, time
from glm46 import cli
from glm46.config.errors import UserError
from glm46.engine.reliability import stop

killed = threading.Event()

def descendants(process):
    killed.set()
    time.sleep(0.5)
    return []

def work(argv):
    killed.wait()
    raise UserError("a launcher was killed")

stop._descendants, cli._run = descendants, work
stop._CLEAN_SECONDS = 3.0
stop.before_exit += [lambda: time.sleep(100), lambda: print("cleaned", flush=True)]
threading.Thread(target=stop.exit_now, args=(75, "stopped"), daemon=True).start()
raise SystemExit(cli.main(["launch"]))
"""


def test_an_error_that_follows_from_the_end_does_not_become_its_exit_code():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (75, "cleaned\n", "stopped\n")
