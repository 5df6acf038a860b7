"""``python -m glm46 rl inspect``: the samples of a run's rollouts, with what was computed for their tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from glm46.commands.options import positive, verb_parser, whole
from glm46.config.errors import UserError
from glm46.data.tokenizer import Tokenizer, load_tokenizer

_COLUMNS = ("logprob", "old", "reference", "ratio", "advantage", "value", "weight")


def rl_command(argv: Sequence[str]) -> int:
    """Print samples of a rollout; returns the exit code.

    Raises:
        UserError: the folder has no rollouts, or they are damaged.
    """
    parser = verb_parser("rl", description="Show what reinforcement learning has drawn.")
    kinds = parser.add_subparsers(title="what", metavar="inspect", required=True)
    inspect = kinds.add_parser("inspect", help="samples with tokens, rewards, advantages and ratios")
    inspect.add_argument("folder", type=Path, help="job.dump_folder of a run with [rl]")
    inspect.add_argument("--step", type=whole(0), help="first optimizer step of a rollout; absent: the newest rollout")
    inspect.add_argument("--samples", type=positive, default=4, help="samples to show, from the first one on")
    inspect.add_argument("--tokens", action="store_true", help="one line for each token, with its mask")
    inspect.add_argument("--tokenizer", default="builtin", help="model.tokenizer_path of the run")
    arguments = parser.parse_args(argv)
    tokenizer = load_tokenizer(arguments.tokenizer)
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
        step: where the rollout begins; None: the newest.
        by_token: also yield a line for each token of prompt and completion.

    Raises:
        UserError: the rollout does not exist, or is damaged.
    """
    from glm46.rl.rollouts import FOLDER, read_fields, read_rollout, rollout_steps
    from glm46.rollout.records import FINISHES

    journal = folder / FOLDER
    steps = rollout_steps(journal)
    if not steps or (step is not None and step not in steps):
        there = f"there are {', '.join(map(str, steps[-10:]))}" if steps else "give job.dump_folder of a run with [rl]"
        raise UserError(f"{journal}: no rollout{f' of step {step}' if steps else ''}; {there}")
    step = steps[-1] if step is None else step
    rollout = read_rollout(journal, step)
    has_fields = (journal / f"step_{step:06d}.fields").is_file()
    fields = {name: values.numpy() for name, values in read_fields(journal, step).items()} if has_fields else {}
    kind = "labels as completions" if rollout.is_demonstration else "samples"
    yield (
        f"rollout of step {step}: {len(rollout):,} {kind} of prompts {rollout.first_prompt:,} to "
        f"{rollout.next_prompt - 1:,}, {rollout.tokens:,} tokens; {len(steps)} rollouts in {journal}"
    )
    yield "  ".join(f"{name} {value:.4g}" for name, value in rollout.figures.items())
    for sample in range(min(samples, len(rollout))):
        place = slice(*rollout.bounds(sample))
        is_drawn = ~rollout.arrays["is_reply"][place]
        prompt, completion = rollout.prompt(sample), rollout.completion(sample)
        parts = zip(rollout.part_names, rollout.arrays["parts"][sample].tolist(), strict=True)
        versions, reward = rollout.arrays["versions"][place], rollout.arrays["rewards"][sample]
        yield ""
        yield (
            f"── sample {sample}, prompt {rollout.arrays['groups'][sample]}: reward {reward:g} "
            f"({', '.join(f'{name} {value:g}' for name, value in parts)}), {len(prompt)} + {len(completion)} tokens, "
            f"finish {FINISHES[rollout.arrays['finish'][sample]]}, weights {versions.min()} to {versions.max()}"
        )
        yield tokenizer.decode(prompt) + _marked(tokenizer, completion, is_drawn)
        if has_fields:
            advantages = fields["advantages"][place][is_drawn]
            yield f"advantage {advantages.mean():.4g} (tokens {advantages.min():.4g} to {advantages.max():.4g})"
        if by_token:
            columns = _columns(rollout.arrays["logprobs"], fields, place)
            mask = np.concatenate([np.zeros(len(prompt), np.bool_), is_drawn])
            yield from _token_lines(tokenizer, np.concatenate([prompt, completion]), mask, columns)


def _marked(tokenizer: Tokenizer, completion: np.ndarray, is_drawn: np.ndarray) -> str:
    """The text of a completion, with [[ ]] around each turn of the policy."""
    turns = np.split(np.arange(len(completion)), np.flatnonzero(np.diff(is_drawn)) + 1)
    texts = [(tokenizer.decode(completion[turn]), is_drawn[turn[0]]) for turn in turns]
    return "".join(f"[[{text}]]" if is_turn else text for text, is_turn in texts)


def _columns(logprobs: np.ndarray, fields: dict[str, np.ndarray], place: slice) -> dict[str, np.ndarray]:
    """Columns of `_COLUMNS` that there are, for the tokens of a sample; those of an environment have any values."""
    names = {"old": "old_logprobs", "reference": "reference_logprobs", "advantage": "advantages"}
    names |= {"value": "old_values", "weight": "correction", "logprob": "rollout_logprobs"}
    columns = {"logprob": logprobs[place]}
    columns |= {column: fields[name][place] for column, name in names.items() if name in fields}
    if "old" in columns:
        columns["ratio"] = np.exp(columns["old"] - columns["logprob"])
    return {name: columns[name] for name in _COLUMNS if name in columns}


def _token_lines(
    tokenizer: Tokenizer, tokens: np.ndarray, mask: np.ndarray, columns: dict[str, np.ndarray]
) -> Iterator[str]:
    """A line for each token; those outside of the mask (prompt and environment) have no values, because nothing is
    computed for them."""
    yield "    ".join(["    token ", "mask", *(f"{name:>9}" for name in columns)])
    start = len(tokens) - len(columns["logprob"])
    for number, token in enumerate(tokens.tolist()):
        text = repr(tokenizer.decode([token]))[1:-1]
        values = [f"{of[number - start]:9.4f}" for of in columns.values()] if mask[number] else []
        yield "    ".join([f"    {text:<6}", f"{mask[number]:4d}", *values])
