"""Prices per GPU hour, in dollars: a table to edit. Prices change by a third in half a year."""

from typing import NamedTuple

from glm46.engine.observe.peaks import Accelerator

PRICES_DATE = "May 2026"


class GpuPrice(NamedTuple):
    """Price of one GPU for one hour; 0 if unknown."""

    on_demand: float
    reserved: float
    """Price with a commitment of one year."""
    spot: float
    """Price of a GPU that can be withdrawn within minutes."""


KINDS = ("on-demand", "reserved", "spot")
PRICES = {
    # On demand: the middle of specialised providers' prices (mercatus-ai.com, cloud GPU pricing, May 2026). Reserved:
    # the one-year index of SemiAnalysis (March 2026). Spot: vast.ai (gridstackhub.ai, 2026).
    "H100": GpuPrice(3.00, 2.35, 1.49),
    "H200": GpuPrice(4.00, 0.0, 0.0),
    "A100": GpuPrice(1.30, 0.0, 0.0),
    # packet.ai, June 2026, the lowest of 26 providers.
    "B200": GpuPrice(3.75, 0.0, 0.0),
}


def price_of(gpu: Accelerator, kind: str) -> float:
    """Return the price of a GPU, of one of `KINDS`.

    Raises:
        ValueError: the table lacks this price; the message lists the available ones.
    """
    prices = dict(zip(KINDS, PRICES.get(gpu.name, GpuPrice(0.0, 0.0, 0.0)), strict=True))
    if not prices[kind]:
        available = [name for name, price in prices.items() if price]
        has = f"has {' and '.join(available)} of {gpu.name}" if available else f"knows none of {gpu.name}"
        raise ValueError(f"{kind}: the table of prices of {PRICES_DATE} {has}; give a number of dollars")
    return prices[kind]
