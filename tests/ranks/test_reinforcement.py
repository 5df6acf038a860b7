"""Reinforcement learning computes the same on one rank and on two, and continues after kills as if nothing was.

A small GLM with experts is trained for six steps, two for each rollout, by GSPO, whose engine has other selection
biases than the policy, so that only replayed routes make them agree; by PPO with a critic, also on a device without
hardware; and by adapters on the weights of the first run, with a penalty for the distance to these. A killed run dies
while it generates its second rollout, in its fourth step, which is inside of a rollout, before it writes its third one,
between the data and the manifest of it, and in a save, between the tensors of a checkpoint and its manifest; each time
the same command continues it.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from glm46.engine.training import loop
from glm46.files import array_file
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint import save
from glm46.storage.checkpoint.integrity import published_steps
from glm46.tasks.rl import journal
from glm46.tasks.rl.journal_files import FOLDER, rollout_steps
from glm46.tasks.rl.rollout import local
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.weights import whole_weights
from tests import pretend_gpu
from tests.builders import TINY, metric_rows, small_config
from tests.harness import Ranks, call, in_halves
from tests.step_tensors import tensor_hashes

STEPS = 6
_REPLAYED = {"algorithm": "gspo", "routing_replay": True}
_ADAPTED = {"algorithm": "grpo", "kl": {"weight": 0.1}}
RUNS = {
    "gspo 1": (1, _REPLAYED, {}), "gspo 2": (2, _REPLAYED, {}),
    "gspo tp": (2, _REPLAYED, {"tensor_parallel_degree": 2}), "live 1": (1, {"algorithm": "gspo"}, {}),
    "ppo 1": (1, {"algorithm": "ppo", "kl": {"weight": 0.1}}, {}),
    "ppo 2": (2, {"algorithm": "ppo", "kl": {"weight": 0.1}}, {}),
    "ppo device": (1, {"algorithm": "ppo", "kl": {"weight": 0.1}}, {}), "lora 1": (1, _ADAPTED, {}),
    "lora 2": (2, _ADAPTED, {"expert_parallel_degree": 2}),
}  # fmt: skip
KILLED = {"gspo 2": ("rollout", "update", "journal", "manifest", "save"), "ppo 2": ("save",), "lora 2": ("update",)}
"""Moments at which a run is killed, one after another."""
AT_ONCE = (("gspo 2", "gspo tp", "live 1", "lora 1", "lora 2"), ("ppo 1", "ppo device", "ppo 2"))
"""After the first run, from which the second ones start; a run is also killed after it."""
ADAPTED = {
    "adapter": {"name": "lora", "rank": 4}, "optimizer": {"lr": 0.01},
    "moe": {"bias_update_rate": 0.0, "sequence_aux_loss_weight": 0.0},
}  # fmt: skip


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def biased(network, shape):
    """`whole_weights` with other selection biases."""
    for name, tensor in whole_weights(network, shape):
        is_bias = name.endswith("correction_bias")
        yield name, tensor + torch.linspace(-0.1, 0.1, len(tensor)) if is_bias else tensor


def train_until(moment: str, config) -> None:
    """On each rank; die at a moment."""
    if config.job.dump_folder.endswith("device"):
        pretend_gpu.install()
    if config.rl.algorithm == "gspo":
        local.whole_weights = biased
    calls = dict.fromkeys(("generate", "train_step", "replace_durably", "publish"), 0)

    def counted(name, original, fatal):
        def call(*arguments, **options):
            calls[name] += 1
            if calls[name] == fatal:
                kill()
            return original(*arguments, **options)

        return call

    if moment == "rollout":  # two calls of it show samples before the first step and generate the first rollout
        LocalEngine.generate = counted("generate", LocalEngine.generate, 3)
    elif moment == "update":
        loop.train_step = counted("train_step", loop.train_step, 4)
    elif moment in ("journal", "manifest"):  # after it was resumed inside of the second rollout, it writes the third
        number = ("journal", "manifest").index(moment) + 1
        journal.replace_durably = counted("replace_durably", journal.replace_durably, number)
        array_file.replace_durably = journal.replace_durably  # writes the data
    elif moment == "save":
        save.publish = counted("publish", save.publish, 1)
    sys.exit(train(config))


def rows(folder: Path) -> list[dict]:
    """What each step computed."""
    names = ("step", "loss", "grad_norm", "reward", "entropy", "mismatch_kl", "loss/critic", "completion_tokens",
             "reference_kl")  # fmt: skip
    return [{name: row[name] for name in names if name in row} for row in metric_rows(folder, "loss")]


def contents(folder: Path) -> dict[str, str]:
    """Hashes of the tensors of the last checkpoint."""
    return tensor_hashes(folder, max(published_steps(folder)))


def run_all(base: Path) -> dict[str, dict]:
    """A row for each run, and for each one that was killed."""
    prompts = base / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} is"}) + "\n" for number in range(20)))
    tokenizer = Path(__file__).parents[2] / "train_configs" / "bytes.tiktoken"

    def train_on(label: str, ranks: int, rl: dict, degrees: dict, moment: str = "") -> list[int]:
        is_adapted = rl is _ADAPTED
        start = base / "gspo 1" / "checkpoint" / f"step-{STEPS:06d}" if "kl" in rl else None
        moe = {"sequence_aux_loss_weight": 0.0} | ({"bias_update_rate": 0.0} if rl is _REPLAYED else {})
        sections = {"moe": moe} | (ADAPTED if is_adapted else {})
        config = small_config(
            base, base / label, parallelism=degrees,
            model=TINY | {
                "tokenizer_path": str(tokenizer), "vocab_size": 292, "num_nextn_predict_layers": 0,
                "num_key_value_heads": 2,
            },
            data={"document_mask": True, "sources": []},
            rl=rl | {
                "prompts_per_rollout": 4, "group_size": 4, "warm_up_rollouts": 0,
                "prompts": {"file": str(prompts)},
                "rewards": [{"name": "tests.ranks.brightness:brightness"}],
            },
            rollout={"max_new_tokens": 12},
            training={"steps": STEPS, "global_batch_size": 8, "local_batch_size": 1, "seq_len": 48},
            checkpoint={
                "interval": 3, "async_mode": "disabled", "initial_load_path": start and str(start),
                "initial_load_model_only": start is not None,
            },
            **sections,
        )  # fmt: skip
        started = Ranks(ranks, train_until, moment, config)
        codes = started.wait(patience=5)
        if not moment:
            started.results()
        return codes

    def interrupt(label: str) -> dict:
        killed, kills = base / f"killed {label}", {}
        for moment in KILLED[label]:
            codes = train_on(killed.name, *RUNS[label], moment=moment)
            journal, data = killed / FOLDER, len([*(killed / FOLDER).glob("step_*.safetensors")])
            kills[moment] = [-9 in codes, published_steps(killed / "checkpoint"), rollout_steps(journal), data]
        train_on(killed.name, *RUNS[label])
        undisturbed, resumed = (contents(folder / "checkpoint") for folder in (base / label, killed))
        different = sorted(n for n in undisturbed.keys() | resumed.keys() if undisturbed.get(n) != resumed.get(n))
        return {"kills": kills, "rows": rows(killed), "tensors": len(undisturbed), "different": different}

    def run(labels: tuple[str, ...]) -> dict[str, dict]:
        found = {}
        for label in labels:
            train_on(label, *RUNS[label])
            found[label] = {"rows": rows(base / label)}
            if label in KILLED:
                found[f"killed {label}"] = interrupt(label)
        return found

    first = run(("gspo 1",))
    one_half, other_half = in_halves(AT_ONCE, run)
    return first | one_half | other_half


# FP32 sums in another order, over three rollouts that are generated from the weights of the steps before. Losses are
# differences of terms near the advantages, which are of order 1.
BOUND = 1e-5
# The critic's values agree to 2e-6 after four steps of AdamW, which divides small gradients by their own size, and
# PPO's advantages are divided by their deviation of 0.15: 1.8e-5 between the kernels of two devices on a CPU with
# AVX-512, 1.2e-6 between one rank and two.
BOUND_OF_WHITENED = 5e-5


def test_ranks_agree_and_kills_lose_nothing(tmp_path):
    by_name = call(run_all, tmp_path)
    interrupted = {label: by_name.pop(f"killed {label}") for label in KILLED}
    found = {name: row["rows"] for name, row in by_name.items()}
    assert found.keys() == RUNS.keys() and all(len(rows) == 6 for rows in found.values())
    for name, rows in found.items():
        expected, bound = found[f"{name.split()[0]} 1"], BOUND_OF_WHITENED if "ppo" in name else BOUND
        for row, one in zip(rows, expected, strict=True):
            assert row == pytest.approx(one, rel=1e-4, abs=bound), name
            assert (row["mismatch_kl"] < 1e-8) == (name != "live 1"), "the engine has other selection biases"
    assert len({row["reward"] for row in found["gspo 1"]}) == 3
    assert any(row["loss"] != 0 for row in found["gspo 1"])
    assert all("loss/critic" in row for row in found["ppo 2"])
    assert found["ppo 2"][-1]["reference_kl"] > 1e-9, "the reference in host memory is not the policy"
    distances = [row["reference_kl"] for row in found["lora 1"]]
    assert distances[0] < 1e-12 < 1e-9 < distances[-1], "adapters begin as their base, which is the reference"

    assert all(was_killed for row in interrupted.values() for was_killed, *_ in row["kills"].values())
    kills = interrupted["gspo 2"]["kills"]
    assert kills["rollout"][2] == [0]
    assert kills["update"][1:] == [[3], [0, 2], 2]
    assert kills["journal"][1:] == [[3], [0, 2], 2]
    assert kills["manifest"][1:] == [[3], [0, 2], 3], "a rollout without manifest does not exist"
    assert kills["save"][1:] == [[3], [0, 2, 4], 3], "nor does a checkpoint"
    assert interrupted["ppo 2"]["kills"]["save"][1:] == [[], [0, 2], 2]
    for label, row in interrupted.items():
        assert row["rows"] == found[label]
        assert row["tensors"] > 20
        assert row["different"] == []
