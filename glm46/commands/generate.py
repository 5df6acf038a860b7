"""``python -m glm46 generate``: generate text with a checkpoint or a Hugging Face folder."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import VerbParser, integer, number, positive, verb_parser, whole
from glm46.operate.launch.model_options import add_model_options

_NEW_TOKENS = 128
_NEW_TOKENS_OF_AN_ANSWER = 1024
"""Defaults of ``--max-new-tokens``: with prompts, and in a chat."""


def generate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is out of range or has no effect, or a folder cannot be used.
    """
    arguments = _parser().parse_args(list(argv))
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = _NEW_TOKENS if arguments.prompt else _NEW_TOKENS_OF_AN_ANSWER
    from glm46.operate.models.generate_start import start_generation  # numpy and jinja2: --help needs neither

    code = start_generation(argv, arguments)
    if code is not None:
        return code
    from glm46.operate.models.generate_ranks import generate  # torch: refusals come before it

    generate(arguments)
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
        "--keep-thoughts",
        action="store_true",
        help="past thoughts stay (clear_thinking = false, from GLM-4.7 on), with --chat without --prompt",
    )
    parser.add_argument(
        "--reasoning-effort", choices=("high", "max"), help="effort that the prompt of GLM-5.2 states, with --thinking"
    )
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
    parser.add_argument("--temperature", type=number, default=0.0, help="0, the default, takes the most likely token")
    parser.add_argument("--top-k", type=integer, help="sample among this many most likely tokens")
    parser.add_argument(
        "--top-p", type=number, default=1.0, help="sample among the most likely tokens up to this probability"
    )
    parser.add_argument(
        "--min-p", type=number, default=0.0, help="leave out tokens below this part of the highest probability"
    )
    parser.add_argument("--seed", type=whole(-(2**63), 2**64 - 1), default=0, help="of the sampling")
    parser.add_argument("--speculative", action="store_true", help="draft with the multi-token prediction layers")
    parser.add_argument(
        "--draft-tokens",
        type=positive,
        metavar="N",
        help="tokens that they draft at once, with --speculative; default: one per layer",
    )
    return parser
