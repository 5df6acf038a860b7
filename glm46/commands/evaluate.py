"""``python -m glm46 evaluate``: loss, loss by position and needle in a haystack of a checkpoint or a folder."""

from collections.abc import Sequence

from glm46.compute.distributed.environment import launched_world_size
from glm46.engine.evaluation.task_names import TASKS
from glm46.operate.launch.ranks import start_ranks
from glm46.operate.models.evaluate_options import evaluate_parser, stated_sources
from glm46.storage.huggingface.hub import fetch_options, with_folders

_TASKS_SECONDS = 3600
"""Longest time for rank 0 to read the tasks of lm-eval and their data, while the other ranks wait."""


def evaluate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is out of range, a folder cannot be used, or the text has no rows of these lengths.
    """
    arguments = evaluate_parser().parse_args(list(argv))
    sources = stated_sources(arguments)
    if launched_world_size() is None:
        from glm46.operate.models.evaluate_options import check_evaluation

        check_evaluation(arguments, sources)
    folders = fetch_options(arguments, "model", "adapter", "tokenizer")
    code = start_ranks("evaluate", with_folders(argv, folders), arguments)
    if code is not None:
        return code
    from glm46.operate.models.evaluate_ranks import evaluate
    from glm46.operate.models.loaded_model import joined

    is_standard = not set(arguments.tasks) <= set(TASKS)
    with joined(_TASKS_SECONDS) if is_standard else joined():
        evaluate(arguments, sources)
    return 0
