"""Linear layers that [float8] converts or excludes, and the rules of the section."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from glm46.config.faults import counted, show
from glm46.config.float8 import Float8Config
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.rules_layout import data_parallel_degree
from glm46.config.run_config import RunConfig

FP8_MULTIPLE = 16
"""FP8 products need a multiple of this many inputs and outputs, and of tokens for a weight gradient: the kernels read
rows in pieces of 16 bytes (`torch._scaled_mm`)."""

MX_BLOCK = 32
"""Elements that share a scale under mxfp8 (OCP Microscaling Formats 1.0)."""

EXPERTS_MULTIPLES = {"rowwise": FP8_MULTIPLE, "mxfp8": MX_BLOCK, None: 1}
"""`experts_recipe_name` -> number of which inputs, outputs and rows of experts must be multiples."""


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer on one rank."""

    name: str
    """Name of the module, such as ``layers.3.self_attn.q_proj``."""
    outputs: int
    inputs: int
    excluded_by: str | None
    """Key and value that exclude the layer; None if it is converted."""


def linear_layers(shape: ModelShape, float8: Float8Config, tp: int = 1) -> Iterator[LinearLayer]:
    """Yield the linear layers of the whole model, with their sizes on a rank of a tensor-parallel group.

    The embedding, the router and the output head are not included: the embedding is a lookup, the router computes in
    FP32, and the output head computes in chunks, together with the loss.
    """
    D = shape.hidden_size
    queries, keys = (heads * shape.head_dim // tp for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    attention = {"q_proj": (queries, D), "k_proj": (keys, D), "v_proj": (keys, D), "o_proj": (D, queries)}
    if shape.is_latent:
        query_latent = shape.q_lora_rank or 0
        key_latent = shape.kv_lora_rank or 0
        key_value_rows = queries + shape.num_attention_heads // tp * (shape.qk_nope_head_dim or 0)
        attention = {
            "q_a_proj": (query_latent, D),
            "q_b_proj": (queries, query_latent),
            "kv_a_proj_with_mqa": (shape.latent_width, D),
            "kv_b_proj": (key_value_rows, key_latent),
            "o_proj": (D, queries),
        }

    def layer(prefix: str, feed_forward: str, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
        yield from ((f"{prefix}self_attn.{name}", size) for name, size in attention.items())
        if width:
            sizes = {"gate_proj": (width, D), "up_proj": (width, D), "down_proj": (D, width)}
            yield from ((f"{prefix}{feed_forward}.{name}", size) for name, size in sizes.items())

    def layers() -> Iterator[tuple[str, tuple[int, int]]]:
        shared = shape.n_shared_experts * shape.moe_intermediate_size // tp
        for index in range(shape.num_hidden_layers):
            if index < shape.first_k_dense_replace:
                yield from layer(f"layers.{index}.", "mlp", shape.intermediate_size // tp)
            else:
                yield from layer(f"layers.{index}.", "mlp.shared_experts", shared)
        for index in range(shape.num_nextn_predict_layers):
            yield f"mtp.{index}.eh_proj", (D, 2 * D)
            yield from layer(f"mtp.{index}.block.", "mlp.shared_experts", shared)

    for name, (outputs, inputs) in layers():
        excluded_by = next((f"filter_fqns {show(part)}" for part in float8.filter_fqns if part in name), None)
        yield LinearLayer(name, outputs, inputs, excluded_by)


def keeps_rounded_experts(config: RunConfig) -> bool:
    """Return True if the weights of experts are rounded once per step instead of in each micro-batch, on pipeline
    stages whose layers stay gathered for the step. torchao's MXFP8 product rounds in each micro-batch."""
    parallelism = config.parallelism
    recipe = config.float8.experts_recipe_name
    is_kept = parallelism.pipeline_parallel_degree > 1 and parallelism.keeps_gathered
    return is_kept and (recipe == "rowwise" or (recipe is not None and config.float8.emulate))


def describe_float8(shape: ModelShape, float8: Float8Config, tp: int) -> str:
    """Describe, for the start message, what is computed in FP8, and why the rest is in higher precision."""
    layers = list(linear_layers(shape, float8, tp))
    converted = sum(layer.excluded_by is None for layer in layers)
    parts = [f"{float8.recipe_name} for {converted} of {counted(len(layers), 'linear layer')}"]
    parts += ["gathered in FP8"] if float8.enable_fsdp_float8_all_gather else []
    parts += [f"{float8.experts_recipe_name} for the routed experts"] if float8.experts_recipe_name else []
    parts += ["emulated"] if float8.emulate else []
    not_converted = ["embedding, router and output head by design"]
    for reason in dict.fromkeys(layer.excluded_by for layer in layers if layer.excluded_by):
        kinds = dict.fromkeys(layer.name.rpartition(".")[2] for layer in layers if layer.excluded_by == reason)
        not_converted.append(f"{', '.join(kinds)} by {reason}")
    not_converted += [] if float8.experts_recipe_name else ["routed experts, because experts_recipe_name is absent"]
    return f"{', '.join(parts)}; not converted: {'; '.join(not_converted)}"


@rule
def filters_leave_something(config: RunConfig, shape: ModelShape) -> Faults:
    """Each filter excludes at least one layer, and not all layers are excluded."""
    float8 = config.float8
    if float8.recipe_name is None:
        return
    layers = list(linear_layers(shape, float8, config.parallelism.tensor_parallel_degree))
    for part in float8.filter_fqns:
        if not any(part in layer.name for layer in layers):
            kinds = ", ".join(dict.fromkeys(layer.name.rpartition(".")[2] for layer in layers))
            yield fault(
                f"float8.filter_fqns = {show(part)}: no linear layer has this in its name, such as {layers[-1].name}; "
                f"take a part of such a name ({kinds}), or remove it",
                "float8.filter_fqns",
            )
    if all(layer.excluded_by for layer in layers):
        count = counted(len(layers), "linear layer")
        yield fault(f"`float8.filter_fqns`: excludes all {count}; exclude fewer, or remove float8.recipe_name")


@rule
def fp8_divides_the_layers(config: RunConfig, shape: ModelShape) -> Faults:
    """On each rank, inputs and outputs of converted layers are multiples of `FP8_MULTIPLE`, and those of experts are
    multiples of what their recipe needs."""
    float8 = config.float8
    tp = config.parallelism.tensor_parallel_degree
    if float8.recipe_name is None:
        return
    uneven: dict[str, LinearLayer] = {}
    for layer in linear_layers(shape, float8, tp):
        if layer.excluded_by is None and (layer.outputs % FP8_MULTIPLE or layer.inputs % FP8_MULTIPLE):
            uneven.setdefault(layer.name.rpartition(".")[2], layer)
    if uneven:
        first = next(iter(uneven.values()))
        yield fault(
            f"`float8.recipe_name`: {first.name} has {first.inputs} inputs and {first.outputs} outputs on a rank, and "
            f"FP8 products need multiples of {FP8_MULTIPLE}; set float8.filter_fqns = {show(list(uneven))}",
            "float8.filter_fqns",
            "model",
            "parallelism.tensor_parallel_degree",
        )
    multiple = EXPERTS_MULTIPLES[float8.experts_recipe_name]
    if shape.hidden_size % multiple or shape.moe_intermediate_size % multiple:
        yield fault(
            "`float8.experts_recipe_name`: experts map `model.shape.hidden_size` to "
            "`model.shape.moe_intermediate_size`, and its products need "
            f"multiples of {multiple}; remove experts_recipe_name"
        )


@rule
def fp8_divides_the_tokens(config: RunConfig, shape: ModelShape) -> Faults:
    """The tokens of a micro-batch on a rank are a multiple of `FP8_MULTIPLE`, if weight gradients are in FP8."""
    if config.float8.recipe_name not in ("tensorwise", "rowwise"):
        return
    layout = config.parallelism
    rows = config.training.local_batch_size
    ranks = layout.context_parallel_degree
    if any(layer.name.endswith("eh_proj") for layer in linear_layers(shape, config.float8) if not layer.excluded_by):
        ranks *= layout.tensor_parallel_degree  # the only linear layer on a rank's own part of the sequence
    lengths = {
        f"data.stages[{index}].seq_len": stage.seq_len or config.training.seq_len
        for index, stage in enumerate(config.data.stages)
    } or {"training.seq_len": config.training.seq_len}
    for key in [key for key, length in lengths.items() if rows * length // ranks % FP8_MULTIPLE][:1]:
        step = FP8_MULTIPLE * ranks // math.gcd(FP8_MULTIPLE * ranks, rows)
        yield fault(
            f"{key} = {lengths[key]}: {rows * lengths[key] // ranks} tokens of a micro-batch on a rank, and weight "
            f"gradients of `float8.recipe_name` need a multiple of {FP8_MULTIPLE}; take "
            f"{-(-lengths[key] // step) * step} or change training.local_batch_size, or set "
            'float8.recipe_name = "rowwise_with_gw_hp"',
            key,
            "training.local_batch_size",
            "parallelism",
        )


@rule
def shards_of_gathered_rows_are_even(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """Weights that FSDP2 gathers in FP8 are sharded evenly: torchao does not pad the shards."""
    degree = data_parallel_degree(config, world_size)
    layout = config.parallelism
    if not config.float8.enable_fsdp_float8_all_gather or degree is None:
        return
    shards = degree // layout.data_parallel_replicate_degree * layout.context_parallel_degree
    layers = linear_layers(shape, config.float8, layout.tensor_parallel_degree)
    for layer in [layer for layer in layers if layer.excluded_by is None and layer.outputs % shards][:1]:
        yield fault(
            f"`float8.enable_fsdp_float8_all_gather`: {layer.name} has {layer.outputs} rows, which {shards} ranks "
            "(data_parallel_shard_degree * context_parallel_degree) do not share evenly; take a degree that divides "
            "them, or set it to false",
            "parallelism",
            "model",
        )
