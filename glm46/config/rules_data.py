"""Rules about the sources and stages of [data]."""

from itertools import combinations, pairwise

from glm46.config.data import DataStageConfig
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig
from glm46.config.text_recipe import LABELLED, PAIRS, PREFERENCES


@rule
def there_is_a_source(config: RunConfig) -> Faults:
    """There is at least one source, unless [rl] generates the text."""
    if not config.data.sources and config.rl is None:
        yield fault(
            "data.sources: no source to train on; add a [[data.sources]] table with name and path", "data.sources"
        )


@rule
def source_names_and_paths_are_unique(config: RunConfig) -> Faults:
    """Names and paths are unique: metrics are named after sources, and a path read twice would repeat its tokens."""
    for key, remedy in (("name", "give each its own"), ("path", "raise the weight of one instead")):
        seen: dict[str, int] = {}
        for index, source in enumerate(config.data.sources):
            first = seen.setdefault(getattr(source, key), index)
            if first != index:
                other = f"data.sources[{first}].{key}"
                yield fault(f"`data.sources[{index}].{key}`: the same as {other}; {remedy}", other)


@rule
def stages_follow_each_other(config: RunConfig) -> Faults:
    """Every token of the run is in exactly one stage."""
    starts = [stage.start_tokens for stage in config.data.stages]
    begin = config.lr_scheduler.start_tokens
    if starts and starts[0] > begin:
        yield fault(
            "`data.stages[0].start_tokens`: the run begins at `lr_scheduler.start_tokens`, before the first stage; "
            f"lower it to {begin}"
        )
    for index, (before, start) in enumerate(pairwise(starts), 1):
        if start <= before:
            yield fault(f"`data.stages[{index}].start_tokens`: must be above {before} of the stage before; raise it")


@rule
def stages_weigh_the_sources(config: RunConfig) -> Faults:
    """Each stage has one weight per source."""
    for index, stage in enumerate(config.data.stages):
        key = f"data.stages[{index}].weights"
        sources = len(config.data.sources)
        if stage.weights is not None and len(stage.weights) != sources:
            yield fault(f"`{key}`: must have one weight for each of the {sources} sources; 0 skips one", "data.sources")


@rule
def stages_fit_their_sequences(config: RunConfig) -> Faults:
    """The mesh splits the sequences of a stage evenly, and its window is not longer."""
    context = config.parallelism.context_parallel_degree
    tensor = config.parallelism.tensor_parallel_degree
    pieces = (2 * context if context > 1 else 1) * tensor
    for index, stage in enumerate(config.data.stages):
        place = f"data.stages[{index}]"
        length = stage.seq_len or config.training.seq_len
        if stage.seq_len is not None and stage.seq_len % pieces:
            yield fault(
                f"`{place}.seq_len`: must be a multiple of {pieces}, into which context and tensor parallelism split a "
                f"sequence; take {-(-stage.seq_len // pieces) * pieces}",
                "parallelism",
            )
        if stage.sliding_window is not None and stage.sliding_window > length:
            yield fault(
                f"`{place}.sliding_window`: longer than the sequences of this stage, {length} tokens, so it limits "
                "nothing; lower it, or write -1 to attend to all previous tokens",
                f"{place}.seq_len",
                "training.seq_len",
            )


@rule
def stages_read_apart(config: RunConfig) -> Faults:
    """No document is read twice, by stages of different sequence lengths or document ranges."""
    for (first_index, first), (second_index, second) in combinations(enumerate(config.data.stages), 2):
        lengths = [stage.seq_len or config.training.seq_len for stage in (first, second)]
        overlap = max(first.documents[0], second.documents[0]) < min(first.documents[1], second.documents[1])
        shared = [config.data.sources[i].name for i in _read(config, first) & _read(config, second)]
        if overlap and shared and not (lengths[0] == lengths[1] and first.documents == second.documents):
            places = (f"data.stages[{first_index}]", f"data.stages[{second_index}]")
            yield fault(
                f"{', '.join(places)}: both read {', '.join(sorted(shared))} with different sequence lengths or "
                "documents, so that some documents would be read twice; give them ranges that do not overlap, such as "
                "documents = [0.0, 0.8] and [0.8, 1.0]",
                *places,
            )


