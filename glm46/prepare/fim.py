"""Fill-in-the-middle: a document cut at two places, its middle moved to the end. Source: arXiv 2207.14255.

Cuts are drawn from the document's own hash, so they depend on nothing else. GLM trains on it with its three code
tokens; its rate and order are not published. CodeGeeX4's guide puts the suffix first.
"""

import random

import numpy as np

from glm46.config.text_recipe import TextRecipe
from glm46.data.tokenizer import Tokenizer

PREFIX, MIDDLE, SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"


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
