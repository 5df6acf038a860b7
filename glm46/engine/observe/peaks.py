"""Table of hardware peaks.

Values are vendor numbers for dense BF16 products with FP32 accumulation (no structured sparsity), for the memory and
for the links between the GPUs of a node. Sources: NVIDIA data sheets of each product; consumer cards: the
architecture white papers' tensor figures with FP32 accumulation.
"""

from dataclasses import dataclass
from difflib import get_close_matches

_GIB = 1024**3
_FP8_CAPABILITY = 8.9
"""Lowest compute capability with products in FP8, which are twice as fast as in BF16 on all GPUs of the table."""


@dataclass(frozen=True)
class Accelerator:
    """One model of accelerator."""

    name: str
    """Part of the name that the driver reports."""
    bf16_flops: float
    """Dense BF16 FLOP/s."""
    memory_bytes: int
    compute_capability: float
    """CUDA compute capability: FP8 products need 8.9, FP8 routed experts 9.0 or 10.x (`torch._scaled_grouped_mm`)."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a GPU sends to the others of its node, in one direction, over NVLink or else PCIe."""
    host_gpus: int = 8
    """GPUs of a host."""
    link_domain: int = 1
    """GPUs that NVLink connects over several hosts; 1 if it ends at the host."""
    watts: float = 0.0
    """Rated power of the GPU; 0 for a GPU that is not in the table."""

    @property
    def fp8_flops(self) -> float:
        """Dense FP8 FLOP/s; equal to `bf16_flops` on a GPU without FP8 products."""
        return self.bf16_flops * (2 if self.compute_capability >= _FP8_CAPABILITY else 1)


_NVL72 = 4, 72
"""GPUs of a host and of a rack: 18 trays of four GPUs under one NVLink switch."""

# The first entry whose words all occur in the driver's name wins, so longer names come before shorter ones.
ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("GB300", 2.5e15, 279 * _GIB, 10.3, 8e12, 900e9, *_NVL72, 1400.0),
    Accelerator("B300", 2.25e15, 268 * _GIB, 10.3, 8e12, 900e9, watts=1100.0),
    Accelerator("GB200", 2.5e15, 184 * _GIB, 10.0, 8e12, 900e9, *_NVL72, 1200.0),
    Accelerator("B200", 2.25e15, 179 * _GIB, 10.0, 8e12, 900e9, watts=1000.0),
    Accelerator("GH200", 989.4e12, 95 * _GIB, 9.0, 4e12, 450e9, watts=900.0),
    Accelerator("H200", 989.4e12, 140 * _GIB, 9.0, 4.8e12, 450e9, watts=700.0),
    Accelerator("H100 NVL", 835.5e12, 93 * _GIB, 9.0, 3.9e12, 300e9, watts=400.0),
    Accelerator("H100 PCIe", 756e12, 79 * _GIB, 9.0, 2e12, 64e9, watts=350.0),
    Accelerator("H100", 989.4e12, 79 * _GIB, 9.0, 3.35e12, 450e9, watts=700.0),
    Accelerator("H800", 989.4e12, 79 * _GIB, 9.0, 3.35e12, 200e9, watts=700.0),
    Accelerator("H20", 148e12, 95 * _GIB, 9.0, 4e12, 450e9, watts=400.0),
    Accelerator("A100 40GB", 312e12, 39 * _GIB, 8.0, 1.555e12, 300e9, watts=400.0),
    Accelerator("A100", 312e12, 79 * _GIB, 8.0, 2.039e12, 300e9, watts=400.0),
    Accelerator("A800", 312e12, 79 * _GIB, 8.0, 2.039e12, 200e9, watts=400.0),
    Accelerator("L40S", 362e12, 44 * _GIB, 8.9, 864e9, 32e9, watts=350.0),
    Accelerator("L40", 181e12, 44 * _GIB, 8.9, 864e9, 32e9, watts=300.0),
    Accelerator("L4", 121e12, 22 * _GIB, 8.9, 300e9, 32e9, watts=72.0),
    Accelerator("A40", 149.7e12, 44 * _GIB, 8.6, 696e9, 32e9, watts=300.0),
    Accelerator("A30", 165e12, 23 * _GIB, 8.0, 933e9, 32e9, watts=165.0),
    Accelerator("A10G", 70e12, 22 * _GIB, 8.6, 600e9, 32e9, watts=300.0),
    Accelerator("A10", 125e12, 22 * _GIB, 8.6, 600e9, 32e9, watts=150.0),
    Accelerator("RTX 6000 Ada", 364.2e12, 47 * _GIB, 8.9, 960e9, 32e9, watts=300.0),
    Accelerator("RTX A6000", 154.8e12, 47 * _GIB, 8.6, 768e9, 32e9, watts=300.0),
    Accelerator("RTX 5090", 209.5e12, 31 * _GIB, 12.0, 1.792e12, 64e9, watts=575.0),
    Accelerator("RTX 4090", 165.2e12, 23 * _GIB, 8.9, 1.008e12, 32e9, watts=450.0),
    Accelerator("RTX 3090", 71e12, 23 * _GIB, 8.6, 936e9, 32e9, watts=350.0),
)

