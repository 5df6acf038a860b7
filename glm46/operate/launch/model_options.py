"""Options of verbs that run a model on several ranks. Needs no pydantic, so that a help is fast."""

import argparse
from pathlib import Path

from glm46.config.options import positive

PROCESSES = "NGPU"
"""Variable with the number of processes, which run_train.sh reads too."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` or ``--checkpoint``, ``--adapter``, ``--tokenizer``, ``--dtype``, ``--device``, ``--nproc`` and
    the degrees of parallelism."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="Hugging Face folder, or hf://owner/name of the hub")
    source.add_argument("--checkpoint", type=Path, help="step folder, such as …/checkpoint/step-000100")
    parser.add_argument(
        "--adapter", type=Path, help="PEFT folder, of LoRA or DoRA, that is added to the weights, or hf://…"
    )
    parser.add_argument("--tokenizer", help="tokenizer file or folder, or hf://…; default: the model's own")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--device", help="such as cpu or cuda:0; default: a GPU where there is one")
    add_nproc(parser)
    for name, meaning in (
        ("tensor", "share each matrix"),
        ("pipeline", "hold different layers"),
        ("expert", "share the experts, borrowed from the processes of a pipeline stage"),
    ):
        parser.add_argument(
            f"--{name}-parallel-degree", type=positive, default=1, metavar="N", help=f"processes that {meaning}"
        )


def add_nproc(parser: argparse.ArgumentParser) -> None:
    """Add ``--nproc``."""
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help=f"processes, one for each GPU; default: {PROCESSES}, or 1"
    )
