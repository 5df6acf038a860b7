"""FSDP2: every rank keeps a part of each parameter and gathers a layer when it computes it."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from glm46.config.parallelism import Parallelism
from glm46.config.training import Training
from glm46.model.transformer import Transformer


def apply(model: Transformer, mesh: DeviceMesh, parallelism: Parallelism, training: Training) -> None:
    """Shard each layer, then what is left (embedding, norm, head), over `mesh`; in place.

    FSDP's own division of gradients is switched off: the loss is already divided by the token count of all ranks.
    """
    compute_type = getattr(torch, training.mixed_precision_param)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_type == torch.float32 else compute_type,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
    )
    shards = mesh.size(-1)
    reshard = parallelism.fsdp_reshard_after_forward != "never"

    def placement(parameter: nn.Parameter) -> Shard | None:
        return _expert_placement(parameter, shards)

    for block in (*model.layers.values(), *model.mtp.values()):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement)
    # The root's parameters are used first and last, and by every prediction depth: gathered once per step.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=placement)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, gloo refuses the reduction that a divide factor asks for.
            module.set_force_sum_reduction_for_comms(True)


def _expert_placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Whole experts on each rank when they divide evenly, else a part of every expert: uneven chunks of experts would
    leave some ranks with most of the memory. None is FSDP's default, the first dimension."""
    if parameter.ndim == 3 and parameter.shape[0] % shards != 0:
        return Shard(1)
    return None


def release_gathered(model: Transformer) -> None:
    """Free weights that a forward without backward left gathered: while they are, the model's parameters are not the
    shards that the optimizer and a checkpoint know."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
