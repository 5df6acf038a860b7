"""The tree over ranks along which they add up small numbers on the host. Ranks of one node are close to each other."""

WIDTH = 4
"""Ranks of a tree of one level. A rank has up to three children on each of its levels."""


def neighbours(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """Parent of a rank, None of rank 0, and its children, those with the smallest subtrees first."""
    children: list[int] = []
    stride = 1
    while stride < ranks and rank % (WIDTH * stride) == 0:
        children += range(rank + stride, min(rank + WIDTH * stride, ranks), stride)
        stride *= WIDTH
    return (rank - rank // stride % WIDTH * stride if rank else None), children
