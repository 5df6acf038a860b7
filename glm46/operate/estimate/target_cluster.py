"""A cluster to plan for: GPUs, the links between them, the shares of their peaks that a run reaches, and the price."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from glm46.config.errors import UserError
from glm46.config.faults import show
from glm46.engine.observe.peaks import Accelerator
from glm46.files.file_content import read_json_object
from glm46.run.layout import ExpertLevels
from glm46.run.plan import Plan

STORAGE_GBYTES = 2.0
"""GB/s that a node writes to the folder of checkpoints, assumed."""
NETWORK_GBITS = 400.0
"""Gbit/s of a GPU's own port between nodes: ConnectX-7, one port per GPU."""


_SHARES = ("products", "experts", "attention", "memory", "link", "network", "fp8", "fp8_experts", "overlap")
"""Keys that are shares of a peak or of a time."""


@dataclass(frozen=True)
class Efficiencies:
    """Shares of the peaks that kernels and links reach, and fixed times.

    The defaults are assumptions for Hopper, chosen on the runs that others published (docs/planner.md); `assumed` has
    those of other generations. `read` takes measured ones.
    """

    products: float = 0.68
    """Of the peak, by products of large matrices."""
    experts: float = 0.65
    """Of the peak, by grouped products of many rows."""
    experts_rows: float = 1536.0
    """Rows of an expert at which grouped products reach half of that."""
    fp8: float = 0.70
    """Of what products reach in FP8, the time to quantise included, over twice their BF16 speed."""
    fp8_experts: float = 0.50
    """The same of grouped products: no faster than in BF16, as torchao's were with 256 to 2,048 rows of an expert on an
    H100 (docs/results/gpu_h100_2026-11-26.md)."""
    attention: float = 0.28
    """Of the peak, by attention over long documents."""
    attention_rows: float = 300.0
    """Queries of a document, or of a rank's part of it, with which attention reaches half of that: from the speeds of
    FlashAttention-2 with causal masks at 512 to 16,384 tokens on an H100 (arXiv 2407.08608, figure 5)."""
    memory: float = 0.80
    """Of the memory's bandwidth, by kernels that compute element by element."""
    link: float = 0.75
    """Of the bandwidth inside a node, by collectives of large tensors."""
    network: float = 0.95
    """Of the bandwidth between nodes."""
    imbalance: float = 1.1
    """Load of the busiest rank that shares experts with others, over the mean."""
    overlap: float = 1.0
    """Of FSDP2's collectives, what runs beside kernels without slowing them. 0 on a CPU, whose cores do both."""
    launch_seconds: float = 5e-6
    """Time of the host for one kernel: a layer takes at least that for each of its kernels."""
    call_seconds: float = 25e-6
    """Time of a collective of an empty tensor."""
    host_bytes_per_second: float = 25e9
    """Between a GPU and host memory in one direction, while all GPUs of a node copy both ways: half of PCIe 5.0's."""
    disk_bytes_per_second: float = 2e9
    """Between host memory and a GPU's share of its node's local disks in one direction, while all GPUs of the node read
    and write: for each GPU one drive on PCIe 4.0, at half of the 4 GB/s that it writes alone."""
    source: str = "assumed"
    """Where the values come from."""
    measured: frozenset[str] = frozenset()
    """Names of those that are not assumed."""

    def numbers(self) -> dict:
        """All values as JSON has them."""
        return asdict(self) | {"measured": sorted(self.measured)}

    @classmethod
    def assumed(cls, gpu: Accelerator) -> "Efficiencies":
        """The assumptions for the generation of a GPU."""
        return _BLACKWELL if int(gpu.compute_capability) == 10 else cls()

    @classmethod
    def read(cls, path: Path, assumed: "Efficiencies") -> "Efficiencies":
        """Read the values that a file of `scripts/gpu_report.sh` states; the others are assumed.

        Raises:
            UserError: the file does not exist, is not JSON, or has a key or value that cannot be.
        """
        remedy = "give --measured a file of `benchmark rates --json`"
        values, known = read_json_object(path, remedy), [each.name for each in fields(cls) if each.name != "measured"]
        for key, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
            is_number = is_number and (value > 0 or key.endswith("_rows"))
            if key not in known or not (isinstance(value, str) if key == "source" else is_number):
                rule = "expected source with a text, or a number above 0 (of _rows: 0 or more) of"
                raise UserError(f"{path}: {key:.40} = {show(value)}: {rule} {', '.join(known[:-1])}; {remedy}")
            if key in _SHARES and value > 1:
                raise UserError(f"{path}: {key} = {show(value)}: a share of a peak is at most 1; {remedy}")
        measured = frozenset(values.keys() - {"source"})
        for key in {"experts", "attention"} & measured:  # as it is at the measured size
            values.setdefault(f"{key}_rows", 0.0)
        if missing := [key for key in _SHARES if key not in measured]:
            values["source"] = f"{values.get('source', path)}; assumed: {', '.join(missing)}"
        return replace(assumed, **values, measured=measured)


