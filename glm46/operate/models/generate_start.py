"""Checks of ``python -m glm46 generate`` before its ranks start, and their start. Does not import torch."""

import argparse
import sys
from collections.abc import Sequence

from glm46.compute.distributed.environment import launched_world_size
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.engine.inference.stored_model import warn_of_other_tokenizer
from glm46.operate.launch.ranks import degrees_of, processes, start_ranks
from glm46.operate.models.generate_prompts import raise_for_length, raise_for_options, read_prompts, read_tools
from glm46.operate.models.model_fit import find_model, is_on_hub, require_fit
from glm46.run.layout import generation_layout
from glm46.storage.huggingface.hub import fetch_options, with_folders


def start_generation(argv: Sequence[str], arguments: argparse.Namespace) -> int | None:
    """Check the options, read the file of tools, fetch the ids of the hub, and start the processes that the options
    request.

    Returns:
        Exit code; None in a process that is to do the work itself.

    Raises:
        UserError: an option is out of range or has no effect, or the model cannot run on this machine with these
            options.
    """
    raise_for_options(arguments)
    arguments.tools = () if arguments.tools is None else read_tools(arguments.tools)
    if not arguments.prompt and (count := processes(arguments)) > 1:
        raise UserError(
            f"--chat without --prompt: talks in one process, not in {count}; unset NGPU, leave out --nproc, or serve "
            "the model (docs/deployment.md)"
        )
    if launched_world_size() is None:
        _check(arguments)
    folders = fetch_options(arguments, "model", "checkpoint", "adapter", "tokenizer")
    return start_ranks("generate", with_folders(argv, folders), arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Check what the ranks would refuse: folder, degrees, memory and prompts. For a model on the Hub, only what
    config.json shows is checked.

    Raises:
        UserError: the model cannot run on this machine with these options.
    """
    folder = arguments.model or arguments.checkpoint
    if (model := find_model(folder)) is None:
        return
    rows = max(len(arguments.prompt), 1)
    longest = 1
    if not is_on_hub(folder) and not is_on_hub(arguments.tokenizer):
        prompts, _ = read_prompts(arguments, model.tokenizer(arguments.tokenizer), model.shape)
        warn_of_other_tokenizer(model, arguments.tokenizer)
        longest = max(map(len, prompts), default=longest)
    raise_for_length([range(longest)], arguments.max_new_tokens, model.shape.max_position_embeddings)
    length = longest + arguments.max_new_tokens
    require_fit(arguments, model.shape, drafts=arguments.speculative, rows=rows, length=length)
    count = processes(arguments)
    replicas = generation_layout(degrees_of(arguments, model.shape, count), count).dp_degree
    if replicas > rows:
        print(
            f"{count} processes hold {replicas} copies of the model, for {counted(rows, 'prompt')}: "
            f"{replicas - rows} of them have nothing to do; give more prompts, raise a degree such as "
            "--tensor-parallel-degree, or lower --nproc",
            file=sys.stderr,
        )
