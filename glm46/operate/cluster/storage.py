"""Checks of the files of a run: speed and space of its folders, shared folders, tokenizer, data and weights."""

import os
import shutil
import time
import uuid
from pathlib import Path

from glm46.config.errors import UserError
from glm46.engine.training.origin import refuse_origin
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, WARN, Defect, Result, describe_error, judge
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.plan import Plan
from glm46.storage.chats.chat_template import raise_for_source
from glm46.storage.checkpoint.integrity import check_hash, published_steps, quick_faults, records_of, step_folder
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.weights.start_folders import refuse_weights

_CHUNK_BYTES = 8 * 2**20
_PROBE_BYTES = {False: 32 * 2**20, True: 2**30}
"""Bytes that a host writes to measure a folder; the key is True for a full preflight."""
_SAVE_SECONDS = 300
"""A save that takes longer loses more of a large run than failures do."""
_CHECKPOINTS = 3
"""Minimum number of saves that must fit: one kept, one being written, and one to spare."""
_STATES_SECONDS = 60
"""Time to read and write the optimizer states of a host, once in each step: as long as a step of a large run."""
_STATES_KEY = "optimizer.state_offload_folder"


def storage(ranks: RankGroup, plan: Plan) -> Result:
    """Check the space for checkpoints, and the speed at which all ranks at once write the folders of the run.
    Collective."""
    count = max(plan.config.checkpoint.keep_latest_k + 1, _CHECKPOINTS)
    size = checkpoint_size(plan).total if plan.config.checkpoint.enable else 0
    # Each step reads and writes the states of all ranks of a host.
    states = 2 * largest_stage(stage_memory(plan)).disk * ranks.local_ranks
    least_of_folders = size / _SAVE_SECONDS / ranks.hosts / 1e9
    place = existing(plan.config.checkpoint_folder)
    free = shutil.disk_usage(place).free
    values = [f"{place}: {free / 2**30:,.2f} GiB free"]
    faults = []
    if free < count * size:
        remedy = "free space, set checkpoint.folder to a larger disk, or lower checkpoint.keep_latest_k"
        faults.append(Defect(FAIL, values[0], remedy))
    for key, folder in run_folders(plan).items():
        least = states / _STATES_SECONDS / 1e9 if key == _STATES_KEY else least_of_folders
        ranks.meet()
        try:
            size_of_rank = _PROBE_BYTES[ranks.is_full] // ranks.local_ranks
            speed = ranks.local_ranks * write_speed(existing(folder), size_of_rank)
        except OSError as error:
            remedy = "free space, chown or mount it writable, or set another folder"
            faults.append(Defect(FAIL, f"{key}: {describe_error(error)}", remedy))
            continue
        values.append(f"{key}: {speed:.2f} GB/s")
        if speed < least:
            remedy = f"checkpoints or steps wait for it; look at the load of {folder}, or set another folder"
            faults.append(Defect(WARN, f"{values[-1]} < {least:.2f} GB/s", remedy))
    requirement = f">= {count * size / 2**30:,.2f} GiB, {count} checkpoints; >= {least_of_folders:.2f} GB/s"
    return judge("storage", faults, ", ".join(values), requirement)


def run_folders(plan: Plan) -> dict[str, Path]:
    """Return the folders that a run writes, by key."""
    config = plan.config
    folders = {"job.dump_folder": Path(config.job.dump_folder), **config.folders_apart}
    if config.checkpoint.node_local_folder:
        folders["checkpoint.node_local_folder"] = Path(config.checkpoint.node_local_folder)
    if config.optimizer.state_offload == "nvme":
        folders[_STATES_KEY] = Path(config.optimizer.state_offload_folder or "")
    return folders


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def write_speed(folder: Path, size: int) -> float:
    """Return the GB/s at which whole chunks are written to a new file and synced; the file is removed."""
    path = folder / f".preflight-{uuid.uuid4().hex}"
    chunk = os.urandom(_CHUNK_BYTES)
    count = max(size // _CHUNK_BYTES, 1)
    began = time.monotonic()
    try:
        with path.open("xb") as file:
            for _ in range(count):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return count * _CHUNK_BYTES / (time.monotonic() - began) / 1e9
    finally:
        path.unlink(missing_ok=True)


def shared_folder(ranks: RankGroup, plan: Plan) -> Result:
    """Check that each host sees the files that the others write into the dump folder. Collective."""
    folder = existing(Path(plan.config.job.dump_folder))
    probe = folder / f".preflight-{uuid.uuid4().hex}"
    error = ""
    try:
        if ranks.is_first_of_host:
            probe.write_text("here")
    except OSError as reason:
        error = f"; {describe_error(reason)}"  # the ranks continue with the other checks
    try:
        written = [name for name in ranks.gather(probe.name if ranks.is_first_of_host else "") if name]
        seen = sum((folder / name).is_file() for name in written)
        ranks.meet()
    finally:
        if ranks.is_first_of_host and not error:
            probe.unlink(missing_ok=True)
    value = f"{folder}: {seen} of {len(written)} hosts' files seen{error}"
    remedy = "mount the same storage at this path on all hosts"
    faults = [Defect(FAIL, value, remedy)] if seen < len(written) else []
    return judge("shared folder", faults, value, "all")


def inputs(ranks: RankGroup, plan: Plan) -> Result | None:
    """Check that the first rank of a host can read the tokenizer, the shards of each source, and the weights to start
    from. A full preflight hashes all of them."""
    if not ranks.is_first_of_host:
        return None
    config = plan.config
    faults: list[str] = []
    values = []
    try:
        refuse_origin(config)
        refuse_weights(config)
        tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.flavor)
        for source in config.data.sources:
            if not Path(source.path).exists() and source.recipe is not None:
                values.append(f"{source.name}: the run prepares it")  # on storage that all nodes see
                continue
            manifest = load_manifest(Path(source.path), full=True if ranks.is_full else None)
            manifest.require_tokenizer(tokenizer.fingerprint)
            raise_for_source(manifest, tokenizer)
            values.append(f"{source.name}: {sum(split.tokens for split in manifest.splits.values()):,} tokens")
        start, checkpoint_faults = _newest_checkpoint(plan, is_full=ranks.is_full)
        values.append(start)
        faults += checkpoint_faults
    except UserError as error:
        faults += error.faults
    except OSError as error:
        faults.append(describe_error(error))
    remedy = "mount the files here, prepare the data again, or correct the key; python -m glm46 checkpoint verify"
    return judge("inputs", [Defect(FAIL, fault, remedy) for fault in faults], ", ".join(values), "readable and whole")


def _newest_checkpoint(plan: Plan, *, is_full: bool) -> tuple[str, list[str]]:
    """Return what the run starts from, and the faults of its newest checkpoint; ``is_full``: read all of it."""
    config = plan.config
    steps = published_steps(config.checkpoint_folder) if config.checkpoint.enable else []
    if not steps:
        return config.checkpoint.load_path or config.checkpoint.initial_load_path or "new weights", []
    folder = step_folder(config.checkpoint_folder, steps[-1])
    body, faults = quick_faults(folder, steps[-1])
    records = records_of(body) if body is not None and is_full and not faults else {}
    hash_faults = [fault for name, record in records.items() for fault in check_hash(folder / name, record)]
    return f"checkpoint of step {steps[-1]}", [*faults, *hash_faults]
