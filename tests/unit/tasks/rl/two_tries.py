"""A conversation of two turns: six digits are sorted, and after a wrong first answer the user repeats them."""

from glm46.tasks.rl.rewards.answer import Answer


def repeat_the_digits(answer: Answer) -> str | None:
    """The user's second message; None ends the conversation."""
    if answer.history:
        return None
    is_right = answer.result.strip() == str(answer.label)
    return None if is_right else answer.prompt


def first_try(answer: Answer) -> float:
    """1 if the first answer was right: a reward without weight, which shows what the first turn learns."""
    if answer.history:
        return 0.0
    return float(answer.result.strip() == str(answer.label))
