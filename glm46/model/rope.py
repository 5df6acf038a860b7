"""Rotary position embedding on a part of each head (GPT-NeoX halves, not interleaved pairs)."""

import math

import torch
from torch import Tensor

from glm46.config.model import ModelShape, RopeScaling


def rotary_dim(shape: ModelShape) -> int:
    """Number of leading dimensions of each head that are rotated."""
    return int(shape.head_dim * shape.partial_rotary_factor)


def inverse_frequencies(shape: ModelShape, device: torch.device) -> tuple[Tensor, float]:
    """Angular step per position of each rotated pair.

    Returns:
        FP32 frequencies [rotary_dim / 2] and the factor on cosine and sine (1 except for YaRN).

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
    # YaRN: frequencies that turn often inside the original length keep their step, slow ones are interpolated.
    interpolated_part = 1.0 - _yarn_ramp(scaling, dim, shape.rope_theta, device)
    frequencies = frequencies / scaling.factor * interpolated_part + frequencies * (1.0 - interpolated_part)
    return frequencies, 1.0 if scaling.factor <= 1.0 else 0.1 * math.log(scaling.factor) + 1.0


def _yarn_ramp(scaling: RopeScaling, dim: int, theta: float, device: torch.device) -> Tensor:
    """1 where a frequency is left alone, 0 where it is fully interpolated, linear between; [dim / 2]."""

    def pair_that_turns(turns: float) -> float:
        positions = scaling.original_max_position_embeddings
        return dim * math.log(positions / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    high = high + 0.001 if high == low else high  # a step instead of a ramp, without dividing by zero
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    return 1.0 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)


def rotary_tables(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, [B, S, 1, rotary_dim / 2] in `dtype`.

    Angles are FP32 and the tables are cast to the activations' type before they are used, as `transformers` does.

    Args:
        positions: integer [B, S].
    """
    frequencies, factor = inverse_frequencies(shape, positions.device)
    angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(2)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotation by an angle; backward rotates the gradient back, so nothing but the tables is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    # One copy that is changed in place: joining three parts would write everything twice.
    out = x.clone()
    out[..., :half].mul_(cos).addcmul_(second, sin, value=-direction)
    out[..., half : 2 * half].mul_(cos).addcmul_(first, sin, value=direction)
    return out


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the leading part of each head of `x` [B, S, heads, C]; the rest passes through."""
    return _Rotate.apply(x, *tables)
