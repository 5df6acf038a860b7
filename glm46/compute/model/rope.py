"""Rotary position embedding on the leading part of each head (GPT-NeoX halves, not interleaved pairs), and on the
rotated part of latent attention, where pairs are neighbours."""

import math

import torch
from torch import Tensor

from glm46.compat import FunctionContext
from glm46.config.model import ModelShape, RopeScalingConfig


def rotary_dim(shape: ModelShape) -> int:
    """Return the number of rotated dimensions: the first of each head; the last in latent attention."""
    return shape.qk_rope_head_dim or int(shape.head_dim * shape.partial_rotary_factor)


def inverse_frequencies(shape: ModelShape, device: torch.device) -> tuple[Tensor, float]:
    """Compute the angular step per position of each rotated pair.

    Returns:
        FP32 frequencies [rotary_dim / 2], and the factor on cosine and sine (1 except for YaRN).

    Source: transformers `modeling_rope_utils.py`; position interpolation arXiv 2306.15595; YaRN arXiv 2309.00071.
    """
    dim = rotary_dim(shape)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    # YaRN keeps frequencies that turn often within the original length, and interpolates slow ones.
    interpolated_part = 1.0 - _yarn_ramp(scaling, dim, shape.rope_theta, device)
    frequencies = frequencies / scaling.factor * interpolated_part + frequencies * (1.0 - interpolated_part)
    factor = 1.0 if scaling.factor <= 1.0 else 0.1 * math.log(scaling.factor) + 1.0
    return frequencies, factor


def _yarn_ramp(scaling: RopeScalingConfig, dim: int, theta: float, device: torch.device) -> Tensor:
    """Compute the weight of the original frequency, [dim / 2]: 1 = unchanged, 0 = fully interpolated, linear in
    between."""

    def pair_that_turns(turns: float) -> float:
        """Return the index of the pair that turns so often within the original length."""
        positions = scaling.original_max_position_embeddings
        assert positions is not None, "yarn requires it"
        return dim * math.log(positions / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    if high == low:
        high += 0.001  # a step instead of a ramp; avoids division by zero
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    return 1.0 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)


def rotary_tables(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of every position, [B, S, 1, rotary_dim / 2] in `dtype`.

    Angles are FP32. The tables are cast to the dtype of the activations before use, as in `transformers`.

    Args:
        positions: integer [B, S].
    """
    frequencies, factor = inverse_frequencies(shape, positions.device)
    angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(2)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotation by an angle. Backward rotates the gradient back, so only the tables are saved."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    # One copy, changed in place: concatenating three parts would write everything twice.
    out = x.clone()
    out[..., :half].mul_(cos).addcmul_(second, sin, value=-direction)
    out[..., half : 2 * half].mul_(cos).addcmul_(first, sin, value=direction)
    return out


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the leading part of each head of `x` [B, S, heads, C]; the rest is unchanged."""
    if not torch.is_grad_enabled():  # starting a Function takes as long as rotating a few tokens
        return _rotated(x, *tables, 1.0)
    rotated: Tensor = _Rotate.apply(x, *tables)
    return rotated


def rotate_pairs(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of neighbours of `x` [B, S, heads, rotary_dim]. The first elements of all pairs become the first
    half of the result, as in `transformers`; scores of queries and keys do not depend on the order."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), tables)
