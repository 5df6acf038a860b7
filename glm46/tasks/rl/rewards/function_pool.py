"""Calls the functions of a run: rewards and environment. What may hang or crash runs in processes of its own."""

import importlib
import math
import numbers
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.config.rl import RLConfig
from glm46.config.rl_data import EnvironmentConfig
from glm46.storage.judge.equal_results import load_math_verify
from glm46.storage.judge.jail import describe_jail, jail_of_code, jail_of_programs, require_jail
from glm46.storage.prepare.workers import end_worker, start_worker
from glm46.tasks.rl.rewards.answer import (
    Answer,
    Reward,
    RewardRule,
    exact,
    exact_fault,
    maths,
    maths_fault,
    remote,
    repetition,
    well_formed,
)
from glm46.tasks.rl.rewards.choice import choice, choice_fault
from glm46.tasks.rl.rewards.code import code
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rewards.label_tests import code_label_faults

_HERE: dict[str, Reward] = {
    "exact": exact,
    "choice": choice,
    "format": well_formed,
    "repetition": repetition,
    "score": lambda answer, options: answer.score,
}
"""Rewards that cannot hang."""
_IN_PROCESSES: dict[str, Reward] = {"math": maths, "code": code, "remote": remote}
READ_LABELS: dict[str, Callable[[Sequence[Any]], list[str]]] = {
    "exact": lambda labels: [*map(exact_fault, labels)],
    "choice": lambda labels: [*map(choice_fault, labels)],
    "math": lambda labels: [*map(maths_fault, labels)],
    "code": code_label_faults,
}
"""Built-in rewards that need a label, each with a function that explains why it cannot use a label; empty if it can."""

_START_SECONDS = 120.0
"""Time limit for a process to import the user's functions."""


class Score(NamedTuple):
    """The score of an answer."""

    total: float | None
    """Weighted sum of the parts; None if a reward failed, so that the sample is dropped."""
    parts: dict[str, float]
    """Unweighted value of each reward by name; failed rewards are missing."""
    fault: str
    """First failure; empty if all rewards succeeded."""

    def plus(self, weight: float, value: float) -> "Score":
        """Add the reward of a reward model."""
        total = None if self.total is None else self.total + weight * value
        return self._replace(total=total, parts=self.parts | {"model": value})


Result = tuple[Any, str]
"""What a function returned, and why it failed; the reason is empty if it did not."""


class FunctionPool:
    """Calls functions on answers: the rewards or the environment of a run. Thread-safe.

    Args:
        rules: all functions; their names differ.
        processes: maximum number of concurrent calls of functions that may hang.
        key: config key for messages.

    Raises:
        UserError: a user's function cannot be loaded.
    """

    def __init__(self, rules: Sequence[RewardRule], processes: int = 4, key: str = "rl.rewards"):
        self._rules = tuple(rules)
        self._most = processes
        self.names = [rule.name for rule in rules]
        self._key = key
        self._idle: list[tuple[Connection, BaseProcess]] = []
        self._processes = set[BaseProcess]()
        """All processes that may be running."""
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._is_closed = False
        self._numbers = count(1)
        """Numbers of tasks."""
        if any(rule.name not in _HERE for rule in self._rules):
            self._idle.append(self._start())

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """Return the scores of the answers in order. An error, a value that is not a finite number, or no value within
        the time limit of its rule drops the answer."""
        rules = range(len(self._rules))
        results = iter(self._results([(rule, answer) for answer in answers for rule in rules]))
        return [self._score(list(islice(results, len(rules)))) for _ in answers]

    def results(self, name: str, answers: Sequence[Answer]) -> list[Result]:
        """Return the result of one function for each answer."""
        number = self.names.index(name)
        return self._results([(number, answer) for answer in answers])

    def reply(self, answer: Answer) -> tuple[str | None, str]:
        """Return the environment's reply to a turn, None to end the conversation, and the reason if there is no reply
        because the function raised, hung or returned no text. A turn without text after its thought, or with an open
        thought, ends the conversation, because calls in a thought are drafts."""
        if not answer.spoken:
            return None, ""
        (result,) = self.results(self.names[0], [answer])
        return result

    def close(self) -> None:
        """End all processes, including those of calls in other threads, and start no more."""
        with self._lock:
            self._is_closed = True
        for process in list(self._processes):
            self._end(process)
        self._idle.clear()

    def _end(self, process: BaseProcess) -> None:
        end_worker(process)
        self._processes.discard(process)

    def _score(self, results: Sequence[Result]) -> Score:
        parts = {}
        total = 0.0
        first_fault = ""
        for rule, (value, fault) in zip(self._rules, results, strict=True):
            if fault:
                first_fault = first_fault or f"{rule.name}: {fault}"
            else:
                parts[rule.name] = value
                total = total + rule.weight * value
        return Score(None if first_fault else total, parts, first_fault)

    def _start(self) -> tuple[Connection, BaseProcess]:
        """Start a process and wait until it has loaded the functions."""
        with self._lock:
            if self._is_closed:
                raise UserError(f"{self._key}: its processes were ended, because the run ends")
            connection, process = start_worker(_load, (self._rules,), _judge)
            self._processes.add(process)
        connection.send((0, (0, None)))
        if not connection.poll(_START_SECONDS):
            self._end(process)
            raise UserError(f"{self._key}: its functions were not imported within {_START_SECONDS:g} s")
        try:
            number, error, _ = connection.recv()
        except (EOFError, OSError):
            raise UserError(f"{self._key}: the process that imports its functions ended") from None
        if number is None:
            user_functions = ", ".join(name for name in self.names if ":" in name)
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{self._key}: a function cannot be loaded: {reason}; correct {user_functions}") from error
        return connection, process

    def _results(self, tasks: Sequence[tuple[int, Answer]]) -> list[Result]:
        """Return the result of each task: the index of a rule and an answer."""
        threads = ThreadPoolExecutor(self._most)
        calls = list[Future[Result] | None]()
        try:
            for rule, answer in tasks:
                calls.append(None if self._rules[rule].name in _HERE else threads.submit(self._call, rule, answer))
            return [
                _result(self._rules[rule], _HERE, answer) if call is None else call.result()
                for (rule, answer), call in zip(tasks, calls, strict=True)
            ]
        finally:
            threads.shutdown(cancel_futures=True)

    def _call(self, rule: int, answer: Answer) -> Result:
        """Call a function that may hang in a process."""
        while True:
            task_number = next(self._numbers)
            is_new = False
            is_sent = False
            try:
                connection, process = self._idle.pop()
            except IndexError:  # no check before `pop`: another thread may take the last one
                with self._starting:  # one at a time: each imports the user's modules
                    connection, process = self._start()
                is_new = True
            try:
                if process.exitcode is not None:  # the pipe of a killed process may take a task for a moment
                    raise EOFError
                connection.send((task_number, (rule, answer)))
                is_sent = True
                end = time.monotonic() + self._rules[rule].seconds
                while connection.poll(max(end - time.monotonic(), 0.0)):
                    result: tuple[Any, str]
                    number, result, _ = connection.recv()
                    if number == task_number:  # otherwise it belongs to an earlier task
                        self._idle.append((connection, process))
                        return result
            except Exception as error:
                self._end(process)
                if not isinstance(error, EOFError | OSError):
                    raise UserError(f"{self._key}: a label cannot be pickled: {error}; simplify it") from error
                if is_new or is_sent:  # otherwise it had ended before: try another process
                    return None, f"its process ended with code {process.exitcode}"
            else:
                self._end(process)
                return None, f"no value within {self._rules[rule].seconds:g} s"


