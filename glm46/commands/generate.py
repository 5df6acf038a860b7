"""``python -m glm46 generate``: generate text with a checkpoint or a Hugging Face folder."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from glm46.compute.distributed.environment import launched_world_size
from glm46.config.errors import UserError
from glm46.config.options import VerbParser, integer, verb_parser, whole
from glm46.operate.launch.ranks import processes, start_ranks
from glm46.operate.models.model_fit import add_model_options
from glm46.storage.huggingface.hub import fetch_options, with_folders

_NEW_TOKENS, _NEW_TOKENS_OF_AN_ANSWER = 128, 1024
"""Defaults of ``--max-new-tokens``: with prompts, and in a chat."""


def generate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is out of range or has no effect, or a folder cannot be used.
    """
    arguments = _parser().parse_args(list(argv))
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = _NEW_TOKENS if arguments.prompt else _NEW_TOKENS_OF_AN_ANSWER
    raise_for_options(arguments)
    if arguments.tools is None:
        arguments.tools = ()
    else:
        from glm46.operate.models.generate_prompts import read_tools

        arguments.tools = read_tools(arguments.tools)
    is_chat = not arguments.prompt
    if is_chat and (count := processes(arguments)) > 1:
        raise UserError(
            f"--chat without --prompt: talks in one process, not in {count}; unset NGPU, leave out --nproc, or serve "
            "the model (docs/deployment.md)"
        )
    if launched_world_size() is None:
        from glm46.operate.models.generate_prompts import check_generation

        check_generation(arguments)
    folders = fetch_options(arguments, "model", "adapter", "tokenizer")
    if (code := start_ranks("generate", with_folders(argv, folders), arguments)) is not None:
        return code
    from glm46.operate.models.generate_ranks import chat, generate
    from glm46.operate.models.loaded_model import joined

    with joined():
        (chat if is_chat else generate)(arguments)
    return 0


def _parser() -> VerbParser:
    parser = verb_parser("generate")
    add_model_options(parser)
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; again for a batch")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message in GLM's template; without --prompt, a chat in the terminal",
    )
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--thinking", action="store_true", help="let the model think before it answers, with --chat")
    parser.add_argument(
        "--keep-thoughts", action="store_true",
        help="past thoughts stay (clear_thinking = false of GLM-4.7), with --chat without --prompt",
    )  # fmt: skip
    parser.add_argument("--tools", type=Path, metavar="FILE", help="JSON list of functions it may call, with --chat")
    parser.add_argument(
        "--max-new-tokens",
        type=integer,
        metavar="N",
        help=f"default: {_NEW_TOKENS}, in a chat {_NEW_TOKENS_OF_AN_ANSWER} of each answer",
    )
    parser.add_argument(
        "--stop-token", action="append", default=[], metavar="TEXT", help="end at this token too; again for more"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the most likely token")
    parser.add_argument("--top-k", type=integer, help="sample among this many most likely tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample among the most likely tokens up to this probability"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="leave out tokens below this part of the highest probability"
    )
    parser.add_argument("--seed", type=whole(-(2**63), 2**64 - 1), default=0, help="of the sampling")
    parser.add_argument("--speculative", action="store_true", help="draft with the multi-token prediction layers")
    return parser


def raise_for_options(arguments: argparse.Namespace) -> None:
    """Raise one UserError for all options that are out of range or have no effect."""
    faults = []
    if arguments.max_new_tokens < 1:
        faults.append(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    if not 0.0 <= arguments.temperature < math.inf:
        faults.append(f"--temperature {arguments.temperature}: must be a number that is not negative")
    if arguments.top_k is not None and arguments.top_k < 1:
        faults.append(f"--top-k {arguments.top_k}: must be at least 1")
    if not 0.0 < arguments.top_p <= 1.0:
        faults.append(f"--top-p {arguments.top_p}: must be above 0 and at most 1")
    if not 0.0 <= arguments.min_p <= 1.0:
        faults.append(f"--min-p {arguments.min_p}: must be between 0 and 1")
    filters = arguments.top_k is not None or arguments.top_p < 1.0 or arguments.min_p > 0.0
    if arguments.temperature == 0.0 and filters:
        faults.append("--top-k, --top-p and --min-p choose what is sampled from; set a --temperature above 0")
    texts = {"--system": [arguments.system or ""], "--prompt": arguments.prompt, "--stop-token": arguments.stop_token}
    for option, given in texts.items():
        faults += [
            f"{option} {text!r}: contains bytes that are not UTF-8; convert the text, or set LC_ALL=C.UTF-8"
            for text in given
            # Python decodes such bytes of the command line to surrogates.
            if any("\ud800" <= letter <= "\udfff" for letter in text)
        ]
    if not arguments.chat and (arguments.system is not None or arguments.thinking or arguments.tools is not None):
        faults.append("--system, --thinking and --tools belong to --chat; add it")
    if arguments.keep_thoughts and (arguments.prompt or not arguments.chat):
        faults.append("--keep-thoughts: belongs to --chat without --prompt, where there are past thoughts")
    if not arguments.chat and not arguments.prompt:
        faults.append("--prompt: give a text to continue, or --chat for a chat in the terminal")
    if faults:
        raise UserError(*faults)
