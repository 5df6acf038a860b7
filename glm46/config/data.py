"""The section [data] and its sources."""

from typing import Literal

from pydantic import Field

from glm46.config.section import Section


class Source(Section):
    """[[data.sources]]: one folder of shards and its share of the training tokens."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in logs and metrics."""

    path: str
    """Folder with manifest.json and the shards that ``python -m glm46 prepare`` wrote."""

    weight: float = Field(1.0, gt=0.0)
    """Share of the training tokens, relative to the other sources. Exact in tokens, not in documents."""

    max_epochs: float | None = Field(None, gt=0.0)
    """Most passes over the source that this run may make; more is refused before the start. Absent: no limit."""

    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """concatenate: documents end to end, cut every seq_len tokens, as GLM pre-trains. best_fit: rows of whole documents
    that are cut only if longer than a row, for long contexts."""

    prepare: Literal["python_stdlib", "python_packages"] | None = None
    """Text of this machine to make the shards from when ``path`` does not exist yet: the sources of the Python standard
    library, or of the packages installed beside glm46. Absent: the shards must exist."""


class Data(Section):
    """[data]: the stream of tokens, as a pure function of the global sample number."""

    sources: tuple[Source, ...] = ()
    """The mixture. At least one source is needed to train."""

    document_mask: bool = False
    """Attend only within a document and restart positions at its first token. Labels never cross documents
    either way."""

    num_workers: int = Field(0, ge=0)
    """Worker processes of the loader on each rank. 0 reads in the training process, which is fast enough for memory
    maps."""

    prefetch_factor: int = Field(2, ge=1)
    """Micro-batches each worker keeps ready."""
