"""What adapters need: names that `transformers` has too, and import and export beside parameters that no folder has."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from glm46.config.model import Model
from glm46.config.presets import PRESETS, resolve_shape
from glm46.huggingface.adapter_targets import adapter_targets
from glm46.huggingface.config_json import config_of
from glm46.huggingface.export_weights import export_weights
from glm46.huggingface.import_weights import import_weights
from glm46.model.transformer import Transformer

TABLE = Model(
    flavor="debug", vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16,
    n_routed_experts=3, num_experts_per_tok=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


@pytest.mark.parametrize("preset", ["GLM-4.6", "GLM-4.5-Air"])
def test_targets_are_the_modules_and_parameters_of_transformers(preset, tmp_path):
    shape = PRESETS[preset].model_copy(update=dict(num_hidden_layers=4))
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, None, eos_ids=[0], dtype="bfloat16")))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        ours = Transformer(shape)
    targets = adapter_targets(shape)
    for name, target in targets.items():
        found = theirs.get_parameter(target.hf_name if target.is_parameter else f"{target.hf_name}.weight")
        assert tuple(found.shape) == target.shape == tuple(ours.get_parameter(name).shape)
        assert target.is_parameter or isinstance(theirs.get_submodule(target.hf_name), torch.nn.Linear)
    linear = {n for n, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert {target.hf_name for target in targets.values() if not target.is_parameter} == linear
    stacked = {n for n, p in theirs.named_parameters() if p.ndim == 3}
    assert {target.hf_name for target in targets.values() if target.is_parameter} == stacked


def test_frozen_weights_and_adapters_beside_them_do_not_disturb_import_and_export(tmp_path):
    torch.manual_seed(0)
    shape = resolve_shape(TABLE)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")

    first = Transformer(shape)
    own = {name for name, _ in [*first.named_parameters(), *first.named_buffers()]}

    def base(model):
        return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()] if n in own}

    for tensor in base(first).values():
        torch.nn.init.normal_(tensor).copy_(tensor.bfloat16())
    export_weights(tmp_path / "plain", shape, config, base(first))
    adapted = Transformer(shape).requires_grad_(False)
    targets = adapter_targets(shape)
    for name, target in targets.items():
        module, _, leaf = name.rpartition(".")
        adapter = torch.nn.Parameter(torch.ones(2, target.shape[-1]))
        adapted.get_submodule(module).register_parameter(f"{leaf}_adapter", adapter)
    import_weights(tmp_path / "plain", shape, base(adapted))
    assert all(torch.equal(tensor, base(first)[name]) for name, tensor in base(adapted).items())
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == len(targets) and trained.isdisjoint(own)
    assert all((adapted.get_parameter(name) == 1).all() for name in trained)
    export_weights(tmp_path / "again", shape, config, base(adapted))
    same = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("plain", "again")]
    assert same[0] == same[1]
    everything = {n: t.detach() for n, t in [*adapted.named_parameters(), *adapted.named_buffers()]}
    with pytest.raises(Exception, match="_adapter"):
        export_weights(tmp_path / "more", shape, config, everything)
    assert not (tmp_path / "more").exists()
