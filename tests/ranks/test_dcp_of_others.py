"""Two gloo ranks save sharded models and optimizers with plain DCP; one rank and two ranks load the weights."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.process import join, leave
from glm46.compute.model.transformer import Transformer
from glm46.config.presets import PRESETS
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.names import Form, HFNames
from tests.harness import run_ranks

SHAPE = PRESETS["GLM-4.6"].model_copy(update=dict(
    vocab_size=50, hidden_size=28, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=36,
    moe_intermediate_size=12, n_routed_experts=5, num_experts_per_tok=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_nextn_predict_layers=0,
))  # fmt: skip


def their_model():
    config = config_of(SHAPE, None, eos_ids=[1], dtype="float32")
    torch.manual_seed(3)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**{key: v for key, v in config.items() if key != "architectures"}))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.normal_(std=0.2)
    return model


def our_model():
    torch.manual_seed(4)
    model = Transformer(SHAPE)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.normal_(std=0.2)
    return model


def expected(kind):
    """Our tensors, whole."""
    if kind == "ours":
        model = our_model()
        return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    state = their_model().state_dict()
    entries = HFNames(SHAPE, repeat_shared=False, form=Form.STACKED).entries
    return {name: state[entry.parts[0].hf_name] for name, entry in entries.items()}


def save(kind, folder):
    model = our_model() if kind == "ours" else their_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values() if kind == "ours" else model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": 5}, checkpoint_id=folder)


def load(kind, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = expected(kind)
    tensors = {
        name: distribute_tensor(torch.full_like(tensor, torch.nan), mesh, [Shard(0)]) for name, tensor in wanted.items()
    }
    import_weights(folder, SHAPE, tensors)
    for name, tensor in tensors.items():
        part = wanted[name]
        for dim, index in enumerate(global_indices(tensor)):
            part = part.index_select(dim, index)
        assert torch.equal(local_tensor(tensor), part), name


def on_rank(folder):
    """Both models; two ranks save them first."""
    process = join(300)
    for kind in ("ours", "theirs"):
        if process.world_size == 2:
            save(kind, Path(folder) / kind)
        load(kind, Path(folder) / kind)
    leave()


def test_what_two_ranks_saved_with_plain_dcp_is_loaded_on_two_ranks_and_on_one(tmp_path):
    for world in (2, 1):
        run_ranks(on_rank, world, tmp_path)
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
