"""Recipe that makes a source from text: [data.sources.recipe] of a config, a separate file, or the command line."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.field_rules import Needs
from glm46.config.hub_address import OnHub
from glm46.config.section import DataFile, LocalPath, ModelFolder, Removed, Section, StoredPath

CHAT_FORMATS = ("chat", "messages", "sharegpt", "prompt_completion", "alpaca")
"""Values of ``format`` for which a row is a conversation."""

PAIRS = "preference"
LABELLED = "unpaired_preference"
"""Values of ``format`` for which a row is a pair of answers, or an answer with a label."""
PREFERENCES = (PAIRS, LABELLED)

_TEXT = Needs("format", "text")
_CHATS = Needs("format", CHAT_FORMATS)
_MARKED = Needs("format", (*CHAT_FORMATS, *PREFERENCES))


class Recipe(Section):
    """[data.sources.recipe]: how to make this source from text files, if its ``path`` does not exist. The same recipe
    on the same text gives the same bytes."""

    removed = {"too_long": Removed("documents above max_tokens are skipped; remove it")}

    input: tuple[DataFile, ...] = Field(min_length=1)
    """Files, folders or globs (``docs/**/*.jsonl.zst``): .jsonl, .ndjson and .json hold rows of JSON (one per line, an
    array, or over several lines), .parquet rows, any other file is one text; all except .parquet may be compressed as
    .gz, .zst, .bz2 or .xz. With verify = "json" a .json file whose first row lacks ``text_key`` is one text. Links are
    followed; hidden files of a folder are skipped. ``builtin:NAME`` is text of this machine: python_stdlib,
    python_packages, cpp_headers or package_docs. ``hf://datasets/owner/name``, followed by a path or glob, is a data
    set of the hub."""

    text_key: Annotated[str, Needs("format", "text", unless="decontaminate")] = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text; for chats, the text of
    ``decontaminate``."""

    format: Literal[
        "text", "chat", "messages", "sharegpt", "prompt_completion", "alpaca", "preference", "unpaired_preference"
    ] = "text"
    """What a document is. text: any text. preference: a row with a better and a worse answer to one prompt, for
    [finetune.preference]; both are in one document. unpaired_preference: a row with an answer that is labelled
    desirable or not, for its loss_type = "kto". The others: a row with a conversation; for chat, the columns decide
    which of the other four formats it is. In all formats except text ("chats" below) the tokens that the model samples
    are the targets (docs/chat_format.md lists the fields), and a source needs packing = "best_fit" and
    data.document_mask = true."""

    history: Annotated[Literal["expand", "last", "all", "keep"], _CHATS] = "expand"
    """Chats: reasoning is removed from the turns before the last user message. expand: a document for each user turn
    with reasoning, so that every turn is trained as it was sampled. last: only the last user turn is trained. all: one
    document, in which every turn is trained. keep: one document, in which every turn is trained and keeps its
    reasoning; for the format of GLM-4.7, served with clear_thinking = false."""

    no_reasoning: Annotated[Literal["nothink", "mask", "train"], _MARKED] = "nothink"
    """Chats: turns without reasoning. nothink: as answers to a prompt that forbids thinking. mask: an empty thought
    without targets, the same in the format of GLM-4.7. train: an empty thought that is a target, so that the model may
    stop thinking. Both answers of a pair have one prompt: it allows thinking if one of them has reasoning."""

    max_tokens: Annotated[int | None, _MARKED] = Field(None, ge=2)
    """Chats: largest number of tokens of a document, for a pair of both halves together. At most the shortest seq_len
    that reads the source, because documents are not cut between rows. Longer ones are skipped. Required."""

    held_out: float = Field(0.01, ge=0.0, lt=1.0)
    """Share of the documents that is kept for validation; the hash of a document decides."""

    max_bad: int = Field(100, ge=0)
    """Number of unreadable documents (not UTF-8, not JSON, no text field) above which preparation stops with an
    error."""

    normalize: Annotated[Literal["none", "newlines", "nfc"], _TEXT] = "none"
    """newlines: end every line with one line feed. nfc: also compose characters (Unicode form C). This is the first
    step."""

    filter: Annotated[Literal["none", "prose"], _TEXT] = "none"
    """prose: skip documents that are not prose by the rules of Gopher (arXiv 2112.11446, table A1)."""

    deduplicate: Literal["exact", "near"] | None = None
    """exact: keep the first of equal texts or conversations. near: keep the first of similar ones too, by MinHash over
    runs of tokens. Absent: near for text, exact for chats, which are similar where they share instructions and
    tools."""

    verify: Annotated[
        Literal["none", "python", "json", "c", "c++", "rust", "go", "javascript", "execute", "maths", "steps"], _TEXT
    ] = "none"
    """Skip documents that do not parse (python, json, go, javascript) or compile alone (c, c++, rust) in this language;
    all except the first two need gcc, g++, rustc, gofmt or node on this machine. execute: run each text as a Python
    program on this machine, in a limited process (docs/data.md), and skip those that fail. maths: skip solutions that
    do not end in the reference answer. steps: skip texts that are not reasoning in numbered steps with a final answer,
    which must equal the reference answer if there is one."""

    answer_key: Annotated[str, Needs("verify", ("maths", "steps"))] = "answer"
    """Field or column with the reference answer, for verify = "maths", which requires it, and "steps"."""

    decontaminate: tuple[LocalPath, ...] = ()
    """Files of evaluation text, read like ``input``; documents that share a run of 13 words with them, or a whole text
    of 8 to 12 words, are skipped. Case and punctuation do not matter."""

    fim_rate: Annotated[float, _TEXT] = Field(0.0, ge=0.0, le=1.0)
    """Share of the documents rearranged for fill-in-the-middle (arXiv 2207.14255). For code. Half of them begin with
    the suffix, the others with the prefix."""

    @property
    def is_chat(self) -> bool:
        """True if the rows are conversations or preferences."""
        return self.format != "text"

    @property
    def duplicates(self) -> Literal["exact", "near"]:
        """``deduplicate``, or its default for the format."""
        return self.deduplicate or ("exact" if self.is_chat else "near")


class TextRecipe(Recipe):
    """The options of ``python -m glm46 prepare --input ... --output ...``."""

    output: StoredPath = Field(min_length=1)
    """Folder to write, or a URL of an object store; the ``path`` of a source in a training run."""

    processes: int | None = Field(None, ge=1)
    """Worker processes. Absent: one per core. Each needs about 100 MB; the result does not depend on it."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in its shards. Absent: the last part of ``output``."""

    tokenizer: Annotated[ModelFolder, OnHub("tokenizer")] = "builtin"
    """"builtin", a .tiktoken rank file, a Hugging Face tokenizer.json or its folder, or ``hf://owner/name``; equal to
    model.tokenizer_path of the runs."""
