"""Expert parallelism: each rank of a group holds whole experts, and tokens are sent to them and back."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.compute.model.moe import MoE
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.deepep import DeepEPDispatcher
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from glm46.compute.parallelize.two_level import TwoLevelDispatcher


def apply(
    model: Transformer,
    ep_mesh: DeviceMesh,
    hosts: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None,
    chunks: int = 1,
    buffer: Any = None,
) -> None:
    """Shard the experts of every MoE layer over `ep_mesh` and dispatch tokens to them; in place.

    Args:
        hosts: see `Meshes.expert_hosts`.
        chunks: see `Plan.exchange_chunks`.
        buffer: DeepEP's buffer, to send tokens by DeepEP; None for the exchanges of this package.
    """
    group = ep_mesh.get_group()
    for module in model.modules():
        if isinstance(module, MoE):
            for name, parameter in list(module.experts.named_parameters()):
                whole_experts = distribute_tensor(parameter.data, ep_mesh, [Shard(0)])
                local_experts = nn.Parameter(whole_experts, requires_grad=parameter.requires_grad)
                module.experts.register_parameter(name, local_experts)
            if buffer is not None:
                module.dispatcher = DeepEPDispatcher(group, buffer)
            elif hosts is None:
                module.dispatcher = AllToAllDispatcher(group, chunks)
            else:
                module.dispatcher = TwoLevelDispatcher(group, *hosts, chunks)
