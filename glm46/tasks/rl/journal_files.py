"""File names of a journal. This module does not import torch."""

from pathlib import Path

FOLDER = "rollouts"
"""Name of the folder in job.dump_folder."""


def rollout_steps(folder: Path) -> list[int]:
    """Return the steps of all rollouts of a journal, ascending."""
    return sorted(int(path.stem.partition("_")[2]) for path in folder.glob("step_*.json"))


def rollout_paths(folder: Path, step: int) -> tuple[Path, Path]:
    """Return the paths of a rollout's arrays and of its manifest."""
    return folder / f"step_{step:06d}.safetensors", folder / f"step_{step:06d}.json"


def remove_rollout(folder: Path, step: int) -> None:
    """Remove the files of a rollout, the manifest first."""
    data, manifest = rollout_paths(folder, step)
    for path in (manifest, data, data.with_suffix(".fields")):
        path.unlink(missing_ok=True)
