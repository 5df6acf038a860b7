"""Fill-in-the-middle: a document cut at two places, its middle moved to the end. Source: arXiv 2207.14255.

Cuts are drawn from the document's own hash, so they depend on nothing else. GLM trains on it with its three code
tokens; its rate and order are not published. CodeGeeX4's guide puts the suffix first.
"""

import random

import numpy as np

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.data.tokenizer import Tokenizer

PREFIX, MIDDLE, SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"


def require_fim_tokens(recipe: TextRecipe, tokenizer: Tokenizer) -> None:
    """Refuse to rearrange documents with a tokenizer that lacks the tokens for it.

    Raises:
        UserError: with the names that are missing.
    """
    missing = [name for name in (PREFIX, MIDDLE, SUFFIX) if name not in tokenizer.special]
    if recipe.fim_rate and missing:
        raise UserError(
            f"fim_rate = {recipe.fim_rate}: the tokenizer '{tokenizer.path}' lacks {', '.join(missing)}; add them to "
            "its special tokens, or set fim_rate = 0"
        )


def encode_document(text: str, digest: bytes, recipe: TextRecipe, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of a document, rearranged if the recipe and the document's hash say so; uint32 [tokens]."""
    dice = random.Random(digest)
    if not recipe.fim_rate or dice.random() >= recipe.fim_rate:
        return tokenizer.encode(text)
    suffix_first = dice.random() < recipe.fim_spm_rate
    first, second = sorted((dice.randint(0, len(text)), dice.randint(0, len(text))))
    prefix, suffix = (PREFIX, text[:first]), (SUFFIX, text[second:])
    ordered = [*((suffix, prefix) if suffix_first else (prefix, suffix)), (MIDDLE, text[first:second])]
    return np.concatenate(
        [
            piece
            for name, part in ordered
            for piece in (np.array([tokenizer.special[name]], np.uint32), tokenizer.encode(part))
        ]
    )
