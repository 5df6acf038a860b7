"""Reinforcement learning on samples that a server generates ahead of training, killed by kill -9 and started again.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/stale_rollouts.py

Two ranks train a small GLM for ten steps, two for each rollout, on a server that has their weights, with samples
that are up to two rollouts old. The run dies in its sixth step, two rollouts behind its checkpoint, and while it waits
for its fourth rollout; each time all groups of two rollouts are generated and wait on the disk. Prints one JSON object.

`in_turn`: with samples of the present weights the run dies in its second rollout, of which two groups are finished, and
goes on with another server, beside a run that was not killed.
"""

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch

from glm46.engine.training import loop
from glm46.operate.launch.train_rank import train
from glm46.tasks.rl.journal import read_rollout
from glm46.tasks.rl.journal_files import FOLDER, rollout_steps
from glm46.tasks.rl.rollout import background
from glm46.tasks.rl.rollout.background import BackgroundGeneration, read_ends
from tests.processes import free_port
from tests.ranks import training_kills
from tests.ranks.forked_ranks import await_ranks, start_ranks
from tests.small_run import TINY, small_config
from tests.unit.tasks.rl.rollout.policy_server import PolicyServer

STEPS, PROMPTS, GROUP, STALENESS = 10, 4, 4, 2
MOMENTS = ("update", "rollout", "")
"""At which a run dies, one after another; the last one ends by itself."""


def serve(port: int, *, together: bool = True) -> None:
    torch.set_num_threads(1)
    PolicyServer(port=port, together=together)
    threading.Event().wait()


def finished_groups(folder: Path) -> dict[int, list]:
    """When each group on the disk that is generated to its end was written, in ns, and tokens and log-probabilities of
    its samples."""
    found = {}
    for path in folder.glob("ahead/*/prompt_*"):
        ends = dict(read_ends(path))
        if len(ends) == GROUP and not any(end.is_part for end in ends.values()):
            samples = [[one.tokens, one.logprobs] for _, end in sorted(ends.items()) for one in end.samples]
            found[int(path.name.partition("_")[2])] = [path.stat().st_mtime_ns, samples]
    return found


def server_config(base: Path, name: str, port: int, prompts: Iterable[dict], *, rl: dict, rollout: dict, **tables):
    """The config of a run on these prompts, whose samples a server generates."""
    path = base / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return small_config(
        base, base / name,
        model=TINY | {
            "tokenizer_path": str(Path(__file__).parents[2] / "train_configs" / "bytes.tiktoken"),
            "vocab_size": 292, "num_nextn_predict_layers": 0, "num_key_value_heads": 2,
        },
        data={"document_mask": True, "sources": []},
        rl={
            "algorithm": "gspo", "prompts_per_rollout": PROMPTS, "prompts": {"file": str(path)},
            "rewards": [{"name": "tests.ranks.brightness:brightness"}],
        } | rl,
        rollout={"kind": "vllm", "urls": [f"http://127.0.0.1:{port}"]} | rollout,
        moe={"sequence_aux_loss_weight": 0.0},
        checkpoint={"interval": 3, "async_mode": "disabled"},
        **tables,
    )  # fmt: skip


def config_of(base: Path, name: str, port: int, *, steps: int, **rollout):
    return server_config(
        base, name, port, ({"prompt": f"{number} is"} for number in range(20)), rl={"group_size": GROUP},
        rollout={"max_new_tokens": 12, "temperature": 0.7} | rollout,
        training={"steps": steps, "global_batch_size": 8, "local_batch_size": 1, "seq_len": 48},
        lr_scheduler={"total_tokens": STEPS * 8 * 48},
    )  # fmt: skip


