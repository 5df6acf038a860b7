"""A shard that is damaged during a run ends it on all ranks before anything is trained on it, whatever the layout."""

import os
import re
from pathlib import Path

from glm46.config.loader import dump_config
from glm46.engine.training import loop
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.shards import BLOCK_BYTES
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.data.verified import VerifiedShard
from tests.builders import metric_rows, small_config, write_source
from tests.harness import call, in_halves
from tests.processes import is_alive, wait_until
from tests.ranks.forked_launch import fork_launch

SOUND_STEPS = 3
CASES = [
    ("flipped for rank 0", {}), ("flipped for rank 1", {"tensor_parallel_degree": 2}),
    ("flipped for rank 1", {"pipeline_parallel_degree": 2}), ("flipped", {}),
    ("cut short", {"context_parallel_degree": 2}), ("held-out text flipped for rank 1", {}),
]  # fmt: skip


def damage(case: str, source: Path, rank: int) -> None:
    """Do it: to the files for all, or to what one rank reads of them."""
    if case.endswith(f"for rank {rank}"):
        pread = VerifiedShard._pread

        def flipped(shard: VerifiedShard, place: int, size: int) -> bytes:
            data = bytearray(pread(shard, place, size))
            data[size // 2] ^= 4
            return bytes(data)

        VerifiedShard._pread = flipped
    elif "for rank" not in case and rank == 0:
        for shard in source.glob("train*.safetensors"):
            if case == "cut short":
                os.truncate(shard, 10)
                continue
            with open(shard, "r+b") as file:
                for place in range(BLOCK_BYTES, shard.stat().st_size, BLOCK_BYTES):
                    file.seek(place)
                    byte = file.read(1)[0]
                    file.seek(place)
                    file.write(bytes([byte ^ 1]))


def hamper(case: str, source: Path, rank: int) -> None:
    step, train_step, validate = 0, loop.train_step, loop.validate

    def counted(*arguments):
        nonlocal step
        outcome = train_step(*arguments)
        step += 1
        if step == SOUND_STEPS and not case.startswith("held-out"):
            damage(case, source, rank)
        return outcome

    def validated(*arguments):
        if step == SOUND_STEPS and case.startswith("held-out"):
            damage(case, source, rank)
        return validate(*arguments)

    loop.train_step, loop.validate = counted, validated


def run(number: int, folder: Path) -> dict:
    """Launch one case."""
    case, degrees = CASES[number]
    base = folder / str(number)
    (base / "source").mkdir(parents=True)
    source = write_source(base / "source", load_tokenizer("builtin"))
    assert load_manifest(source).splits["train"].tokens > BLOCK_BYTES // 4
    held_out = {"enable": True, "freq": SOUND_STEPS if case.startswith("held-out") else 100}
    config = small_config(
        source, base / "out", training={"steps": 20, "global_batch_size": 4}, checkpoint={"interval": 1},
        parallelism=degrees, validation=held_out, model={"num_key_value_heads": 2},
    )  # fmt: skip
    (base / "run.toml").write_text(dump_config(config))
    child = fork_launch(base / "run.toml", base / "log", lambda rank: hamper(case, source, rank))
    wait_until(lambda: not is_alive(child))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {
        "case": case, "code": code, "steps": [row["step"] for row in metric_rows(base / "out", "loss")],
        "said": (base / "log").read_text(), "log": (base / "out" / "log.txt").read_text(),
        "saved": sorted(int(path.name[5:]) for path in (base / "out" / "checkpoint").glob("step-??????")),
    }  # fmt: skip


def run_all(folder: Path) -> list[dict]:
    return in_halves(range(len(CASES)), lambda number: run(number, folder))


def test_damaged_text_ends_all_ranks_before_the_step_that_would_use_it(tmp_path):
    rows = call(run_all, tmp_path)
    assert len(rows) == 6
    for row in rows:
        assert row["code"] == 2, row
        assert row["steps"] == [1, 2, 3], row
        assert max(row["saved"], default=0) <= 3, row
        kind = "missing, the file is truncated" if row["case"] == "cut short" else "do not match the checksum"
        part = "validation" if row["case"].startswith("held-out") else "train"
        found = re.findall(rf"error: \S+/{part}-00000.safetensors: bytes \d+ to \d+: {kind}", row["said"])
        # Once for each damaged place, however many ranks have seen it; ranks that read other rows may see another.
        assert 1 <= len(found) <= 2 and len(set(found)) == len(found), f"{row['case']}\n{row['said']}"
        assert "Traceback" not in row["said"], row
        assert kind in row["log"], row
