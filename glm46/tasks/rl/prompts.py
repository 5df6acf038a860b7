"""Reads prompts and labels from a file, checks the labels, and decides the order of prompts."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from glm46.config.errors import UserError
from glm46.config.rl_data import PromptsConfig
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.chat_rows import BadConversation, text_or_messages
from glm46.storage.chats.chat_template import format_of, raise_for_kept_thoughts
from glm46.storage.chats.conversation import EFFORT_KEY, parse_prompt, parse_tools
from glm46.storage.data.mixing import permute
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.prepare.readers import file_rows
from glm46.storage.prepare.rows import BadDocument, strings_fault
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import READ_LABELS, FunctionPool

_FAULTS_SHOWN = 5
_COMPARED = {"exact": "{}", "choice": "\\boxed{{{}}}", "math": "\\boxed{{{}}}"}
"""Rewards that compare texts, and the format of a result in an answer."""


class Prompt(NamedTuple):
    """One prompt."""

    tokens: list[int]
    text: str
    """Text of the last message."""
    label: Any
    """Label, or None without one."""
    place: str = ""
    """File and line."""
    row: Any = None
    """Row of the file that the prompt was read from."""
    effort: str = ""
    """Reasoning effort that the prompt states, for formats that state it; empty for their default."""


def read_prompts(
    file: Path, keys: PromptsConfig, tokenizer: Tokenizer, *, most_tokens: int, needs_label: bool
) -> list[Prompt]:
    """Read all prompts of a file, in its order.

    Args:
        keys: keys of the rows, and whether the model may think.
        most_tokens: most tokens of a prompt.
        needs_label: True if each row must have a label.

    Raises:
        UserError: if the chat format cannot keep thoughts, if the file cannot be read, or if rows are bad; the message
            names file and line of the first of them.
    """
    if keys.keep_thoughts:
        raise_for_kept_thoughts(tokenizer, "rl.prompts.keep_thoughts = true")
    prompts = []
    faults = []
    too_long = []
    if not file.is_file():
        raise UserError(f"{file}: no such file; correct rl.prompts.file or rl.validation")
    for place, row in file_rows(file, keys.prompt_key):
        try:
            prompt = _prompt(row, keys, tokenizer, needs_label=needs_label)
            if len(prompt.tokens) > most_tokens:
                too_long.append((place, len(prompt.tokens)))
            prompts.append(prompt._replace(place=place))
        except ValueError as error:
            faults.append(f"{place}: {error}")
            if len(faults) == _FAULTS_SHOWN:
                break
    if too_long:
        place, tokens = too_long[0]
        max_length = max(length for _, length in too_long)
        faults.append(
            f"{place}: {tokens} tokens, and training.seq_len leaves {most_tokens} beside the longest completion; "
            f"{len(too_long):,} of {len(prompts):,} prompts are so long, up to {max_length:,} tokens: leave them out, "
            "lower rollout.max_new_tokens or raise training.seq_len"
        )
    if not prompts and not faults:
        faults = [f"{file}: no prompt; name another file in rl.prompts.file"]
    if faults:
        raise UserError(*faults)
    return prompts


def require_reachable_labels(prompts: Sequence[Prompt], rewards: FunctionPool, *, thinking: bool) -> None:
    """Check that each built-in reward can judge the labels, and that rewards that compare texts give 1 to the label
    itself and 0 to an empty answer.

    Args:
        rewards: pool of the run's rewards. They run in its processes because they may hang.

    Raises:
        UserError: if no answer could be right, or if every answer is.
    """
    _check_labels(prompts, rewards.names)
    faults = []
    end = "</think>" if thinking else ""
    labels = {repr(prompt.label): prompt.label for prompt in prompts}
    for name, form in _COMPARED.items():
        if name not in rewards.names:
            continue
        firsts = ((label, label[0] if isinstance(label, list) and label else label) for label in labels.values())
        cases = [(label, text) for label, first in firsts for text in (form.format(first), "")]
        results = rewards.results(name, [Answer("", end + text, label, thinking, 0, True) for label, text in cases])
        pairs = zip(labels, results[::2], results[1::2], strict=True)
        wrong = {key: (right, empty) for key, right, empty in pairs if (right[0], empty[0]) != (1.0, 0.0)}
        if wrong:
            label, pair = next(iter(wrong.items()))
            why = next((f": {failure}" for _, failure in pair if failure), "")
            count = sum(repr(prompt.label) in wrong for prompt in prompts)
            faults.append(
                f"rl.rewards: {name} does not give the label {label:.60} itself 1 and an empty answer 0{why} "
                f"({count:,} of {len(prompts):,} prompts); correct rl.prompts.label_key or the labels, or take "
                "another reward"
            )
    if faults:
        raise UserError(*faults)


def _check_labels(prompts: Sequence[Prompt], rewards: Sequence[str]) -> None:
    """Raise UserError with file and line of the first labels that a reward cannot judge."""
    faults = []
    for name in READ_LABELS.keys() & set(rewards):
        # A list holds alternative labels, except for the reward `code`, where it holds several tests.
        labels_by_key = {
            repr(prompt.label): prompt.label
            if name != "code" and prompt.label and isinstance(prompt.label, list)
            else [prompt.label]
            for prompt in prompts
        }
        single = {repr(label): label for labels in labels_by_key.values() for label in labels}
        label_faults = dict(zip(single, READ_LABELS[name](list(single.values())), strict=True))
        wrong = [
            (prompt.place, repr(prompt.label), fault)
            for prompt in prompts
            if (
                fault := next(
                    filter(None, (label_faults[repr(label)] for label in labels_by_key[repr(prompt.label)])), ""
                )
            )
        ]
        faults += [
            f"{place}: rl.rewards: {name} cannot judge the label {label:.80}: {fault} ({len(wrong):,} of "
            f"{len(prompts):,} prompts have such labels under rl.prompts.label_key)"
            for place, label, fault in wrong[:_FAULTS_SHOWN]
        ]
    if faults:
        raise UserError(*faults)


def answers_of_labels(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Format labels as answers without a thought in the chat format: token ids with the stop token."""
    texts = [str(p.label[0] if isinstance(p.label, list) else p.label) for p in prompts]
    line = format_of(tokenizer).line
    stop = tokenizer.special["<|user|>"]
    return [[*tokenizer.encode(f"{line}{text}").tolist(), stop] for text in texts]


