"""The work of ``python -m glm46 teach`` on one rank: a model on this machine, or running servers, are asked for their
most likely tokens."""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.config.finetune import DistillationConfig
from glm46.config.rollout import server_address
from glm46.config.run_config import RunConfig
from glm46.engine.evaluation.results import run_rows
from glm46.engine.evaluation.rows import share_of_rows
from glm46.engine.inference.loading import Loaded
from glm46.files.progress import tokens_progress
from glm46.operate.models.loaded_model import digest, files_of, load_model, on_all_ranks
from glm46.run.plan import resolve_plan
from glm46.storage.chats.chat_template import raise_for_source
from glm46.storage.data.corpus import load_text
from glm46.tasks.finetune.distillation import top_tokens
from glm46.tasks.finetune.teacher_values import AskedDocument, Values, facts_of, store
from glm46.tasks.pretrain.network_rows import batch_of_rows
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, call
from glm46.tasks.rl.rollout.inference_server import QUICK_SECONDS
from glm46.tasks.rl.rollout.sglang_server import SglangServer
from glm46.tasks.rl.rollout.vllm_server import VllmServer

_VALUES_AT_ONCE = 2**19
"""Of all tokens of a batch of a model: 8,192 tokens with 64 each."""
_AT_ONCE, _TRIES, _SECONDS = 32, 3, 600.0
"""Requests to a server at a time; tries of a request, each with the next server; and the time of one."""