@rule
def chats_are_read_whole(config: RunConfig) -> Faults:
    """Documents of chats are packed whole and attend only to themselves: the second part of a cut chat would lose its
    prompt."""
    for index, source in enumerate(config.data.sources):
        if source.recipe is not None and source.recipe.is_chat:
            yield from chat_faults(config, index, source.recipe.max_tokens, f"data.sources[{index}].recipe.max_tokens")


@rule
def sources_are_what_the_task_reads(config: RunConfig) -> Faults:
    """[finetune.preference] reads pairs or labelled answers, which no other run reads."""
    for index, source in enumerate(config.data.sources):
        if source.recipe is not None:
            key = f"data.sources[{index}].recipe.format"
            yield from preference_faults(config, source.recipe.format, key, f"`{key}`")


def preference_faults(config: RunConfig, format: str, key: str, named: str) -> Faults:
    """Yield the fault of a source that does not fit the task.

    Args:
        format: format of its rows.
        named: ``key``, or another name for the place that defines the format.
    """
    preference = config.preference
    loss_type = "finetune.preference.loss_type"
    what = {PAIRS: "pairs", LABELLED: "labelled answers"}.get(format, "no pairs")
    if preference is None:
        if format in PREFERENCES:
            yield fault(
                f"{named}: {what}, which only [finetune.preference] reads; add that section, or give another source",
                key,
                "finetune.preference",
            )
    elif format == LABELLED and preference.loss_type != "kto":
        yield fault(
            f'{named}: labelled answers, which only {loss_type} = "kto" reads; set that, or give a source with '
            'format = "preference"',
            key,
            loss_type,
        )
    elif format not in PREFERENCES:
        more = ' or "unpaired_preference"' if preference.loss_type == "kto" else ""
        yield fault(
            f'{named}: no pairs, which [finetune.preference] reads; give a source with format = "preference"{more}, or '
            "remove that section",
            key,
            "finetune.preference",
        )


def chat_faults(config: RunConfig, index: int, max_tokens: int | None, named: str) -> Faults:
    """Yield the faults of a source of chats.

    Args:
        index: index of the source.
        max_tokens: largest number of tokens of a document; None: not configured.
        named: name of the place that defines ``max_tokens``.
    """
    source = config.data.sources[index]
    stages = config.data.stages
    key = f"data.sources[{index}].packing"
    if source.packing != "best_fit":
        yield fault(f'`{key}`: cuts chats between rows; set packing = "best_fit"')
    if not config.data.document_mask:
        yield fault(
            f"`data.document_mask`: the chats of data.sources[{index}] in a row would read each other; set it to true",
            key,
        )
    lengths = [stage.seq_len or config.training.seq_len for stage in stages if index in _read(config, stage)]
    shortest = min(lengths, default=config.training.seq_len)
    is_kto = config.preference is not None and config.preference.loss_type == "kto"
    cap = shortest // 2 if is_kto else shortest
    part = "half of the" if is_kto else "the"
    why = "KTO puts several answers of a row after each other's prompts" if is_kto else "a chat must fit into a row"
    if max_tokens is None:
        yield fault(f"{named}: absent, and chats need it; set it to at most {cap}, by the shortest rows", named)
    elif max_tokens > cap:
        yield fault(
            f"{named} = {max_tokens}: longer than {part} shortest rows that read it, {shortest} tokens, and {why}; "
            f"lower it to {cap}, or raise seq_len",
            named,
            "training.seq_len",
            "data.stages",
            "finetune.preference.loss_type",
        )


def _read(config: RunConfig, stage: DataStageConfig) -> set[int]:
    """Return the indices of the sources that a stage reads."""
    weights = stage.weights or [1.0] * len(config.data.sources)
    return {i for i, weight in enumerate(weights[: len(config.data.sources)]) if weight > 0}
