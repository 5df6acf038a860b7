"""One job with three networks: a policy, a frozen reference and a critic; prints JSON for each layout.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/three_networks.py

The task is here, the engine is the package's: the policy has an objective with a weight per token, the critic a value
head. Each layout trains undisturbed; the first one also trains once more, is killed after a save, and resumes.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE, summed_loss, token_logprobs
from glm46.engine.training import loop
from glm46.engine.training.build import run
from glm46.engine.training.network import build_frozen_network, build_network
from glm46.engine.training.task import Task
from glm46.storage.checkpoint.integrity import published_steps
from glm46.storage.data.corpus import load_text
from glm46.tasks.pretrain.data_stream import DataStream, rows_read
from tests.ranks import training_kills
from tests.ranks.forked_ranks import await_ranks, in_halves, start_ranks
from tests.small_run import folder_with_source, small_config

LAYOUTS = {
    "one rank": (1, {}), "fsdp": (2, {}), "tensor": (2, {"tensor_parallel_degree": 2}),
    "context": (2, {"context_parallel_degree": 2}), "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "experts": (2, {"expert_parallel_degree": 2}),
}  # fmt: skip
KILLED = "fsdp"
STEPS, SAVED, KILLED_AT = 6, 3, 5
KL_WEIGHT, ENTROPY_WEIGHT, MTP_WEIGHT = 0.1, 0.01, 0.1


class PerToken:
    """What both objectives share: sums over the tokens with a label."""

    def __init__(self, network):
        self.network = network

    def share(self, loss):
        """This rank's share of what all ranks that read the same rows compute."""
        return {"loss": loss.sum().double() / self.network.cluster.layout.ranks_per_dp_rank}

    def count(self, micro_batches):
        return {"targets": sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)}

    def empty_sums(self):
        return {"loss": torch.zeros((), dtype=torch.float64)}

    def metrics(self, sums, totals, clock):
        return {"loss": sums["loss"].item() / max(totals["targets"], 1)}


class PolicyGradient(PerToken):
    """Advantage-weighted log-probabilities, a penalty for the distance to the reference, the entropy, and the loss of
    multi-token prediction, so that drafts follow the policy."""

    form = staticmethod(partial(token_logprobs, entropy=True))
    fields = ("advantages", "reference_logprobs", "is_target")

    def loss(self, output, batch, totals, clock):
        distance = (output.logprobs - batch["reference_logprobs"]).square() * batch["is_target"]
        gain = batch["advantages"] * output.logprobs + ENTROPY_WEIGHT * output.entropy
        return ((KL_WEIGHT * distance - gain).sum() + MTP_WEIGHT * output.mtp_losses.sum()) / max(totals["targets"], 1)

    def sums(self, output, batch):
        return self.share(-self.network.whole_rows(output.logprobs.unsqueeze(0), batch))


class ValueLoss(PerToken):
    """Squared error of the value at each token with a label."""

    form = staticmethod(summed_loss)
    fields = ("returns", "is_target")

    def loss(self, output, batch, totals, clock):
        return ((output.values - batch["returns"]).square() * batch["is_target"]).sum() / max(totals["targets"], 1)

    def sums(self, output, batch):
        values = self.network.whole_rows(output.values.unsqueeze(0), batch)[0]
        return self.share((values - batch["returns"]).square() * batch["is_target"])


class TinyReinforcement(Task):
    """A task of three networks on text; rewards are a function of the tokens."""

    identity_keys = ("data.sources",)

    def __init__(self, plan, cluster):
        self.plan, self.cluster = plan, cluster
        self.tokenizer, self.manifests = load_text(plan)
        self.networks = {
            "policy": build_network(plan, cluster),
            "reference": build_frozen_network(plan, cluster),
            "critic": build_network(plan, cluster, head="value"),
        }
        self.objectives = {
            "policy": PolicyGradient(self.networks["policy"]),
            "critic": ValueLoss(self.networks["critic"]),
        }
        self.stream = DataStream(plan, cluster, self.manifests)

    def next(self, progress, sequences):
        step = self.stream.next(progress, sequences)
        for batch in step.micro_batches:
            batch["is_target"] = (batch["labels"] != IGNORE).float()
            batch["returns"] = torch.sin(batch["input_ids"].float())
        return step

    def _whole(self, name: str, batch: dict[str, Tensor], field: str, form) -> Tensor:
        """A field of a network's output for whole rows; zeros on pipeline stages without the head."""
        network = self.networks[name]
        output = network.evaluate(batch, form)
        if output is None:
            return torch.zeros_like(batch["returns"])
        return network.whole_rows(getattr(output, field).unsqueeze(0), batch)[0]

    def complete(self, micro_batches):
        for batch in micro_batches:
            batch["reference_logprobs"] = self._whole("reference", batch, "logprobs", token_logprobs)
            values = self._whole("critic", batch, "values", summed_loss)
            batch["advantages"] = (batch["returns"] - values) * batch["is_target"]
        for name in ("reference", "critic"):
            self.networks[name].release()
        return micro_batches

    def fingerprint(self):
        return "text"

    def state(self, progress):
        return {"read": rows_read(self.plan, self.manifests, progress)}

    def validate(self, progress):
        return {}


def work(rank: int, config, kill_at: int | None) -> int:
    torch.set_num_threads(1)
    original, step = loop.train_step, 0

    def train_step(*arguments):
        nonlocal step
        step += 1
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    loop.train_step = train_step
    return run(config, TinyReinforcement)


def rows(folder: Path) -> list[dict]:
    """What each step computed."""
    names = ("step", "loss", "grad_norm", "loss/critic", "grad_norm/critic")
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in names} for row in found if "loss" in row]


def contents(folder: Path) -> dict[str, str]:
    """Hashes of the tensors of the last checkpoint."""
    return training_kills.contents(SimpleNamespace(checkpoint_folder=folder), max(published_steps(folder)))


def main() -> None:
    with folder_with_source() as (base, source):

        def train(label: str, ranks: int, degrees: dict, kill_at: int | None = None) -> list[int]:
            config = small_config(
                source, base / label, parallelism=degrees, validation={"enable": False},
                training={"steps": STEPS, "global_batch_size": 8, "local_batch_size": 2},
                checkpoint={"interval": SAVED, "async_mode": "disabled"}, model={"num_key_value_heads": 2},
            )  # fmt: skip
            log = base / f"log-{label}-"
            children = start_ranks(ranks, log, lambda rank: work(rank, config, kill_at))
            codes = await_ranks(children)
            if kill_at is None and any(codes):
                raise SystemExit("".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(ranks)))
            return codes

        def run(label: str) -> None:
            row = {"name": label}
            if label == "killed":
                row["codes"] = train(label, *LAYOUTS[KILLED], kill_at=KILLED_AT)
                row["saved"] = published_steps(base / label / "checkpoint")
            train(label, *LAYOUTS.get(label, LAYOUTS[KILLED]))
            print(json.dumps(row | {"rows": rows(base / label)}), flush=True)

        in_halves([*LAYOUTS, "killed"], run)
        expected, resumed = (contents(base / label / "checkpoint") for label in (KILLED, "killed"))
        different = sorted(n for n in expected.keys() | resumed.keys() if expected.get(n) != resumed.get(n))
        print(json.dumps({"name": "tensors", "all": sorted(expected), "different": different}), flush=True)


if __name__ == "__main__":
    main()
