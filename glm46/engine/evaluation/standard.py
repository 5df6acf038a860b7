"""Standard tasks of lm-eval, and tasks of the user in the same format, on our models. Needs lm-eval, which is optional:
the extra [eval]."""

import logging
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from datasets.exceptions import DatasetsError
from lm_eval import evaluate
from lm_eval.api import task as lm_eval_task
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.manager import TaskDict
from yaml import YAMLError

from glm46.config.errors import UserError
from glm46.config.faults import nearest
from glm46.engine.evaluation.answers import Answers
from glm46.engine.evaluation.lm_eval_model import LmEvalModel
from glm46.engine.evaluation.task_names import TASKS
from glm46.storage.data.tokenizer import Tokenizer

_SUFFIXES = (".yaml", ".yml")


_FEWSHOT_SEED = 1234
"""Seed of the examples before a question, the same as in lm-eval, so that results are comparable."""


class PromptForm(NamedTuple):
    """Options for the prompts of lm-eval's tasks, with the names that lm-eval uses."""

    apply_chat_template: bool = False
    """True to format a question as the message of a user in the chat format, and examples as earlier turns."""
    system_instruction: str | None = None
    """Text before each prompt; in a chat, a system message."""
    thinking: bool = False
    """True if the model may think before it answers in a chat."""

    def lm_eval_options(self) -> dict[str, Any]:
        """Return the options of lm-eval's functions. Thinking is not among them: `LmEvalModel` has it."""
        return {
            "apply_chat_template": self.apply_chat_template,
            "fewshot_as_multiturn": self.apply_chat_template,
            "system_instruction": self.system_instruction,
        }


@dataclass(frozen=True)
class StandardTasks:
    """Tasks that are ready to run, with their data loaded."""

    loaded: TaskDict
    """Tasks and groups by name, as lm-eval returns them."""
    limit: int | None
    """Maximum number of documents of a task."""
    form: PromptForm

    def run(self, answers: Answers, tokenizer: Tokenizer, positions: int) -> dict[str, Any]:
        """Return the results: ``figures``, a row for each metric of each task, and ``columns``.

        Args:
            positions: maximum number of tokens that the model can read.

        Raises:
            UserError: see `LmEvalModel`.
        """
        model = LmEvalModel(answers, tokenizer, positions, thinking=self.form.thinking)
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        state = random.getstate()
        random.seed(0)  # like the command of lm-eval
        try:
            results = evaluate(
                model,
                self.loaded,
                limit=self.limit,
                log_samples=False,
                confirm_run_unsafe_code=True,  # `find_tasks` has refused it without --run-code
                **self.form.lm_eval_options(),
            )
        finally:
            random.setstate(state)
        figures = _figures(results)
        return {"figures": figures, "columns": {_column(figure): figure["value"] for figure in figures}}


def find_tasks(
    names: Sequence[str],
    folders: Sequence[Path],
    *,
    fewshot: int | None,
    limit: int | None,
    run_code: bool = False,
    form: PromptForm = PromptForm(),  # noqa: B008 - frozen
) -> StandardTasks:
    """Find tasks by name or file, and load their data.

    Args:
        folders: folders with task files of the user.
        fewshot: number of examples before a question; None for the number in each task.
        limit: maximum number of documents of a task.
        run_code: accept tasks that execute code that the model writes.

    Raises:
        UserError: a file or folder is missing, a name is not known, or a task cannot be loaded.
    """
    faults = [f"--tasks {name}: no such file" for name in names if _looks_like_path(name) and not Path(name).is_file()]
    faults += [f"--task-folder {folder}: no such folder" for folder in folders if not folder.is_dir()]
    if faults:
        raise UserError(*(f"{fault}; correct the path" for fault in faults))
    manager = _manager_that_knows(names, folders)
    for name in names:
        path = name if _looks_like_path(name) else manager.task_index[name].yaml_path
        if path is not None:  # None for a tag, which stands for several tasks
            with _faults_of_tasks(name):
                _check_content(Path(path), is_group=not _looks_like_path(name))
    with _faults_of_tasks(",".join(names)):
        loaded = manager.load([*names])
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not run_code:
            raise UserError(
                f"--tasks {name}: runs code that the model writes, on this machine; allow it with --run-code"
            )
        if form.thinking and task.OUTPUT_TYPE != "generate_until":
            raise UserError(
                f"--tasks {name}: compares given texts, before which the model cannot think; leave --thinking out"
            )
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"--tasks {name}: has images; the model reads text only; take another task")
        task_fewshot = task.get_config("num_fewshot")
        refuses_examples = task_fewshot == 0  # 0 in a task's file means never
        if task_fewshot is None or (fewshot is not None and not refuses_examples):
            task.set_config(key="num_fewshot", value=fewshot or 0)
        with _faults_of_tasks(name):
            _score_empty_answers(task, form)
    return StandardTasks(loaded, limit, form)


