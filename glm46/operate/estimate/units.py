"""Formats numbers with units for a plan, with at least three digits."""

import math


def amount(value: float) -> str:
    """Format a number with at least three digits: ``51.04``, ``0.0164``, ``1,234.00``."""
    decimals = 2 if value == 0 or value >= 1 else 2 - math.floor(math.log10(value))
    return f"{value:,.{decimals}f}"


def binary_size(size: float, like: float = 0) -> str:
    """Format bytes of memory: ``13.9 GiB``, ``1.25 MiB``, ``0 B``.

    Args:
        like: a larger size, such as a total, whose unit is used if the value stays visible in it.
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit or (like >= unit and (size == 0 or size >= 0.01 * unit)):
            return f"{size / unit:,.{2 if size < 10 * unit else 1}f} {name}"
    return f"{size:,.0f} B"


def decimal_size(size: float) -> str:
    """Format bytes of files: ``2.9 TB``, ``116.3 MB``, ``12.4 kB``, ``8 B``."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"


def duration(seconds: float) -> str:
    """Format the time of a step or a file: ``1.233 s``, ``58.17 ms``, ``3.10 µs``."""
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:,.2f} µs"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return seconds and name of the largest unit that does not exceed a run's time."""
    units = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))
    return next((unit for unit in units if seconds >= unit[0]), (1.0, "s"))


def run_time(seconds: float) -> str:
    """Format the time of a run: ``59.16 days``, ``3.50 h``, ``12.00 min``, ``0.628 s``."""
    unit, name = time_unit(seconds)
    return f"{amount(seconds / unit)} {name}"


def flops_text(flops: float) -> str:
    """Format floating-point operations per token: ``197.124 GFLOP``, ``29.011 MFLOP``."""
    unit, name = (1e9, "GFLOP") if flops >= 1e9 or flops == 0 else (1e6, "MFLOP") if flops >= 1e6 else (1e3, "kFLOP")
    return f"{flops / unit:,.3f} {name}"


def token_count(tokens: int) -> str:
    """Format a number of tokens in few characters: ``15T``, ``4.1943M``, ``1.024k``."""
    for size, unit in ((10**15, "P"), (10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if tokens >= size:
            return f"{tokens / size:.5g}{unit}"
    return f"{tokens:,}"


def plan_line(name: str, value: str, remark: str = "") -> str:
    """Format a value of a plan with its name and a remark."""
    return f"{name:<35} {value:>22}  {remark}".rstrip()


def aligned(rows: list[tuple[str, ...]], gap: str = "  ") -> list[str]:
    """Format the rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
