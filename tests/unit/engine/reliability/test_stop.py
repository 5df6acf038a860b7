"""The end of a process by a signal: nothing that follows from it changes its exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

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
threading.Thread(target=stop.exit_now, args=(75, "stopped"), daemon=True).start()
raise SystemExit(cli.main(["launch"]))
"""


# A rank has ended on a signal; the connection to it breaks before the signal has come here.
IN_THE_FIRST_EXCHANGE = """
import os, signal, threading
from glm46.engine.reliability.stop import StopRequest

class Late(threading.Event):
    def wait(self, seconds):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().wait(seconds)

request = StopRequest()
request._is_asked = Late()
with request.exchange():
    raise RuntimeError("closed by peer")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "printed", "said"), [
    (PROGRAM, "", "stopped\n"),
    (IN_THE_FIRST_EXCHANGE, "", "closed by peer\nstopped by SIGTERM before training began; nothing is lost\n"),
], ids=["of a killed launcher", "of a rank that has left"])  # fmt: skip
def test_an_error_that_follows_from_the_end_does_not_become_its_exit_code(program, printed, said):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, (done.stdout, done.stderr)) == (75, (printed, said))
