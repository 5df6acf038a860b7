"""The options of verbs that run a model: which one, in which type, on which device, on which ranks."""

import argparse
from pathlib import Path

from glm46.operate.launch.ranks import add_rank_options


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` or ``--checkpoint``, ``--adapter``, ``--tokenizer``, ``--dtype``, ``--device`` and the options of
    ranks."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="Hugging Face folder, or hf://owner/name of the hub")
    source.add_argument("--checkpoint", type=Path, help="step folder, such as …/checkpoint/step-000100")
    parser.add_argument(
        "--adapter", type=Path, help="PEFT folder, of LoRA or DoRA, that is added to the weights, or hf://…"
    )
    parser.add_argument("--tokenizer", help="tokenizer file or folder, or hf://…; default: the model's own")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--device", help="such as cpu or cuda:0; default: a GPU where there is one")
    add_rank_options(parser)
