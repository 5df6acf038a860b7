"""A run whose samples are generated ahead of training loses no finished group by a kill, and generates none twice.

Two ranks train a small GLM for ten steps, two for each rollout, on a server that has their weights, with samples
that are up to two rollouts old. The run dies in its sixth step, two rollouts after its checkpoint, and while it waits
for its fourth rollout; each time all groups of two rollouts are generated and wait on the disk.

With samples of the present weights the run dies in its second rollout, of which two groups are finished, and continues
with another server, next to a run that was not killed.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from glm46.engine.training import loop
from glm46.operate.launch.train_rank import train
from glm46.tasks.rl.journal import read_rollout
from glm46.tasks.rl.journal_files import FOLDER, rollout_steps
from glm46.tasks.rl.rollout import background
from glm46.tasks.rl.rollout.background import BackgroundGeneration, read_ends
from tests.builders import TINY, metric_rows, small_config
from tests.harness import Ranks, call, this_rank
from tests.processes import free_port
from tests.step_tensors import tensor_hashes
from tests.unit.tasks.rl.rollout.policy_server import PolicyServer

STEPS, PROMPTS, GROUP, STALENESS = 10, 4, 4, 2
MOMENTS = ("update", "rollout", "")
"""At which a run dies, one after another; the last one ends by itself."""


def serve(ports: list[int], together: bool) -> None:
    """On each rank."""
    PolicyServer(port=ports[this_rank()], together=together)
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
        checkpoint={"interval": 3, "keep_latest_k": 0, "async_mode": "disabled"},  # all rollouts stay too
        **tables,
    )  # fmt: skip


def config_of(base: Path, name: str, port: int, *, steps: int, **rollout):
    return server_config(
        base, name, port, ({"prompt": f"{number} is"} for number in range(20)), rl={"group_size": GROUP},
        rollout={"max_new_tokens": 12, "temperature": 0.7} | rollout,
        training={"steps": steps, "global_batch_size": 8, "local_batch_size": 1, "seq_len": 48},
        lr_scheduler={"total_tokens": STEPS * 8 * 48},
    )  # fmt: skip


def train_until(moment: str, config, seen: Path) -> None:
    """On each rank; die at a moment, when all groups that are handed out are finished."""
    calls = 0

    def fatal(number, original):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if this_rank() == 0 and calls == number:
                while len(groups := finished_groups(Path(config.job.dump_folder) / FOLDER)) < STALENESS * PROMPTS:
                    time.sleep(0.01)
                seen.write_text(json.dumps([*groups.items()]))
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    if moment == "update":
        loop.train_step = fatal(6, loop.train_step)
    elif moment == "rollout":  # it reads the third rollout from the journal, and waits for the fourth
        BackgroundGeneration.take = fatal(1, BackgroundGeneration.take)
    sys.exit(train(config))


def run_ahead(base: Path) -> dict:
    """A run that is killed at each of `MOMENTS`."""
    codes, kept, said = [], {}, []
    port = free_port()
    server = Ranks(1, serve, [port], True)
    config = config_of(base, "run", port, steps=STEPS, max_staleness=STALENESS)
    folder = base / "run" / FOLDER
    for moment in MOMENTS:
        seen = base / f"seen-{moment}"
        ranks = Ranks(2, train_until, moment, config, seen)
        codes.append(ranks.wait(patience=5))
        if not moment:
            ranks.results()
        said += re.findall(r"differ from the trainer's policy by (\S+) in", ranks.text(0))
        kept[moment] = dict(json.loads(seen.read_text())) if seen.exists() else {}
    os.kill(server.pids[0], signal.SIGKILL)

    used, ages, waiting = {}, [], []
    for step in rollout_steps(folder):
        rollout = read_rollout(folder, step)
        ages += (step - rollout.versions).tolist()
        waiting = [number for number, _ in rollout.waiting]
        for i, number in enumerate(rollout.group.tolist()):
            logprobs = rollout.logprobs[rollout.of_targets == i]
            used.setdefault(number, []).append([rollout.completion(i).tolist(), logprobs.tolist()])
    steps = [row["step"] for row in metric_rows(base / "run", "loss")]
    found = {"codes": codes, "kept": kept, "used": used, "ages": ages, "waiting": waiting, "steps": steps}
    return found | {"said": [float(gap) for gap in said]}


def train_or_die(config, fatal: int | None, seen: Path) -> None:
    """On each rank; die when a group is generated to its end, before its file is written. ``seen`` gets the number of
    each group that is written."""
    write, numbers = background.append_durably, []

    def write_or_die(path, lines) -> None:
        numbers.append(int(path.name.partition("_")[2]))
        if len(numbers) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, lines)
        seen.write_text(json.dumps(numbers))

    background.append_durably = write_or_die
    sys.exit(train(config))


def run_in_turn(base: Path) -> dict:
    ports, found = [free_port(), free_port()], {}
    servers = Ranks(2, serve, ports, False)
    moved = {"deadline_seconds": 60.0}
    runs = (("whole", 0, None, {}), ("killed", 0, PROMPTS + 3, {}), ("killed", 1, None, moved))
    for label, server, fatal, rollout in runs:
        steps = 8 if rollout else 6  # it ends later; the learning rate does not depend on it
        config = config_of(base, label, ports[server], steps=steps, **rollout)
        ranks = Ranks(2, train_or_die, config, fatal, base / "seen")
        codes = ranks.wait(patience=5)
        if fatal is None:
            ranks.results()
        folder = base / label / FOLDER
        found[f"{label} {server}"] = {
            "codes": codes,
            "written": json.loads((base / "seen").read_text()),
            "finished": sorted(finished_groups(folder)),
            "rollouts": rollout_steps(folder),
            "weights": tensor_hashes(base / label / "checkpoint", 6) if fatal is None else {},
        }
    for pid in servers.pids:
        os.kill(pid, signal.SIGKILL)
    return found


def test_kills_lose_no_finished_group(tmp_path):
    found = call(run_ahead, tmp_path)
    assert [-9 in codes for codes in found["codes"]] == [True, True, False]
    for moment in ("update", "rollout"):
        assert len(found["kept"][moment]) >= STALENESS * PROMPTS
        for number, (_, samples) in found["kept"][moment].items():
            of_run = found["used"][number]
            assert [tokens for tokens, _ in of_run] == [tokens for tokens, _ in samples], (moment, number)
            # The journal has FP32.
            for (_, ours), (_, theirs) in zip(of_run, samples, strict=True):
                np.testing.assert_array_equal(np.float32(ours), np.float32(theirs), err_msg=f"{moment} {number}")
    # At the temperature of the samples, of the server at each start.
    assert len(found["said"]) == 3 and max(found["said"]) < 1e-4
    # What was generated before the first kill still waits at the second one, and was not generated again.
    times = [{number: at for number, (at, _) in found["kept"][moment].items()} for moment in ("update", "rollout")]
    assert times[0] == times[1]
    assert all(len(samples) == GROUP for samples in found["used"].values())
    numbers = sorted([*map(int, found["used"]), *found["waiting"]])
    assert numbers == list(range(len(numbers))), "each prompt is used once"
    assert len(found["used"]) == PROMPTS * STEPS // 2
    assert min(found["ages"]) >= 0 and 0 < max(found["ages"]) <= 2 * STALENESS
    assert found["steps"][-1] == STEPS


def test_a_kill_in_a_rollout_loses_no_finished_group_and_changes_nothing(tmp_path):
    found = call(run_in_turn, tmp_path)
    whole, killed, resumed = (found[name] for name in ("whole 0", "killed 0", "killed 1"))
    assert sorted(whole["written"]) == list(range(3 * PROMPTS))
    assert whole["rollouts"] == [0, 2, 4] and not whole["finished"]
    assert -9 in killed["codes"] and len(killed["finished"]) == 2 and killed["rollouts"] == [0]
    assert set(killed["finished"]) < set(range(PROMPTS, 2 * PROMPTS))
    # Another server, deadline and end of the run generate the other two groups and those of later rollouts.
    assert sorted([*killed["finished"], *resumed["written"]]) == list(range(PROMPTS, 4 * PROMPTS))
    assert resumed["rollouts"] == [0, 2, 4, 6] and not resumed["finished"]
    assert len(whole["weights"]) > 20 and resumed["weights"] == whole["weights"]
