"""Options of ``python -m glm46 evaluate``, and the checks that need only these."""

import argparse
from contextlib import suppress
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.options import VerbParser, list_of, positive, verb_parser, whole
from glm46.engine.evaluation.task_names import TASKS, USUAL_TASKS
from glm46.operate.launch.model_options import add_model_options

RESULTS = "evaluation.json"
PICTURE = "evaluation.png"


def evaluate_parser() -> VerbParser:
    """Create the parser of the verb."""
    parser = verb_parser(
        "evaluate",
        description="Measures a model on held-out text: its loss, its loss by position in long documents, and whether "
        "it finds a sentence in long text.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--tasks",
        type=_tasks,
        default=USUAL_TASKS,
        metavar="NAMES",
        help=f"with commas: {','.join(TASKS)}, tasks of lm-eval such as gsm8k, and task files; default: "
        f"{','.join(USUAL_TASKS)}",
    )
    parser.add_argument(
        "--task-folder",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="of your own task files in lm-eval's format; again for more",
    )
    parser.add_argument(
        "--fewshot",
        type=whole(0),
        metavar="N",
        help="examples before a question of lm-eval; default: the task's own",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="most documents of a task of lm-eval; default: all")
    parser.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="ask the questions of lm-eval in GLM's chat format, with its examples as earlier turns",
    )
    parser.add_argument("--system-instruction", metavar="TEXT", help="before each prompt of lm-eval")
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="with --apply-chat-template: the model thinks first; its text after the thought is judged",
    )
    parser.add_argument(
        "--run-code", action="store_true", help="allow tasks that run what the model writes, such as humaneval"
    )
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a source that prepare has made; again for more; default: the sources of the checkpoint's config",
    )
    parser.add_argument(
        "--lengths",
        type=list_of(positive),
        metavar="N,N,…",
        help="tokens of a row; default: once, twice and four times the training.seq_len of the checkpoint",
    )
    parser.add_argument(
        "--depths",
        type=list_of(_share),
        default=(0.0, 0.25, 0.5, 0.75, 1.0),
        metavar="X,X,…",
        help="places of the needle, from 0, the begin of the text, to 1; default: 0,0.25,0.5,0.75,1",
    )
    parser.add_argument(
        "--samples",
        type=positive,
        default=32,
        metavar="N",
        help="most rows of each source (loss), documents (position), and rows of each length and depth (needle); "
        "default: 32",
    )
    parser.add_argument(
        "--draft-tokens",
        type=positive,
        metavar="N",
        help="tokens that the prediction layers draft at once (drafts); default: mtp.depths of the checkpoint, or one "
        "per layer",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"write {RESULTS} and {PICTURE}; a call with the same folder computes only what is missing",
    )
    return parser


def _tasks(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0.0 <= float(text) <= 1.0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected numbers between 0 and 1")


_OF_CHATS = ("apply_chat_template", "system_instruction", "thinking")
_OF_TASKS = ("task_folder", "fewshot", "limit", "run_code", *_OF_CHATS)
"""Options that only tasks of lm-eval have."""


def stated_sources(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of ``--data`` by name. Raises UserError if a folder is missing, two have the same name, or an
    option has no effect."""
    if arguments.thinking and not arguments.apply_chat_template:
        raise UserError("--thinking: belongs to --apply-chat-template; add it")
    if arguments.draft_tokens is not None and "drafts" not in arguments.tasks:
        raise UserError("--draft-tokens: belongs to the task drafts; add it to --tasks")
    if arguments.model and not arguments.data and not set(TASKS).isdisjoint(arguments.tasks):
        raise UserError("--data: required with --model, whose folder names no text; give a source made by prepare")
    if set(arguments.tasks) <= set(TASKS):
        for option in _OF_TASKS:
            if getattr(arguments, option) not in (None, [], False):
                option = option.replace("_", "-")
                raise UserError(f"--{option}: belongs to tasks of lm-eval; name some with --tasks")
    sources = {folder.absolute().name: folder for folder in arguments.data}
    if len(sources) < len(arguments.data):
        raise UserError(f"--data {' --data '.join(map(str, arguments.data))}: two folders of one name; rename one")
    return sources
