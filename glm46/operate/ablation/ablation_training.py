"""The runs of an ablation, trained one after the other through the launcher, and the errors of their FP8 products."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.config.presets import resolve_shape
from glm46.engine.observe.console import duration
from glm46.engine.reliability.run_lock import writing
from glm46.engine.reliability.stop import EXIT_STOPPED, code_before_training
from glm46.files.durable import replace_durably
from glm46.files.progress import tokens_progress
from glm46.operate.ablation.ablation_runs import CONFIG_FILE, FP8_ERRORS, AblationPlan, AblationRun
from glm46.operate.estimate.machine import Machine
from glm46.operate.launch.torchrun import LauncherSignals, describe_exit
from glm46.run.parameters import count_parameters
from glm46.run.plan import resolve_plan
from glm46.storage.checkpoint.integrity import published_steps, step_folder

_CONSOLE = "console.txt"
_POLL_SECONDS = 1.0
_BYTES = 8
"""For each parameter, to measure FP8 errors: the weight in FP32, and as much for activations and one layer's copies."""
_EXIT_FAILED = 1
"""Exit code if the run of a variant failed."""


def train_all(plan: AblationPlan, signals: LauncherSignals) -> int:
    """Train what is not finished; returns the exit code."""
    waiting = [run for run in plan.runs if run.result().get("status") != "finished"]
    budgets = [resolve_plan(run.config, run.processes).budget_tokens - run.trained_tokens() for run in waiting]
    done = len(plan.runs) - len(waiting)
    emulated = [name for name, own in plan.keys.items() if own.get("float8.emulate")]
    if emulated:
        print(f"FP8 is emulated, without a speed to compare: {', '.join(emulated)}", flush=True)
    print(f"{len(plan.runs)} runs under {plan.folder}: {done} finished, {len(waiting)} to train", flush=True)
    has_failed = False
    with tokens_progress("ablation", sum(budgets), partial(print, file=sys.stderr, flush=True)) as advance:
        for number, run in enumerate(waiting, done + 1):
            print(f"{number} of {len(plan.runs)}  {run.title}: {run.folder / _CONSOLE}", flush=True)
            code = _train(run, signals, advance)
            result = run.result()
            print(
                f"  {result['status']} after {duration(result['seconds'])}  {result['error'] or ''}".rstrip(),
                flush=True,
            )
            if signals.number is not None or code == EXIT_STOPPED:
                print("the same command goes on with the runs that are not finished", flush=True)
                return code if code > 0 or signals.number is None else code_before_training(signals.number)
            has_failed |= code != 0
    return _EXIT_FAILED if has_failed else 0


def _train(run: AblationRun, signals: LauncherSignals, advance: Callable[[int], None]) -> int:
    """Train one run through the launcher, in a process of its own, and keep how it ended; returns its exit code."""
    console, began = run.folder / _CONSOLE, time.monotonic()
    with writing(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_durably(run.folder / CONFIG_FILE, [dump_config(run.config).encode()])
        seconds = run.result().get("seconds", 0.0)
        run.keep_result("stopped", None, seconds)
        output = console.open("ab")
    start = output.tell()
    words = ["launch", "--config", str(run.folder / CONFIG_FILE), "--nproc", str(run.processes)]
    # In a session of its own: Ctrl-C reaches this process only, which passes it on (LauncherSignals).
    with output, subprocess.Popen(
        [sys.executable, "-m", "glm46", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _watch(run, process, advance)
        except BaseException:  # the reader of the output has closed the pipe, for example: the run saves and ends
            process.terminate()
            raise
    code, error, status = process.returncode, None, "finished"
    if code != 0 and (signals.number is not None or code == EXIT_STOPPED):
        status = "stopped"
    elif code != 0:
        status, error = "failed", _error(console.read_bytes()[start:].decode(errors="replace"), code)
    with writing(run.folder):
        run.keep_result(status, error, seconds + time.monotonic() - began)
    return code


def _watch(run: AblationRun, process: subprocess.Popen, advance: Callable[[int], None]) -> None:
    """Wait for the end of a run and report its progress."""
    code, most = None, run.trained_tokens()
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_SECONDS)
        tokens = max(most, run.trained_tokens())  # a resumed run cuts its rows back
        advance(tokens - most)
        most = tokens


def measure_fp8(run: AblationRun, machine: Machine) -> None:
    """Measure the errors of the FP8 products of a finished run, once, and say why if that is not possible."""
    steps = published_steps(run.config.checkpoint_folder)
    file = run.folder / FP8_ERRORS
    if run.config.float8.recipe_name is None or run.result().get("status") != "finished" or file.exists():
        return
    memory = machine.gpus[0].memory_bytes if machine.gpus else machine.free_bytes
    parameters = count_parameters(resolve_shape(run.config.model))
    try:
        if not steps:
            raise UserError("checkpoint.enable = false: there is no checkpoint; enable it")
        if memory is not None and _BYTES * (parameters.main + parameters.mtp) > memory:
            raise UserError(f"the whole model does not fit one device; {_BYTES} bytes are needed for each parameter")
        # Imported here: it takes seconds, and other ablations do not need it.
        import torch

        from glm46.operate.ablation.quantisation import measure_quantisation

        device = torch.device("cuda" if machine.gpus else "cpu")
        errors = measure_quantisation(
            resolve_plan(run.config, 1), step_folder(run.config.checkpoint_folder, steps[-1]), device
        )
        replace_durably(file, [json.dumps(errors).encode()])
    except UserError as error:
        print(f"the errors of the FP8 products of {run.title} are not measured: {error}", flush=True)


def _error(output: str, code: int) -> str:
    """The line of the output that says why a run failed."""
    lines = re.findall(r"(?m)^(?:error: |[\w.]+(?:Error|Exception): ).*", output)
    # The last line of the launcher only names the rank.
    causes = [line for line in lines if not line.startswith("error: rank ")] or lines
    return causes[0].removeprefix("error: ").strip() if causes else f"the launcher {describe_exit(code)}"
