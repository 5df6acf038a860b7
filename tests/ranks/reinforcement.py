"""Reinforcement learning on one and two ranks, and killed in a rollout, an update and a save; prints JSON per run.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/reinforcement.py

A small GLM with experts is trained for six steps, two for each rollout, by GSPO, whose engine has other selection
biases than the policy, so that only replayed routes make them agree; by PPO with a critic, also on a device without
hardware; and by adapters on the weights of the first run, with a penalty for the distance to these. A killed run dies
while it generates its second rollout, in its fourth step, which is inside of a rollout, before it writes its third one,
between the data and the manifest of it, and in a save, between the tensors of a checkpoint and its manifest; each time
the same command goes on.
"""

import json
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

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
from tests.ranks import training_kills
from tests.ranks.forked_ranks import await_ranks, in_halves, start_ranks
from tests.small_run import TINY, small_config

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


def work(rank: int, config, moment: str) -> int:
    """Train; die at a moment."""
    torch.set_num_threads(1)
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
    return train(config)


def rows(folder: Path) -> list[dict]:
    """What each step computed."""
    names = ("step", "loss", "grad_norm", "reward", "entropy", "mismatch_kl", "loss/critic", "completion_tokens",
             "reference_kl")  # fmt: skip
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in names if name in row} for row in found if "loss" in row]


def contents(folder: Path) -> dict[str, str]:
    """Hashes of the tensors of the last checkpoint."""
    return training_kills.contents(SimpleNamespace(checkpoint_folder=folder), max(published_steps(folder)))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        prompts = base / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{number} is"}) + "\n" for number in range(20)))
        tokenizer = Path(__file__).parents[2] / "train_configs" / "bytes.tiktoken"

        def train(label: str, ranks: int, rl: dict, degrees: dict, moment: str = "") -> list[int]:
            is_adapted = rl is _ADAPTED
            start = base / "gspo 1" / "checkpoint" / f"step-{STEPS:06d}" if "kl" in rl else None
            sections = {"moe": {"sequence_aux_loss_weight": 0.0}} | (ADAPTED if is_adapted else {})
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
            log = base / f"log-{label}-"
            codes = await_ranks(start_ranks(ranks, log, lambda rank: work(rank, config, moment)), patience=5)
            if not moment and any(codes):
                raise SystemExit("".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(ranks)))
            return codes

        def interrupt(label: str) -> None:
            killed, kills = base / f"killed {label}", {}
            for moment in KILLED[label]:
                codes = train(killed.name, *RUNS[label], moment=moment)
                journal, data = killed / FOLDER, len([*(killed / FOLDER).glob("step_*.safetensors")])
                kills[moment] = [-9 in codes, published_steps(killed / "checkpoint"), rollout_steps(journal), data]
            train(killed.name, *RUNS[label])
            undisturbed, resumed = (contents(folder / "checkpoint") for folder in (base / label, killed))
            row = {"name": killed.name, "kills": kills, "rows": rows(killed), "tensors": len(undisturbed)}
            row["different"] = sorted(
                n for n in undisturbed.keys() | resumed.keys() if undisturbed.get(n) != resumed.get(n)
            )
            print(json.dumps(row), flush=True)

        def run(labels: tuple[str, ...]) -> None:
            for label in labels:
                train(label, *RUNS[label])
                print(json.dumps({"name": label, "rows": rows(base / label)}), flush=True)
                if label in KILLED:
                    interrupt(label)

        run(("gspo 1",))
        in_halves(AT_ONCE, run)


if __name__ == "__main__":
    main()