def teach(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Store what is missing, on this rank. Collective.

    Raises:
        UserError: the config asks for no stored values, the data is not prepared, the teacher is of another family, or
            a server does not answer as asked.
    """
    of = config.distillation
    if of is None or of.stored_path is None:
        raise UserError(
            "finetune.distillation.stored_path: absent; name the folder that the values are stored in, in place of "
            "load_path and flavor"
        )
    plan, is_first = resolve_plan(config), not dist.is_initialized() or dist.get_rank() == 0
    tokenizer, manifests = on_all_ranks(lambda: load_text(plan))
    sources = list(manifests.values())
    if arguments.server:
        ask, teacher = _of_servers(arguments, of)
    else:
        loaded = load_model(arguments, drafts=False)
        folders = [folder for folder in (arguments.model or arguments.checkpoint, arguments.adapter) if folder]
        if (loaded.tokenizer.fingerprint, loaded.model.shape.vocab_size) != (
            tokenizer.fingerprint, plan.shape.vocab_size
        ):  # fmt: skip
            raise UserError(
                f"{folders[0]}: has another tokenizer or vocab_size than the student; give one with the same"
            )
        for manifest in sources:
            raise_for_source(manifest, loaded.tokenizer)
        names = " + ".join(str(folder.absolute()) for folder in folders)
        dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        ask, teacher = partial(_of_model, loaded, of), f"{names} {digest(files_of(folders))} in {dtype}"
    splits = [split for manifest in sources for split in manifest.splits.values()]
    targets = sum(split.labels for split in splits)
    facts = facts_of(teacher, of, sources)
    missing, stored = store(Path(of.stored_path), facts, sources, ask, on_all_ranks, writes=is_first)
    if is_first:
        size, there = f"{8 * of.top_k * targets / 1e6:,.1f} MB", facts["parts"] - missing
        goes_on = f"; {there} of {facts['parts']} parts are there" if there else ""
        print(f"{of.stored_path}: {of.top_k} tokens of {targets:,} targets, {size}, of {teacher}{goes_on}")
    total, known, asked = sum(split.tokens for split in splits), 0, 0
    with tokens_progress("asking", total, partial(print, file=sys.stderr)) if is_first else nullcontext(id) as advance:
        for document, (ids, _) in stored:
            labels = document.tokens[1:][document.is_target[:-1]]
            known, asked = known + int((ids == labels[:, None]).any(1).sum()), asked + len(labels)
            advance(len(document.tokens))
    if is_first:
        share = f"the target is among them at {known / asked:.1%} of {asked:,}" if asked else "nothing was missing"
        print(f"{of.stored_path}: complete; {share}")


@torch.inference_mode()
def _of_model(loaded: Loaded, config: DistillationConfig, documents: list[AskedDocument]) -> list[Values]:
    """Asks a model; documents of similar length are computed together. Collective."""
    mesh, form = loaded.mesh, partial(top_tokens, count=config.top_k, temperature=config.temperature)
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number].tokens))
    values = dict[int, Values]()
    while order:
        length = len(documents[order[0]].tokens)
        count = max(1, _VALUES_AT_ONCE // config.top_k // length) * mesh.layout.dp_degree
        here, order = order[:count], order[count:]
        places, mine = share_of_rows(here, mesh.row_group, mesh.layout.dp_degree)
        batch = batch_of_rows([documents[number].tokens.tolist() for number in mine], length)
        found = torch.zeros(len(here), 2, config.top_k, length, dtype=torch.float64)  # exact for token ids
        output = run_rows(loaded.model, mesh, batch, False, form)
        if output is not None and mesh.is_source:
            assert output.logprobs is not None, "the form is `top_tokens`"
            both = torch.stack([output.predictions[0].double(), output.logprobs.double()], 1).cpu()
            found[places.start : places.stop] = both[: len(places), ..., :length]
        if mesh.layout.world_size > 1:
            dist.all_reduce(found)  # one rank has the values of a row
        for number, of_row in zip(here, found.numpy(), strict=True):
            is_target = documents[number].is_target
            values[number] = _values(of_row[..., : len(is_target)][..., is_target].transpose(0, 2, 1))
    return [values[number] for number in range(len(documents))]


def _values(both: np.ndarray) -> Values:
    """``both``: ids and log-probabilities, FP64 [2, targets, K]."""
    return both[0].astype(np.uint32), both[1].astype(np.float32)


def _of_servers(
    arguments: argparse.Namespace, config: DistillationConfig
) -> tuple[Callable[[list[AskedDocument]], list[Values]], str]:
    """Asks running servers of one model, and its name."""
    key = f"--server {arguments.server[0]}"
    if stated := [name for name in ("adapter", "tokenizer", "dtype", "device", "nproc") if getattr(arguments, name)]:
        raise UserError(f"--{stated[0]}: has no effect with --server; remove it")
    if config.temperature != 1.0:
        raise UserError(
            f"finetune.distillation.temperature = {config.temperature:g}: {key} says log-probabilities at 1; set it to "
            "1, or give --model"
        )
    client = VllmServer if arguments.kind == "vllm" else SglangServer
    try:
        servers = [client(server_address(url), range(0)) for url in arguments.server]
    except ValueError as error:
        raise UserError(f"--server: {' '.join(arguments.server)} {error}") from None
    try:
        names = {call(server.url, "/v1/models", seconds=QUICK_SECONDS)["data"][0]["id"] for server in servers}
    except (CallError, LookupError, TypeError) as error:
        raise UserError(f"{key}: {error}; start it, or correct the address") from None
    if len(names) > 1:
        raise UserError(f"{key}: serves another model than the others: {', '.join(sorted(names))}; give those of one")

    def ask(documents: list[AskedDocument]) -> list[Values]:
        with ThreadPoolExecutor(_AT_ONCE * len(servers)) as pool:
            return list(pool.map(partial(_of_document, servers, config.top_k), range(len(documents)), documents))

    return ask, f"{names.pop()} of {arguments.kind}"


def _of_document(
    servers: Sequence[VllmServer | SglangServer], top_k: int, number: int, document: AskedDocument
) -> Values:
    places = np.flatnonzero(document.is_target)
    tokens = document.tokens[: places[-1] + 2].tolist()
    for attempt in range(_TRIES):
        server = servers[(number + attempt) % len(servers)]
        try:
            found = server.prompt_logprobs(tokens, top_k, _SECONDS)
            if len(found) != len(tokens) - 1 or any(len(found[place]) < top_k for place in places):
                raise RefusedError(f"it says fewer than {top_k} tokens of a target")
            best = [sorted(found[place].items(), key=lambda one: (-one[1], one[0]))[:top_k] for place in places]
            return _values(np.array(best).transpose(2, 0, 1))
        except RefusedError as error:
            raise UserError(
                f"--server {server.url}: {error}; for documents of {len(tokens):,} tokens and {top_k} tokens of each "
                f"target start vLLM with --max-logprobs {top_k} --max-model-len {len(tokens) + 1} or more; or take "
                "another --kind"
            ) from None
        except CallError as error:
            reason = f"--server {server.url}: {error}; the same command goes on when it answers"
    raise UserError(reason)
