"""Trains the runs of an ablation one after the other through the launcher."""

import subprocess
import sys

from glm46.config.loader import dump_config
from glm46.engine.reliability.run_lock import writing
from glm46.engine.reliability.stop import EXIT_STOPPED, code_before_training
from glm46.files.durable import replace_durably
from glm46.operate.ablation.ablation_runs import CONFIG_FILE, FINISHED, STOPPED, AblationPlan, AblationRun
from glm46.operate.launch.torchrun import LauncherSignals

_EXIT_FAILED = 1
"""Exit code if the run of a variant failed."""


def train_all(plan: AblationPlan, signals: LauncherSignals) -> int:
    """Train all runs that are not finished; return the exit code."""
    waiting = [run for run in plan.runs if run.status() != FINISHED]
    finished = len(plan.runs) - len(waiting)
    emulated = [name for name, keys in plan.keys.items() if keys.get("float8.emulate")]
    if emulated:
        print(f"FP8 is emulated, without a speed to compare: {', '.join(emulated)}", flush=True)
    print(f"{len(plan.runs)} runs under {plan.folder}: {finished} finished, {len(waiting)} to train", flush=True)
    has_failed = False
    for number, run in enumerate(waiting, finished + 1):
        print(f"{number} of {len(plan.runs)}  {run.title}: {run.folder}", flush=True)
        code = _train(run)
        status = FINISHED if code == 0 else f"failed with exit code {code}"
        if code != 0 and (signals.number is not None or code == EXIT_STOPPED):
            status = STOPPED
        with writing(run.folder):
            run.keep_status(status)
        print(f"{run.title}: {status}", flush=True)
        if status == STOPPED:
            print("the same command continues with the runs that are not finished", flush=True)
            return code if code > 0 or signals.number is None else code_before_training(signals.number)
        has_failed |= code != 0
    return _EXIT_FAILED if has_failed else 0


def _train(run: AblationRun) -> int:
    """Train one run through the launcher, in a separate process; return its exit code."""
    with writing(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_durably(run.folder / CONFIG_FILE, [dump_config(run.config).encode()])
        run.keep_status(STOPPED)
    words = ["launch", "--config", str(run.folder / CONFIG_FILE), "--nproc", str(run.processes)]
    command = [sys.executable, "-m", "glm46", *words]
    # In its own session, so that Ctrl-C reaches only this process, which forwards it (LauncherSignals).
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise
