"""Recipe that makes a source from text: [data.sources.recipe] of a run, a file of its own, or the command line."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.section import LocalPath, Needs, Section


class Recipe(Section):
    """[data.sources.recipe]: how to make the source above it from text files, if its ``path`` does not exist. The same
    recipe on the same text gives the same bytes."""

    input: tuple[LocalPath, ...] = Field(min_length=1)
    """Files, folders or globs (``docs/**/*.jsonl.zst``): .jsonl, .parquet, .json that has rows with ``text_key``,
    and any other file as one text; each may be compressed as .gz or .zst. Hidden files of a folder are skipped.
    ``builtin:NAME`` is text of this machine: python_stdlib, python_packages, cpp_headers or package_docs."""

    text_key: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""

    held_out: float = Field(0.01, ge=0.0, lt=1.0)
    """Share of the documents that is kept for validation; the hash of a document decides."""

    max_bad: int = Field(100, ge=0)
    """Number of unreadable documents (not UTF-8, not JSON, no text field) above which preparation stops with an
    error."""

    normalize: Literal["none", "newlines", "nfc"] = "none"
    """newlines: end every line with one line feed. nfc: also compose characters (Unicode form C). Runs before all other
    steps."""

    filter: Literal["none", "prose"] = "none"
    """prose: skip documents that are not prose by the rules of Gopher (arXiv 2112.11446, table A1)."""

    deduplicate: Literal["exact", "near"] = "near"
    """exact: keep the first of equal texts. near: also of similar texts, by MinHash over runs of tokens."""

    deduplicate_memory_mb: int = Field(1024, ge=16)
    """Memory in MB for finding duplicates, for any number of documents; less memory takes longer. The result does not
    depend on it."""

    verify: Literal["none", "python", "json", "c", "c++", "rust", "go", "javascript", "maths"] = "none"
    """Skip documents that do not parse (python, json, go, javascript) or compile alone (c, c++, rust) in this language;
    all but the first two need gcc, g++, rustc, gofmt or node on this machine. maths: skip solutions that do not end in
    the known result."""

    answer_key: Annotated[str, Needs("verify", "maths")] = "answer"
    """Field or column that holds the known result, for verify = "maths"."""

    decontaminate: tuple[str, ...] = ()
    """Files of evaluation text, read like ``input``; documents that share a run of 13 tokens with them are skipped."""

    fim_rate: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the documents rearranged for fill-in-the-middle (arXiv 2207.14255). For code."""

    fim_spm_rate: Annotated[float, Needs("fim_rate")] = Field(0.5, ge=0.0, le=1.0)
    """Share of the rearranged documents with the suffix first; the others begin with the prefix."""

    pack_lengths: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Row lengths to plan best-fit packing for during preparation. A run with another row length makes its plan when it
    starts."""

    processes: int | None = Field(None, ge=1)
    """Worker processes. Absent: one per core. Each needs about 100 MB; the result does not depend on it."""


class TextRecipe(Recipe):
    """The options of ``python -m glm46 prepare --input ... --output ...``."""

    output: LocalPath = Field(min_length=1)
    """Folder to write; the ``path`` of a source in a training run."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in its shards. Absent: the last part of ``output``."""

    tokenizer: LocalPath = "builtin"
    """"builtin", a .tiktoken rank file, or a Hugging Face tokenizer.json; as model.tokenizer_path of the runs."""
