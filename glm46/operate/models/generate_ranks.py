"""The work of ``python -m glm46 generate`` on one rank."""

import argparse
import sys
from collections.abc import Sequence

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.transformer import Transformer
from glm46.engine.inference.decoder import describe_kernels
from glm46.engine.inference.display import Display
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.loading import Loaded
from glm46.engine.inference.sampling import Sampling
from glm46.operate.models.generate_prompts import raise_for_length, read_prompts
from glm46.operate.models.loaded_model import joined, load_model, on_all_ranks
from glm46.operate.models.terminal_chat import TerminalChat
from glm46.run.curriculum import describe_attention


def generate(arguments: argparse.Namespace) -> None:
    """Continue the prompts on this rank; without prompts, run a chat in the terminal. Collective."""
    with joined():
        if arguments.prompt:
            _continue(arguments)
        else:
            _chat(arguments)


def _continue(arguments: argparse.Namespace) -> None:
    loaded, prompts, stop = on_all_ranks(lambda: _read(arguments))
    mesh = loaded.mesh
    if mesh.rank == 0:
        print(_attention(loaded.model), file=sys.stderr)
    rows = [Continuation(prompt, arguments.max_new_tokens, arguments.seed) for prompt in prompts]
    share = -(-len(rows) // mesh.layout.dp_degree)  # rows per data-parallel rank; the last ranks may have fewer
    local_rows = rows[mesh.row_group * share :][:share]
    generation = _generation(arguments, loaded, local_rows, stop)
    if mesh.rank == 0:
        Display(generation, local_rows, loaded.tokenizer, stop=stop, total=len(rows), gather=mesh.gather_rows).run()
    else:
        generation.run()
        # Collective: `Display.run` gathers once, after generation.
        mesh.gather_rows([row.text(stop) for row in local_rows])


def _chat(arguments: argparse.Namespace) -> None:
    loaded, _, stop = _read(arguments)  # in one process: a chat in several is refused before
    positions = loaded.model.shape.max_position_embeddings

    def answer(prompt: list[int]) -> tuple[Continuation, Generation]:
        raise_for_length([prompt], arguments.max_new_tokens, positions)
        continuation = Continuation(prompt, arguments.max_new_tokens, arguments.seed)
        return continuation, _generation(arguments, loaded, [continuation], stop)

    TerminalChat(
        loaded.tokenizer,
        answer,
        stop,
        system=arguments.system,
        tools=arguments.tools,
        thinks=arguments.thinking,
        keeps_thoughts=arguments.keep_thoughts,
        effort=arguments.reasoning_effort or "",
    ).run()


def _generation(
    arguments: argparse.Namespace,
    loaded: Loaded,
    rows: Sequence[Continuation],
    stop: frozenset[int],
) -> Generation:
    return Generation(
        decoder_for(loaded.model, rows, drafts=arguments.draft_tokens or arguments.speculative, mesh=loaded.mesh),
        rows,
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p),
        stop=stop,
        vocab_size=loaded.tokenizer.vocab_size,
    )


def _attention(model: Transformer) -> str:
    window, scaling = describe_attention(model.shape)
    weight = local_tensor(next(model.parameters()))
    as_trained = "" if window == scaling == "none" else f"; as in training: window {window}, RoPE scaling {scaling}"
    return f"attention: {describe_kernels(weight.device, weight.dtype)}{as_trained}"


def _read(arguments: argparse.Namespace) -> tuple[Loaded, list[list[int]], frozenset[int]]:
    """Load the model, the prompts and the ids that end a text. Collective."""
    loaded = load_model(arguments, drafts=arguments.speculative)
    model, tokenizer, _ = loaded
    prompts, stop = read_prompts(arguments, tokenizer, model.shape)
    return loaded, prompts, stop
