"""The sections [moe] and [mtp]: expert balancing and additional losses."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.field_rules import Excludes, Needs
from glm46.config.section import Schedule, Section, every_value

_FROZEN_ROUTERS = Excludes("adapter", reason="which freezes the routers")


class MoEConfig(Section):
    """[moe]: how training balances tokens over the experts."""

    balance: Literal["sign", "proportional", "none"] = "sign"
    """Rule for the selection bias after each optimizer step. sign: loss-free balancing (arXiv 2408.15664), as GLM-4.5.
    proportional: moving average of the counts, bias moved by the relative excess, clamped."""

    bias_update_rate: Annotated[
        Schedule, every_value(0), _FROZEN_ROUTERS, Needs("balance", ("sign", "proportional"))
    ] = 0.001
    """Step of the selection bias; GLM-4.5 uses 0.001 for its first 15T tokens, then 0."""

    bias_ema_decay: Annotated[float, Needs("balance", "proportional")] = Field(0.99, ge=0.0, lt=1.0)
    """proportional: decay of the moving average of the token counts."""

    bias_clamp: Annotated[float, Needs("balance", "proportional")] = Field(5.0, gt=0.0)
    """proportional: largest absolute value of the bias."""

    sequence_aux_loss_weight: Annotated[
        Schedule,
        every_value(0),
        _FROZEN_ROUTERS,
        Excludes("rl", reason="which packs samples into rows in any way, and this balances rows"),
    ] = 1e-4
    """Weight of the sequence-level balance loss (arXiv 2412.19437, eq. 17 to 20), summed over the layers."""

    z_loss_weight: Annotated[Schedule, every_value(0), _FROZEN_ROUTERS] = 0.0
    """Weight of the router z-loss: mean over tokens of logsumexp(logits)^2, summed over the layers, of logits that
    router_temperature has divided (arXiv 2202.08906)."""

    router_temperature: Annotated[Schedule, every_value(0, is_exclusive=True)] = 1.0
    """Divisor of the router logits; a schedule warms it up. 1 is off. It is part of what the network computes: see
    docs/model.md. [adapter] accepts only a constant."""

    capacity_factor: Annotated[
        float | None,
        Excludes(
            "rl",
            reason="whose samples would lose tokens by the samples next to them, which the engine keeps",
            remedy="remove moe.capacity_factor",
        ),
    ] = Field(None, gt=0.0)
    """Largest number of tokens that an expert takes from one micro-batch, relative to an even share; tokens above it
    skip that expert and are counted as overflow. Absent: no token is dropped, as GLM trains. Only training drops:
    validation and exports warn of it."""


class MTPConfig(Section):
    """[mtp]: multi-token prediction; model.shape.num_nextn_predict_layers = 0 switches it off."""

    loss_weight: Annotated[Schedule, every_value(0), Needs("model.shape.num_nextn_predict_layers")] = 0.3
    """Weight of the mean multi-token prediction loss; GLM-4.5 uses 0.3 for its first 15T tokens, then 0.1. With [rl]
    only the prediction layers get its gradient."""

    depths: Annotated[int | None, Needs("model.shape.num_nextn_predict_layers", above=0)] = Field(None, ge=1)
    """Number of tokens that the prediction layers learn to draft; depth k runs layer k modulo their number. Absent: one
    per layer. One layer used for 3 depths is how GLM-5 (arXiv 2602.15763) and FastMTP (arXiv 2509.18362) train."""
