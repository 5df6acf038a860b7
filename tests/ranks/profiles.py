"""Profile a step on layouts of two ranks; print one JSON object per layout with what the ranks wrote and said.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/profiles.py
"""

import json
from collections.abc import Callable
from itertools import count

import torch

from glm46.engine.observe.profiler import REQUEST_FILE, Profiler
from glm46.operate.launch.train_rank import train
from tests.processes import wait_until
from tests.ranks.forked_ranks import in_halves, run_whole
from tests.small_run import folder_with_source, small_config

LAYOUTS = {
    "fsdp": ({}, "none"),
    "pipeline": ({"pipeline_parallel_degree": 2}, "none"),
    "experts": ({"expert_parallel_degree": 2}, "full"),
    "tensor": ({"tensor_parallel_degree": 2}, "selective"),
    "requested": ({}, "none"),
}
"""Degrees and activation checkpointing."""


def wait_for_request(is_requested: Callable[[Profiler], bool] = Profiler.is_requested) -> Callable[[Profiler], bool]:
    """In place of `Profiler.is_requested` in a short run: the first call waits until the thread has seen the file."""
    calls = count()

    def waiting(profiler: Profiler) -> bool:
        if profiler._request is not None and next(calls) == 0:
            wait_until(profiler._request._is_seen.is_set)
        return is_requested(profiler)

    return waiting


def main() -> None:
    """Two steps on each layout, the second one recorded; six where a file requests it, which the first rank sees."""
    with folder_with_source() as (base, source):

        def run(label: str) -> None:
            degrees, mode = LAYOUTS[label]
            profiling = {"enable_profiling": True, "profile_freq": 2}
            if label == "requested":
                profiling = {}
                (base / label).mkdir()
                (base / label / REQUEST_FILE).touch()
            config = small_config(
                source, base / label, parallelism=degrees, checkpoint={"enable": False},
                activation_checkpoint={"mode": mode}, model={"num_key_value_heads": 2},
                training={"steps": 6 if label == "requested" else 2, "global_batch_size": 8},
                profiling=profiling,
            )  # fmt: skip

            def work(rank: int) -> int:
                torch.set_num_threads(1)
                if label == "requested":
                    Profiler.is_requested = wait_for_request()
                return train(config)

            log = base / f"log-{label}-"
            said = run_whole(2, log, work)
            files = sorted((base / label / "profile_traces").rglob("*.json"))
            tables = [json.loads(file.read_text()) for file in files if file.name.endswith("flops.json")]
            names = [str(file.relative_to(base / label)) for file in files]
            print(json.dumps({"name": label, "said": said, "files": names, "tables": tables}), flush=True)

        in_halves(LAYOUTS, run)


if __name__ == "__main__":
    main()
