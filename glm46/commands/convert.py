"""``python -m glm46 convert``: checkpoints, Hugging Face folders and adapters, without a model in memory."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import VerbParser, above_zero, verb_parser
from glm46.storage.huggingface.hub import fetch_options
from glm46.storage.huggingface.scheme_names import FP8_NAMES, SCHEME_NAMES
from glm46.storage.huggingface.stored_folder import local_output

_ON_HUB = {"model", "base", "adapter", "tokenizer", "checkpoint", "config"}
"""Options that take an id of the hub."""


def convert_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: input is missing, damaged or does not fit; nothing incomplete is left behind.
    """
    arguments = _parser().parse_args(list(argv))
    fetch_options(arguments, *(_ON_HUB & vars(arguments).keys()))
    from glm46.operate.models.conversions import convert  # torch: refusals come before it

    with local_output(arguments.output) as arguments.output:
        return convert(arguments)


def _parser() -> VerbParser:
    parser = verb_parser("convert")
    kinds = parser.add_subparsers(title="what", metavar="to-hf|from-hf|from-dcp|adapter-to-hf|merge", required=True)
    export = kinds.add_parser("to-hf", help="a step folder, or a Hugging Face folder of another type, as a new one")
    steps = "step folder, such as …/checkpoint/step-000100; or a Hugging Face folder, or hf://…, with --dtype"
    export.add_argument("--checkpoint", type=Path, required=True, help=steps)
    export.add_argument("--output", type=Path, required=True, help="new folder")
    export.add_argument("--tokenizer", help="tokenizer file or folder; default: the one the run trained with")
    types = (
        "type of the weights; fp8-…: projections in FP8 with a scale per 128 x 128 block or per row, the rest BF16; "
        "int4: projections in INT4 with a scale per 128 weights of a row"
    )
    export.add_argument("--config", type=Path, help="Hugging Face folder whose config.json fields are kept")
    export.add_argument("--dtype", choices=["bfloat16", "float32", *SCHEME_NAMES], help=f"{types}; default: bfloat16")
    duplicates = (
        "repeat embedding and head in MTP layers, as GLM-4.5 and Air; default: as the imported folder or preset"
    )
    export.add_argument("--mtp-copies", action="store_true", help=duplicates)
    export.add_argument("--max-file-gb", type=above_zero, default=5.0, help="largest file, 10^9 bytes")
    export.set_defaults(kind="to_hf")
    load = kinds.add_parser("from-hf", help="a Hugging Face folder as a step folder")
    load.add_argument("--model", type=Path, required=True, help="Hugging Face folder, or hf://owner/name")
    load.add_argument("--output", type=Path, required=True, help="checkpoint folder; step-000000 is made in it")
    load.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32", help="as training.dtype")
    load.set_defaults(kind="from_hf")
    others = kinds.add_parser("from-dcp", help="a folder of torch.distributed.checkpoint as a step folder")
    others.add_argument("--checkpoint", type=Path, required=True, help="folder with .metadata, of another program")
    shapes = "Hugging Face folder, or hf://…, whose config.json and tokenizer are the model's; needs no weights"
    others.add_argument("--config", type=Path, required=True, help=shapes)
    others.add_argument("--output", type=Path, required=True, help="checkpoint folder; step-000000 is made in it")
    others.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32", help="as training.dtype")
    others.set_defaults(kind="from_dcp")
    adapter = kinds.add_parser("adapter-to-hf", help="a step folder of adapters as a PEFT folder")
    adapter.add_argument("--checkpoint", type=Path, required=True, help="step folder, such as …/checkpoint/step-000100")
    adapter.add_argument("--output", type=Path, required=True, help="new folder")
    readers = "which transformers PEFT runs on; default: 5, whose folder vLLM and SGLang read too"
    adapter.add_argument(
        "--peft-for", choices=["transformers-4", "transformers-5"], default="transformers-5", help=readers
    )
    adapter.set_defaults(kind="adapter_to_hf")
    merge = kinds.add_parser("merge", help="a Hugging Face folder with an adapter added to its weights")
    merge.add_argument(
        "--base", type=Path, required=True, help="Hugging Face folder that the adapter was trained on, or hf://…"
    )
    merge.add_argument("--adapter", type=Path, required=True, help="PEFT folder, of LoRA or DoRA")
    merge.add_argument("--output", type=Path, required=True, help="new folder")
    types = "type of the changed weights; fp8-…: of all projections; default: as in the base"
    merge.add_argument("--dtype", choices=["bfloat16", "float32", *FP8_NAMES], help=types)
    merge.set_defaults(kind="merge")
    return parser
