"""How text becomes a source: in a run as [data.sources.recipe], in a file of its own, or on the command line."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.section import LocalPath, Needs, Section


class Recipe(Section):
    """[data.sources.recipe]: how files of text become the source above it, if its ``path`` does not exist yet. The same
    recipe on the same text gives the same bytes."""

    input: tuple[LocalPath, ...] = Field(min_length=1)
    """Files, folders or globs (``docs/**/*.jsonl.zst``): .jsonl, .parquet, .json where it holds rows with ``text_key``,
    and anything else as one text per file; each may be compressed as .gz or .zst. Hidden files of a folder are left
    out. ``builtin:NAME`` is text of this machine: python_stdlib, python_packages,
    cpp_headers or package_docs."""

    text_key: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""

    held_out: float = Field(0.01, ge=0.0, lt=1.0)
    """Share of the documents that is kept for validation, chosen by the hash of each."""

    max_bad: int = Field(100, ge=0)
    """Documents that cannot be read (not UTF-8, not JSON, no text field) before the work stops with an error."""

    normalize: Literal["none", "newlines", "nfc"] = "none"
    """newlines: end every line with one line feed. nfc: compose characters too (Unicode form C). Before all else."""

    filter: Literal["none", "prose"] = "none"
    """prose: leave out what is not running text, by the rules of Gopher (arXiv 2112.11446, table A1)."""

    deduplicate: Literal["exact", "near"] = "near"
    """exact: of equal texts keep the first. near: of similar ones too, by MinHash over runs of tokens."""

    deduplicate_memory_mb: int = Field(1024, ge=16)
    """Memory in MB that finding copies may hold, however many documents there are; what does not fit lies on the disk
    of the output. The result does not depend on it."""

    verify: Literal["none", "python", "json", "c", "c++", "rust", "go", "javascript", "maths"] = "none"
    """Leave out documents that do not parse (python, json, go, javascript) or compile alone (c, c++, rust) in this
    language; all but the first two need gcc, g++, rustc, gofmt or node on this machine. maths: leave out solutions that
    do not end in the result beside them."""

    answer_key: Annotated[str, Needs("verify", "maths")] = "answer"
    """Field or column that holds the known result, for verify = "maths"."""

    decontaminate: tuple[str, ...] = ()
    """Files of evaluation text, read like ``input``; documents that share a run of 13 tokens with them are left out."""

    fim_rate: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the documents rearranged for fill-in-the-middle (arXiv 2207.14255). For code."""

    fim_spm_rate: Annotated[float, Needs("fim_rate")] = Field(0.5, ge=0.0, le=1.0)
    """Share of those with the suffix first; the others begin with the prefix."""

    pack_lengths: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Lengths of rows to plan best-fit packing for at once. A run that packs in rows of another length plans when it
    starts."""

    processes: int | None = Field(None, ge=1)
    """Worker processes. Absent: one per core. Each needs about 100 MB; the result does not depend on it."""


class TextRecipe(Recipe):
    """What ``python -m glm46 prepare --input ... --output ...`` is told."""

    output: LocalPath = Field(min_length=1)
    """Folder to make; the ``path`` of a source in a training run."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in its shards. Absent: the last part of ``output``."""

    tokenizer: LocalPath = "builtin"
    """"builtin", a .tiktoken rank file, or a Hugging Face tokenizer.json; as model.tokenizer_path of the runs."""
