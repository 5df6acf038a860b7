"""``python -m glm46 convert``: checkpoints, Hugging Face folders and adapters, without a model in memory."""

from collections.abc import Sequence
from pathlib import Path

from glm46.commands.options import VerbParser, verb_parser
from glm46.huggingface.hub import fetch_options
from glm46.huggingface.scheme_names import FP8_NAMES, SCHEME_NAMES

_ON_HUB = {"model", "base", "adapter", "tokenizer", "checkpoint", "config"}
"""Options that take an id of the hub."""


def convert_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: input is missing, damaged or does not fit; nothing incomplete is left behind.
    """
    arguments = _parser().parse_args(list(argv))
    fetch_options(arguments, *(_ON_HUB & vars(arguments).keys()))
    from glm46.commands.conversions import convert

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
    duplicates = "repeat embedding and head in MTP layers, as GLM-4.5 and Air; default: not, as GLM-4.6"
    export.add_argument("--mtp-copies", action="store_true", help=duplicates)
    export.add_argument("--max-file-gb", type=float, default=5.0, help="largest file, 10^9 bytes")
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
<<<<<<< HEAD
=======


def _to_hf(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.max_file_gb < inf:
        raise UserError(f"--max-file-gb {arguments.max_file_gb}: must be a number above 0")
    if require_kind(arguments.checkpoint, Kind.STEP, Kind.HUGGING_FACE) is Kind.HUGGING_FACE:
        if arguments.dtype is None:
            raise UserError(
                f"--checkpoint {arguments.checkpoint}: this is a Hugging Face folder already; state the type of "
                f"the new one with --dtype, such as {', '.join(SCHEMES)}"
            )
        shape = stored_shape(arguments.checkpoint)
        with FolderReader(arguments.checkpoint, shape) as reader:
            return _export(arguments, reader, shape, read_config(arguments.checkpoint), str(arguments.checkpoint), None)
    tensors = StepTensors(arguments.checkpoint)
    config, raw, shape = tomli.loads(tensors.meta["config"]), tensors.meta.get(_HF_CONFIG), tensors.shape
    if "adapter" in config:
        raise UserError(f"{arguments.checkpoint}: holds adapters without their base; use convert adapter-to-hf")
    raise_if([f"{arguments.checkpoint}: holds no {name}" for name in named_rows(shape) if name not in tensors])
    tokenizer = config["model"].get("tokenizer_path", "builtin")
    return _export(arguments, tensors, shape, raw, tokenizer, tensors.meta.get(TOKENIZER_KEY))


def _export(
    arguments: argparse.Namespace,
    source: StepTensors | FolderReader,
    shape: ModelShape,
    raw: dict[str, Any] | None,
    tokenizer_path: str,
    fingerprint: str | None,
) -> int:
    dtype = arguments.dtype or "bfloat16"
    names = HFNames(shape, repeat_shared=arguments.mtp_copies)
    tokenizer = tokenizer_of_checkpoint(
        tokenizer_path, stated=arguments.tokenizer, fingerprint=fingerprint, vocab_size=shape.vocab_size
    )
    if arguments.config:
        raw = read_config(arguments.config)
        shape_of(raw, str(arguments.config / CONFIG))  # raises faults that name the file
    stored = {name: source.stored(name) for name in names.entries}
    options = ExportOptions(
        dtype=torch.float32 if dtype == "float32" else torch.bfloat16,
        scheme=SCHEMES.get(dtype),
        repeat_shared=arguments.mtp_copies,
        max_file_bytes=int(arguments.max_file_gb * 1e9),
        other_files=files_beside_weights(tokenizer, max_length=shape.max_position_embeddings),
    )
    config = config_of(shape, raw, eos_ids=stop_ids(tokenizer), dtype=str(options.dtype).removeprefix("torch."))
    if options.scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(options.scheme, names)
    total = sum(tensor.nbytes for tensor in stored.values())
    with bytes_progress("writing weights", total, _report) as report:
        size = export_weights(arguments.output, shape, config, stored, options=options, report=report)
    print(f"{arguments.output}: {size:,} bytes of weights in {dtype}")
    if shape.rope_scaling is not None:
        print(f"RoPE scaling of its last step: {describe_attention(shape)[1]}; config.json has it")
    if options.scheme is not None:
        errors = json.loads((arguments.output / ERRORS_FILE).read_text(encoding="utf-8"))
        worst = max(errors, key=lambda name: errors[name]["relative"])
        print(f"largest relative error {errors[worst]['relative']:.4f}, of {worst}; all of them: {ERRORS_FILE}")
    return 0


def _from_hf(arguments: argparse.Namespace) -> int:
    raw = read_config(arguments.model)
    shape = stored_shape(arguments.model)
    return _import(arguments, arguments.model, shape, raw, arguments.model)


def _from_dcp(arguments: argparse.Namespace) -> int:
    require_kind(arguments.checkpoint, Kind.DCP)
    raw = read_config(arguments.config)
    shape = stored_shape(arguments.checkpoint, shape_of(raw, str(arguments.config / CONFIG)))
    return _import(arguments, arguments.checkpoint, shape, raw, arguments.config)


def _import(
    arguments: argparse.Namespace, source: Path, shape: ModelShape, raw: dict[str, Any], tokenizer: Path
) -> int:
    """Write the weights of a folder as step 0 of a checkpoint folder."""
    if known := published_steps(arguments.output):
        raise UserError(f"{step_folder(arguments.output, known[-1])}: exists already; name another folder")
    entries = HFNames(shape, repeat_shared=False).entries
    dtype = getattr(torch, arguments.dtype)
    kinds = {name: (entry.shape, torch.float32 if entry.is_fp32 else dtype) for name, entry in entries.items()}
    total = sum(prod(size) * dtype.itemsize for size, dtype in kinds.values())
    with FolderReader(source, shape) as reader, bytes_progress("reading weights", total, _report) as report:

        def fill(name: str, tensor: Tensor) -> None:
            raise_if([f"{source}: {fault}" for fault in reader.fill(name, tensor, global_indices(tensor))])
            report(tensor.nbytes)

        meta = {"config": dump_config(RunConfig(model=_table_of(shape, tokenizer))), _HF_CONFIG: raw}
        folder = write_model(arguments.output, kinds, fill, meta)
    print(f"{folder}: checkpoint.initial_load_path for a run with initial_load_model_only = true")
    return 0


def _adapter_to_hf(arguments: argparse.Namespace) -> int:
    tensors = StepTensors(arguments.checkpoint)
    config = tomli.loads(tensors.meta["config"])
    if "adapter" not in config:
        raise UserError(f"{arguments.checkpoint}: holds a whole model, not adapters; use convert to-hf")
    adapter, base = Adapter.model_validate(config["adapter"]), config["checkpoint"]["initial_load_path"]
    stored = {name: tensors.stored(name) for name in tensors}
    total = sum(tensor.nbytes for tensor in stored.values())
    base_files = next(iter(tensors.meta[BASES_KEY].values()))
    with bytes_progress("writing adapters", total, _report) as report:
        size = export_adapter(
            arguments.output,
            tensors.shape,
            stored,
            scale=adapter.scale,
            base=base,
            base_files=base_files,
            for_transformers_4=arguments.peft_for == "transformers-4",
            report=report,
        )
    print(f"{arguments.output}: {size:,} bytes of adapters; its base is {base}")
    if adapter.name == "dora":
        print(DORA_NOTE)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    target = None if arguments.dtype is None else FP8_SCHEMES.get(arguments.dtype) or getattr(torch, arguments.dtype)
    total = sum(record.nbytes for _, record in find_tensors(arguments.base).values())
    with bytes_progress("merging", total, _report) as report:
        errors = merge_adapter(arguments.base, arguments.adapter, arguments.output, target=target, report=report)
    for line in merge_lines(arguments.output, errors):
        (_report if line.startswith("warning") else print)(line)
    return 0


def _table_of(shape: ModelShape, folder: Path) -> Model:
    """[model] of a shape: the nearest preset, the keys that differ from it, and the folder's tokenizer."""

    def differences(flavor: str) -> dict[str, Any]:
        preset: Mapping[str, Any] = PRESETS[flavor].model_dump()
        return {key: value for key, value in shape.model_dump().items() if preset[key] != value}

    flavor = min(PRESETS, key=lambda flavor: len(differences(flavor)))
    return Model.model_validate({"flavor": flavor, "tokenizer_path": str(folder.resolve())} | differences(flavor))


def _report(line: str) -> None:
    print(line, file=sys.stderr)
>>>>>>> w-e
