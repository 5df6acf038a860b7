"""``python -m glm46 rl inspect``: samples of the rollouts of a run, with the values that were computed for their
tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.cells import cell_len

from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import read_table
from glm46.config.options import positive, verb_parser, whole
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.huggingface.hub import fetch_options, local_tokenizer
from glm46.tasks.rl.journal_files import FOLDER, rollout_steps

_COLUMNS = ("logprob", "old", "reference", "ratio", "advantage", "value", "weight")


def rl_command(argv: Sequence[str]) -> int:
    """Print samples of a rollout; returns the exit code.

    Raises:
        UserError: the folder has no rollouts, or they are damaged.
    """
    parser = verb_parser("rl", description="Show samples of reinforcement learning.")
    kinds = parser.add_subparsers(title="what", metavar="inspect", required=True)
    inspect = kinds.add_parser("inspect", help="samples with tokens, rewards, advantages and ratios")
    inspect.add_argument("folder", type=Path, help="job.dump_folder of a run with [rl]")
    inspect.add_argument("--step", type=whole(0), help="first optimizer step of a rollout; absent: the newest rollout")
    inspect.add_argument("--samples", type=positive, default=4, help="samples to show, from the first one on")
    inspect.add_argument("--tokens", action="store_true", help="one line for each token, with its mask")
    inspect.add_argument("--tokenizer", help="where model.tokenizer_path of the run lies now; absent: there")
    arguments = parser.parse_args(argv)
    fetch_options(arguments, "tokenizer")
    tokenizer = _tokenizer_of(arguments.folder, arguments.tokenizer)
    for line in describe_rollout(
        arguments.folder, tokenizer, step=arguments.step, samples=arguments.samples, by_token=arguments.tokens
    ):
        print(line)
    return 0


def describe_rollout(
    folder: Path, tokenizer: Tokenizer, *, step: int | None, samples: int, by_token: bool
) -> Iterator[str]:
    """Yield lines about a rollout: its figures, then samples.

    Args:
        step: first optimizer step of the rollout; None: the newest rollout.
        by_token: also yield a line for each token of prompt and completion.

    Raises:
        UserError: the rollout does not exist, is damaged, or has another tokenizer.
    """
    journal = folder / FOLDER
    steps = rollout_steps(journal)
    if not steps or (step is not None and step not in steps):
        hint = f"there are {', '.join(map(str, steps[-10:]))}" if steps else "give job.dump_folder of a run with [rl]"
        raise UserError(f"{journal}: no rollout{f' of step {step}' if steps else ''}; {hint}")
    from glm46.tasks.rl.journal import read_fields, read_rollout  # torch: refusals come before it

    step = steps[-1] if step is None else step
    rollout = read_rollout(journal, step)
    assert rollout is not None, "it is among the steps"
    if rollout.about.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(
            f"{journal}: generated with the tokenizer {rollout.about['tokenizer'][:12]}…, and this one is "
            f"{tokenizer.fingerprint[:12]}…; give the tokenizer of the run as --tokenizer"
        )
    has_fields = (journal / f"step_{step:06d}.fields").is_file()
    fields = {name: values.numpy() for name, values in read_fields(journal, step).items()} if has_fields else {}
    kind = "labels as completions" if rollout.is_demonstration else "samples"
    yield (
        f"rollout of step {step}: {len(rollout):,} {kind} of prompts {rollout.first_prompt:,} to "
        f"{rollout.next_prompt - 1:,}, {counted(len(rollout.logprobs), 'target')}; "
        f"{counted(len(steps), 'rollout')} in {journal}"
    )
    yield "  ".join(f"{name} {value:.4g}" for name, value in rollout.figures.items())
    for sample in range(min(samples, len(rollout))):
        is_target = rollout.targets[slice(*rollout.bounds(sample))] >= 0
        places = rollout.places[slice(*rollout.bounds(sample))][is_target]  # among all targets
        episode = rollout.episode[sample]
        prompt = rollout.prompt(sample)
        completion = rollout.completion(sample)
        parts = zip(rollout.part_names, rollout.parts[episode].tolist(), strict=True)
        yield ""
        yield (
            f"── sample {sample}, prompt {rollout.group[episode]}: reward {rollout.reward[episode]:g} "
            f"({', '.join(f'{name} {value:g}' for name, value in parts)}), {len(prompt)} + {len(completion)} tokens, "
            f"{rollout.outcome_name(episode)}, weights {rollout.versions[places].min()} "
            f"to {rollout.versions[places].max()}"
        )
        yield tokenizer.decode(prompt) + _marked(tokenizer, completion, is_target[len(prompt) :])
        if has_fields:
            advantages = fields["advantages"][places]
            yield f"advantage {advantages.mean():.4g} (tokens {advantages.min():.4g} to {advantages.max():.4g})"
        if by_token:
            columns = _columns(rollout.logprobs, fields, places)
            yield from _token_lines(tokenizer, np.concatenate([prompt, completion]), is_target, columns)


def _tokenizer_of(folder: Path, option: str | None) -> Tokenizer:
    file = folder / "config.toml"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the job.dump_folder of a run with [rl]")
    if option is None and not file.is_file():
        raise UserError(f"{file}: missing, so the tokenizer of the run is not known; give it as --tokenizer")
    try:
        return load_tokenizer(option or local_tokenizer(read_table(file)["model"]["tokenizer_path"]))
    except UserError as error:
        raise UserError(
            *(f"{fault}; give the tokenizer of the run as --tokenizer" for fault in error.faults)
        ) from error


def _marked(tokenizer: Tokenizer, completion: np.ndarray, is_generated: np.ndarray) -> str:
    """Return the text of a completion, with [[ ]] around each turn of the policy."""
    turns = np.split(np.arange(len(completion)), np.flatnonzero(np.diff(is_generated)) + 1)
    texts = [(tokenizer.decode(completion[turn]), is_generated[turn[0]]) for turn in turns]
    return "".join(f"[[{text}]]" if is_turn else text for text, is_turn in texts)


def _columns(logprobs: np.ndarray, fields: dict[str, np.ndarray], places: np.ndarray) -> dict[str, np.ndarray]:
    """Return the available columns of `_COLUMNS`, for the targets of a sample."""
    names = {"old": "old_logprobs", "reference": "reference_logprobs", "advantage": "advantages"}
    names |= {"value": "old_values", "weight": "correction", "logprob": "rollout_logprobs"}
    columns = {"logprob": logprobs[places]}
    columns |= {column: fields[name][places] for column, name in names.items() if name in fields}
    if "old" in columns:
        columns["ratio"] = np.exp(columns["old"] - columns["logprob"])
    return {name: columns[name] for name in _COLUMNS if name in columns}


def _token_lines(
    tokenizer: Tokenizer, tokens: np.ndarray, is_target: np.ndarray, columns: dict[str, np.ndarray]
) -> Iterator[str]:
    """Yield a header, then a line for each token. Tokens of the prompt and of the environment have no values, because
    nothing is computed for them."""
    texts = {token: repr(tokenizer.decode([token]))[1:-1] for token in {*tokens.tolist()}}
    width = max(map(cell_len, ("token", *texts.values())))
    widths = {name: max(len(name), 9, *(len(f"{value:.4f}") for value in values)) for name, values in columns.items()}
    yield "    ".join([f"    {'token':<{width}}", "mask", *(f"{name:>{widths[name]}}" for name in columns)])
    rows = zip(*([f"{value:{widths[name]}.4f}" for value in values] for name, values in columns.items()), strict=True)
    for token, has_values in zip(tokens.tolist(), is_target.tolist(), strict=True):
        text = texts[token] + " " * (width - cell_len(texts[token]))
        yield "    ".join([f"    {text}", f"{has_values:4d}", *(next(rows) if has_values else ())])