_BLACKWELL = Efficiencies(products=0.60, experts=0.40, attention=0.25, memory=0.60)
"""Shares of their peaks that kernels reach on B200, B300, GB200 and GB300."""


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a group. A node here is what NVLink connects."""

    bytes_per_second: float
    """That each rank sends when all send at once in a ring."""
    exchange_bytes_per_second: float
    """That each rank sends when each sends to all others."""
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
    """Of one GPU for one hour, in dollars."""
    storage_gbytes: float = STORAGE_GBYTES
    """GB/s that each node writes."""
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    exchange: Literal["own", "deepep"] = "own"
    """The way of tokens to experts: that of the config, or, to compare with published runs, that of training stacks
    with DeepEP-class kernels, an overlap of micro-batches and equal loads, where tokens travel in levels."""

    @property
    def host_ranks(self) -> int:
        """GPUs of each node that has some; 0 if the last one has fewer than the others."""
        of_node = min(self.gpus_per_node, self.gpus)
        return 0 if self.gpus % of_node else of_node

    def writing_seconds(self, nbytes: float) -> float:
        """Time in which all nodes write so many bytes together, each its part."""
        return nbytes / (max(self.gpus / self.gpus_per_node, 1) * self.storage_gbytes * 1e9)

    def link(self, stride: int, ranks: int) -> Link:
        """The link of a group of ranks with a constant distance between neighbours.

        A ring of ranks of several nodes leaves a node through the ports of all its members, as NCCL's rings do; in an
        exchange the part for other nodes goes through each rank's own port.
        """
        inside, domain = self.gpu.link_bandwidth * self.efficiencies.link, max(self.gpus_per_node, self.gpu.link_domain)
        port = self.network_gbits / 8 * 1e9 * self.efficiencies.network
        of_node = min(max(domain // stride, 1), ranks)
        if of_node == ranks:
            return Link(inside, inside, True)
        away = (ranks - of_node) / (ranks - 1)
        return Link(min(inside, port * of_node), 1 / (away / port + (1 - away) / inside), False)


def groups(plan: Plan) -> dict[str, tuple[int, int]]:
    """The distance between neighbours and the number of ranks of each axis of the mesh, as `build_meshes` has them, and
    of the tensor-parallel ranks that share one of the key heads."""
    layout, key_heads = plan.layout, plan.shape.num_key_value_heads
    shards, levels = layout.dp_shard * layout.cp, plan.expert_levels or ExpertLevels(1, layout.ep)
    return {
        "tp": (1, layout.tp),
        "tp_head": (1, max(layout.tp // key_heads, 1)),
        "cp": (layout.tp, layout.cp),
        "ep": (1, layout.ep),
        "ep_hosts": (levels.of_host, levels.hosts),
        "ep_host": (1, levels.of_host),
        "shard": (layout.tp, shards),
        "efsdp": (layout.ep, layout.expert_shards),
        "dp_replicate": (layout.tp * shards, layout.dp_replicate),
        "pp": (layout.world_size // layout.pp, layout.pp),
        "stage": (1, layout.world_size // layout.pp),
        "stage_experts": (layout.ep, layout.dp_replicate * layout.expert_shards),
        "world": (1, layout.world_size),
    }
