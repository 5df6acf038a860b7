"""Lines on standard output that appear without delay, also in a file or a pipe."""

from collections.abc import Callable

LineWriter = Callable[[str], None]
"""Takes one line of the log."""


def print_line(text: str) -> None:
    """Print a line and flush: Python buffers output to a file or a pipe, perhaps for hours."""
    print(text, flush=True)
