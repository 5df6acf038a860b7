"""Rules about [adapter]."""

from glm46.config.adapter import BASE_FORMATS, AdapterConfig
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig
from glm46.config.section import values_of


@rule
def base_is_loaded_whole(config: RunConfig, adapter: AdapterConfig) -> Faults:
    """Adapters start from trained weights, which are loaded completely."""
    if config.checkpoint.initial_load_path is None:
        yield fault(
            "`checkpoint.initial_load_path`: required by `adapter`, but absent; name the checkpoint or the Hugging "
            "Face folder (with checkpoint.initial_load_in_hf = true) of the base"
        )
    if config.checkpoint.initial_load_exclude:
        name = "checkpoint.initial_load_exclude"
        yield fault(f"`{name}`: is not possible under `adapter`, whose base is loaded whole; remove {name}")


@rule
def base_stays_as_it_is(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """Only adapters are trained: routers and their selection biases belong to the base."""
    moe = config.moe
    rates = () if moe.balance == "none" else values_of(moe.bias_update_rate)
    for key, values, remedy in (
        ("moe.bias_update_rate", rates, 'set it to 0, or set moe.balance = "none"'),
        ("moe.sequence_aux_loss_weight", values_of(moe.sequence_aux_loss_weight), "set it to 0"),
        ("moe.z_loss_weight", values_of(moe.z_loss_weight), "set it to 0"),
    ):
        if any(values):
            yield fault(f"`{key}`: must be 0 under `adapter`, which freezes the routers; {remedy}")
    temperatures = values_of(moe.router_temperature)
    if len(set(temperatures)) > 1:
        yield fault(
            "`moe.router_temperature`: cannot change under `adapter`, which leaves the routers of the base as they "
            f"are; set it to {temperatures[-1]:g}"
        )
    if shape.num_nextn_predict_layers:
        yield fault(
            "`model.shape.num_nextn_predict_layers`: must be 0 under `adapter`, which does not train them: the base's "
            "are left as they are; set it to 0"
        )


@rule
def adapters_are_under_adamw(config: RunConfig, adapter: AdapterConfig) -> Faults:
    """A and B are factors of a matrix, for which Muon's update is not meant."""
    if config.optimizer.name != "AdamW":
        yield fault('`optimizer.name`: adapters are trained by AdamW; set it to "AdamW"', "adapter")


@rule
def adapted_products_are_not_in_fp8(config: RunConfig, adapter: AdapterConfig) -> Faults:
    """[float8] does not convert adapted layers."""
    if config.float8.recipe_name is not None:
        yield fault("`float8.recipe_name`: is not possible under `adapter`; remove [float8]")


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
def magnitudes_are_on_the_device(config: RunConfig, adapter: AdapterConfig) -> Faults:
    """DoRA's norms are computed on the device, where offloaded weights are not."""
    if adapter.name == "dora" and config.training.parameter_offload:
        yield fault(
            '`training.parameter_offload`: is not possible with `adapter.name`; take "lora", or set it to false'
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
def targets_are_different(adapter: AdapterConfig) -> Faults:
    """There is a target, each is named once, and expert_rank is set only with experts among them."""
    if not adapter.targets:
        yield fault("`adapter.targets`: nothing would be trained; name one, or remove the key")
    if len(set(adapter.targets)) < len(adapter.targets):
        yield fault("`adapter.targets`: one is there twice; remove it")
    if adapter.expert_rank is not None and "experts" not in adapter.targets:
        yield fault(
            '`adapter.expert_rank`: has no effect without "experts" in adapter.targets; add it, or remove '
            "adapter.expert_rank",
            "adapter.targets",
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
