"""Estimates times of kernels by a roofline, and of collectives by their links."""

from collections.abc import Iterable, Mapping

from glm46.operate.estimate.kernels import Work
from glm46.operate.estimate.target_cluster import TargetCluster, groups
from glm46.operate.estimate.traffic import MUON, Traffic
from glm46.run.plan import Plan

_FP32_SHARE = 1 / 15
"""Share of the BF16 peak that FP32 products reach without tensor cores: 67 of 989 TFLOP/s on an H100, 19.5 of 312 on an
A100."""
_TENSOR_CORES = 7.0
"""Lowest compute capability with tensor cores. A GPU described without a capability has its peak in the used type."""
_UPDATE_BYTES = {"muon": 28, "adamw": 40}
"""Bytes read and written per element by norm, clipping and update in FP32: gradient three times, states and weight
twice."""


class Cost(dict[str, float]):
    """Seconds by cause; 0 for a missing cause."""

    def __missing__(self, cause: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float]) -> None:
        """Add the seconds of another cost."""
        for cause, seconds in other.items():
            self[cause] += seconds

    @property
    def seconds(self) -> float:
        return sum(self.values())

    def times(self, factor: float) -> "Cost":
        """Return the cost with all seconds multiplied by a factor."""
        return Cost({cause: factor * seconds for cause, seconds in self.items()})


class Roofline:
    """Times of kernels and collectives on one cluster, for one compute type and mesh."""

    def __init__(self, cluster: TargetCluster, plan: Plan):
        gpu = cluster.gpu
        share = cluster.efficiencies
        is_slow = plan.config.training.mixed_precision_param == "float32" and gpu.compute_capability >= _TENSOR_CORES
        self._share = share
        self._launch = share.launch_seconds
        self._call = share.call_seconds
        self._bf16 = gpu.bf16_flops * (_FP32_SHARE if is_slow else 1)
        self._fp8 = gpu.fp8_flops
        self._memory = gpu.memory_bandwidth * share.memory
        self._links = {axis: cluster.link(*group) for axis, group in groups(plan).items()}
        self.overlap = share.overlap
        self.host_bytes_per_second = share.host_bytes_per_second
        self.published_exchange = cluster.exchange == "deepep" and plan.expert_levels is not None
        """True if tokens are exchanged as `TargetCluster.exchange` states, not as the run sends them."""
        # Published benchmarks force equal loads of experts.
        self._imbalance = share.imbalance if plan.layout.ep > 1 and not self.published_exchange else 1.0
        self._state_place = "host"
        self._state_bytes_per_second = share.host_bytes_per_second
        if plan.config.optimizer.state_offload == "nvme":
            # States pass through a ring in host memory, which uses both links at once.
            self._state_place = "disk"
            self._state_bytes_per_second = min(share.host_bytes_per_second, share.disk_bytes_per_second)

    def kernels(self, work: Iterable[Work]) -> Cost:
        """Return the seconds of consecutive kernels by kind, at least the time in which the host launches them."""
        cost = Cost()
        launched = 0.0
        for item in work:
            cost[item.kind] += self.kernel(item)
            launched += item.kernels * self._launch
        waited = launched - cost.seconds
        return cost if waited <= 0 else Cost({**cost, "launches": waited})

    def kernel(self, work: Work) -> float:
        """Return the seconds of one kernel."""
        moved = work.nbytes / self._memory
        if work.kind == "memory":
            return moved
        # Published training stacks have faster grouped products in FP8 than this product.
        are_own_experts = work.kind == "experts" and not self.published_exchange
        fp8_share = self._share.fp8_experts if are_own_experts else self._share.fp8
        peak = self._fp8 * fp8_share if work.in_fp8 and self._fp8 > self._bf16 else self._bf16
        share: float = getattr(self._share, work.kind)
        if work.rows:  # the share grows with the rows, and is half of its limit at `<kind>_rows` of them
            share *= work.rows / (work.rows + getattr(self._share, f"{work.kind}_rows"))
        computed = max(work.flops / (peak * share), moved)
        return computed * (self._imbalance if work.kind == "experts" else 1.0)

    def update(self, elements: dict[str, int], products: float, exchanges: list[Traffic], offloaded: float) -> Cost:
        """Return the seconds of the optimizer.

        Args:
            elements: updated elements, by optimizer.
            products: FLOPs of Newton-Schulz iterations in BF16.
            exchanges: Muon's exchanges, which its products hide except for the first one of matrices and the last one
                of updates (`compute/optim/muon_step.py`): with few buckets that is most of them.
            offloaded: bytes of states in host memory or in a file; they are copied in and out while the update runs.
        """
        moved = sum(_UPDATE_BYTES[name] * count for name, count in elements.items()) / self._memory
        computed = products / (self._bf16 * self._share.products)
        sent = sum(map(self.traffic, exchanges))
        calls = sum(exchange.calls for exchange in exchanges)
        waited = max(sent - computed, 2 * sent / calls) if calls else 0.0
        cost = Cost({"optimizer": moved + computed})
        copied = offloaded / self._state_bytes_per_second
        cost.add({"waiting for Muon's matrices": waited} if waited else {})
        cost.add({f"waiting for the {self._state_place}": copied - cost.seconds} if copied > cost.seconds else {})
        return cost

    def copies(self, traffic: Traffic) -> float:
        """Return the seconds of FSDP2's kernels that split gathered weights, or concatenate gradients."""
        return 2 * traffic.nbytes / self._memory

    def traffic(self, traffic: Traffic) -> float:
        """Return the seconds of the collectives of one kind."""
        link = self._links[traffic.axis]
        others = traffic.ranks - 1
        calls = traffic.calls * self._call
        if traffic.kind == "send" or traffic.what == MUON:
            return calls + traffic.nbytes / link.exchange_bytes_per_second
        sent = traffic.nbytes * others / traffic.ranks
        if traffic.kind == "all_to_all":
            return calls + sent / link.exchange_bytes_per_second * self._imbalance
        return calls + sent * (2 if traffic.kind == "all_reduce" else 1) / link.bytes_per_second