def work(rank: int, config, moment: str, seen: Path) -> int:
    """Train; die at a moment, when all groups that are handed out are finished."""
    torch.set_num_threads(1)
    calls = 0

    def fatal(number, original):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if rank == 0 and calls == number:
                while len(groups := finished_groups(Path(config.job.dump_folder) / FOLDER)) < STALENESS * PROMPTS:
                    time.sleep(0.01)
                seen.write_text(json.dumps(groups))
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    if moment == "update":
        loop.train_step = fatal(6, loop.train_step)
    elif moment == "rollout":  # it reads the third rollout from the journal, and waits for the fourth
        BackgroundGeneration.take = fatal(1, BackgroundGeneration.take)
    return train(config)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base, codes, kept, said = Path(name), [], {}, []
        port = free_port()
        server = start_ranks(1, base / "log-server", lambda _: serve(port))
        config = config_of(base, "run", port, steps=STEPS, max_staleness=STALENESS)
        folder = base / "run" / FOLDER
        for moment in MOMENTS:
            seen, log = base / f"seen-{moment}", base / f"log-{moment}-"
            started = start_ranks(2, log, lambda rank, moment=moment, seen=seen: work(rank, config, moment, seen))
            codes.append(await_ranks(started, patience=5))
            if not moment and any(codes[-1]):
                raise SystemExit("".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)))
            lines = log.with_name(f"{log.name}0").read_text()
            said += re.findall(r"differ from the trainer's policy by (\S+) in", lines)
            kept[moment] = json.loads(seen.read_text()) if seen.exists() else {}
        os.kill(server[0], signal.SIGKILL)

        used, ages, waiting = {}, [], []
        for step in rollout_steps(folder):
            rollout = read_rollout(folder, step)
            ages += (step - rollout.versions).tolist()
            waiting = [number for number, _ in rollout.waiting]
            for i, number in enumerate(rollout.group.tolist()):
                logprobs = rollout.logprobs[rollout.of_targets == i]
                used.setdefault(number, []).append([rollout.completion(i).tolist(), logprobs.tolist()])
        lines = map(json.loads, (base / "run" / "metrics.jsonl").read_text().splitlines())
        steps = [row["step"] for row in lines if "loss" in row]
        found = {"codes": codes, "kept": kept, "used": used, "ages": ages, "waiting": waiting, "steps": steps}
        print(json.dumps(found | {"said": [float(gap) for gap in said]}))


def work_in_turn(rank: int, config, fatal: int | None, seen: Path) -> int:
    """Train; die when a group is generated to its end, before its file is written. `seen` gets the number of each group
    that is written."""
    torch.set_num_threads(1)
    write, numbers = background.append_durably, []

    def write_or_die(path, lines) -> None:
        numbers.append(int(path.name.partition("_")[2]))
        if len(numbers) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, lines)
        seen.write_text(json.dumps(numbers))

    background.append_durably = write_or_die
    return train(config)


def in_turn() -> None:
    with tempfile.TemporaryDirectory() as name:
        base, ports, found = Path(name), [free_port(), free_port()], {}
        servers = start_ranks(2, base / "log-server", lambda number: serve(ports[number], together=False))
        moved = {"deadline_seconds": 60.0, "keep_latest_k": 5}
        runs = (("whole", 0, None, {}), ("killed", 0, PROMPTS + 3, {}), ("killed", 1, None, moved))
        for label, server, fatal, rollout in runs:
            steps = 8 if rollout else 6  # it ends later; the learning rate does not depend on it
            config = config_of(base, label, ports[server], steps=steps, **rollout)
            log, seen = base / f"log-{label}-{fatal}-{server}-", base / "seen"
            started = start_ranks(2, log, lambda rank, c=config, f=fatal, s=seen: work_in_turn(rank, c, f, s))
            codes = await_ranks(started, patience=5)
            if fatal is None and any(codes):
                raise SystemExit("".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)))
            folder = base / label / FOLDER
            found[f"{label} {server}"] = {
                "codes": codes,
                "written": json.loads(seen.read_text()),
                "finished": sorted(finished_groups(folder)),
                "rollouts": rollout_steps(folder),
                "weights": training_kills.contents(SimpleNamespace(checkpoint_folder=base / label / "checkpoint"), 6)
                if fatal is None
                else {},
            }
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
    in_turn()
