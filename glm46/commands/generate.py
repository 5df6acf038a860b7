"""``python -m glm46 generate``: generate text with a checkpoint or a Hugging Face folder."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from glm46.commands.chat_ranks import first_of_ranks
from glm46.commands.model_options import add_model_options, load_model
from glm46.commands.options import VerbParser, verb_parser
from glm46.commands.ranks import joined, on_all_ranks, processes, start_ranks
from glm46.commands.terminal_chat import TerminalChat, read_tools
from glm46.config.errors import UserError
from glm46.data.chat import chat_prompt
from glm46.data.chat_template import raise_for_template
from glm46.data.conversation import Message
from glm46.data.tokenizer import Tokenizer
from glm46.distributed.environment import launched_rank, launched_world_size
from glm46.huggingface.hub import fetch_options, with_folders
from glm46.huggingface.tokenizer_files import stop_ids
from glm46.inference.display import Display
from glm46.inference.generation import Continuation, Generation, decoder_for
from glm46.inference.loading import Loaded
from glm46.inference.sampling import Sampling
from glm46.planner.curriculum import describe_attention

_LOWEST_SEED, _HIGHEST_SEED = -(2**63), 2**64 - 1
"""64 bits, signed or not."""
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
    arguments.tools = read_tools(arguments.tools) if arguments.tools is not None else ()
    is_chat = not arguments.prompt
    if is_chat:
        _raise_for_chat_ranks(arguments)
    folders = fetch_options(arguments, "model", "adapter", "tokenizer")
    argv = with_folders(argv, folders)
    if is_chat:
        others = launched_world_size() is None and processes(arguments) > 1
        with first_of_ranks("generate", argv, processes(arguments)) if others else nullcontext() as send, joined():
            _chat(arguments, send)
        return 0
    code = start_ranks("generate", argv, arguments)
    if code is not None:
        return code
    with joined():
        _generate(arguments)
    return 0


def _generate(arguments: argparse.Namespace) -> None:
    """Generate on this rank. Collective."""
    (model, tokenizer, mesh), prompts, stop = on_all_ranks(lambda: _read(arguments))
    window, scaling = describe_attention(model.shape)
    if (window, scaling) != ("none", "none") and mesh.rank == 0:
        print(f"attention as in training: window {window}, RoPE scaling {scaling}", file=sys.stderr)
    rows = [Continuation(prompt, arguments.max_new_tokens, arguments.seed) for prompt in prompts]
    share = -(-len(rows) // mesh.layout.dp_degree)  # of the ranks that share rows; the first have some
    mine = rows[mesh.row_group * share :][:share]
    generation = Generation(
        decoder_for(model, mine, drafts=arguments.speculative, mesh=mesh),
        mine,
        sampling=_sampling(arguments),
        stop=stop,
        vocab_size=tokenizer.vocab_size,
    )
    if mesh.rank == 0:
        Display(generation, mine, tokenizer, stop=stop, total=len(rows), gather=mesh.gather_rows).run()
    else:
        generation.run()
        mesh.gather_rows([one.text(stop) for one in mine])


def _raise_for_chat_ranks(arguments: argparse.Namespace) -> None:
    """Raise UserError if a chat cannot run in the processes that are asked for."""
    count, start = processes(arguments), "--chat without --prompt"
    stage = max(arguments.tensor_parallel_degree, arguments.expert_parallel_degree)
    needed = stage * arguments.pipeline_parallel_degree
    if launched_world_size() is not None and launched_rank() == 0:
        raise UserError(f"{start}: starts its processes itself, beside the terminal; use NGPU={count}, not a launcher")
    if count != needed:
        raise UserError(
            f"{start}: {count} processes, but by the degrees {needed} hold a model, and a chat has one answer at a "
            f"time; set NGPU={needed}, or --tensor-parallel-degree {count}"
        )
    if count > 1 and arguments.device is not None:
        raise UserError(f"--device {arguments.device}: {count} processes take one GPU each, or the CPU; remove it")


def _chat(arguments: argparse.Namespace, send: Callable[[list[int]], None] | None) -> None:
    """Talk in the terminal on rank 0, whose prompts the others get on standard input. Collective."""
    (model, tokenizer, mesh), _, stop = on_all_ranks(lambda: _read(arguments))

    def generation(prompt: list[int], is_stopped: Callable[[], bool] = lambda: False):
        one = Continuation(prompt, arguments.max_new_tokens, arguments.seed)
        mine = [one] if mesh.row_group == 0 else []  # other ranks run their experts
        return one, Generation(
            decoder_for(model, mine, drafts=arguments.speculative, mesh=mesh),
            mine,
            sampling=_sampling(arguments),
            stop=stop,
            vocab_size=tokenizer.vocab_size,
            is_stopped=is_stopped,
        )

    def answer(prompt: list[int], is_stopped: Callable[[], bool]) -> tuple[Continuation, Generation]:
        raise_for_length([prompt], arguments.max_new_tokens, model.shape.max_position_embeddings)
        if send is not None:
            send(prompt)
        return generation(prompt, is_stopped)

    if mesh.rank > 0:
        for line in sys.stdin:
            generation(json.loads(line))[1].run()
        return
    options = (arguments.system, arguments.tools, arguments.thinking)
    TerminalChat(tokenizer, answer, stop, *options, is_alone=send is None).run()


def _sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)


def _read(arguments: argparse.Namespace) -> tuple[Loaded, list[list[int]], frozenset[int]]:
    """The model, the prompts and the ids that end a text. Collective."""
    loaded = load_model(arguments, drafts=arguments.speculative)
    model, tokenizer, _ = loaded
    if arguments.chat:
        raise_for_template(tokenizer)
    if arguments.speculative and not model.shape.num_nextn_predict_layers:
        raise UserError("--speculative: the model has no prediction layers (num_nextn_predict_layers = 0)")
    prompts = [_prompt(tokenizer, text, arguments) for text in arguments.prompt]
    empty = [f"--prompt {number} of {len(prompts)} is empty" for number, ids in enumerate(prompts, 1) if not ids]
    if empty:
        raise UserError(*(f"{fault}; give some text" for fault in empty))
    if prompts:
        raise_for_length(prompts, arguments.max_new_tokens, model.shape.max_position_embeddings)
    stop = frozenset((*stop_ids(tokenizer), *(_token(tokenizer, text) for text in arguments.stop_token)))
    return loaded, prompts, stop


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
    parser.add_argument("--tools", type=Path, metavar="FILE", help="JSON list of functions it may call, with --chat")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"default: {_NEW_TOKENS}, in a chat {_NEW_TOKENS_OF_AN_ANSWER} of each answer",
    )
    parser.add_argument(
        "--stop-token", action="append", default=[], metavar="TEXT", help="end at this token too; again for more"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among this many likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest tokens up to this chance")
    parser.add_argument("--min-p", type=float, default=0.0, help="leave out tokens below this part of the best chance")
    parser.add_argument("--seed", type=int, default=0)
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
        faults.append("--top-k, --top-p and --min-p choose what is drawn from; set a --temperature above 0")
    if not _LOWEST_SEED <= arguments.seed <= _HIGHEST_SEED:
        faults.append(f"--seed {arguments.seed}: must be between {_LOWEST_SEED} and {_HIGHEST_SEED}")
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
    if not arguments.chat and not arguments.prompt:
        faults.append("--prompt: give a text to continue, or --chat for a chat in the terminal")
    if faults:
        raise UserError(*faults)


def raise_for_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, positions: int) -> None:
    """Raise UserError if the longest prompt and its new tokens exceed the positions of the model."""
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > positions:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} after a prompt of {longest} tokens: the model has {positions} "
            "positions (max_position_embeddings); ask for fewer tokens or give a shorter prompt"
        )


def _prompt(tokenizer: Tokenizer, text: str, arguments: argparse.Namespace) -> list[int]:
    if arguments.chat:
        system = [Message("system", arguments.system)] if arguments.system is not None else []
        messages = [*system, Message("user", text)]
        return chat_prompt(tokenizer, messages, tools=arguments.tools, thinking=arguments.thinking)
    return tokenizer.encode(text).tolist()


def _token(tokenizer: Tokenizer, text: str) -> int:
    """Id of a special token, by its name, or of a text that is exactly one token."""
    if text in tokenizer.special:
        return tokenizer.special[text]
    ids = tokenizer.encode(text).tolist()
    if len(ids) != 1:
        raise UserError(f"--stop-token {text!r}: {len(ids)} tokens; give a text that is one, or a special token's name")
    return ids[0]
