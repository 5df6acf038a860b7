"""Describes a cluster to plan for: GPUs, links, the shares of their peaks that a run reaches, and the price."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from glm46.config.errors import UserError
from glm46.config.faults import show
from glm46.engine.observe.peaks import Accelerator
from glm46.files.file_content import read_json_object
from glm46.run.layout import ExpertLevels
from glm46.run.plan import Plan

STORAGE_GBYTES = 2.0
"""GB/s that a node writes to the checkpoint folder (assumed)."""
NETWORK_GBITS = 400.0
"""Gbit/s of a GPU's own port between nodes: ConnectX-7, one port per GPU."""


_SHARES = ("products", "experts", "attention", "memory", "link", "network", "fp8", "fp8_experts", "overlap")
"""Keys that are shares of a peak or of a time."""


@dataclass(frozen=True)
class Efficiencies:
    """Shares of the peaks that kernels and links reach, and fixed times.

    The defaults are assumptions for Hopper, chosen to match runs that others published (docs/planner.md); `assumed`
    returns those for other generations. `read` replaces them by measured values.
    """

    products: float = 0.68
    """Share of the peak that products of large matrices reach."""
    experts: float = 0.65
    """Share of the peak that grouped products of many rows reach."""
    experts_rows: float = 1536.0
    """Rows per expert at which grouped products reach half of that."""
    fp8: float = 0.70
    """FP8 speed of products, including quantisation, relative to twice their BF16 speed."""
    fp8_experts: float = 0.50
    """The same for grouped products: no faster than in BF16, as measured for torchao with 256 to 2,048 rows per expert
    on an H100 (docs/results/gpu_h100.md). Published runs of Qwen3-30B-A3B with block scales on H100 gained
    1 %."""
    attention: float = 0.28
    """Share of the peak that attention over long documents reaches."""
    attention_rows: float = 300.0
    """Queries of a document, or of a rank's part of it, at which attention reaches half of that: from the speeds of
    FlashAttention-2 with causal masks at 512 to 16,384 tokens on an H100 (arXiv 2407.08608, figure 5)."""
    memory: float = 0.80
    """Share of the memory bandwidth that elementwise kernels reach."""
    link: float = 0.75
    """Share of the bandwidth inside a node that collectives of large tensors reach."""
    network: float = 0.95
    """Share of the bandwidth between nodes that collectives reach."""
    imbalance: float = 1.1
    """Load of the busiest expert-parallel rank relative to the mean."""
    overlap: float = 1.0
    """Share of FSDP2's collectives that overlap with kernels without slowing them. 0 on a CPU, whose cores do both."""
    launch_seconds: float = 5e-6
    """Host time per kernel launch: a layer takes at least this for each of its kernels."""
    call_seconds: float = 25e-6
    """Time of a collective of an empty tensor."""
    host_bytes_per_second: float = 25e9
    """Bandwidth between a GPU and host memory in one direction, while all GPUs of a node copy both ways: half of PCIe
    5.0's."""
    disk_bytes_per_second: float = 2e9
    """Bandwidth between host memory and a GPU's share of its node's local disks in one direction, while all GPUs of the
    node read and write: one PCIe 4.0 drive per GPU, at half of the 4 GB/s that it writes alone."""
    source: str = "assumed"
    """Origin of the values."""
    measured: frozenset[str] = frozenset()
    """Names of the values that are measured, not assumed."""

    def numbers(self) -> dict[str, Any]:
        """Return all values in a form for JSON."""
        return asdict(self) | {"measured": sorted(self.measured)}

    @classmethod
    def assumed(cls, gpu: Accelerator) -> "Efficiencies":
        """Return the assumptions for the generation of a GPU."""
        return powered_shares(BLACKWELL, gpu) if int(gpu.compute_capability) == 10 else cls()

    @classmethod
    def read(cls, path: Path, assumed: "Efficiencies") -> "Efficiencies":
        """Read the values in a file of `scripts/gpu_report.sh`; the others are assumed.

        Raises:
            UserError: the file does not exist, is not JSON, or has an invalid key or value.
        """
        remedy = "give --measured a file of `benchmark rates --json`"
        values = read_json_object(path, remedy)
        valid_keys = [item.name for item in fields(cls) if item.name != "measured"]
        for key, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
            is_number = is_number and (value > 0 or key.endswith("_rows"))
            if key not in valid_keys or not (isinstance(value, str) if key == "source" else is_number):
                rule = "expected source with a text, or a number above 0 (of _rows: 0 or more) of"
                raise UserError(f"{path}: {key:.40} = {show(value)}: {rule} {', '.join(valid_keys[:-1])}; {remedy}")
            if key in _SHARES and value > 1:
                raise UserError(f"{path}: {key} = {show(value)}: a share of a peak is at most 1; {remedy}")
        measured = frozenset(values.keys() - {"source"})
        for key in {"experts", "attention"} & measured:  # the speed holds at the measured size
            values.setdefault(f"{key}_rows", 0.0)
        if missing := [key for key in _SHARES if key not in measured]:
            values["source"] = f"{values.get('source', path)}; assumed: {', '.join(missing)}"
        return replace(assumed, **values, measured=measured)