def reward_pool(config: RLConfig) -> FunctionPool:
    """Return the functions of [[rl.rewards]], without the reward model."""
    tables = [rule for rule in config.rewards if rule != config.reward_model]
    for table in tables:
        if table.name == "code":
            require_jail(jail_of_code(), "sandbox of the reward code", table.options.get("sandbox"))
    return FunctionPool([RewardRule(rule.name, rule.weight, rule.timeout_seconds, rule.options) for rule in tables])


def sandbox_lines(config: RLConfig) -> list[str]:
    """Describe the sandboxes of features that run programs."""
    lines = []
    if any(table.name == "code" for table in config.rewards):
        lines.append(f"code: {describe_jail(jail_of_code(), keeps_modes=True)}")
    environment = config.environment
    if environment is not None and environment.kind != "function":
        keeps_modes = environment.sandbox == "required"
        lines.append(f"rl.environment: {describe_jail(jail_of_programs(), keeps_modes=keeps_modes)}")
    return lines


def environment_pool(table: EnvironmentConfig) -> FunctionPool:
    """Return the function of [rl.environment]. For a command the pool is empty, and its program must exist."""
    if table.kind != "function":
        require_jail(jail_of_programs(), "rl.environment.sandbox", table.sandbox)
        for key, command in (("command", table.command), ("score_command", table.score_command)):
            found_program(command, f"rl.environment.{key}")
        return FunctionPool([], key="rl.environment")
    assert table.function is not None, "of kind = function"
    rule = RewardRule(table.function, seconds=table.timeout_seconds, options=table.options, is_environment=True)
    return FunctionPool([rule], key="rl.environment")


_LOADED: list[Callable[[Answer], Result]] = []
"""Functions by the index of their rule; only filled in a process of a pool."""


def _load(rules: Sequence[RewardRule]) -> None:
    if any(rule.name == "math" for rule in rules):
        load_math_verify()  # before the first answer, whose time limit it would use up
    _LOADED.extend(partial(_result, rule, {rule.name: _find(rule)}) for rule in rules)


def _find(rule: RewardRule) -> Reward:
    if ":" not in rule.name:
        built_in = (_HERE | _IN_PROCESSES)[rule.name]
        return lambda answer, options: built_in(answer, {**options, "timeout_seconds": rule.seconds})
    module, _, function = rule.name.partition(":")
    user_function = getattr(importlib.import_module(module), function)
    return lambda answer, options: user_function(answer, **options)


def _judge(rule: int, answer: Answer | None) -> Result:
    return (0.0, "") if answer is None else _LOADED[rule](answer)  # None asks whether the functions are loaded


def _result(rule: RewardRule, rewards: dict[str, Reward], answer: Answer) -> Result:
    """Call a function. Verifiers may raise a BaseException that is not an Exception, such as the timeout of
    math-verify."""
    try:
        value: Any = rewards[rule.name](answer, rule.options)
        if rule.is_environment and (value is None or isinstance(value, str)):
            return value and value.encode("utf-8", "replace").decode(), ""
        if hasattr(value, "item") and not rule.is_environment:  # scalar of NumPy or torch
            value = value.item()
        if not rule.is_environment and isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value), ""
        fault = f"gave {value!r:.60}, which is not a {'text' if rule.is_environment else 'finite number'}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"
    return None, fault.encode("utf-8", "replace").decode()  # records and logs cannot hold lone surrogates
