"""Tokenizer and sources of a run, checked against each other, the model and the token budget. Needs no torch."""

from pathlib import Path
from typing import NamedTuple

from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.data.manifest import Manifest, load_manifest
from glm46.data.packing import full_rows
from glm46.data.tokenizer import Tokenizer, load_tokenizer
from glm46.planner.budget import budget_tokens, stage_tokens


class SourcePlan(NamedTuple):
    """Tokens and passes that a run reads of one source."""

    name: str
    tokens: float
    """The source's share of the token budget."""
    epochs: float
    """Largest number of passes over any of its documents, computed from tokens; infinite if it has no full row."""


def load_text(config: RunConfig) -> tuple[Tokenizer, dict[str, Manifest]]:
    """Load the tokenizer and the manifests of all sources (by name), and check them against each other and the model.

    Raises:
        UserError: all faults at once.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    vocab_size = resolve_shape(config.model).vocab_size
    manifests, faults = {}, []
    if tokenizer.vocab_size > vocab_size:
        faults.append(
            f"model.vocab_size = {vocab_size}: the tokenizer {config.model.tokenizer_path!r} has ids up to "
            f"{tokenizer.vocab_size - 1}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    prompt = len(tokenizer.encode(config.inference.prompt))
    positions = resolve_shape(config.model).max_position_embeddings
    if prompt and prompt + config.inference.max_new_tokens > positions:
        faults.append(
            f"inference.max_new_tokens = {config.inference.max_new_tokens}: with {prompt} tokens of inference.prompt "
            f"above model.max_position_embeddings = {positions}; lower it to at most {max(positions - prompt, 0)}"
        )
    for source in config.data.sources:
        try:
            manifests[source.name] = load_manifest(Path(source.path))
            manifests[source.name].require_tokenizer(tokenizer.fingerprint)
            held_out = manifests[source.name].splits["validation"]
            # The first token of a document is not a target.
            if config.validation.enable and held_out.tokens <= held_out.documents:
                faults.append(
                    f"{source.path}: validation.enable = true, but no text to predict is held out; set "
                    "validation.enable = false, or remove the folder and prepare it with held_out above 0"
                )
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*faults)
    return tokenizer, manifests


def plan_sources(config: RunConfig, manifests: dict[str, Manifest], rows_per_micro_batch: int) -> list[SourcePlan]:
    """Return the planned tokens and passes of each source, in the order of data.sources."""
    depth = resolve_shape(config.model).num_nextn_predict_layers
    tokens = [0.0] * len(config.data.sources)
    # Stages with equal length and range of documents share their passes; others read documents of their own.
    rows: list[dict[tuple, float]] = [{} for _ in config.data.sources]
    for stage, here in stage_tokens(config, budget_tokens(config, rows_per_micro_batch)):
        for i, weight in enumerate(stage.weights):
            share, grid = here * weight / sum(stage.weights), (stage.seq_len, stage.documents)
            tokens[i] += share
            if share:
                rows[i][grid] = rows[i].get(grid, 0.0) + share / stage.seq_len
    plans = []
    for i, source in enumerate(config.data.sources):
        held = manifests[source.name].splits["train"].tokens
        epochs = 0.0
        for (seq_len, (low, high)), count in rows[i].items():
            whole = full_rows(round(held * (high - low)), seq_len, depth)
            epochs = max(epochs, count / whole if whole else float("inf"))
        plans.append(SourcePlan(source.name, tokens[i], epochs))
    return plans


def describe_sources(config: RunConfig, manifests: dict[str, Manifest], rows_per_micro_batch: int) -> list[str]:
    """Return one line per source: its size, and the tokens and epochs planned."""
    lines = []
    for plan in plan_sources(config, manifests, rows_per_micro_batch):
        split = manifests[plan.name].splits["train"]
        lines.append(
            f"source       {plan.name}: {split.tokens:,} tokens in {split.documents:,} documents; "
            f"{plan.tokens:,.0f} planned, {plan.epochs:.3g} epochs"
        )
    return lines


def check_epochs(config: RunConfig, manifests: dict[str, Manifest], rows_per_micro_batch: int) -> None:
    """Check that no source is read more often than its ``max_epochs``.

    Raises:
        UserError: one fault for each such source.
    """
    faults = []
    for index, (source, plan) in enumerate(
        zip(config.data.sources, plan_sources(config, manifests, rows_per_micro_batch), strict=True)
    ):
        if source.max_epochs is not None and plan.epochs > source.max_epochs:
            faults.append(
                f"data.sources[{index}].max_epochs = {source.max_epochs:g}: {source.name} would be read "
                f"{plan.epochs:.3g} times in {budget_tokens(config, rows_per_micro_batch):,} tokens; train on fewer "
                "tokens, lower its weight, or add text"
            )
    if faults:
        raise UserError(*faults)