BLACKWELL = Efficiencies(
    products=0.60,
    experts=0.40,
    experts_rows=512.0,
    attention=0.36,
    memory=0.70,
    fp8=0.95,
    fp8_experts=0.95,
)
"""The assumptions for a GB200; `powered_shares` derives those for other GPUs of its generation.

`fp8` and `fp8_experts` refer to MXFP8: the tensor cores apply the scales of 32 elements, while Hopper applies block
scales with other cores. They are based on releases of 2026, which are also faster in other parts. `experts_rows` is
smaller than on Hopper, because these runs launch one kernel for all experts of a rank.
"""
_BLACKWELL_WATTS = 1200 / 2.5e15
"""Rated power of a GB200 divided by its BF16 peak."""


def powered_shares(blackwell: Efficiencies, gpu: Accelerator) -> Efficiencies:
    """Scale the shares of a GB200 to another GPU of Blackwell's generation.

    Products run at the clock that the rated power allows, so their share of the peak grows with the power per FLOP/s of
    the peak: 1.17 on a GB300, 1.02 on a B300, 0.93 on a B200. A GPU of unknown power keeps the shares of a GB200.
    """
    power = gpu.watts / gpu.bf16_flops / _BLACKWELL_WATTS if gpu.watts else 1.0
    return replace(blackwell, products=blackwell.products * power, experts=blackwell.experts * power)


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a group. A node here is a set of GPUs connected by NVLink."""

    bytes_per_second: float
    """Bytes that each rank sends when all send at the same time in a ring."""
    exchange_bytes_per_second: float
    """Bytes that each rank sends when each sends to all others."""
    inside_node: bool


@dataclass(frozen=True)
class TargetCluster:
    """Equal GPUs in equal nodes. Every GPU has its own port to the network."""

    gpu: Accelerator
    gpus: int
    gpus_per_node: int = 8
    network_gbits: float = NETWORK_GBITS
    """Gbit/s of a GPU's port, in one direction."""
    price: float | None = None
    """Price of one GPU for one hour, in dollars."""
    storage_gbytes: float = STORAGE_GBYTES
    """GB/s that each node writes to storage."""
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    exchange: Literal["own", "deepep"] = "own"
    """How tokens are exchanged with experts. "own" follows the config. "deepep", to compare with published runs, models
    training stacks with DeepEP-class kernels, overlapped micro-batches and equal loads, if tokens travel in levels."""

    @property
    def host_ranks(self) -> int:
        """GPUs per used node; 0 if the last node has fewer than the others."""
        node_gpus = min(self.gpus_per_node, self.gpus)
        return 0 if self.gpus % node_gpus else node_gpus

    def writing_seconds(self, nbytes: float) -> float:
        """Return the seconds in which all nodes together write this many bytes, in equal parts."""
        return nbytes / (max(self.gpus / self.gpus_per_node, 1) * self.storage_gbytes * 1e9)

    def link(self, stride: int, ranks: int) -> Link:
        """Return the link of a group of ranks with a constant distance between neighbours.

        A ring over several nodes leaves a node through the ports of all its members, like NCCL's rings; in an exchange,
        the part for other nodes goes through each rank's own port.
        """
        inside = self.gpu.link_bandwidth * self.efficiencies.link
        domain = max(self.gpus_per_node, self.gpu.link_domain)
        port = self.network_gbits / 8 * 1e9 * self.efficiencies.network
        node_ranks = min(max(domain // stride, 1), ranks)
        if node_ranks == ranks:
            return Link(inside, inside, True)
        away = (ranks - node_ranks) / (ranks - 1)
        return Link(min(inside, port * node_ranks), 1 / (away / port + (1 - away) / inside), False)


def groups(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the distance between neighbours and the number of ranks for each mesh axis, as `build_meshes` creates
    them, and for the tensor-parallel ranks that share a key head."""
    layout = plan.layout
    key_heads = plan.shape.num_key_value_heads
    shards = layout.dp_shard * layout.cp
    levels = plan.expert_levels or ExpertLevels(1, layout.ep)
    return {
        "tp": (1, layout.tp),
        "tp_head": (1, max(layout.tp // key_heads, 1)),
        "cp": (layout.tp, layout.cp),
        "ep": (1, layout.ep),
        "ep_hosts": (levels.ranks_per_host, levels.hosts),
        "ep_host": (1, levels.ranks_per_host),
        "shard": (layout.tp, shards),
        "efsdp": (layout.ep, layout.expert_shards),
        "dp_replicate": (layout.tp * shards, layout.dp_replicate),
        "pp": (layout.world_size // layout.pp, layout.pp),
        "stage": (1, layout.world_size // layout.pp),
        "stage_experts": (layout.ep, layout.dp_replicate * layout.expert_shards),
        "world": (1, layout.world_size),
    }
