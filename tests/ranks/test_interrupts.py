"""Every signal, once and twice, at random moments of what a user starts, before ranks train.

The programs are real ones, from the first line of run_train.sh on.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from glm46.config.loader import dump_config
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.names import HFNames
from glm46.tasks.weights.write_model import write_model
from tests.builders import model_table, small_config, write_source
from tests.processes import HANG_SECONDS, MARK, free_port, left_behind, wait_until

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Phase(NamedTuple):
    """What is started, when the signals come, and how it may end."""

    command: list[str]
    after: str = ""
    """Text in the output from which on the signals come."""
    within: float = 2.0
    """Seconds in which they come."""
    trains: bool = True
    """Whether job systems may start it again: exit code 75."""
    environment: dict[str, str] = {}


def phases(base: Path, outputs: Path) -> dict[str, Phase]:
    """All phases before a rank trains. The first call makes in ``base`` what they read."""
    start = ["bash", str(ROOT / "run_train.sh"), f"--job.dump_folder={outputs / 'out'}"]
    made = [f"--data.sources[{i}].path={outputs / f'source{i}'}" for i in range(2)]
    verb = [sys.executable, "-m", "glm46"]
    text = base / "text.jsonl"
    if not text.exists():
        lines = (json.dumps({"text": " ".join(random.choices(["one", "two", "three", "four", "five"], k=400))}) + "\n"
                 for _ in range(20_000))  # fmt: skip
        text.write_text("".join(lines))
    config, port = base / "run.toml", str(free_port(behind=9))
    if not config.exists():
        (base / "ready").mkdir()
        config.write_text(
            dump_config(small_config(write_source(base / "ready", load_tokenizer("builtin")), base / "out"))
        )
    node = {"CONFIG_FILE": str(config), "NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NGPU": "1"}
    first, other = node | {"NODE_RANK": "0"}, node | {"NODE_RANK": "1"}
    folder = ["--input", str(text), "--output", str(outputs / "own")]
    step = base / "model" / "step-000000"
    if not step.exists():
        write_random_model(step.parent)
    source = ["--checkpoint", str(step)]
    return {
        "start": Phase([*start, *made], within=3.0),
        "prepare": Phase([*start, *made], "preparing", within=4.0),
        "prepare a source": Phase([*verb, "prepare", *folder], "preparing", within=4.0, trains=False),
        "waiting": Phase(start, "waits for the first node", environment=other),
        "misspelt": Phase(
            start, "waits for the first node", environment=other | {"MASTER_ADDR": "no-such-node.invalid"}
        ),
        "first": Phase(start, "waits until all 2 nodes", environment=first),
        "plan": Phase(
            [*verb, "plan", "--config", str(ROOT / "train_configs" / "debug.toml")], within=0.5, trains=False
        ),
        "convert": Phase(
            [*verb, "convert", "to-hf", *source, "--output", str(outputs / uuid.uuid4().hex)], within=4.0, trains=False
        ),
        "generate": Phase(
            [*verb, "generate", *source, "--prompt", "def", "--max-new-tokens", "2000"], within=8.0, trains=False
        ),
        "benchmark": Phase([*verb, "benchmark", "rates"], within=12.0, trains=False),
    }


def write_random_model(folder: Path) -> None:
    """A checkpoint of the debug model with more and wider experts, of 190 MB: converting it takes a moment."""
    model = ModelConfig(**model_table(flavor="debug", n_routed_experts=64, moe_intermediate_size=256))
    entries = HFNames(resolve_shape(model), repeat_shared=False).entries
    kinds = {name: (entry.shape, torch.float32) for name, entry in entries.items()}
    meta = {"config": dump_config(RunConfig(model=model))}
    write_model(folder, kinds, lambda name, tensor: tensor.normal_(std=0.02), meta)


def attempt(name: str, phase: Phase, numbers: tuple[int, ...], chance: random.Random, base: Path) -> dict:
    """Start it and send the signals; the second one, as `timeout` and people do, 0 to 0.5 s after the first."""
    mark, log = uuid.uuid4().hex, base / "log"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), MARK: mark} | phase.environment
    with log.open("w") as file:
        process = subprocess.Popen(
            # Shells ignore SIGINT for what they start in the background, nohup SIGHUP for all that it starts.
            ["env", "--default-signal=INT,HUP", *phase.command],
            env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    wait_until(lambda: phase.after in log.read_text() or process.poll() is not None, log.read_text)
    time.sleep(chance.uniform(0.0, phase.within))
    ended_before = process.poll() is not None
    for i, number in enumerate(numbers):
        if i:
            time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.5)]))
        if process.poll() is None:
            # Ctrl-C reaches all processes of the terminal, the others the one that a person or a job system knows.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    sent = time.monotonic()
    try:
        code = process.wait(HANG_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - sent
    with suppress(AssertionError):  # what ends with its parent needs a moment
        wait_until(lambda: not left_behind(mark))
    left = left_behind(mark)
    for other in left:
        os.kill(other, signal.SIGKILL)
    names = [signal.Signals(number).name for number in numbers]
    return {
        "phase": name, "signals": names, "code": code, "seconds": seconds, "left": len(left),
        "ended_before": ended_before, "said": log.read_text()[-3000:], "right": is_right(phase, numbers[0], code),
    }  # fmt: skip


def is_right(phase: Phase, number: int, code: int | None) -> bool:
    """Whether the exit code says which signal ended it. Before Python has started, the system ends it."""
    if number == signal.SIGINT:
        return code in (130, -number)
    return code in ((75,) if phase.trains else (128 + number,)) or code in (-number, 128 + number)


CASES = {
    "start": ("start", signal.SIGINT), "prepare": ("prepare", signal.SIGINT, signal.SIGINT),
    "prepare terminated": ("prepare", signal.SIGTERM),
    "prepare a source": ("prepare a source", signal.SIGHUP, signal.SIGTERM), "waiting": ("waiting", signal.SIGTERM),
    "misspelt": ("misspelt", signal.SIGINT, signal.SIGINT), "first": ("first", signal.SIGUSR1),
    "convert": ("convert", signal.SIGTERM), "generate": ("generate", signal.SIGINT, signal.SIGINT),
}  # fmt: skip
"""By name: what is started, and the signals."""


def end_in_time(inputs: Path, folder: Path, phase: str, *numbers: int) -> dict:
    """The row of an attempt whose signals came before the end."""
    for i in range(4):
        outputs = folder / str(i)
        outputs.mkdir(parents=True)
        started = phases(inputs, outputs)[phase]
        # A fast machine may be done before the signal comes, or be ending, which shows nothing: the next one comes
        # earlier. A program that ignores its signals ends so each time.
        row = attempt(phase, started._replace(within=started.within / 4**i), numbers, random.Random(0), outputs)
        if not row["ended_before"] and row["code"] != 0:
            break
    return row


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory):
    """By name, `end_in_time` of the selected cases, three at a time: they import on one core, then wait."""
    inputs, outputs = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("outputs")
    phases(inputs, outputs)  # makes the inputs, which no attempt changes
    items = [item for item in request.session.items if item.module is request.module]
    names = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(end_in_time, inputs, outputs / name, *CASES[name]) for name in names}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_ends_all_that_was_started(case, ends):
    row = ends[case].result()
    assert row["right"] and not row["left"], row
    assert "Traceback" not in row["said"], row


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_random_signals_end_every_phase(seed, tmp_path):
    chance = random.Random(seed)
    for name in phases(tmp_path, tmp_path):
        number = chance.choice(SIGNALS)
        for numbers in ((number,), (number, chance.choice([number, signal.SIGINT, signal.SIGTERM]))):
            row = attempt(name, phases(tmp_path, tmp_path)[name], numbers, chance, tmp_path)
            assert row["right"] or row["ended_before"], row
            assert not row["left"], row


@pytest.mark.parametrize(("command", "code"), [
    (["bash", str(ROOT / "run_train.sh")], 75), ([sys.executable, "-m", "glm46", "launch"], 75),
    ([sys.executable, "-m", "glm46", "schema"], 128 + signal.SIGTERM),
])  # fmt: skip
def test_a_signal_that_comes_before_python_listens_is_not_lost(command, code, tmp_path):
    """After run_train.sh it comes before Python's first import, else before glm46's own first import."""
    is_script = command[0] == "bash"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Sender:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'glm46.engine.reliability.stop': os.kill(os.getpid(), signal.SIGTERM)\n"
        f"if {is_script}:\n"
        "    if b'\\0launch\\0' in open('/proc/self/cmdline', 'rb').read(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "else: sys.meta_path.insert(0, Sender)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    end = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert end.returncode == code and end.stderr.endswith("stopped by SIGTERM\n"), end
