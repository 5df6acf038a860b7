"""The one table of hardware peaks.

Values are the vendors' numbers for dense BF16 products with FP32 accumulation (no structured sparsity). Sources: NVIDIA
data sheets of each product; consumer cards: the architecture white papers' tensor figures with FP32 accumulation.
"""

from dataclasses import dataclass

_GIB = 1024**3


@dataclass(frozen=True)
class Accelerator:
    """One model of accelerator."""

    name: str
    """Part of the name that the driver reports."""
    bf16_flops: float
    """Dense BF16 FLOP/s."""
    memory_bytes: int
    compute_capability: float
    """Of CUDA: products in FP8 need 8.9, those of routed experts 9.0 or 10.x (`torch._scaled_grouped_mm`)."""


# The first entry whose words all occur in the driver's name wins, so longer names come before shorter ones.
ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("GB300", 2.5e15, 279 * _GIB, 10.3),
    Accelerator("B300", 2.25e15, 268 * _GIB, 10.3),
    Accelerator("GB200", 2.5e15, 184 * _GIB, 10.0),
    Accelerator("B200", 2.25e15, 179 * _GIB, 10.0),
    Accelerator("GH200", 989.4e12, 95 * _GIB, 9.0),
    Accelerator("H200", 989.4e12, 140 * _GIB, 9.0),
    Accelerator("H100 NVL", 835.5e12, 93 * _GIB, 9.0),
    Accelerator("H100 PCIe", 756e12, 79 * _GIB, 9.0),
    Accelerator("H100", 989.4e12, 79 * _GIB, 9.0),
    Accelerator("H800", 989.4e12, 79 * _GIB, 9.0),
    Accelerator("H20", 148e12, 95 * _GIB, 9.0),
    Accelerator("A100 40GB", 312e12, 39 * _GIB, 8.0),
    Accelerator("A100", 312e12, 79 * _GIB, 8.0),
    Accelerator("A800", 312e12, 79 * _GIB, 8.0),
    Accelerator("L40S", 362e12, 44 * _GIB, 8.9),
    Accelerator("L40", 181e12, 44 * _GIB, 8.9),
    Accelerator("L4", 121e12, 22 * _GIB, 8.9),
    Accelerator("A40", 149.7e12, 44 * _GIB, 8.6),
    Accelerator("A30", 165e12, 23 * _GIB, 8.0),
    Accelerator("A10G", 70e12, 22 * _GIB, 8.6),
    Accelerator("A10", 125e12, 22 * _GIB, 8.6),
    Accelerator("RTX 6000 Ada", 364.2e12, 47 * _GIB, 8.9),
    Accelerator("RTX A6000", 154.8e12, 47 * _GIB, 8.6),
    Accelerator("RTX 5090", 209.5e12, 31 * _GIB, 12.0),
    Accelerator("RTX 4090", 165.2e12, 23 * _GIB, 8.9),
    Accelerator("RTX 3090", 71e12, 23 * _GIB, 8.6),
)


def find_accelerator(name: str) -> Accelerator | None:
    """The entry for a name from the driver, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    words = name.replace("-", " ").lower().split()
    for accelerator in ACCELERATORS:
        if all(word in words for word in accelerator.name.lower().split()):
            return accelerator
    return None
