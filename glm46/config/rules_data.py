"""Rules about what is read: sources and stages of [data], tasks of [validation]."""

from collections.abc import Callable
from itertools import combinations

from glm46.config.data import DataStageConfig
from glm46.config.faults import Fault, Faults, show
from glm46.config.run_config import RunConfig


def there_is_a_source(config: RunConfig) -> Faults:
    """There is at least one source, unless the run makes its own text."""
    if not config.data.sources and config.rl is None:
        yield Fault(
            ("data.sources",), "data.sources: no source to train on; add a [[data.sources]] table with name and path"
        )


def source_names_and_paths_are_unique(config: RunConfig) -> Faults:
    """Names and paths are unique: metrics are named after sources, and a path read twice would repeat its tokens."""
    for key, remedy in (("name", "give each its own"), ("path", "raise the weight of one instead")):
        seen: dict[str, int] = {}
        for index, source in enumerate(config.data.sources):
            value = getattr(source, key)
            if value in seen:
                where = f"data.sources[{index}].{key}"
                other = f"data.sources[{seen[value]}].{key}"
                yield Fault((where, other), f"{where} = {show(value)}: the same as {other}; {remedy}")
            seen.setdefault(value, index)


def stages_follow_each_other(config: RunConfig) -> Faults:
    """Every token of the run is in exactly one stage."""
    starts = [stage.start_tokens for stage in config.data.stages]
    begin = config.lr_scheduler.start_tokens
    if starts and starts[0] > begin:
        yield Fault(
            ("data.stages[0].start_tokens", "lr_scheduler.start_tokens"),
            f"data.stages[0].start_tokens = {starts[0]}: the run begins at lr_scheduler.start_tokens = {begin}, before "
            f"the first stage; lower it to {begin}",
        )
    for index in range(1, len(starts)):
        if starts[index] <= starts[index - 1]:
            key = f"data.stages[{index}].start_tokens"
            yield Fault((key,), f"{key} = {starts[index]}: must be greater than that of the stage before")


def stages_weigh_the_sources(config: RunConfig) -> Faults:
    """Each stage has one weight per source, and at least one above zero."""
    for index, stage in enumerate(config.data.stages):
        if stage.weights is None:
            continue
        key = f"data.stages[{index}].weights"
        if len(stage.weights) != len(config.data.sources):
            yield Fault(
                (key, "data.sources"),
                f"{key} = {show(stage.weights)}: must have one weight for each of the "
                f"{len(config.data.sources)} sources; "
                "0 skips one",
            )
        elif min(stage.weights) < 0 or not sum(stage.weights):
            yield Fault(
                (key,), f"{key} = {show(stage.weights)}: no weight may be negative, and at least one must be above 0"
            )


def stages_fit_the_longest_sequence(config: RunConfig) -> Faults:
    """No stage is longer than training.seq_len, and the mesh splits its sequences evenly."""
    context, tensor = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    pieces = (2 * context if context > 1 else 1) * tensor
    for index, stage in enumerate(config.data.stages):
        key = f"data.stages[{index}].seq_len"
        if stage.seq_len is not None and stage.seq_len > config.training.seq_len:
            yield Fault(
                (key, "training.seq_len"),
                f"{key} = {stage.seq_len}: longer than training.seq_len = {config.training.seq_len}, which validation "
                "uses; raise training.seq_len to the longest stage",
            )
        elif stage.seq_len is not None and stage.seq_len % pieces:
            yield Fault(
                (key, "parallelism"),
                f"{key} = {stage.seq_len}: must be a multiple of {pieces}, into which context and tensor parallelism "
                f"split a sequence; take {-(-stage.seq_len // pieces) * pieces}",
            )


def windows_fit_into_their_stages(config: RunConfig) -> Faults:
    """The window of a stage is not longer than its sequences."""
    for index, stage in enumerate(config.data.stages):
        key, length = f"data.stages[{index}].sliding_window", stage.seq_len or config.training.seq_len
        if stage.sliding_window is not None and stage.sliding_window > length:
            yield Fault(
                (key, f"data.stages[{index}].seq_len", "training.seq_len"),
                f"{key} = {stage.sliding_window}: longer than the sequences of this stage, {length} tokens, so it "
                "limits nothing; lower it, or write -1 to attend to all previous tokens",
            )


def stages_read_apart(config: RunConfig) -> Faults:
    """No document is read twice, by stages of different sequence lengths or document ranges."""
    for index, stage in enumerate(config.data.stages):
        low, high = stage.documents
        if not 0.0 <= low < high <= 1.0:
            key = f"data.stages[{index}].documents"
            yield Fault(
                (key,), f"{key} = {show(stage.documents)}: must be a range [low, high] with 0 <= low < high <= 1"
            )
    for (one, first), (other, second) in combinations(enumerate(config.data.stages), 2):
        is_same_grid = (first.seq_len or config.training.seq_len, first.documents) == (
            second.seq_len or config.training.seq_len,
            second.documents,
        )
        overlap = max(first.documents[0], second.documents[0]) < min(first.documents[1], second.documents[1])
        shared = [config.data.sources[i].name for i in _read(config, first) & _read(config, second)]
        if overlap and shared and not is_same_grid:
            yield Fault(
                (f"data.stages[{one}]", f"data.stages[{other}]"),
                f"data.stages[{one}], data.stages[{other}]: both read {', '.join(sorted(shared))} with different "
                "sequence lengths or documents, so that some documents would be read twice; give them ranges that do "
                "not overlap, such as documents = [0.0, 0.8] and [0.8, 1.0]",
            )


def chats_are_read_whole(config: RunConfig) -> Faults:
    """A row holds whole documents of chats, which see only themselves: the rest of a cut one would lose its prompt."""
    for index, source in enumerate(config.data.sources):
        if source.recipe is not None and source.recipe.is_chat:
            yield from chat_faults(config, index, source.recipe.max_tokens, f"data.sources[{index}].recipe.max_tokens")


def preferences_read_pairs(config: RunConfig) -> Faults:
    """[finetune.preference] reads pairs, which no other run reads."""
    for index, source in enumerate(config.data.sources):
        if source.recipe is not None:
            key = f"data.sources[{index}].recipe.format"
            yield from pair_faults(config, source.recipe.is_paired, key, f"{key} = {show(source.recipe.format)}")


def pair_faults(config: RunConfig, is_paired: bool, key: str, named: str) -> Faults:
    """The fault of a source that is not what the task reads.

    Args:
        named: ``key``, or what else states what the source holds.
    """
    wants_pairs = config.preference is not None
    if is_paired and not wants_pairs:
        yield Fault((key, "finetune.preference"), f"{named}: pairs, which only [finetune.preference] reads; add that "
                    "section, or give another source")  # fmt: skip
    if wants_pairs and not is_paired:
        yield Fault((key, "finetune.preference"), f"{named}: no pairs, which [finetune.preference] reads; give a "
                    'source with format = "preference", or remove that section')  # fmt: skip


def chat_faults(config: RunConfig, index: int, max_tokens: int | None, named: str) -> Faults:
    """The faults of a source of chats.

    Args:
        index: of the source.
        max_tokens: most tokens of its documents; None: not stated.
        named: what states them.
    """
    source, stages = config.data.sources[index], config.data.stages
    key = f"data.sources[{index}].packing"
    if source.packing != "best_fit":
        yield Fault((key,), f'{key} = {show(source.packing)}: cuts chats between rows; set packing = "best_fit"')
    if not config.data.document_mask:
        yield Fault(
            ("data.document_mask", key),
            f"data.document_mask = false: the chats of data.sources[{index}] in a row would read each other; set it to "
            "true",
        )
    lengths = [stage.seq_len or config.training.seq_len for stage in stages if index in _read(config, stage)]
    shortest = min(lengths, default=config.training.seq_len)
    if max_tokens is None:
        yield Fault((named,), f"{named}: absent, and chats need it; set it to at most {shortest}, the shortest rows")
    elif max_tokens > shortest:
        yield Fault(
            (named, "training.seq_len", "data.stages"),
            f"{named} = {max_tokens}: longer than the shortest rows that read it, {shortest} tokens, and a document of "
            f"chats must fit into a row; lower it to {shortest}, or raise seq_len",
        )


def _read(config: RunConfig, stage: DataStageConfig) -> set[int]:
    """Indices of the sources that a stage reads."""
    weights = stage.weights or [1.0] * len(config.data.sources)
    return {i for i, weight in enumerate(weights[: len(config.data.sources)]) if weight > 0}


def validation_tasks_differ(config: RunConfig) -> Faults:
    """Each kind of validation task, and each standard task, is there at most once: its columns are named after it."""
    found: dict[str, str] = {}
    for index, task in enumerate(config.validation.tasks):
        key = f"validation.tasks[{index}].{'names' if task.kind == 'standard' else 'kind'}"
        for name in task.names if task.kind == "standard" else (task.kind,):
            if other := found.get(name):
                remedy = "name each task once" if task.kind == "standard" else "put the lengths into one task"
                yield Fault((key, other), f"{key} = {show(name)}: the same as {other}; {remedy}")
            found.setdefault(name, key)


def validation_tasks_are_whole(config: RunConfig) -> Faults:
    """A validation task says what it measures."""
    for index, task in enumerate(config.validation.tasks):
        key = "names" if task.kind == "standard" else "lengths"
        if not getattr(task, key):
            place, example = f"validation.tasks[{index}]", '["glm46_next_line"]' if key == "names" else "[4096]"
            yield Fault(
                (f"{place}.{key}", f"{place}.kind"),
                f"{place}.{key}: required with kind = {show(task.kind)}; add it, for example {key} = {example}",
            )


def validation_tasks_run_in_validations(config: RunConfig) -> Faults:
    """A task runs at a validation, so its frequency is a multiple of that of validations."""
    every = config.validation.freq
    for index, task in enumerate(config.validation.tasks):
        if task.freq is not None and task.freq % every:
            key, near = f"validation.tasks[{index}].freq", -(-task.freq // every) * every
            yield Fault(
                (key, "validation.freq"),
                f"{key} = {task.freq}: must be a multiple of validation.freq = {every}; take {near}",
            )


DATA_RULES: tuple[Callable[[RunConfig], Faults], ...] = (
    there_is_a_source,
    source_names_and_paths_are_unique,
    stages_follow_each_other,
    stages_weigh_the_sources,
    stages_fit_the_longest_sequence,
    windows_fit_into_their_stages,
    stages_read_apart,
    chats_are_read_whole,
    preferences_read_pairs,
    validation_tasks_differ,
    validation_tasks_are_whole,
    validation_tasks_run_in_validations,
)
