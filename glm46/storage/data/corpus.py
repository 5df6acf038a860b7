"""Tokenizer and sources of a run, checked against each other, the model and the token budget. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from glm46.config.data import SourceConfig
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.rules import messages
from glm46.config.rules_data import chat_faults, preference_faults
from glm46.run.plan import Plan
from glm46.storage.data.manifest import Manifest, describe_targets, held_out_remedy, load_manifest
from glm46.storage.data.pack_plans import plan_of
from glm46.storage.data.packing import full_rows
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer


class SourcePlan(NamedTuple):
    """Tokens and passes that a run reads of one source."""

    name: str
    tokens: float
    """The source's share of the token budget."""
    epochs: float
    """Largest number of passes over any of its documents, computed from tokens; infinite if it has no full row."""


def load_text(plan: Plan, sources: Sequence[SourceConfig] | None = None) -> tuple[Tokenizer, dict[str, Manifest]]:
    """Load the tokenizer and the manifests of the sources (by name), and check them against each other and the model.

    Args:
        sources: the sources of the plan to load; None: all.

    Raises:
        UserError: all faults together.
    """
    config = plan.config
    vocab_size = plan.shape.vocab_size
    positions = plan.shape.max_position_embeddings
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.flavor)
    manifests = {}
    faults = []
    if tokenizer.vocab_size > vocab_size:
        faults.append(
            f"model.shape.vocab_size = {vocab_size}: the tokenizer {config.model.tokenizer_path!r} has ids up to "
            f"{tokenizer.vocab_size - 1}; set model.shape.vocab_size to at least {tokenizer.vocab_size}"
        )
    prompt = len(tokenizer.encode(config.inference.prompt))
    if prompt >= positions:
        faults.append(
            f"inference.prompt: its {prompt} tokens leave none of model.shape.max_position_embeddings = {positions} "
            "for a continuation; shorten it, or remove it"
        )
    for index, source in enumerate(config.data.sources):
        if sources is not None and source not in sources:
            continue
        try:
            manifests[source.name] = manifest = load_manifest(Path(source.path))
            if source.recipe is None:  # else rules of the config have checked it
                faults += messages(config, preference_faults(config, manifest.format, source.path, source.path))
                if manifest.splits["train"].targets is not None:
                    key = f"{source.path}: max_tokens"
                    max_tokens = manifest.settings["max_tokens"]
                    faults += messages(config, chat_faults(config, index, max_tokens, key))
            manifest.require_tokenizer(tokenizer.fingerprint)
            if config.validation.enable and not manifest.splits["validation"].labels:
                count = sum(split.documents for split in manifest.splits.values())
                remedy = held_out_remedy(count, manifest.settings.get("held_out"))
                faults.append(
                    f"{source.path}: validation.enable = true, but no text to predict is held out of {count:,} "
                    f"documents; set validation.enable = false, or remove the folder, {remedy}, and prepare it again"
                )
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    return tokenizer, manifests


def plan_sources(plan: Plan, manifests: dict[str, Manifest]) -> list[SourcePlan]:
    """Return the planned tokens and passes of each source, in the order of data.sources."""
    sources = plan.config.data.sources
    depth = plan.mtp_depths
    tokens = [0.0] * len(sources)
    # Stages with equal length and range of documents share their passes; other stages read other documents.
    rows_by_grid: list[dict[tuple[int, tuple[float, float]], float]] = [{} for _ in sources]
    for stage, stage_tokens in zip(plan.text_stages, plan.stage_tokens, strict=True):
        for i, weight in enumerate(stage.weights):
            share = stage_tokens * weight / sum(stage.weights)
            grid = (stage.seq_len, stage.documents)
            tokens[i] += share
            if share:
                rows_by_grid[i][grid] = rows_by_grid[i].get(grid, 0.0) + share / stage.seq_len
    plans = []
    for i, source in enumerate(sources):
        manifest = manifests[source.name]
        split = manifest.splits["train"]
        epochs = 0.0
        for (seq_len, (low, high)), count in rows_by_grid[i].items():
            if split.targets is None:
                rows_per_pass = full_rows(round(split.tokens * (high - low)), seq_len, depth)
            else:  # chats are few enough to count their rows
                rows_per_pass = plan_of(manifest, seq_len, (low, high)).rows
            epochs = max(epochs, count / rows_per_pass if rows_per_pass else float("inf"))
        plans.append(SourcePlan(source.name, tokens[i], epochs))
    return plans


def describe_sources(plan: Plan, manifests: dict[str, Manifest]) -> list[str]:
    """Return one line per source: its size, and the tokens and epochs planned; for chats also the tokens per epoch,
    with padding, and the share of targets."""
    lines = []
    for source in plan_sources(plan, manifests):
        split = manifests[source.name].splits["train"]
        line = (
            f"source       {source.name}: {counted(split.tokens, 'token')} in {counted(split.documents, 'document')}; "
            f"{source.tokens:,.0f} planned, {source.epochs:.3g} epochs"
        )
        if split.targets is not None and source.epochs:
            line += f", {source.tokens / source.epochs:,.0f} tokens each; {describe_targets(split)}"
        lines.append(line)
    return lines


def check_epochs(plan: Plan, manifests: dict[str, Manifest]) -> None:
    """Check that no source is read more often than its ``max_epochs``. Raises UserError with one fault for each
    such source."""
    faults = []
    pairs = zip(plan.config.data.sources, plan_sources(plan, manifests), strict=True)
    for index, (source, planned) in enumerate(pairs):
        if source.max_epochs is not None and planned.epochs > source.max_epochs:
            faults.append(
                f"data.sources[{index}].max_epochs = {source.max_epochs:g}: {source.name} would be read "
                f"{planned.epochs:.3g} times in {plan.budget_tokens:,} tokens; train on fewer tokens, lower its "
                "weight, or add text"
            )
    raise_if(faults)
