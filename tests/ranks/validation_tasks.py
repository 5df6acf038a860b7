"""Validate all tasks on several layouts; print one JSON object per layout with the first validation row.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/validation_tasks.py

The weights of this row are the initial ones, which are equal on every layout.
"""

import json
from importlib.util import find_spec

import torch

from glm46.tasks.pretrain.task import train
from tests.ranks.forked_ranks import in_halves, run_whole
from tests.small_run import folder_with_source, small_config

LAYOUTS = {
    "one rank": (1, {}), "fsdp": (2, {}), "replicas": (2, {"data_parallel_replicate_degree": 2}),
    "experts": (2, {"expert_parallel_degree": 2}), "tensor": (2, {"tensor_parallel_degree": 2}),
    "context": (2, {"context_parallel_degree": 2}), "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "context and tensor": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}  # fmt: skip
TASKS = [
    # Three rows of 61 tokens: two ranks cannot split the rows evenly, nor a mesh the tokens.
    {"kind": "position", "lengths": [30, 61, 999]},
    {"kind": "needle", "lengths": [50, 64], "samples": 1},
]
# Three documents, which two ranks cannot split evenly; the first of the metrics is a number of the written text.
WRITING = """
task: writing
custom_dataset: !function writing.documents
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: ""
generation_kwargs: {until: ["never"], max_gen_toks: 6, do_sample: false}
process_results: !function writing.number
metric_list: [{metric: number, aggregation: mean, higher_is_better: true}]
"""
WRITING_CODE = """
import zlib
from datasets import Dataset

def documents(**_):
    return {"test": Dataset.from_list([{"text": "def function_%d" % i + "(value):" * i} for i in range(3)])}

def number(document, results):
    return {"number": float(zlib.crc32(results[0].encode()))}
"""


def main() -> None:
    """Train one step on each layout."""
    with folder_with_source() as (base, source):
        tasks = [*TASKS]
        if find_spec("lm_eval"):
            (base / "writing.yaml").write_text(WRITING)
            (base / "writing.py").write_text(WRITING_CODE)
            names = [str(base / "writing.yaml"), "glm46_next_line", "glm46_documentation"]
            tasks.append({"kind": "standard", "names": names, "samples": 3})

        def run(label: str) -> None:
            ranks, degrees = LAYOUTS[label]
            config = small_config(
                source, base / label, parallelism=degrees, validation={"enable": True, "tasks": tasks},
                training={"steps": 1, "global_batch_size": 4}, checkpoint={"enable": False},
                model={"num_key_value_heads": 2},
            )  # fmt: skip

            def work(rank: int) -> int:
                torch.set_num_threads(1)
                return train(config)

            log = base / f"log-{label}-"
            run_whole(ranks, log, work)
            rows = map(json.loads, (base / label / "metrics.jsonl").read_text().splitlines())
            print(json.dumps({"name": label, "row": next(rows)}), flush=True)

        in_halves(LAYOUTS, run)


if __name__ == "__main__":
    main()
