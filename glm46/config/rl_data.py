"""Tables of [rl] about what is asked and how answers are judged: prompts, rewards, validation."""

from typing import Annotated

from pydantic import Field

from glm46.config.section import DataFile, OnHub, Section

WITHOUT_LABELS = frozenset({"format", "repetition", "model"})
"""Rewards that do not read the label of a prompt."""


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

    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """``package.module:function`` of your own, which gets the `Answer` of a turn and the options, and returns the text
    of the reply, or None at the end of the conversation. A turn that ends as a tool call gets it as the response of a
    tool, another one as the user's message. A turn that says nothing behind its thought ends the conversation. A call
    that fails or hangs drops its sample."""

    max_turns: int = Field(4, ge=2)
    """Turns of the policy in a conversation. All of its tokens together are at most rollout.max_new_tokens."""

    timeout_seconds: float = Field(10.0, gt=0.0)
    """Longest time for one reply."""

    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of the function."""


class RewardTableConfig(Section):
    """[[rl.rewards]]: one part of the reward. A part that fails, hangs or gives no number drops its sample."""

    name: str
    """math, exact, choice, format, repetition, code, remote, model (docs/rl.md, docs/reward_model.md), or
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
