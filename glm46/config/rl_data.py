"""Tables of [rl] about what is asked and how answers are judged: prompts, rewards, validation."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.section import DataFile, Needs, OnHub, Section

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
    offers none."""

    thinking: bool = False
    """True if the model may think before it answers; else the prompt closes the thought."""

    keep_thoughts: bool = False
    """Past thoughts of a prompt stay in it (clear_thinking = false), in the format of GLM-4.7; else those before the
    last user message are removed. What a run samples itself always stays in a conversation with [rl.environment]."""


class EnvironmentConfig(Section):
    """[rl.environment]: what answers the policy's turns, such as tools. Its tokens are not targets."""

    kind: Literal["function", "command", "worker"] = "function"
    """function: a function replies to each turn. command: a program of your own runs once for each sample, and asks the
    policy by OpenAI's chat API. worker: such a program stays, and gets one sample after another (docs/rl.md)."""

    function: Annotated[str | None, _FUNCTION] = Field(None, pattern=r"^[\w.]+:\w+$")
    """``package.module:function`` of your own, which gets the `Answer` of a turn and the options, and returns the text
    of the reply, or None at the end of the conversation. A turn that ends as a tool call gets it as the response of a
    tool, another one as the user's message. A turn that says nothing behind its thought ends the conversation. A call
    that fails or hangs drops its sample."""

    max_turns: int = Field(4, ge=2)
    """Turns of the policy in a conversation. All of its tokens together are at most rollout.max_new_tokens. A program
    that asks for more is told so, and its sample counts as one that was cut."""

    timeout_seconds: float = Field(10.0, gt=0.0)
    """Longest time for one reply, or for the scoring command."""

    options: Annotated[dict[str, bool | int | float | str], _FUNCTION] = Field(default_factory=dict)
    """Options of the function."""

    command: Annotated[tuple[str, ...], _PROGRAM] = ()
    """The program, as a list of words; paths of files in it lead from the folder that the run was started in. It runs
    on the host of rank 0 in an empty folder, which is removed, with OPENAI_BASE_URL, OPENAI_API_KEY and GLM46_TASK: the
    row of the prompt without its label, as JSON of at most 128 KiB. Exit code 0 ends the episode well; with another one
    it has failed. A worker gets these by lines."""

    score_command: Annotated[tuple[str, ...], _COMMAND] = ()
    """A program that runs in the same folder when the first one has ended. Its standard input is JSON: the ``row`` with
    its label and the ``messages`` of the last turn. The last line that it prints is the number that the reward "score"
    gives; without it the last line of the first program is."""

    seconds: Annotated[float, _PROGRAM] = Field(3600.0, gt=0.0)
    """Longest time for an episode; then its program is killed, and it has failed. A worker's start counts."""

    tries: Annotated[int, _PROGRAM] = Field(2, ge=1)
    """Most runs of an episode that fails, each with another seed. Then its group goes on without it."""

    at_once: Annotated[int, _PROGRAM] = Field(64, ge=1)
    """Programs that run at the same time, and most workers that are kept."""

    variables: Annotated[tuple[str, ...], _PROGRAM] = ()
    """Names of environment variables that both programs get, beside PATH, HOME, LANG, TMPDIR, PYTHONPATH and the like;
    others, such as keys of services, stay here."""

    sandbox: Annotated[Literal["auto", "required"], _PROGRAM] = "auto"
    """auto: programs run in bubblewrap where it starts, else under Landlock where the kernel has it, else as any
    program of this user. required: the run is refused where neither works."""

    allow: Annotated[tuple[str, ...], _PROGRAM] = ()
    """Files and folders that the sandbox lets both programs read, beside those of the system, of Python and of the
    command itself; "network" opens the network of the host to them."""


class RewardTableConfig(Section):
    """[[rl.rewards]]: one part of the reward. A part that fails, hangs or gives no number drops its sample."""

    name: str
    """math, exact, choice, format, repetition, code, remote, score, model (docs/rl.md, docs/reward_model.md), or
    ``package.module:function`` of your own, which gets an `Answer` and the options."""

    weight: float = 1.0
    """Factor of this part in the reward."""

    timeout_seconds: float = Field(10.0, gt=0.0)
    """Longest time for one answer, for the rewards that run in processes: math, code, remote and your own."""

    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of the reward."""


class PromptSetConfig(Section):
    """[[rl.validation]]: prompts that are answered in each validation ([validation] enable, freq)."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in metrics."""

    file: Annotated[DataFile, OnHub("dataset")]
    """As that of [rl.prompts], with its keys."""

    samples: int = Field(1, ge=1)
    """Answers to each prompt: the estimate of pass@k is unbiased up to k = samples."""

    temperature: float = Field(1.0, ge=0.0)
    """Sampling temperature; 0 always takes the most likely token."""
