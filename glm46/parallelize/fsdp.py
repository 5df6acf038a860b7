"""FSDP2: every rank keeps a part of each parameter and gathers a layer when it computes it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from glm46.config.parallelism import Parallelism
from glm46.config.training import Training
from glm46.distributed.local_tensor import local_tensor
from glm46.distributed.mesh import Meshes
from glm46.model.experts import Experts
from glm46.model.transformer import Transformer


def apply(model: Transformer, meshes: Meshes, parallelism: Parallelism, training: Training) -> None:
    """Shard experts, then the rest of each layer, then what is left (embedding, norm, head); in place.

    FSDP's own division of gradients is switched off: the loss is already divided by the token count of all ranks.
    """
    compute_type = getattr(torch, training.mixed_precision_param)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_type == torch.float32 else compute_type,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
    )
    # "default" under a pipeline: gathered for all micro-batches of a step. Schedules that split backward also need it.
    frees = {"always": True, "never": False, "default": meshes.pipeline is None}
    options = {"mp_policy": policy, "reshard_after_forward": frees[parallelism.fsdp_reshard_after_forward]}
    for block in (*model.layers.values(), *model.mtp.values()):
        if meshes.expert_shard is not meshes.dense:
            for experts in (module for module in block.modules() if isinstance(module, Experts)):
                placement = expert_placement(meshes.expert_shard)
                fully_shard(experts, mesh=meshes.expert_shard, shard_placement_fn=placement, **options)
        fully_shard(block, mesh=meshes.dense, shard_placement_fn=expert_placement(meshes.dense), **options)
    # The root's parameters are used first and last, and by every prediction depth: gathered once per step.
    fully_shard(model, mesh=meshes.dense, mp_policy=policy, reshard_after_forward=False)
    _prefetch(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, gloo refuses the reduction that a divide factor asks for.
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(model: Transformer) -> None:
    """Gather the next layer while this one computes, in both directions.

    FSDP2 alone gathers ahead in backward only, and not the experts when they are units of their own; and where a layer
    waits for the host, as an exchange of tokens does, it comes too late.
    """
    blocks = (*model.layers.values(), *model.mtp.values())
    units = [[module for module in block.modules() if isinstance(module, FSDPModule)] for block in blocks]
    for unit, following in zip([model, *blocks], [*units, []], strict=True):
        unit.set_modules_to_forward_prefetch(following)
    # In backward a unit is called once for each of its results, for some after what it leads to is done: so neither the
    # root, which would gather the last layer again, nor a layer for its own experts.
    for block, before in zip(blocks[1:], units, strict=False):
        block.set_modules_to_backward_prefetch(before)


def expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Whole experts on each rank when those of a rank divide evenly, else a part of every expert: uneven chunks of
    experts would leave some ranks with most of the memory. None is FSDP's default, the first dimension."""
    shards = mesh.size(-1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        local = local_tensor(parameter)
        return Shard(1) if local.ndim == 3 and local.shape[0] % shards else None

    return placement


def release_gathered(model: Transformer) -> None:
    """Free weights that a forward without backward left gathered: while they are, the model's parameters are not the
    shards that the optimizer and a checkpoint know."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
