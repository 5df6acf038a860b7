"""``python -m glm46 ablate``: train the same run with different keys, one after the other, and compare them."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glm46.ablation.figures import Outcome, gap_rows, mean_rows
from glm46.ablation.report import build_report, markdown, table
from glm46.commands.ablation_runs import CONFIG_FILE, AblationPlan, AblationRun, plan_ablation
from glm46.commands.environment import describe_version
from glm46.commands.nodes import VARIABLES, detect_nodes
from glm46.commands.options import config_parser, parse_with_overrides, process_count
from glm46.commands.plot import PANELS, Panel, Run, draw
from glm46.commands.torchrun import LauncherSignals, describe_exit
from glm46.config.command_line import module_command
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.distributed.environment import set_variables, visible_gpus
from glm46.files.durable import replace_durably
from glm46.files.progress import tokens_progress
from glm46.observe.console import duration
from glm46.observe.history import ROWS_FILE, read_history, rows_by_kind
from glm46.planner.machine import Machine, detect_machine
from glm46.planner.plan import resolve_plan
from glm46.reliability.run_lock import lock_run, writing
from glm46.reliability.stop import EXIT_STOPPED, code_before_training

_RESULT, _CONSOLE = "result.json", "console.txt"
_REPORT = "ablation"
"""Name of the files of the report, without their endings."""
_POLL_SECONDS = 1.0
_TAIL_BYTES = 1 << 16
"""Of metrics.jsonl, read at each poll."""
_EXIT_FAILED = 1
"""Exit code if the run of a variant failed."""

_PANELS = (
    PANELS[0],
    Panel("Loss: gap to the baseline", "per cent", ("loss_gap",)),
    Panel("Gradient norm", "before clipping", ("grad_norm",)),
    Panel("Gradient norm: gap to the baseline", "per cent", ("grad_norm_gap",)),
    PANELS[2],
)


def ablate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code: 0 all runs are finished, 1 a run failed, of the launcher if it was stopped.

    Raises:
        UserError: the config or a variant has faults, or this machine cannot train one.
    """
    parser = config_parser("ablate")
    parser.add_argument(
        "--vary", action="append", default=[], metavar="KEY=V,V",
        help="train with each of these values of section.key; again for more keys: all combinations",
    )  # fmt: skip
    parser.add_argument("--seeds", metavar="N,N", help="train each variant with each of these values of debug.seed")
    parser.add_argument(
        "--nproc", type=process_count, metavar="N", help="processes of each run; auto, the default, as launch has it"
    )
    arguments, overrides = parse_with_overrides(parser, argv)
    if arguments.seeds is not None:
        overrides = (*overrides, f"--ablation.seeds=[{arguments.seeds}]")
    nodes = detect_nodes(set_variables(VARIABLES), "")
    if nodes.count > 1:
        raise UserError(f"environment: {nodes.count} nodes: ablate trains on one node; unset NNODES, or start it once")
    machine = detect_machine(visible_gpus())
    plan = plan_ablation(arguments.config, overrides, arguments.vary, arguments.nproc, machine)
    command = f"{module_command()} {shlex.join(['ablate', *argv])}"
    for run in plan.runs:
        _require_equal_processes(run)
    lock, signals = lock_run(plan.folder), LauncherSignals()
    try:
        code = _train_all(plan, signals)
        outcomes = [_outcome(run) for run in plan.runs]
        with writing(plan.folder):
            _write_report(plan, outcomes, {"config": str(arguments.config), "command": command}, machine)
    finally:
        signals.close()
        lock.release()
    return code


def _train_all(plan: AblationPlan, signals: LauncherSignals) -> int:
    """Train what is not finished; returns the exit code."""
    waiting = [run for run in plan.runs if _result(run).get("status") != "finished"]
    budgets = [resolve_plan(run.config, run.processes).budget_tokens - _trained_tokens(run) for run in waiting]
    done = len(plan.runs) - len(waiting)
    print(f"{len(plan.runs)} runs under {plan.folder}: {done} finished, {len(waiting)} to train", flush=True)
    has_failed = False
    with tokens_progress("ablation", sum(budgets), partial(print, file=sys.stderr, flush=True)) as advance:
        for number, run in enumerate(waiting, done + 1):
            print(f"{number} of {len(plan.runs)}  {run.title}: {run.folder / _CONSOLE}", flush=True)
            code = _train(run, signals, advance)
            result = _result(run)
            print(
                f"  {result['status']} after {duration(result['seconds'])}  {result['error'] or ''}".rstrip(),
                flush=True,
            )
            if signals.number is not None or code == EXIT_STOPPED:
                print("the same command goes on with the runs that are not finished", flush=True)
                return code if code > 0 else code_before_training(signals.number)
            has_failed |= code != 0
    return _EXIT_FAILED if has_failed else 0


