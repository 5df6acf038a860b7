"""The order in which a model is prepared for many devices, with the reason for each place in it."""

import torch

from glm46 import compat
from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.adapters import add_adapters
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import activation_checkpoint, compile, context, deepep, expert, float8, fsdp, tensor
from glm46.config.errors import UserError
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.run.plan import Plan


def parallelize(model: Transformer, plan: Plan, cluster: Cluster, *, sizes_vary: bool = False) -> Transformer:
    """Prepare `model`, or this rank's part of it, for training on this rank.

    Args:
        model: on the meta device.
        sizes_vary: micro-batches have different numbers of tokens.

    Returns:
        The same model with its parameters sharded over the cluster, on the device of this rank or, under
        `parameter_offload`, in host memory, with initial values.
    """
    config = plan.config
    meshes = cluster.meshes
    trained_type = getattr(torch, config.training.dtype)
    adapter = config.adapter
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    # What is frozen is kept as it is computed with.
    model.cast(getattr(torch, config.training.mixed_precision_param))
    if is_trained and adapter is None:  # before sharding: the shards are the master weights
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.data = parameter.data.to(trained_type)
    if is_trained and adapter is not None:
        add_adapters(model, adapter, trained_type)  # before sharding, and before FSDP2 asks what is frozen
    if meshes.expert is not None:
        # Before compile, which must see the token dispatch.
        is_deepep = config.parallelism.expert_exchange == "deepep"
        buffer = deepep.open_buffer(plan, meshes.expert.get_group(), cluster.device) if is_deepep else None
        expert.apply(model, meshes.expert, meshes.expert_hosts, plan.exchange_chunks, buffer)
    if meshes.sequence is not None:
        context.apply(model, meshes.sequence)  # before compile, which must see the gather of keys and values
    if meshes.tensor is not None:
        tensor.apply(model, meshes.tensor)  # after context parallelism: the router sums over both groups
    if config.float8.recipe_name is not None:
        float8.apply(model, plan)  # before compile, which must see the products
    if config.compile.enable:
        # Before checkpointing, so that the recomputation runs compiled code too.
        schedule = PIPELINE_SCHEDULES[config.parallelism.pipeline_parallel_schedule]
        compile.apply(
            model,
            whole_graphs=not (meshes.expert or meshes.sequence or meshes.tensor),
            sizes_vary=sizes_vary,
            splits_backward=meshes.pipeline is not None and schedule.splits_backward,
            # An exchange of tokens breaks the graph in any case.
            inner_layers=config.activation_checkpoint.mode == "selective" and meshes.expert is None,
        )
    if config.parallelism.enable_async_tensor_parallel and meshes.tensor is not None:
        if cluster.device.type != "cuda":
            raise UserError(
                "parallelism.enable_async_tensor_parallel = true: only GPUs share memory; remove it, or train on GPUs"
            )
        compat.overlap_tensor_parallel(meshes.tensor.get_group())
    if config.activation_checkpoint.mode != "none":
        # Before FSDP2, whose hooks must gather weights around the whole layer.
        activation_checkpoint.apply(model, **config.activation_checkpoint.model_dump())
    # Last transform: it shards the parameters that the others have split.
    fsdp.apply(model, meshes, plan)
    # Allocates memory for this rank's shards only. FSDP2 pins those that stay in host memory.
    model.to_empty(device="cpu" if config.training.parameter_offload else cluster.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(cluster.device))
    initialise(model, config.debug.seed)
    return model


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer with its initial value, which is the same on every layout."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():  # a quantised frozen weight, or its scales, which import reads
            local_tensor(parameter).zero_()
            continue
        part = (local_tensor(parameter), global_indices(parameter))
        whole = tuple(parameter.shape)
        fill_parameter(*part, whole, seed=seed, name=name, std=model.shape.initializer_range)
    for buffer in model.buffers():
        buffer.zero_()