def prompt_at(number: int, count: int, seed: int) -> int:
    """Return the index of the prompt that is handed out as number ``number``.

    Each pass hands out all ``count`` prompts once, in an order that depends on the seed and the pass.
    """
    epoch, place = divmod(number, count)
    return int(_order(epoch, count, seed)[place])


@lru_cache(maxsize=2)  # a rollout may begin in one pass and end in the next one
def _order(epoch: int, count: int, seed: int) -> np.ndarray:
    return permute(np.arange(count), count, f"prompts {seed} {epoch}")


def _prompt(row: object, keys: PromptsConfig, tokenizer: Tokenizer, *, needs_label: bool) -> Prompt:
    """Parse the prompt of a row.

    Raises:
        ValueError: if the row holds no valid prompt.
    """
    if not isinstance(row, Mapping):
        content = row.args[0] if isinstance(row, BadDocument) else type(row).__name__
        raise ValueError(f'{content}: a JSON object is expected, such as {{"{keys.prompt_key}": "..."}}')
    content = text_or_messages(_at(row, keys.prompt_key))
    label = _at(row, keys.label_key)
    if needs_label and label is None:
        raise ValueError(f"no '{keys.label_key}' (rl.prompts.label_key), which rl.rewards compare answers with")
    if content is None:
        raise ValueError(
            f"no '{keys.prompt_key}' (rl.prompts.prompt_key) among its keys: {', '.join(row) or 'none':.200}"
        )
    if not isinstance(content, str | list) or not content:
        what = f"'{keys.prompt_key}' (rl.prompts.prompt_key) is {content!r:.60}"
        raise ValueError(f"{what}: neither a text nor a list of messages")
    if fault := strings_fault(json.dumps(content, ensure_ascii=False, default=str)):
        raise ValueError(f"'{keys.prompt_key}' (rl.prompts.prompt_key): {fault}")
    try:
        tools = parse_tools(_at(row, keys.tools_key))
    except BadConversation as error:
        raise ValueError(f"'{keys.tools_key}' (rl.prompts.tools_key): {error}") from error
    try:
        messages = parse_prompt(content, tools)
    except BadConversation as error:
        raise ValueError(f"'{keys.prompt_key}' (rl.prompts.prompt_key): {error}") from error
    effort = _at(row, EFFORT_KEY)
    effort = "" if effort is None else str(effort)
    tokens = chat_prompt(
        tokenizer, messages, tools=tools, thinking=keys.thinking, keeps_thoughts=keys.keep_thoughts, effort=effort
    )
    return Prompt(tokens, messages[-1].content, label, row=row, effort=effort)


def _at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or of a path with dots into tables, which may be stored as JSON text. None if it is
    absent."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        table = _table(value)
        value = None if table is None else table.get(part)
    return value


def _table(value: object) -> Mapping[str, Any] | None:
    """Return a table, parsed if it is JSON text; None for any other value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None
