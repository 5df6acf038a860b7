"""Prompts of a file as token ids, with their labels, and the order in which they are handed out."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from glm46.config.errors import UserError
from glm46.config.rl_data import PromptsConfig
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.chat_template import format_of, raise_for_kept_thoughts
from glm46.storage.chats.conversation import BadConversation, parse_prompt, parse_tools
from glm46.storage.data.mixing import permute
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.prepare.readers import file_rows
from glm46.storage.prepare.rows import BadDocument
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import READ_LABELS, FunctionPool

_FAULTS_SHOWN = 5
_COMPARED = {"exact": "{}", "choice": "\\boxed{{{}}}", "math": "\\boxed{{{}}}"}
"""Rewards that compare texts, and how an answer states its result."""


class Prompt(NamedTuple):
    """One prompt."""

    tokens: list[int]
    text: str
    """The last message."""
    label: Any
    """None if there is none."""
    place: str = ""
    """File and line."""
    row: Any = None
    """Of the file."""


def read_prompts(
    file: Path, keys: PromptsConfig, tokenizer: Tokenizer, *, most_tokens: int, needs_label: bool
) -> list[Prompt]:
    """All prompts of a file in its order.

    Args:
        keys: which key of a row is what, and whether the model may think.
        most_tokens: of a prompt.
        needs_label: whether each row must have a label.

    Raises:
        UserError: the format cannot keep thoughts, the file cannot be read, or with file and line what is wrong with
            its first bad rows.
    """
    if keys.keep_thoughts:
        raise_for_kept_thoughts(tokenizer, "rl.prompts.keep_thoughts = true")
    prompts, faults, too_long = [], [], []
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
        (place, tokens), longest = too_long[0], max(length for _, length in too_long)
        faults.append(
            f"{place}: {tokens} tokens, and training.seq_len leaves {most_tokens} beside the longest completion; "
            f"{len(too_long):,} of {len(prompts):,} prompts are so long, up to {longest:,} tokens: leave them out, "
            "lower rollout.max_new_tokens or raise training.seq_len"
        )
    if not prompts and not faults:
        faults = [f"{file}: no prompt; name another file in rl.prompts.file"]
    if faults:
        raise UserError(*faults)
    return prompts


def require_reachable_labels(prompts: Sequence[Prompt], rewards: FunctionPool, *, thinking: bool) -> None:
    """Check that each built-in reward can judge the labels, and that those that compare texts give a label itself 1,
    and an empty answer 0.

    Args:
        rewards: of the run: they may hang, so that it calls them.

    Raises:
        UserError: no answer could be right, or each is.
    """
    _check_labels(prompts, rewards.names)
    faults, end = [], "</think>" if thinking else ""
    labels = {repr(prompt.label): prompt.label for prompt in prompts}
    for name, form in _COMPARED.items():
        if name not in rewards.names:
            continue
        firsts = ((label, label[0] if isinstance(label, list) and label else label) for label in labels.values())
        asked = [(label, text) for label, first in firsts for text in (form.format(first), "")]
        found = rewards.values(name, [Answer("", end + text, label, thinking, 0, True) for label, text in asked])
        pairs = zip(labels, found[::2], found[1::2], strict=True)
        wrong = {key: values for key, *values in pairs if values != [1.0, 0.0]}
        if wrong:
            label, values = next(iter(wrong.items()))
            why = next((f": {value}" for value in values if isinstance(value, str)), "")
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
        # A list has several labels, of which one suffices; of code it is several tests.
        some = {
            repr(prompt.label): prompt.label if name != "code" and prompt.label and isinstance(prompt.label, list)
            else [prompt.label] for prompt in prompts
        }  # fmt: skip
        single = {repr(label): label for labels in some.values() for label in labels}
        known = dict(zip(single, READ_LABELS[name](list(single.values())), strict=True))
        wrong = [
            (prompt.place, repr(prompt.label), fault) for prompt in prompts
            if (fault := next(filter(None, (known[repr(label)] for label in some[repr(prompt.label)])), ""))
        ]  # fmt: skip
        faults += [
            f"{place}: rl.rewards: {name} cannot judge the label {label:.80}: {fault} ({len(wrong):,} of "
            f"{len(prompts):,} prompts have such labels under rl.prompts.label_key)"
            for place, label, fault in wrong[:_FAULTS_SHOWN]
        ]
    if faults:
        raise UserError(*faults)


def answers_of_labels(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Labels as answers without a thought, as the chat format writes them: token ids with the stop token."""
    texts = [str(p.label[0] if isinstance(p.label, list) else p.label) for p in prompts]
    line, stop = format_of(tokenizer).line, tokenizer.special["<|user|>"]
    return [[*tokenizer.encode(f"{line}{text}").tolist(), stop] for text in texts]


def prompt_at(number: int, count: int, seed: int) -> int:
    """The index of the prompt that is handed out as this number: each of ``count`` once in each pass, in an order that
    seed and pass decide."""
    epoch, place = divmod(number, count)
    return int(_order(epoch, count, seed)[place])


@lru_cache(maxsize=2)  # a rollout may begin in one pass and end in the next one
def _order(epoch: int, count: int, seed: int) -> np.ndarray:
    return permute(np.arange(count), count, f"prompts {seed} {epoch}")


def _prompt(row: Any, keys: PromptsConfig, tokenizer: Tokenizer, *, needs_label: bool) -> Prompt:
    """The prompt of a row; ValueError if it is none."""
    if not isinstance(row, Mapping):
        found = row.args[0] if isinstance(row, BadDocument) else type(row).__name__
        raise ValueError(f'{found}: a JSON object is expected, such as {{"{keys.prompt_key}": "..."}}')
    found, label = _at(row, keys.prompt_key), _at(row, keys.label_key)
    if needs_label and label is None:
        raise ValueError(f"no '{keys.label_key}' (rl.prompts.label_key), which rl.rewards compare answers with")
    if found is None:
        raise ValueError(
            f"no '{keys.prompt_key}' (rl.prompts.prompt_key) among its keys: {', '.join(row) or 'none':.200}"
        )
    if not isinstance(found, str | list) or not found:
        what = f"'{keys.prompt_key}' (rl.prompts.prompt_key) is {found!r:.60}"
        raise ValueError(f"{what}: neither a text nor a list of messages")
    try:
        tools = parse_tools(_at(row, keys.tools_key))
    except BadConversation as error:
        raise ValueError(f"'{keys.tools_key}' (rl.prompts.tools_key): {error}") from error
    try:
        messages = parse_prompt(found, tools)
    except BadConversation as error:
        raise ValueError(f"'{keys.prompt_key}' (rl.prompts.prompt_key): {error}") from error
    tokens = chat_prompt(tokenizer, messages, tools=tools, thinking=keys.thinking, keeps_thoughts=keys.keep_thoughts)
    return Prompt(tokens, messages[-1].content, label, row=row)


def _at(row: Mapping, key: str) -> Any:
    """The value of a key, or of a path with dots into tables; None if it is absent."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
