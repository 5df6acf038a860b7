"""The section [rollout]: how completions are drawn for reinforcement learning."""

from pydantic import Field

from glm46.config.section import Section


class Rollout(Section):
    """[rollout]: how completions are drawn: from the whole distribution, without top-p and top-k, whose support the
    trainer would not know."""

    max_new_tokens: int = Field(ge=1)
    """Longest completion in tokens. With the longest prompt it fits into training.seq_len."""

    temperature: float = Field(1.0, gt=0.0)
    """Logits are divided by it when tokens are drawn, and in training."""
