"""Tables of [rl] about prompts, the environment, rewards and validation."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from glm46.config.faults import nearest
from glm46.config.field_rules import Excludes, Needs, Requires
from glm46.config.hub_address import OnHub
from glm46.config.section import DataFile, Removed, Section

BUILT_IN_REWARDS = ("math", "exact", "choice", "format", "repetition", "code", "remote", "score", "model")
WITHOUT_LABELS = frozenset({"format", "repetition", "model"})
"""Rewards that do not read the label of a prompt."""


_FUNCTION, _COMMAND, _PROGRAM = (Needs("kind", value) for value in ("function", "command", ("command", "worker")))


class PromptsConfig(Section):
    """[rl.prompts]: the prompts of a run. All are read once in an order that debug.seed decides, then again in another
    order."""

    file: Annotated[DataFile, OnHub("dataset")]
    """Lines of JSON (.jsonl) or a Parquet file (.parquet), one prompt each: a path, or a file of a data set of the hub,
    ``hf://datasets/owner/name/file``."""

    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages as in chats of fine-tuning that ends with the user's or a
    tool's. Dots lead into tables."""

    label_key: str = "label"
    """Key of what rewards compare answers with, such as "reward_model.ground_truth". Built-in rewards that compare need
    it in each line."""

    tools_key: str = "tools"
    """Key of the descriptions of the tools that a prompt offers, a list of JSON objects or its text. A row without it
    offers no tools."""

    thinking: Annotated[
        bool,
        Excludes(
            "rl.warm_up_rollouts",
            reason="because labels hold no thoughts",
            remedy="set rl.prompts.thinking = false, or start from a fine-tuned model",
        ),
    ] = False
    """True if the model may think before it answers; else the prompt closes the thought."""

    keep_thoughts: bool = False
    """Past thoughts of a prompt stay in it (clear_thinking = false), from GLM-4.7 on; else thoughts before the last
    user message are removed. Thoughts that the run samples itself always stay in a conversation with
    [rl.environment]."""


class EnvironmentConfig(Section):
    """[rl.environment]: what replies to the turns of the policy, such as tools. Tokens of replies are not targets."""

    removed = {"tries": Removed("an episode that fails runs once more; remove it")}

    kind: Annotated[
        Literal["function", "command", "worker"],
        Requires("function", when="function"),
        Requires("command", when=("command", "worker")),
    ] = "function"
    """function: a function replies to each turn. command: a program of your own runs once for each sample, and calls
    the policy through OpenAI's chat API. worker: such a program keeps running, and gets one sample after another
    (docs/rl_agents.md)."""

    function: Annotated[str | None, _FUNCTION] = Field(None, pattern=r"^[\w.]+:\w+$")
    """``package.module:function`` of your own, which gets the `Answer` of a turn and the options, and returns the text
    of the reply, or None at the end of the conversation. The reply to a tool call is the response of a tool; any other
    reply is the user's message. A turn without text after its thought ends the conversation. A call that fails or hangs
    drops its sample."""

    max_turns: int = Field(4, ge=2)
    """Largest number of turns of the policy in a conversation. The tokens of all turns together are at most
    rollout.max_new_tokens. A program that requests more turns or tokens gets an error, and its sample counts as
    truncated."""

    timeout_seconds: float = Field(10.0, gt=0.0)
    """Longest time for one reply, or for the scoring command."""

    options: Annotated[dict[str, bool | int | float | str], _FUNCTION] = Field(default_factory=dict)
    """Options of the function."""

    command: Annotated[tuple[str, ...], _PROGRAM] = ()
    """The program, as a list of words; file paths in it are relative to the folder that the run was started in. It runs
    on the host of rank 0 in an empty folder, which is removed, with OPENAI_BASE_URL, OPENAI_API_KEY and GLM46_TASK: the
    row of the prompt without its label, as JSON of at most 128 KiB. Exit code 0: the episode succeeded; any other: it
    failed. A failed episode runs once more, with another seed; then its group continues without it. A worker gets the
    tasks line by line."""

    score_command: Annotated[tuple[str, ...], _COMMAND, Needs("rl.rewards[].name", "score")] = ()
    """A program that runs after ``command`` has ended, in an empty folder of its own. GLM46_EPISODE_FOLDER names the
    folder of ``command``, which is read-only for it. Its standard input is JSON: the ``row`` with its label and the
    ``messages`` of the last turn. The last line of its standard output is the number of the reward "score". Absent: the
    last line of the output of ``command``."""

    seconds: Annotated[float, _PROGRAM] = Field(3600.0, gt=0.0)
    """Longest time for an episode, the start of a worker included; after it the program is killed and the episode
    fails."""

    at_once: Annotated[int, _PROGRAM] = Field(64, ge=1)
    """Largest number of programs that run at the same time, and of workers that are kept."""

    variables: Annotated[tuple[str, ...], _PROGRAM] = ()
    """Names of environment variables that both programs get, in addition to PATH, HOME, LANG, TMPDIR, PYTHONPATH and
    similar ones; others, such as keys of services, are not passed on."""

    sandbox: Annotated[Literal["auto", "required"], _PROGRAM] = "auto"
    """auto: programs run in bubblewrap where it starts, else under Landlock where the kernel has it, else without a
    sandbox. required: the run is refused if neither bubblewrap nor the Landlock of Linux 6.12 works; under Landlock
    programs then cannot change modes, owners and times of files."""

    allow: Annotated[tuple[str, ...], _PROGRAM] = ()
    """Files and folders that the sandbox lets both programs read, in addition to the files of the system, of Python and
    of the command itself; "network" gives them the network of the host."""


def _reward(name: str) -> str:
    if name not in BUILT_IN_REWARDS and ":" not in name:
        near = nearest(name, BUILT_IN_REWARDS, 0.6)
        remedy = f"did you mean '{near}'?" if near else "correct it"
        raise ValueError(f"neither one of {', '.join(BUILT_IN_REWARDS)} nor package.module:function; {remedy}")
    return name


class RewardTableConfig(Section):
    """[[rl.rewards]]: one part of the reward. A sample is dropped if a part fails, hangs or gives no number."""

    name: Annotated[
        str,
        AfterValidator(_reward),
        Requires("rl.environment.command", when="score", remedy='add [rl.environment] with kind = "command"'),
    ]
    """math, exact, choice, format, repetition, code, remote, score, model (docs/rl_run.md), or
    ``package.module:function`` of your own, which gets an `Answer` and the options."""

    weight: float = 1.0
    """Factor of this part in the reward."""

    timeout_seconds: float = Field(10.0, gt=0.0)
    """Longest time for one answer, for the rewards that run in processes: math, code, remote and your own."""

    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of the reward."""


class PromptSetConfig(Section):
    """[[rl.validation]]: prompts that the policy answers in each validation ([validation] enable, freq)."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in metrics."""

    file: Annotated[DataFile, OnHub("dataset")]
    """File of prompts, in the format of rl.prompts.file and with the keys of [rl.prompts]."""

    samples: int = Field(1, ge=1)
    """Answers to each prompt: the estimate of pass@k is unbiased up to k = samples."""

    temperature: float = Field(1.0, ge=0.0)
    """Sampling temperature; 0 always takes the most likely token."""
