"""The section [finetune]: a run that fine-tunes trained weights on conversations."""

from typing import Annotated

from pydantic import Field

from glm46.config.section import Needs, Section


class FineTune(Section):
    """[finetune]: start from trained weights (checkpoint.initial_load_path) and learn the targets of conversations."""

    samples: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Messages of a user; the greedy answers to them are shown before the first step and after the last one, on any
    layout. Each new token runs the model on all of them without a cache. Absent: no answers."""

    thinking: Annotated[bool, Needs("samples")] = False
    """Let the model think before it answers the samples."""

    max_new_tokens: Annotated[int, Needs("samples")] = Field(128, ge=1)
    """Longest answer to a sample in tokens."""
