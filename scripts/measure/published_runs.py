"""Runs that others measured and published, read for the planner: the repository's table, or a folder of configs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import tomli

from glm46.config.loader import config_from, load_config
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.run_cost import RunCost, run_cost
from glm46.operate.estimate.target_cluster import BLACKWELL, Efficiencies, TargetCluster, powered_shares
from glm46.run.plan import Plan, resolve_plan

TABLE = Path(__file__).resolve().parents[2] / "tests/unit/operate/estimate/published_runs.toml"
"""The runs of the repository, with their sources."""
Shares = dict[str, float]
"""Some of `Efficiencies`, by name."""
_COMMON: dict[str, dict[str, Any]] = {
    "data": {"sources": [{"name": "text", "path": "data/text", "weight": 1.0}]},
    "optimizer": {"name": "AdamW", "lr": 1e-4},
    "lr_scheduler": {"warmup_tokens": 0},
    "compile": {"enable": True},
}
"""Sections of all runs of the table."""
_TRAINING = {
    "steps": 1000,
    "dtype": "float32",
    "mixed_precision_param": "bfloat16",
    "mixed_precision_reduce": "float32",
}


@dataclass(frozen=True)
class Replay:
    """A published run and its plans."""

    name: str
    gpus: int
    gpu: str
    """As `plan --gpu` takes it."""
    tokens_per_second: float | None
    """Published for each GPU."""
    tflops: float | None
    """Published for each GPU: FLOPs of the model."""
    config: RunConfig
    is_further: bool = False
    """No share was chosen on this run."""

    @cached_property
    def cluster(self) -> TargetCluster:
        gpu = accelerator_of(self.gpu)
        return TargetCluster(gpu, self.gpus, gpu.host_gpus, efficiencies=Efficiencies.assumed(gpu))

    @cached_property
    def plan(self) -> Plan:
        return resolve_plan(self.config, self.gpus, host_ranks=self.cluster.host_ranks)

    @property
    def generation(self) -> str:
        """The GPU generation whose shares the plan takes."""
        return "Blackwell" if int(self.cluster.gpu.compute_capability) == 10 else "Hopper"

    @property
    def crosses_nodes(self) -> bool:
        """Tokens leave their node on the way to experts."""
        return self.plan.layout.ep > max(self.cluster.gpus_per_node, self.cluster.gpu.link_domain)

    @cached_property
    def _costs(self) -> dict[tuple, RunCost]:
        return {}

    def _efficiencies(self, shares: Shares) -> Efficiencies:
        if not shares:
            return self.cluster.efficiencies
        if self.generation == "Hopper":
            return replace(Efficiencies(), **shares)
        return powered_shares(replace(BLACKWELL, **shares), self.cluster.gpu)

    def cost(self, exchange: str = "own", shares: Shares | None = None) -> RunCost:
        """The planned cost.

        Args:
            exchange: how tokens travel, as `plan --exchange`.
            shares: other shares for the generation of the GPU.
        """
        key = (exchange, *(shares or {}).items())
        if key not in self._costs:
            cluster = replace(self.cluster, efficiencies=self._efficiencies(shares or {}), exchange=exchange)
            self._costs[key] = run_cost(self.plan, cluster)
        return self._costs[key]

    def published_speed(self) -> float:
        """Tokens per second of a GPU."""
        if self.tokens_per_second:
            return self.tokens_per_second
        assert self.tflops is not None
        cost = self.cost()
        return self.tflops * 1e12 / (cost.flops / cost.tokens)

    def planned_speed(self, exchange: str = "own", shares: Shares | None = None) -> float:
        """Tokens per second of a GPU."""
        return self.cost(exchange, shares).tokens_per_second / self.gpus

    def ratio(self, exchange: str = "own", shares: Shares | None = None) -> float:
        """Planned time over published time."""
        return self.published_speed() / self.planned_speed(exchange, shares)

    def is_inside(self, shares: Shares | None = None) -> bool:
        """The published speed lies in the range that the plan prints."""
        low, high, _ = self.cost("own", shares).spread
        return low <= 1 / self.ratio("own", shares) <= high


def read_folder(folder: Path) -> list[Replay]:
    """The runs of a folder with `runs.json` and one config for each run."""
    replays = []
    for run in json.loads((folder / "runs.json").read_text()):
        config = load_config(folder / f"{run['name']}.toml", world_size=run["gpus"])
        speed = run.get("tokens_per_second_per_gpu")
        replays.append(Replay(run["name"], run["gpus"], run["gpu"], speed, run.get("tflops_per_gpu"), config))
    return replays


def read_table(file: Path = TABLE) -> list[Replay]:
    """The runs of a table like that of the repository."""
    table = tomli.loads(file.read_text())
    replays = []
    for run in table["runs"]:
        config = config_from(_sections(run, table["models"]))
        gpu = table["gpus"].get(run["gpu"], run["gpu"])
        speed = run.get("tokens_per_second")
        is_further = run.get("further", False)
        replays.append(Replay(run["name"], run["gpus"], gpu, speed, run.get("tflops"), config, is_further))
    return replays


def read_replays(path: Path) -> list[Replay]:
    """The runs of a folder or of a table."""
    return read_folder(path) if path.is_dir() else read_table(path)


def _sections(run: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The sections of the config of a run of the table."""
    shape = {**models[run["model"]], "num_nextn_predict_layers": run.get("prediction_layers", 0)}
    sections = {
        **_COMMON,
        "model": {"flavor": "GLM-4.5", "shape": shape},
        "training": _TRAINING | run["training"],
        "parallelism": run["parallelism"],
        "activation_checkpoint": {"mode": run.get("recompute", "none")},
    }
    if "float8" in run:
        sections["float8"] = run["float8"]
    return sections


def machine_pairs(replays: Sequence[Replay]) -> list[tuple[Replay, Replay]]:
    """Pairs of runs of one model on two kinds of GPU, the slower one first; both of them with FP8, or both without.

    The runs also have the same length, and not the same published speed.
    """
    pairs = []
    for first, second in combinations(replays, 2):
        kinds = [
            (each.plan.shape, each.config.training.seq_len, each.config.float8.recipe_name is None)
            for each in (first, second)
        ]
        if kinds[0] != kinds[1] or first.cluster.gpu == second.cluster.gpu:
            continue
        pairs.append((first, second) if first.published_speed() < second.published_speed() else (second, first))
    return pairs
