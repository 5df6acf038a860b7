"""Rules about [adapter]."""

from collections.abc import Callable

from glm46.config.adapter import AdapterConfig
from glm46.config.faults import Fault, Faults, show
from glm46.config.model import ModelShape
from glm46.config.rules_layout import values_of
from glm46.config.run_config import RunConfig

_FP8_BLOCK = 128
"""Rows and columns of a block; a test holds it equal to `run/parameters.py`."""


def adapter_has_a_base(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """Adapters belong to trained weights."""
    if config.checkpoint.initial_load_path is None:
        yield Fault(
            ("adapter", "checkpoint.initial_load_path"),
            "checkpoint.initial_load_path: required by [adapter], but absent; name the checkpoint or the Hugging Face "
            "folder (with checkpoint.initial_load_in_hf = true) of the base",
        )


def base_is_loaded_whole(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """The base of adapters has all of its weights."""
    for name in ("initial_load_include", "initial_load_exclude"):
        if patterns := getattr(config.checkpoint, name):
            yield Fault(
                (f"checkpoint.{name}", "adapter"),
                f"checkpoint.{name} = {show(patterns)}: is not possible under [adapter], whose base is loaded whole; "
                f"remove checkpoint.{name}",
            )


def base_stays_as_it_is(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """Nothing but adapters is trained: routers and their selection biases belong to the base."""
    moe = config.moe
    rates = () if moe.balance == "none" else values_of(moe.bias_update_rate)
    for key, value, values, remedy in (
        ("moe.bias_update_rate", moe.bias_update_rate, rates, 'set it to 0, or set moe.balance = "none"'),
        ("moe.sequence_aux_loss_weight", moe.sequence_aux_loss_weight, None, "set it to 0"),
        ("moe.z_loss_weight", moe.z_loss_weight, None, "set it to 0"),
    ):
        if any(values_of(value) if values is None else values):
            yield Fault((key, "adapter"), f"{key} = {show(value)}: must be 0 under [adapter], which freezes the "
                        f"routers; {remedy}")  # fmt: skip
    temperatures = values_of(moe.router_temperature)
    if len(set(temperatures)) > 1:
        yield Fault(
            ("moe.router_temperature", "adapter"),
            f"moe.router_temperature = {show(moe.router_temperature)}: cannot change under [adapter], which "
            f"leaves the routers of the base as they are; set it to {temperatures[-1]:g}",
        )
    if shape.num_nextn_predict_layers:
        yield Fault(
            ("model.num_nextn_predict_layers", "adapter"),
            f"model.num_nextn_predict_layers = {shape.num_nextn_predict_layers}: must be 0 under [adapter], which does "
            "not train them: the base's are left as they are; set it to 0",
        )


def adapters_are_under_adamw(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """A and B are factors of a matrix, for which Muon's update is not meant."""
    if config.optimizer.name != "AdamW":
        yield Fault(
            ("optimizer.name", "adapter"),
            f'optimizer.name = {show(config.optimizer.name)}: adapters are trained by AdamW; set it to "AdamW"',
        )


def base_is_in_full_precision(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """The products of adapted layers are not in FP8."""
    if (recipe := config.float8.recipe_name) is not None:
        yield Fault(
            ("float8.recipe_name", "adapter"),
            f"float8.recipe_name = {show(recipe)}: is not possible under [adapter]; remove [float8]",
        )


def float8_base_has_whole_blocks(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """Some projections consist of blocks of 128 x 128, and tensor parallelism splits none."""
    if adapter.base_dtype is None:
        return
    key, tp = f"adapter.base_dtype = {show(adapter.base_dtype)}", config.parallelism.tensor_parallel_degree
    # Columns of the projections back to the hidden size, which tensor parallelism splits; experts stay whole.
    split = {
        "model.num_attention_heads x model.head_dim": shape.num_attention_heads * shape.head_dim,
        "model.intermediate_size": shape.intermediate_size,
        "model.moe_intermediate_size x model.n_shared_experts": shape.moe_intermediate_size * shape.n_shared_experts,
    }
    widths = split | {"model.moe_intermediate_size": shape.moe_intermediate_size}
    if shape.hidden_size % _FP8_BLOCK or all(width % _FP8_BLOCK for width in widths.values()):
        yield Fault(
            ("adapter.base_dtype", "model.hidden_size"),
            f"{key}: no projection of this model has sizes that are multiples of {_FP8_BLOCK} (model.hidden_size = "
            f"{shape.hidden_size}); remove adapter.base_dtype",
        )
        return
    for name, width in split.items():
        if width and width % _FP8_BLOCK == 0 and width % (_FP8_BLOCK * tp):
            yield Fault(
                ("adapter.base_dtype", "parallelism.tensor_parallel_degree"),
                f"parallelism.tensor_parallel_degree = {tp}: splits {name} = {width} into parts that are not multiples "
                f'of {_FP8_BLOCK}, which adapter.base_dtype = "float8" needs; take a degree of which {width} is '
                f"{_FP8_BLOCK} times a multiple, or remove adapter.base_dtype",
            )


def magnitudes_are_on_the_device(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """DoRA's norms are computed where the weights are."""
    if adapter.name == "dora" and config.training.parameter_offload:
        yield Fault(
            ("adapter.name", "training.parameter_offload"),
            'training.parameter_offload = true: is not possible with adapter.name = "dora"; take "lora", or set it to '
            "false",
        )


def adapted_layers_exist(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """The range of layers is inside the model, and every target is there."""
    first, last = adapter.layers or (0, shape.num_hidden_layers - 1)
    if not 0 <= first <= last < shape.num_hidden_layers:
        yield Fault(
            ("adapter.layers", "model.num_hidden_layers"),
            f"adapter.layers = {show(adapter.layers)}: must be [first, last] with 0 <= first <= last < "
            f"model.num_hidden_layers = {shape.num_hidden_layers}",
        )
        return
    has_moe = last >= shape.first_k_dense_replace
    for target, is_there, why in (
        ("dense", first < shape.first_k_dense_replace, "are dense"),
        ("shared_experts", has_moe and shape.n_shared_experts, "have shared experts"),
        ("experts", has_moe, "have experts"),
    ):
        if target in adapter.targets and not is_there and "targets" in adapter.model_fields_set:
            yield Fault(
                ("adapter.targets", "adapter.layers", "model.first_k_dense_replace", "model.n_shared_experts"),
                f"adapter.targets = {show(adapter.targets)}: none of the layers {first} to {last} {why}; remove "
                f"{show(target)}",
            )


def targets_are_different(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """There is a target, each is named once, and the rank of experts has experts."""
    if not adapter.targets:
        yield Fault(("adapter.targets",), "adapter.targets = []: nothing would be trained; name one, or remove the key")
    if len(set(adapter.targets)) < len(adapter.targets):
        yield Fault(("adapter.targets",), f"adapter.targets = {show(adapter.targets)}: one is there twice; remove it")
    if adapter.expert_rank is not None and "experts" not in adapter.targets:
        yield Fault(
            ("adapter.expert_rank", "adapter.targets"),
            f'adapter.expert_rank = {adapter.expert_rank}: has no effect without "experts" in adapter.targets; add it, '
            "or remove adapter.expert_rank",
        )


def expert_ranks_are_aligned(config: RunConfig, adapter: AdapterConfig, shape: ModelShape) -> Faults:
    """Rows of A and B of experts begin at multiples of 16 bytes, which grouped products need."""
    dtype = config.training.mixed_precision_param
    entries = 16 // {"bfloat16": 2, "float32": 4}[dtype]
    key = "rank" if adapter.expert_rank is None else "expert_rank"
    rank = getattr(adapter, key)
    if "experts" in adapter.targets and rank % entries:
        yield Fault(
            (f"adapter.{key}", "training.mixed_precision_param"),
            f"adapter.{key} = {rank}: must be a multiple of {entries} for experts in {dtype}; take "
            f"{-(-rank // entries) * entries}" + (", or set adapter.expert_rank" if key == "rank" else ""),
        )


_RULES: tuple[Callable[[RunConfig, AdapterConfig, ModelShape], Faults], ...] = (
    adapter_has_a_base,
    base_is_loaded_whole,
    base_stays_as_it_is,
    adapters_are_under_adamw,
    base_is_in_full_precision,
    float8_base_has_whole_blocks,
    magnitudes_are_on_the_device,
    adapted_layers_exist,
    targets_are_different,
    expert_ranks_are_aligned,
)


def adapter_is_possible(config: RunConfig, shape: ModelShape) -> Faults:
    """All rules of this file."""
    if config.adapter is not None:
        for rule in _RULES:
            yield from rule(config, config.adapter, shape)
