"""A verb on the ranks that the server forked, which see the variables of torchrun."""

from glm46.cli import main


def verb(*argv: str) -> int:
    """On each rank; the exit code."""
    return main(argv)
