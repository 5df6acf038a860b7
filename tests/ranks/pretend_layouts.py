"""Layouts with the model on a device that refuses what CUDA refuses, each against one process on the CPU; prints JSON.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/pretend_layouts.py 2 tp2-ep2
"""

import json
import sys

from torch.utils._python_dispatch import _disable_current_modes

from glm46.compute.distributed.process import join, leave
from tests import pretend_gpu
from tests.ranks.forked_ranks import run_cases
from tests.ranks.sharded_layouts import LAYOUTS, compare, make_config, run_layout, run_reference


def work(ranks: int, names: list[str]) -> None:
    """On each rank; prints a row per layout."""
    pretend_gpu.install()
    process = join(300)
    for name in names:
        layout = LAYOUTS[ranks][name]
        found = run_layout(process, layout, None)
        with _disable_current_modes():  # all is on the CPU from here on
            row = compare(layout, found, run_reference(make_config(layout), layout))
        if process.is_main:
            print(json.dumps(row), flush=True)
    leave()


def main(ranks: int, *names: str) -> None:
    run_cases(ranks, list(names), lambda some: work(ranks, some), at_once=4)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
