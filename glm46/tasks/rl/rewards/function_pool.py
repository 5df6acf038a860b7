"""The functions of a run: rewards, environment, filter. What may hang or crash runs in processes that can be killed."""

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
from glm46.storage.prepare.equal_results import load_math_verify
from glm46.storage.prepare.jail import describe_jail, jail_of_code, jail_of_programs, require_jail
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
)  # fmt: skip
from glm46.tasks.rl.rewards.choice import choice, choice_fault
from glm46.tasks.rl.rewards.code import code
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rewards.label_tests import code_label_faults

_HERE: dict[str, Reward] = {
    "exact": exact, "choice": choice, "format": well_formed, "repetition": repetition,
    "score": lambda answer, options: answer.score,
}  # fmt: skip
"""Rewards that cannot hang."""
_IN_PROCESSES: dict[str, Reward] = {"math": maths, "code": code, "remote": remote}
READ_LABELS: dict[str, Callable[[Sequence[Any]], list[str]]] = {
    "exact": lambda labels: [*map(exact_fault, labels)], "choice": lambda labels: [*map(choice_fault, labels)],
    "math": lambda labels: [*map(maths_fault, labels)], "code": code_label_faults,
}  # fmt: skip
"""Built-in rewards that are nothing without a label, each with what finds why it cannot judge one; empty if it can."""

_START_SECONDS = 120.0
"""For a process to import what a reward of the user's imports."""


class Score(NamedTuple):
    """The judgement of an answer."""

    total: float | None
    """Weighted sum of the parts; None if a reward failed: the sample is to be dropped."""
    parts: dict[str, float]
    """By the name of each reward, before its weight; without those that failed."""
    fault: str
    """The first failure; empty if none."""

    def plus(self, weight: float, value: float) -> "Score":
        """The same with the reward of a network."""
        total = None if self.total is None else self.total + weight * value
        return self._replace(total=total, parts=self.parts | {"model": value})


class Reply(NamedTuple):
    """The reply of an environment to a turn."""

    text: str | None
    """None: the conversation has ended."""


class FunctionPool:
    """Calls functions on answers: the rewards, the environment or the filter of a run. Several threads may.

    Args:
        rules: all functions; their names differ.
        processes: at most this many calls run at once of functions that may hang.
        key: of the configuration, for messages.

    Raises:
        UserError: a function of the user's cannot be loaded.
    """

    def __init__(self, rules: Sequence[RewardRule], processes: int = 4, key: str = "rl.rewards"):
        self._rules, self._most = tuple(rules), processes
        self.names = [rule.name for rule in rules]
        self._key = key
        self._idle: list[tuple[Connection, BaseProcess]] = []
        self._processes = set[BaseProcess]()
        """All that may run."""
        self._lock, self._starting, self._is_closed = threading.Lock(), threading.Lock(), False
        self._numbers = count(1)
        """Of the tasks that are handed out."""
        if any(rule.name not in _HERE for rule in self._rules):
            self._idle.append(self._start())

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """The scores of the answers in their order. An error, a value that is not a finite number, or no value
        within the time of its rule drops the answer."""
        rules = range(len(self._rules))
        values = iter(self._values([(rule, answer) for answer in answers for rule in rules]))
        return [self._score(list(islice(values, len(rules)))) for _ in answers]

    def values(self, name: str, answers: Sequence[Any]) -> list[Any]:
        """The result of one function for each answer, or a text that says why it has none. A reward gets an `Answer`,
        the function of rl.filter a list of `Scored`; both give a number."""
        number = self.names.index(name)
        return self._values([(number, answer) for answer in answers])

    def replies(self, answers: Sequence[Answer]) -> list[Reply | str]:
        """Replies of the environment to each turn, or as a text the reason for none: it raised, hung or returned no
        text. A turn that says nothing after its thought, or never closed it, ends the conversation: calls in a thought
        are drafts."""
        replies = iter(self.values(self.names[0], [answer for answer in answers if answer.spoken]))
        return [next(replies) if answer.spoken else Reply(None) for answer in answers]

    def close(self) -> None:
        """End the processes, also those of calls in other threads, which start none any more."""
        with self._lock:
            self._is_closed = True
        for process in list(self._processes):
            self._end(process)
        self._idle.clear()

    def _end(self, process: BaseProcess) -> None:
        end_worker(process)
        self._processes.discard(process)

    def _score(self, values: Sequence[object]) -> Score:
        parts, total, fault = {}, 0.0, ""
        for rule, value in zip(self._rules, values, strict=True):
            if isinstance(value, float):
                parts[rule.name], total = value, total + rule.weight * value
            else:
                fault = fault or f"{rule.name}: {value}"
        return Score(None if fault else total, parts, fault)

    def _start(self) -> tuple[Connection, BaseProcess]:
        """Start a process, and wait until it has loaded the functions."""
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
            own = ", ".join(name for name in self.names if ":" in name)
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{self._key}: a function cannot be loaded: {reason}; correct {own}") from error
        return connection, process

    def _values(self, tasks: Sequence[tuple[int, Any]]) -> list[Any]:
        """The value of each task, which is the number of a rule and an answer, or why there is none."""
        threads, calls = ThreadPoolExecutor(self._most), list[Future[Any] | None]()
        try:
            for rule, answer in tasks:
                calls.append(None if self._rules[rule].name in _HERE else threads.submit(self._call, rule, answer))
            return [
                _value(self._rules[rule], _HERE, answer) if call is None else call.result()
                for (rule, answer), call in zip(tasks, calls, strict=True)
            ]
        finally:
            threads.shutdown(cancel_futures=True)

    def _call(self, rule: int, answer: Any) -> Any:
        """The value of a function that may hang, by a process, or why there is none."""
        while True:
            asked, is_new, is_sent = next(self._numbers), False, False
            try:
                connection, process = self._idle.pop()
            except IndexError:  # asked for: another thread may have taken the last one
                with self._starting:  # one after another: each imports what the user's module does
                    connection, process = self._start()
                is_new = True
            try:
                if process.exitcode is not None:  # the pipe of a killed process may take a task for a moment
                    raise EOFError
                connection.send((asked, (rule, answer)))
                is_sent, end = True, time.monotonic() + self._rules[rule].seconds
                while connection.poll(max(end - time.monotonic(), 0.0)):
                    number, value, _ = connection.recv()
                    if number == asked:  # else of a task before
                        self._idle.append((connection, process))
                        return value
            except Exception as error:
                self._end(process)
                if not isinstance(error, EOFError | OSError):
                    raise UserError(f"{self._key}: a label cannot be pickled: {error}; simplify it") from error
                if is_new or is_sent:  # else it has ended before
                    return f"its process ended with code {process.exitcode}"
            else:
                self._end(process)
                return f"no value within {self._rules[rule].seconds:g} s"


