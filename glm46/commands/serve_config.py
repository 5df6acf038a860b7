"""``python -m glm46 serve-config``: the commands of inference servers for a folder, after it has been checked."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import VerbParser, above_zero, port, positive, verb_parser
from glm46.operate.estimate.target_cluster import GPUS_PER_NODE


def serve_config_command(argv: Sequence[str]) -> int:
    """Print the commands of vLLM and SGLang, or write scripts of them; returns the exit code.

    Raises:
        UserError: a server would refuse the folder, an option is wrong, or the GPUs cannot hold the model.
    """
    arguments = _parser().parse_args(list(argv))
    from glm46.operate.serving.served_folder import serve_config

    return serve_config(arguments)


def _parser() -> VerbParser:
    parser = verb_parser(
        "serve-config",
        description="Checks a Hugging Face folder as inference servers do, and prints the commands that serve it.",
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder, or hf://owner/name")
    parser.add_argument("--gpus", type=positive, required=True, metavar="N", help="GPUs of the server")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="as of plan; default: H100")
    parser.add_argument("--gpu-memory", type=above_zero, metavar="GIB", help="of a GPU; default: that of --gpu")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=0.9,
        metavar="X",
        help="share that the server takes; default: 0.9",
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, default=GPUS_PER_NODE, metavar="N", help=f"default: {GPUS_PER_NODE}"
    )
    parser.add_argument("--first-node", metavar="ADDRESS", help="of the first node, with several")
    parser.add_argument(
        "--tensor-parallel-degree", type=positive, metavar="N",
        help="GPUs that split each layer, the rest are pipeline stages; default: the most inside a node that hold it",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=positive, metavar="N", help="longest request in tokens; default: all that fits"
    )
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="of keys and values")
    parser.add_argument("--speculative", action="store_true", help="draft with the multi-token prediction layers")
    parser.add_argument("--name", help="of the model in requests; default: that of the folder")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, for this machine only")
    parser.add_argument("--port", type=port, default=8000, help="default: 8000")
    parser.add_argument(
        "--environment", type=Path, metavar="FOLDER", help="Python environment of the server; default: found by PATH"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write a script for each server")
    return parser


def _share(text: str) -> float:
    value = above_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share below 1")
    return value
