"""Options of ``python -m glm46 generate`` as values: their checks, prompts as tokens, tools. Does not import torch."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.model import ModelShape
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.chat_rows import BadConversation
from glm46.storage.chats.chat_template import find_format, raise_for_effort, raise_for_kept_thoughts
from glm46.storage.chats.conversation import Message, parse_tools
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.tokenizer_files import stop_ids


def raise_for_options(arguments: argparse.Namespace) -> None:
    """Raise one UserError for all options that are out of range or have no effect."""
    faults = []
    if arguments.max_new_tokens < 1:
        faults.append(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    if not 0.0 <= arguments.temperature < math.inf:
        faults.append(
            f"--temperature {arguments.temperature}: must be a number that is not negative; 0 takes the most likely "
            "token"
        )
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
    for option, values in texts.items():
        faults += [
            f"{option} {text!r}: contains bytes that are not UTF-8; convert the text, or set LC_ALL=C.UTF-8"
            for text in values
            # Python decodes such bytes of the command line to surrogates.
            if any("\ud800" <= letter <= "\udfff" for letter in text)
        ]
    if not arguments.chat and (arguments.system is not None or arguments.thinking or arguments.tools is not None):
        faults.append("--system, --thinking and --tools belong to --chat; add it")
    if arguments.draft_tokens is not None and not arguments.speculative:
        faults.append("--draft-tokens: belongs to --speculative; add it")
    if arguments.keep_thoughts and (arguments.prompt or not arguments.chat):
        faults.append("--keep-thoughts: belongs to --chat without --prompt, where there are past thoughts")
    if arguments.reasoning_effort and not (arguments.chat and arguments.thinking):
        faults.append("--reasoning-effort belongs to --chat --thinking; add them, or leave it out")
    if not arguments.chat and not arguments.prompt:
        faults.append("--prompt: give a text to continue, or --chat for a chat in the terminal")
    raise_if(faults)


def read_prompts(
    arguments: argparse.Namespace, tokenizer: Tokenizer, shape: ModelShape
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the prompts as token ids, and the ids that end a text.

    Raises:
        UserError: the tokenizer has no chat template, the model has no prediction layers or too few positions, or a
            prompt is empty.
    """
    if arguments.chat:
        find_format(tokenizer)
    if arguments.keep_thoughts:
        raise_for_kept_thoughts(tokenizer, "--keep-thoughts")
    if arguments.reasoning_effort:
        raise_for_effort(tokenizer, "--reasoning-effort")
    if arguments.speculative and not shape.num_nextn_predict_layers:
        raise UserError("--speculative: the model has no prediction layers (num_nextn_predict_layers = 0)")
    prompts = [_prompt(tokenizer, text, arguments) for text in arguments.prompt]
    empty = [
        f"--prompt {number} of {len(prompts)} is empty"
        for number, ids in enumerate(prompts, 1)
        if not ids or arguments.chat and not arguments.prompt[number - 1].strip()
    ]
    if empty:
        raise UserError(*(f"{fault}; give some text" for fault in empty))
    if prompts:
        raise_for_length(prompts, arguments.max_new_tokens, shape.max_position_embeddings)
    return prompts, frozenset((*stop_ids(tokenizer), *(_token(tokenizer, text) for text in arguments.stop_token)))


def raise_for_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, positions: int) -> None:
    """Raise UserError if the longest prompt and its new tokens exceed the positions of the model."""
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > positions:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} after a prompt of {counted(longest, 'token')}: the model has "
            f"{positions} positions (max_position_embeddings); ask for fewer tokens or give a shorter prompt"
        )


def _prompt(tokenizer: Tokenizer, text: str, arguments: argparse.Namespace) -> list[int]:
    if arguments.chat:
        system = [Message("system", arguments.system)] if arguments.system is not None else []
        messages = [*system, Message("user", text)]
        effort = arguments.reasoning_effort or ""
        return chat_prompt(tokenizer, messages, tools=arguments.tools, thinking=arguments.thinking, effort=effort)
    ids: list[int] = tokenizer.encode(text).tolist()
    return ids


def _token(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a special token by its name, or of a text that is exactly one token."""
    if text in tokenizer.special:
        return tokenizer.special[text]
    ids: list[int] = tokenizer.encode(text).tolist()
    if len(ids) != 1:
        raise UserError(f"--stop-token {text!r}: {len(ids)} tokens; give a text that is one, or a special token's name")
    return ids[0]


def read_tools(file: Path) -> tuple[Mapping[str, Any], ...]:
    """Read the descriptions of tools, as the model is shown them, from a JSON file.

    Raises:
        UserError: the file is missing, or is not a list of functions with names.
    """
    remedy = 'give a list such as [{"type": "function", "function": {"name": "now", "parameters": {}}}]'
    try:
        tools = parse_tools(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"--tools {file}: {error.strerror}; {remedy}") from error
    except (ValueError, RecursionError, BadConversation) as error:
        raise UserError(f"--tools {file}: {error}; {remedy}") from error
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool)
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise UserError(f"--tools {file}: function {number} of {len(tools)} has no name; {remedy}")
    return tools