def reward_pool(config: RLConfig) -> FunctionPool:
    """The functions of [[rl.rewards]], without the reward of a network."""
    tables = [one for one in config.rewards if one != config.reward_model]
    for table in tables:
        if table.name == "code":
            require_jail(jail_of_code(), "sandbox of the reward code", table.options.get("sandbox"))
    return FunctionPool([RewardRule(one.name, one.weight, one.timeout_seconds, one.options) for one in tables])


def sandbox_lines(config: RLConfig) -> list[str]:
    """The sandboxes of what runs programs."""
    table = config.environment
    lines = [f"code: {describe_jail(jail_of_code())}"] if any(one.name == "code" for one in config.rewards) else []
    if table is not None and table.kind != "function":
        lines.append(f"rl.environment: {describe_jail(jail_of_programs())}")
    return lines


def environment_pool(table: EnvironmentConfig) -> FunctionPool:
    """The function of [rl.environment]; none of a command, whose program is looked for."""
    if table.kind != "function":
        require_jail(jail_of_programs(), "rl.environment.sandbox", table.sandbox)
        for key, command in (("command", table.command), ("score_command", table.score_command)):
            found_program(command, f"rl.environment.{key}")
        return FunctionPool([], key="rl.environment")
    assert table.function is not None, "of kind = function"
    rule = RewardRule(table.function, seconds=table.timeout_seconds, options=table.options, is_environment=True)
    return FunctionPool([rule], key="rl.environment")


def filter_pool(name: str) -> FunctionPool:
    """The function of rl.filter."""
    return FunctionPool([RewardRule(name)], key="rl.filter")


_LOADED: list[Callable[[Answer], Any]] = []
"""In a process of a pool: the rewards by the number of their rule."""


def _load(rules: Sequence[RewardRule]) -> None:
    if any(rule.name == "math" for rule in rules):
        load_math_verify()  # not in the time of the first answer
    _LOADED.extend(partial(_value, rule, {rule.name: _find(rule)}) for rule in rules)


def _find(rule: RewardRule) -> Reward:
    if ":" not in rule.name:
        built_in = (_HERE | _IN_PROCESSES)[rule.name]
        return lambda answer, options: built_in(answer, {**options, "timeout_seconds": rule.seconds})
    module, _, function = rule.name.partition(":")
    of_user = getattr(importlib.import_module(module), function)
    return lambda answer, options: of_user(answer, **options)


def _judge(rule: int, answer: Answer | None) -> Any:
    return 0.0 if answer is None else _LOADED[rule](answer)  # None asks whether the functions are loaded


def _value(rule: RewardRule, rewards: dict[str, Reward], answer: Answer) -> float | Reply | str:
    """The value of a reward, or why there is none. Verifiers may raise a BaseException that is not an
    Exception, as the timeout of math-verify is."""
    try:
        value: Any = rewards[rule.name](answer, rule.options)
        if rule.is_environment and (value is None or isinstance(value, str)):
            return Reply(value and value.encode("utf-8", "replace").decode())
        if hasattr(value, "item") and not rule.is_environment:  # of NumPy or torch
            value = value.item()
        if not rule.is_environment and isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
        fault = f"gave {value!r:.60}, which is not a {'text' if rule.is_environment else 'finite number'}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"
    return fault.encode("utf-8", "replace").decode()  # no record or log can hold a lone surrogate
