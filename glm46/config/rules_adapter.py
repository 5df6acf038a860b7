"""Rules about [adapter]."""

from glm46.config.adapter import BASE_FORMATS, AdapterConfig
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig
from glm46.config.section import values_of


@rule
def quantised_base_has_whole_groups(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """At least one projection divides into groups of columns that share a scale, and tensor parallelism does not split
    a group."""
    if adapter.base_dtype is None:
        return
    tp = config.parallelism.tensor_parallel_degree
    base = BASE_FORMATS[adapter.base_dtype]
    size = base.columns
    heads = shape.num_attention_heads * shape.head_dim
    shared = shape.moe_intermediate_size * shape.n_shared_experts
    # Widths that tensor parallelism splits: inputs of o_proj and of down_proj. Routed experts are not split.
    split = {
        "model.shape.num_attention_heads x model.shape.head_dim": heads,
        "model.shape.intermediate_size": shape.intermediate_size,
        "model.shape.moe_intermediate_size x model.shape.n_shared_experts": shared,
    }
    fits_hidden = shape.hidden_size % size == 0
    if base.rows > 1:  # both sizes of a projection are divided
        widths = [*split.values(), shape.moe_intermediate_size]
        fits_any = fits_hidden and any(width and width % size == 0 for width in widths)
    else:  # q, k and v read the hidden size, o_proj the heads
        fits_any = fits_hidden or heads % size == 0
    if not fits_any:
        yield fault(
            f"`adapter.base_dtype`: no projection of this model has sizes that are multiples of {size} "
            "(`model.shape.hidden_size`); remove adapter.base_dtype"
        )
        return
    for name, width in split.items():
        if width and width % size == 0 and width % (size * tp):
            yield fault(
                f"`parallelism.tensor_parallel_degree`: splits {name} = {width} into parts that are not multiples of "
                f"{size}, which `adapter.base_dtype` needs; take a degree d for which {width} is a multiple of "
                f"{size} x d, or remove adapter.base_dtype"
            )


@rule
def routers_stay_as_they_are(config: RunConfig, adapter: AdapterConfig) -> Faults:  # noqa: ARG001 - see `rule`
    """Routers belong to the frozen base, so that their temperature cannot change."""
    temperatures = values_of(config.moe.router_temperature)
    if len(set(temperatures)) > 1:
        yield fault(
            "`moe.router_temperature`: cannot change with `adapter`, which freezes the routers; take "
            f"{temperatures[-1]:g}"
        )


@rule
def adapted_layers_exist(adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """The range of layers is inside the model, and every target exists in it."""
    first, last = adapter.layers or (0, shape.num_hidden_layers - 1)
    if not 0 <= first <= last < shape.num_hidden_layers:
        yield fault("`adapter.layers`: must be [first, last] with 0 <= first <= last < `model.shape.num_hidden_layers`")
        return
    has_moe = last >= shape.first_k_dense_replace
    for target, is_there, why in (
        ("dense", first < shape.first_k_dense_replace, "are dense"),
        ("shared_experts", has_moe and shape.n_shared_experts, "have shared experts"),
        ("experts", has_moe, "have experts"),
    ):
        # The default names every target, also those that the model lacks.
        is_named = target in adapter.targets and "targets" in adapter.model_fields_set
        if is_named and not is_there:
            yield fault(
                f'`adapter.targets`: none of the layers {first} to {last} {why}; remove "{target}"',
                "adapter.layers",
                "model.shape.first_k_dense_replace",
                "model.shape.n_shared_experts",
            )


@rule
def expert_ranks_are_aligned(config: RunConfig, adapter: AdapterConfig) -> Faults:
    """Rows of A and B of experts begin at multiples of 16 bytes, which grouped products need."""
    dtype = config.training.mixed_precision_param
    entries = 16 // {"bfloat16": 2, "float32": 4}[dtype]
    key = "rank" if adapter.expert_rank is None else "expert_rank"
    rank = getattr(adapter, key)
    if "experts" in adapter.targets and rank % entries:
        alternative = ", or set adapter.expert_rank" if key == "rank" else ""
        yield fault(
            f"`adapter.{key}`: must be a multiple of {entries} for experts in {dtype}; take "
            f"{-(-rank // entries) * entries}{alternative}",
            "training.mixed_precision_param",
        )
