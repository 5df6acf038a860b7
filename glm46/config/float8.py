"""The section [float8]."""

from typing import Annotated, Literal

from glm46.config.field_rules import Excludes, Needs
from glm46.config.section import Section


class Float8Config(Section):
    """[float8]: products that are computed with operands in 8-bit floating point (docs/float8.md)."""

    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None,
        Excludes("adapter", reason="whose layers are not converted", remedy="remove [float8]"),
    ] = None
    """torchao's recipe for the linear layers. tensorwise: one scale per tensor. rowwise: one scale per row or column.
    rowwise_with_gw_hp: as rowwise, but weight gradients stay in training.mixed_precision_param. Absent: no FP8."""

    experts_recipe_name: Annotated[Literal["rowwise", "mxfp8"] | None, Needs("recipe_name")] = None
    """Recipe for the products of the routed experts. rowwise: one scale per token, and per expert and column of a
    weight. mxfp8: one scale per 32 elements. Absent: experts stay in training.mixed_precision_param."""

    filter_fqns: Annotated[tuple[str, ...], Needs("recipe_name")] = ()
    """Linear layers that are not converted: layers with one of these texts in their name, such as "k_proj" or
    "mtp."."""

    enable_fsdp_float8_all_gather: Annotated[bool, Needs("recipe_name", "tensorwise")] = False
    """Gather the weights of converted linear layers in FP8: half the bytes of BF16. Only tensorwise has one scale for
    all shards of a weight."""

    emulate: Annotated[bool, Needs("recipe_name")] = False
    """Round operands to FP8 and multiply them in training.mixed_precision_param: the numerics of a recipe on any
    device, without its speed."""