def _train(run: AblationRun, signals: LauncherSignals, advance: Callable[[int], None]) -> int:
    """Train one run through the launcher, in a process of its own, and keep how it ended; returns its exit code."""
    console, began = run.folder / _CONSOLE, time.monotonic()
    with writing(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_durably(run.folder / CONFIG_FILE, [dump_config(run.config).encode()])
        seconds = _result(run).get("seconds", 0.0)
        _keep_result(run, "stopped", None, seconds)
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
        _keep_result(run, status, error, seconds + time.monotonic() - began)
    return code


def _watch(run: AblationRun, process: subprocess.Popen, advance: Callable[[int], None]) -> None:
    """Wait for the end of a run and report its progress."""
    code, most = None, _trained_tokens(run)
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_SECONDS)
        tokens = max(most, _trained_tokens(run))  # a resumed run cuts its rows back
        advance(tokens - most)
        most = tokens


def _trained_tokens(run: AblationRun) -> int:
    rows, _ = _rows(run, _TAIL_BYTES)
    return rows[-1]["tokens"] if rows else 0


def _rows(run: AblationRun, last_bytes: int | None = None) -> tuple[list[dict], list[dict]]:
    """Training rows and validation rows."""
    file = run.folder / ROWS_FILE
    return rows_by_kind(read_history(file, last_bytes)) if file.exists() else ([], [])


def _error(output: str, code: int) -> str:
    """The line of the output that says why a run failed."""
    lines = re.findall(r"(?m)^(?:error: |[\w.]+(?:Error|Exception): ).*", output)
    # The last line of the launcher only names the rank.
    causes = [line for line in lines if not line.startswith("error: rank ")] or lines
    return causes[0].removeprefix("error: ").strip() if causes else f"the launcher {describe_exit(code)}"


def _result(run: AblationRun) -> dict[str, Any]:
    """How the run ended in an earlier call or this one; empty if it was not started."""
    try:
        return json.loads((run.folder / _RESULT).read_bytes())
    except (OSError, ValueError):
        return {}


def _require_equal_processes(run: AblationRun) -> None:
    before = _result(run).get("processes", run.processes)
    if before != run.processes:
        raise UserError(
            f"command line: --nproc {run.processes}: {run.folder} was trained by {before} processes in a former call, "
            f"and speeds would not compare; give --nproc {before}, remove {run.folder}, or set another job.dump_folder"
        )


def _keep_result(run: AblationRun, status: str, error: str | None, seconds: float) -> None:
    content = {"status": status, "error": error, "seconds": round(seconds, 1), "processes": run.processes}
    replace_durably(run.folder / _RESULT, [json.dumps(content).encode()])


def _outcome(run: AblationRun) -> Outcome:
    result, (train, validation) = _result(run), _rows(run)
    return Outcome(
        run.variant, run.seed, str(run.folder), result.get("status", "missing"), result.get("error"),
        result.get("seconds", 0.0), train, validation,
    )  # fmt: skip


def _write_report(plan: AblationPlan, outcomes: Sequence[Outcome], about: dict[str, str], machine: Machine) -> None:
    """Write JSON, Markdown and the picture, and print the table."""
    processes = sorted({run.processes for run in plan.runs})
    date = time.strftime("%Y-%m-%d %H:%M")
    about |= {"date": date, "versions": describe_version()}
    about["machine"] = f"{machine.describe()}, processes of a run: {', '.join(map(str, processes))}"
    report = build_report(outcomes, plan.keys, about)
    picture = _draw(plan, outcomes)
    pages = {".json": json.dumps(report, indent=1), ".md": markdown(report, picture and picture.name)}
    for ending, text in pages.items():
        replace_durably(plan.folder / f"{_REPORT}{ending}", [text.encode()])
    print("\n".join(["", *table(report), ""]))
    print(f"{plan.folder / _REPORT}.md")
    print(f"{plan.folder / _REPORT}.json")
    print(picture or "no picture: matplotlib is not installed; pip install matplotlib, or glm46 with its extra [plot]")


def _draw(plan: AblationPlan, outcomes: Sequence[Outcome]) -> Path | None:
    """Draw the means over the seeds of each variant; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    baselines = {outcome.seed: outcome for outcome in outcomes if outcome.variant == next(iter(plan.keys))}
    lines = []
    for name in plan.keys:
        own = [outcome for outcome in outcomes if outcome.variant == name and outcome.train]
        # A variant that never finished is drawn as far as it went.
        own = [outcome for outcome in own if outcome.is_finished] or own
        train = mean_rows([gap_rows(outcome, baselines[outcome.seed]) for outcome in own])
        lines.append(Run(name, train, mean_rows([outcome.validation for outcome in own])))
    picture = plan.folder / f"{_REPORT}.png"
    draw([line for line in lines if line.train], picture, "tokens", _PANELS)
    return picture
