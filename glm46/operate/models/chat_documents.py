"""Documents of chats as a model reads them, token by token, with the targets in colour, in brackets or in HTML."""

import html
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.text import Text

from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.text_recipe import PAIRS, PREFERENCES
from glm46.files.durable import replace_durably
from glm46.operate.launch.config_options import fetched_overrides
from glm46.storage.chats.chat_format import made_in
from glm46.storage.chats.pairs import BEGIN, SIDES
from glm46.storage.data.manifest import Manifest, load_manifest
from glm46.storage.data.mixing import permute
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.prepare.tally import Tally

_TOKEN_BYTES = 4
"""Most tokens that share a character."""
_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.6 monospace; max-width: 100ch; margin: 2em auto; white-space: pre-wrap; overflow-wrap: anywhere }}
h2, h3 {{ font: bold 14px sans-serif; margin: 2em 0 .5em }}
span {{ background: #f2f2f2; border-right: 1px solid #fff }}
span:nth-of-type(odd) {{ background: #e6e6e6 }}
.target {{ background: #b9ecb9; font-weight: bold }}
.target:nth-of-type(odd) {{ background: #a0dfa0 }}
</style>
<p>Targets are green: the tokens whose loss counts. Their ids are shown under the pointer.</p>
"""


class ChatPart(NamedTuple):
    """A document of a conversation, or a half of a pair."""

    title: str
    ids: np.ndarray
    """int64 [n]."""
    is_target: np.ndarray
    """bool [n]."""


def sampled_parts(manifest: Manifest, tokenizer: Tokenizer, *, rows: int, seed: int | None) -> Iterator[ChatPart]:
    """The parts of documents of a source's training split.

    Args:
        rows: documents.
        seed: of the choice; None: the first ones.
    """
    stream = TokenStream(manifest.folder, manifest.splits["train"], manifest.vocab_size, marked=True)
    starts = np.concatenate([[0], stream.doc_ends()])
    count = len(starts) - 1
    numbers = np.arange(min(rows, count))
    for number in numbers if seed is None else permute(numbers, count, f"inspect {seed}"):
        tokens = np.empty(starts[number + 1] - starts[number], np.int64)
        stream.read(int(starts[number]), tokens)
        yield from _parts(f"{number} of {count}", tokens, manifest.format, tokenizer, made_in(manifest.settings))


def first_parts(place: Path, tokenizer: str, rows: int, tally: Tally) -> Iterator[tuple[Tokenizer, ChatPart]]:
    """The parts of the first documents of a source of chats, or of each that a run reads: from its folder, or from its
    files where it is not prepared. No model is built.

    Args:
        place: a folder of shards, or the config of a run.
        tokenizer: of the folder; a config names its own.
        rows: documents of a source.
        tally: counts what is left out of the files.

    Raises:
        UserError: the config or its data has faults, or there are no chats.
    """
    if place.is_dir():
        manifest, loaded = opened_source(place, tokenizer)
        if not is_chat(manifest):
            raise UserError(f"--chat {place}: holds text without targets; leave out --chat, or give a source of chats")
        yield from ((loaded, part) for part in sampled_parts(manifest, loaded, rows=rows, seed=None))
        return
    # Imported here: --help needs no jinja2.
    from glm46.storage.chats.chat_template import find_format, raise_for_source
    from glm46.storage.huggingface.hub import local_inputs
    from glm46.storage.prepare.parts import first_documents
    from glm46.storage.prepare.pipeline import text_recipe

    if place.suffix != ".toml" and place.exists():
        raise UserError(
            f"--chat {place}: neither a folder of shards nor the TOML file of a run; name {place} in the recipe of a "
            "source, or prepare it"
        )
    config = load_config(place, fetched_overrides(load_config(place)))
    loaded = load_tokenizer(config.model.tokenizer_path, config.model.flavor)
    found = False
    for source in config.data.sources:
        if Path(source.path).exists():
            manifest, _ = opened_source(Path(source.path), config.model.tokenizer_path)
            raise_for_source(manifest, loaded)
            parts = sampled_parts(manifest, loaded, rows=rows, seed=None) if is_chat(manifest) else iter(())
        elif source.recipe is not None and source.recipe.is_chat:
            recipe = text_recipe(source, config.model.tokenizer_path)
            recipe = recipe.model_copy(update={"input": local_inputs(recipe.input)})
            made = find_format(loaded).name
            parts = (
                part
                for name, tokens in first_documents(recipe, loaded, rows, tally)
                for part in _parts(name, tokens, recipe.format, loaded, made)
            )
        else:
            continue
        for part in parts:
            found = True
            yield loaded, part._replace(title=f"{source.name}, {part.title}")
    if not found:
        why = f" ({'; '.join(tally.skipped())})" if tally.skipped() else ""
        raise UserError(
            f"--chat {place}: no conversation in its data.sources{why}; give a run with a source of chats, whose "
            'recipe has a format other than "text", and rows of that format'
        )


def opened_source(folder: Path, tokenizer: str) -> tuple[Manifest, Tokenizer]:
    """The manifest of a folder of shards, and the tokenizer that made it. Raises UserError if another one did."""
    loaded, manifest = load_tokenizer(tokenizer), load_manifest(folder, full=False)
    manifest.require_tokenizer(loaded.fingerprint)
    return manifest, loaded


def is_chat(manifest: Manifest) -> bool:
    """True if the documents of a source have targets of their own."""
    return manifest.splits["train"].targets is not None


def _parts(name: str, tokens: np.ndarray, format: str, tokenizer: Tokenizer, made: str) -> Iterator[ChatPart]:
    """The document of a conversation, both halves of a pair, or the answer that is labelled.

    Args:
        format: of the rows, as in the recipe.
        made: name of the chat format.
    """
    is_target, ids = tokens < NOT_A_TARGET, tokens.astype(np.int64) & ~NOT_A_TARGET
    if format not in PREFERENCES:
        yield ChatPart(f"document {name}: {_amounts(is_target)}, chat format of {made}", ids, is_target)
        return
    begins = np.flatnonzero(ids == tokenizer.special[BEGIN])[1:]
    names = SIDES if format == PAIRS else ("desirable", "undesirable")
    for side, half in zip(names, np.split(np.arange(len(ids)), begins), strict=False):
        if len(half) > 1:
            what = f"pair {name}, {side}" if format == PAIRS else f"{side} answer {name}"
            title = f"{what}: {_amounts(is_target[half])}, chat format of {made}"
            yield ChatPart(title, ids[half], is_target[half])


def _amounts(is_target: np.ndarray) -> str:
    return f"{counted(len(is_target), 'token')}, {counted(int(is_target.sum()), 'target')}"


def shown_text(part: ChatPart, tokenizer: Tokenizer, *, most: int, brackets: bool, tokens: bool = False) -> Text:
    """A part for a terminal: targets in colour and, with ``brackets``, in [[ ]].

    Args:
        most: tokens shown.
        tokens: show where tokens end: by a background in colour, and with ``brackets`` by a dot between them.
    """
    shown, was_target = Text(), False
    for number, (text, _, is_target) in enumerate(_pieces(part, tokenizer, most)):
        style = "bold green" if is_target else ""
        if tokens and number % 2 and not brackets:
            style += " on grey19"
        if brackets and is_target != was_target:
            text = f"[[{text}" if is_target else f"]]{text}"
            was_target = is_target
        elif brackets and tokens and number:
            text = f"·{text}"
        shown.append(text, style.strip() or None)
    if was_target:
        shown.append("]]", "bold green")
    if len(part.ids) > most:
        shown.append(f"\n… {len(part.ids) - most} more tokens", "dim")
    return shown


def write_page(file: Path, title: str, parts: Iterable[tuple[Tokenizer, ChatPart]], most: int) -> None:
    """Write parts as a page of HTML, completely or not at all."""
    lines = [_PAGE.format(title=html.escape(title))]
    for tokenizer, part in parts:
        lines.append(f"<h2>{html.escape(part.title)}</h2>\n<div>")
        for text, ids, is_target in _pieces(part, tokenizer, most):
            mark = ' class="target"' if is_target else ""
            lines.append(f'<span{mark} title="{" ".join(map(str, ids))}">{html.escape(text)}</span>')
        lines.append(f"… {len(part.ids) - most} more tokens</div>\n" if len(part.ids) > most else "</div>\n")
    replace_durably(file, ["".join(lines).encode()])


def _pieces(part: ChatPart, tokenizer: Tokenizer, most: int) -> Iterator[tuple[str, list[int], bool]]:
    """The tokens of a part as text; those that share a character together."""
    waiting: list[int] = []
    ids, flags = part.ids[:most].tolist(), part.is_target[:most].tolist()
    for place, (token, is_target) in enumerate(zip(ids, flags, strict=True)):
        waiting.append(token)
        text, is_last = tokenizer.decode(np.array(waiting)), place + 1 == len(ids)
        if "\ufffd" in text and len(waiting) < _TOKEN_BYTES and not is_last and flags[place + 1] == is_target:
            continue
        yield text, waiting, is_target
        waiting = []