_UNITS = {"bf16": 1e12, "memory": float(_GIB), "bandwidth": 1e9, "link": 1e9, "capability": 1.0}
"""Keys of a described accelerator, and the unit of each: TFLOP/s, GiB, GB/s, GB/s."""
_EXAMPLE = "MI300X:bf16=1307,memory=191,bandwidth=5300,link=448"


def find_accelerator(name: str) -> Accelerator | None:
    """Return the entry for a name from the driver, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    words = name.replace("-", " ").lower().split()
    for accelerator in ACCELERATORS:
        if all(word in words for word in accelerator.name.lower().split()):
            return accelerator
    return None


def accelerator_of(text: str) -> Accelerator:
    """Return the accelerator that a user names, or describes as
    ``NAME:bf16=TFLOP/s,memory=GiB,bandwidth=GB/s,link=GB/s``.

    ``capability`` is optional; a GPU described without it is planned without FP8 products. A
    described GPU gets hosts and rated power from the GPU of the table whose name is a prefix of its own.

    Raises:
        ValueError: the name is unknown, or the description is wrong; the message lists allowed values.
    """
    name, described, rest = text.partition(":")
    if described:
        return _described(name.strip(), rest)
    if (match := find_accelerator(text)) is not None:
        return match
    names = [accelerator.name for accelerator in ACCELERATORS]
    folded = {name.lower(): name for name in names}
    nearest = [folded[match] for match in get_close_matches(text.lower(), folded, 3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise ValueError(
        f"{text!r} is not in the table of GPUs: {hint}Known: {', '.join(names)}. Or describe it, such as {_EXAMPLE} "
        "(dense BF16 TFLOP/s, GiB, GB/s of the memory, GB/s that a GPU sends to the others of its node)"
    )


def _described(name: str, text: str) -> Accelerator:
    values = {"capability": 0.0}
    for part in text.split(","):
        key, _, number = (piece.strip() for piece in part.partition("="))
        try:
            values[key] = float(number) * _UNITS[key]
        except (KeyError, ValueError):
            raise ValueError(f"{part!r}: expected KEY=NUMBER with a key of {', '.join(_UNITS)}: {_EXAMPLE}") from None
        if not 0 < values[key] < float("inf"):
            raise ValueError(f"{part!r}: the number must be greater than 0")
    missing = _UNITS.keys() - values
    if missing or not name:
        what = f"lacks {', '.join(sorted(missing))}" if missing else "has no name"
        raise ValueError(f"the description of the GPU {what}: {_EXAMPLE}")
    numbers = values["bf16"], int(values["memory"]), values["capability"], values["bandwidth"], values["link"]
    match = next((row for row in ACCELERATORS if name.lower().startswith(row.name.lower())), None)
    if match is None:
        return Accelerator(name, *numbers)
    return Accelerator(name, *numbers, match.host_gpus, match.link_domain, match.watts)
