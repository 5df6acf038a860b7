"""Saves to a disk of each node, gathered on shared storage afterwards: training's ranks do both together.

A local disk is fast and is lost with its node, so a node-local save protects against a crash of the run at once, and
against the loss of a node when it was gathered. Loading always reads the shared folder.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

from glm46.checkpoint.dcp import write_tensors
from glm46.checkpoint.gathering import (
    NodePart,
    copy_part,
    is_gathered,
    is_superseded,
    parts_in,
    publish_gathered,
    remove_part,
    whole_saves,
)
from glm46.checkpoint.integrity import MANIFEST
from glm46.checkpoint.metadata import METADATA
from glm46.checkpoint.publish import open_draft, publish, remove, repair, step_folder
from glm46.checkpoint.snapshot import Snapshot
from glm46.distributed.ranks import CheckpointError, Ranks
from glm46.files.durable import create_durably


@dataclass(frozen=True)
class NodeFolder:
    """The local folder of this rank's node, and whether this rank is the one that acts for the node."""

    path: Path
    is_leader: bool

    @classmethod
    def of_this_rank(cls, path: Path, ranks: Ranks) -> "NodeFolder":
        """Collective. Ranks share a node when host name and folder are the same."""
        node = (socket.gethostname(), str(Path(path).absolute()))
        return cls(Path(path), is_leader=ranks.all_gather(node).index(node) == ranks.rank)


def save_locally(node: NodeFolder, content: Snapshot, ranks: Ranks, staged: dict | None) -> int:
    """Write and publish this node's part of a checkpoint on its local disk. Collective.

    Returns:
        The bytes of all files, over all nodes.

    Raises:
        CheckpointError: on all ranks. What was published before is untouched.
    """
    with ranks.stage("making the node-local folder"):
        if node.is_leader:
            open_draft(node.path, content.step)
    draft = step_folder(node.path, content.step).with_suffix(".tmp")
    try:
        files = write_tensors(draft, content.tensors, ranks, staged)
        with ranks.stage("reading the index") as stage:
            if ranks.is_first:
                stage.value = (draft / METADATA).read_bytes(), content.meta, content.facts(ranks.size, is_finite=True)
        index, meta, facts = stage.values[0]
        with ranks.stage("publishing on the local disk"):
            if node.is_leader:
                if not ranks.is_first:
                    create_durably(draft / METADATA, [index])
                publish(draft, content.step, files, meta, facts)
    except CheckpointError:
        if node.is_leader and draft.is_dir():
            remove(draft)
        raise
    return sum(record.bytes for record in files.values())


def gather(node: NodeFolder, output: Path, ranks: Ranks) -> int | None:
    """Bring the newest save that is whole over all nodes to the shared folder, then free the local disks. Collective.

    Args:
        output: the shared checkpoint folder.

    Returns:
        The step, or None when no save is whole, or the shared folder has a later one of the same step.

    Raises:
        CheckpointError: on all ranks. The local files stay; gathering again goes on where it stopped.
    """
    with ranks.stage("listing node-local saves") as stage:
        stage.value = []
        if node.is_leader:
            if node.path.is_dir():
                repair(node.path)
            if ranks.is_first and output.is_dir():
                repair(output)
            stage.value = parts_in(node.path)[0]
    saves = whole_saves(part for parts in stage.values for part in parts)
    if not saves:
        return None
    newest, mine = saves[-1], stage.values[ranks.rank]
    have_it = any(part.seal == newest.seal for part in mine)
    with ranks.stage("looking at the shared folder") as shared:
        if ranks.is_first:
            shared.value = is_gathered(output, newest), is_superseded(output, newest)
    gathered, superseded = shared.values[0]
    if superseded:
        return None
    if not gathered:
        _copy_and_publish(node if have_it else None, output, newest, ranks)
    with ranks.stage("removing node-local files"):
        if have_it and (faults := remove_part(node.path, output, newest)):
            raise OSError("; ".join(faults))
        for part in mine:  # older ones are of no more use, now that a newer one is safe
            if part.step < newest.step:
                remove(step_folder(node.path, part.step))
    return newest.step


def _copy_and_publish(node: NodeFolder | None, output: Path, save: NodePart, ranks: Ranks) -> None:
    with ranks.stage("copying to shared storage") as stage:
        if node is not None:
            if faults := copy_part(node.path, output, save):
                raise OSError("; ".join(faults))
            stage.value = (step_folder(node.path, save.step) / MANIFEST).read_bytes()
    manifest = next(value for value in stage.values if value is not None)
    with ranks.stage("publishing on shared storage"):
        if ranks.is_first and (faults := publish_gathered(output, save.step, manifest)):
            raise OSError("; ".join(faults))
