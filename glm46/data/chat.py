"""Prompts in the chat format of GLM-4.5 and 4.6.

Source: GLM-4.6's chat template, as in llama.cpp's models/templates/GLM-4.6.jinja.
"""

from glm46.config.errors import UserError
from glm46.data.tokenizer import Tokenizer


def chat_prompt(tokenizer: Tokenizer, message: str, *, system: str | None, thinking: bool) -> list[int]:
    """Return the token ids of a prompt up to the assistant's turn. Special tokens inside a message are plain text.

    Raises:
        UserError: the tokenizer lacks one of GLM's special tokens.
    """
    parts: list[tuple[str, bool]] = [("[gMASK]", True), ("<sop>", True)]  # text, is_special
    if system is not None:
        parts += [("<|system|>", True), (f"\n{system}", False)]
    parts += [("<|user|>", True), (f"\n{message}", False)]
    if thinking:
        parts += [("<|assistant|>", True)]
    else:
        parts += [("/nothink", True), ("<|assistant|>", True), ("\n", False), ("<think>", True), ("</think>", True)]
    missing = sorted(text for text, is_special in parts if is_special and text not in tokenizer.special)
    if missing:
        raise UserError(f"tokenizer '{tokenizer.path}': has no {', '.join(missing)}; --chat needs GLM's special tokens")
    ids: list[int] = []
    for text, is_special in parts:
        ids += [tokenizer.special[text]] if is_special else tokenizer.encode(text).tolist()
    return ids
