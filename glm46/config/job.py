"""The sections [job] and [inference]: what a run is called, and its last words."""

from typing import Annotated

from pydantic import Field

from glm46.config.section import LocalPath, Needs, Section


class Job(Section):
    """[job]: what this run is called and where it writes."""

    dump_folder: LocalPath = "./outputs"
    """Folder of everything the run writes: metrics.jsonl, tb/, checkpoint/, config.toml, log.txt. Starting again with
    the same folder resumes."""

    description: str = "glm46 training"
    """One line that is printed at the start and kept with the logs."""

    print_config: bool = False
    """Print the resolved configuration, defaults included, at the start."""


class Inference(Section):
    """[inference]: the continuation that is printed when training ends."""

    prompt: str = ""
    """Text to continue when training ends. Empty: nothing is generated."""

    max_new_tokens: Annotated[int, Needs("prompt")] = Field(64, ge=1)
    """Length of the continuation, in tokens."""

    temperature: Annotated[float, Needs("prompt")] = Field(0.0, ge=0.0)
    """Sampling temperature; 0 takes the most likely token each time."""
