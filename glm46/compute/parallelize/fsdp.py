"""FSDP2: every rank keeps a shard of each parameter and gathers a layer to compute it."""

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.mesh import Meshes
from glm46.compute.model.experts import Experts
from glm46.compute.model.transformer import Transformer
from glm46.run.plan import Plan, unsharded_kinds


def apply(model: Transformer, meshes: Meshes, plan: Plan) -> None:
    """Shard experts, then the rest of each layer, then embedding, norm and head; in place. Parameters of
    `unsharded_kinds` stay as they are.

    FSDP's division of gradients is turned off: the loss is already divided by the token count of all ranks.
    """
    training = plan.config.training
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Layers take FP32 tensors that must stay FP32: weights of the rows of experts, and of the heads of indexers.
        cast_forward_inputs=False,
    )
    ignored = _unsharded(model, unsharded_kinds(plan))
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": OffloadPolicy(), "ignored_params": ignored}
    if training.parameter_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=meshes.dense.device_type != "cpu")
    layer_options = {"reshard_after_forward": not plan.config.parallelism.keeps_gathered} | options
    for block in (*model.layers.values(), *model.mtp.values()):
        if meshes.expert_shard is not meshes.dense:
            for experts in (module for module in block.modules() if isinstance(module, Experts)):
                placement = expert_placement(meshes.expert_shard)
                if set(experts.parameters()) - ignored:  # something to shard
                    fully_shard(experts, mesh=meshes.expert_shard, shard_placement_fn=placement, **layer_options)
        fully_shard(block, mesh=meshes.dense, shard_placement_fn=expert_placement(meshes.dense), **layer_options)
    # The root's parameters are used first, last and by every prediction depth: gather them once per step.
    fully_shard(model, mesh=meshes.dense, reshard_after_forward=False, **options)
    _prefetch(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo does not support the reduction with a divide factor.
            module.set_force_sum_reduction_for_comms(True)


def _unsharded(model: Transformer, kinds: Set[tuple[bool, bool]]) -> set[nn.Parameter]:
    expert_modules = (module for module in model.modules() if isinstance(module, Experts))
    expert_parameters = {parameter for experts in expert_modules for parameter in experts.parameters()}
    return {
        parameter
        for parameter in model.parameters()
        if (parameter in expert_parameters, parameter.requires_grad) in kinds
    }


def _prefetch(model: Transformer) -> None:
    """Gather the next layer while this one computes, in forward and backward.

    By itself FSDP2 prefetches in backward only, not experts that are separate units, and too late in layers that wait
    for the host, as the exchange of tokens does.
    """
    blocks: tuple[Any, ...] = (*model.layers.values(), *model.mtp.values())
    units = [[module for module in block.modules() if isinstance(module, FSDPModule)] for block in blocks]
    for unit, following in zip([model, *blocks], [*units, []], strict=True):
        unit.set_modules_to_forward_prefetch(following)
    # In backward a unit is called once per result, for some results after its successors are done. So the root must not
    # prefetch, or it gathers the last layer again, and no layer may prefetch its own experts.
    for block, before in zip(blocks[1:], units, strict=False):
        block.set_modules_to_backward_prefetch(before)


def expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return the placement of FSDP: whole experts on each rank if the experts divide evenly, else a part of every
    expert, because uneven chunks of experts would leave some ranks with most of the memory. None is FSDP's default, the
    first dimension."""
    shards = mesh.size(-1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        local = local_tensor(parameter)
        return Shard(1) if local.ndim == 3 and local.shape[0] % shards else None

    return placement


@torch.no_grad()
def widen_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Convert gradients to FP32, so that gradients of the next micro-batches are added in FP32.

    FSDP2 and autograd add gradients in the type of the gradient that is there. In BF16 each sum would be rounded:
    after 64 micro-batches the error is 1 % of the gradient, and terms below 1/512 of the sum are lost.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.dtype != torch.bfloat16:
            continue
        parameter.grad = None
        # By default torch refuses a gradient whose type differs from its parameter.
        parameter.grad_dtype = None
        parameter.grad = gradient.float()


def release_gathered(model: Transformer) -> None:
    """Free weights that a forward without backward left gathered. Until then the model's parameters are not the shards
    that the optimizer and checkpoints use."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
