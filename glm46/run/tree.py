"""Tree over ranks, along which they sum small numbers on the host. Ranks of one node are close to each other."""

WIDTH = 4
"""Number of ranks in a tree of one level. A rank has up to three children on each of its levels."""


def neighbours(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """Return the parent of a rank, None for rank 0, and its children, smallest subtrees first."""
    children: list[int] = []
    stride = 1
    while stride < ranks and rank % (WIDTH * stride) == 0:
        children += range(rank + stride, min(rank + WIDTH * stride, ranks), stride)
        stride *= WIDTH
    # In base WIDTH, the parent has 0 in place of the rank's lowest digit that is not 0.
    parent = None if rank == 0 else rank - rank // stride % WIDTH * stride
    return parent, children