@contextmanager
def _faults_of_tasks(names: str) -> Iterator[None]:
    """Turn errors of lm-eval, and of the code and templates of tasks, into a UserError. A task's code may even exit."""
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        NameError,
        OSError,
        RuntimeError,
        SyntaxError,
        SystemExit,
        TypeError,
        ValueError,
        re.error,
        jinja2.TemplateError,
        DatasetsError,
        YAMLError,
    ) as error:
        message = re.sub(r"\s+", " ", str(error)).strip()[:300] or "a key that its output_type needs is missing"
        kind = f"{type(error).__name__}: {message}"
        if isinstance(error, KeyError) and error.args == (None,):  # lm-eval looks up the aggregation of an own metric
            kind = "a metric of metric_list has no aggregation: state one, such as aggregation: mean"
        raise UserError(f"--tasks {names}: cannot be loaded: {kind}; correct the task, or its data") from error


def _check_content(path: Path, *, is_group: bool) -> None:
    """Check that a file holds a task, without running code that it names. Raises errors of any kind.

    Args:
        is_group: True to accept a group of tasks.
    """
    content = load_yaml(path, resolve_func=False)
    if "group" in content or isinstance(content.get("task"), list):
        if not is_group:
            raise UserError(f"--tasks {path}: holds a group of tasks; give its folder with --task-folder, and its name")
        return
    if "class" in content:  # a task in Python may have any keys
        return
    metrics = content.get("metric_list", [])
    unknown = sorted(map(str, content.keys() - TaskConfig.__dataclass_fields__.keys()))
    for fault, has_fault in (
        (
            "has no key task with the name of the task; is it a task file of lm-eval?",
            not isinstance(content.get("task"), str),
        ),
        (f"key {', '.join(unknown[:3])}: unknown to lm-eval; remove or correct it", bool(unknown)),
        (
            "has no dataset_path with the data's path or its id on the hub; state one, such as dataset_path: json",
            not isinstance(content.get("dataset_path"), str) and "custom_dataset" not in content,
        ),
        (
            "metric_list: is no list of tables with metric; write each as metric: acc",
            not isinstance(metrics, list) or any(not isinstance(row, dict) or "metric" not in row for row in metrics),
        ),
    ):
        if has_fault:
            raise UserError(f"--tasks {path}: {fault}")


def _score_empty_answers(task: lm_eval_task.Task, form: PromptForm) -> None:
    """Check the metrics of a task: build the requests of a document and score empty answers to them. Raises errors of
    any kind."""
    metrics = task.aggregation()
    if not metrics:
        raise ValueError("metric_list is empty")
    for name, aggregation in metrics.items():
        if aggregation is None:
            raise ValueError(f"metric {name}: unknown aggregation; state one, such as aggregation: mean")
        functions = getattr(task, "_metric_fn_list", {})  # a task in Python has none
        has_no_function = name in functions and functions[name] is None
        if has_no_function and task.get_config("process_results") is None:
            raise ValueError(f"metric {name}: unknown; take one of lm-eval, or give process_results")
    options = form.lm_eval_options()
    task.build_all_requests(limit=1, chat_template=lambda messages, **_: str(messages), **options)
    for instance in task.instances:
        empty = {"generate_until": "", "loglikelihood_rolling": 0.0}.get(instance.request_type, (0.0, False))
        instance.resps += [empty] * instance.repeats
    task.apply_filters()
    for filter_name in task.instances[0].filtered_resps:
        values = task.process_results(
            task.instances[0].doc, [instance.filtered_resps[filter_name] for instance in task.instances]
        )
        for name in values.keys() & metrics:
            metrics[name]([values[name]])


def _manager_that_knows(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """Return the task manager, without the tasks of lm-eval unless one is requested. Raises UserError, see
    `find_tasks`."""
    # Disable lm-eval's bars: this package shows its own.
    lm_eval_task.tqdm = partial(lm_eval_task.tqdm, disable=True)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # requests that it would warn about are refused
    paths = [str(folder) for folder in folders]
    manager = TaskManager(include_path=paths, include_defaults=False)
    requested = [name for name in names if not _looks_like_path(name)]
    if not set(requested) <= set(manager.all_tasks):
        print(f"looking for {', '.join(requested)} among the tasks of lm-eval", file=sys.stderr, flush=True)
        manager = TaskManager(include_path=paths)  # reads more than 10,000 files
    available = [*TASKS, *manager.all_tasks]
    unknown = [(name, nearest(name, available, 0.5)) for name in requested if name not in manager.all_tasks]
    if unknown:
        raise UserError(
            *(
                f"--tasks {name}: unknown task; "
                + (f"did you mean {near}?" if near else "`lm-eval ls tasks` lists those of lm-eval")
                for name, near in unknown
            )
        )
    return manager


def _figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each metric of each task and group."""
    figures = []
    for task_name, metrics in (results["results"] | results.get("groups", {})).items():
        documents = results["n-samples"].get(task_name, {}).get("effective")
        examples = results["n-shot"].get(task_name)
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{metric}_stderr,{filter_name}")
            figures.append(
                {
                    "task": task_name,
                    "metric": metric,
                    "filter": filter_name,
                    "examples": examples,
                    "documents": documents,
                    "value": value,
                    "standard_error": error if isinstance(error, (int, float)) else None,
                }
            )
    return figures


def _column(figure: dict[str, Any]) -> str:
    names = [figure["task"], figure["metric"]]
    # Several filters of a task can have the same metric.
    if figure["filter"] != "none":
        names.append(figure["filter"])
    return "/".join(names)


def _looks_like_path(name: str) -> bool:
    return name.endswith(_SUFFIXES) or "/" in name
