"""What [adapter] refuses: each message has the key, its value and what to write instead."""

from itertools import product

import pytest

from glm46.config import rules_layout
from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.config.rules import broken_rules
from glm46.config.run_config import RunConfig
from glm46.run.parameters import base_families
from tests.builders import model_table
from tests.unit.config.test_preference import load

SOUND = """
[model]
flavor = "debug"
[model.shape]
num_nextn_predict_layers = 0
[training]
steps = 2
seq_len = 16
[optimizer]
name = "AdamW"
[moe]
balance = "none"
sequence_aux_loss_weight = 0.0
[checkpoint]
initial_load_path = "base"
[[data.sources]]
name = "a"
path = "data/a"
[adapter]
rank = 8
"""
# Old and new text, or text for the end of [adapter]; what the message says.
BAD = {
    "no base": (('initial_load_path = "base"', ""), ["checkpoint.initial_load_path", "absent", "name the checkpoint"]),
    "Muon": (('name = "AdamW"', 'name = "Muon"'), ["optimizer.name", '"Muon"', 'set it to "AdamW"']),
    "moving bias": (('balance = "none"', ""), ["moe.bias_update_rate = 0.001", 'moe.balance = "none"']),
    "balance loss": (
        ("sequence_aux_loss_weight = 0.0", "sequence_aux_loss_weight = [[0, 0.1], [9, 0.0]]"),
        ["moe.sequence_aux_loss_weight = [[0, 0.1], [9, 0.0]]", "set it to 0"],
    ),
    "temperature that changes": (
        ('balance = "none"', 'balance = "none"\nrouter_temperature = [[0, 1.0], [9, 1.5]]'),
        ["moe.router_temperature = [[0, 1.0], [9, 1.5]]", "cannot change under [adapter]", "set it to 1.5"],
    ),
    "z-loss": (('balance = "none"', 'balance = "none"\nz_loss_weight = 0.1'), ["moe.z_loss_weight = 0.1", "to 0"]),
    "MTP": (
        ("num_nextn_predict_layers = 0", ""),
        ["model.shape.num_nextn_predict_layers = 1", "must be 0", "set it to 0"],
    ),
    "FP8": (("[adapter]", '[float8]\nrecipe_name = "rowwise"\n[adapter]'), ["float8.recipe_name", "remove [float8]"]),
    "DoRA in host memory": (
        ("[optimizer]", 'parameter_offload = true\n[optimizer]\nstate_offload = "cpu"'),
        ["training.parameter_offload = true", 'adapter.name = "dora"', 'take "lora"'],
    ),
    "no such layer": ("layers = [0, 99]", ["adapter.layers = [0, 99]", "num_hidden_layers = 4"]),
    "layers backwards": ("layers = [2, 1]", ["adapter.layers = [2, 1]", "first <= last"]),
    "no dense layer": (
        'layers = [1, 3]\ntargets = ["dense"]', ['adapter.targets = ["dense"]', "1 to 3", 'remove "dense"'],
    ),
    "no experts": ('layers = [0, 0]\ntargets = ["experts"]', ["adapter.targets", "0 to 0", 'remove "experts"']),
    "no shared experts": (
        ("num_nextn_predict_layers = 0\n", "num_nextn_predict_layers = 0\nn_shared_experts = 0\n"),
        [],
    ),
    "unknown target": ('targets = ["router"]', ["adapter.targets[0]", '"router"', "'attention'"]),
    "no target": ("targets = []", ["adapter.targets = []"]),
    "twice": ('targets = ["attention", "attention"]', ["adapter.targets", "twice"]),
    "expert_rank in vain": (
        'targets = ["attention"]\nexpert_rank = 8', ["adapter.expert_rank = 8", "no effect", 'without "experts"'],
    ),
    "rank of experts": (("rank = 8", "rank = 12"), ["adapter.rank = 12", "multiple of 8", "bfloat16", "take 16"]),
    "expert_rank": ("expert_rank = 4", ["adapter.expert_rank = 4", "multiple of 8", "take 8"]),
    "FP8 base of a step folder": (
        'base_dtype = "float8"', ["adapter.base_dtype", '"float8"', "checkpoint.initial_load_in_hf"],
    ),
    "FP8 base without blocks": (
        ("num_nextn_predict_layers = 0", "num_nextn_predict_layers = 0\nhidden_size = 320"),
        ['adapter.base_dtype = "float8"', "multiples of 128", "hidden_size = 320", "remove adapter.base_dtype"],
    ),
    "FP8 base in parts": (
        ("[optimizer]", "[parallelism]\ntensor_parallel_degree = 2\n[optimizer]"),
        [
            "tensor_parallel_degree = 2",
            "model.shape.n_shared_experts = 128",
            'adapter.base_dtype = "float8"',
            "or remove",
        ],
    ),
    "FP8 base in parts, of NF4": (
        ("[optimizer]", "[parallelism]\ntensor_parallel_degree = 4\n[optimizer]"),
        [
            "tensor_parallel_degree = 4",
            "model.shape.n_shared_experts = 128",
            "multiples of 64",
            'adapter.base_dtype = "nf4"',
        ],
    ),
    "unknown base": ('base_dtype = "int8"', ["adapter.base_dtype", '"int8"', "'nf4'"]),
    "dropout": ("dropout = 0.1", ["adapter.dropout", "unknown key"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_adapter_is_refused_in_one_message(name, tmp_path):
    change, said = BAD[name]
    sound = SOUND.replace("[adapter]", '[adapter]\nname = "dora"')
    if name.startswith("FP8 base") and isinstance(change, tuple):
        sound = SOUND.replace("[checkpoint]", "[checkpoint]\ninitial_load_in_hf = true")
        sound += 'base_dtype = "{}"\n'.format("nf4" if name.endswith("NF4") else "float8")
    text = sound.replace(*change) if isinstance(change, tuple) else SOUND + change + "\n"
    if not said:
        assert load(text, tmp_path)  # what is adapted by default may be missing
        return
    with pytest.raises(UserError) as caught:
        load(text, tmp_path)
    (fault,) = caught.value.faults
    assert all(part in fault for part in said), fault


@pytest.mark.parametrize("base_dtype", ["float8", "int4", "nf4"])
def test_base_dtype_is_refused_exactly_where_no_projection_can_have_it(base_dtype, tmp_path):
    """The rule agrees with `base_families`, which decides what a base stores in the format."""
    for hidden, heads, intermediate, experts, shared in product(
        (320, 336, 384), (3, 4), (248, 256), (248, 256), (0, 1)
    ):
        sizes = (
            f"hidden_size = {hidden}\nnum_attention_heads = {heads}\nnum_key_value_heads = 1\nhead_dim = 96\n"
            f"intermediate_size = {intermediate}\nmoe_intermediate_size = {experts}\nn_shared_experts = {shared}"
        )
        text = SOUND.replace("[checkpoint]", "[checkpoint]\ninitial_load_in_hf = true")
        text = text.replace("num_nextn_predict_layers = 0", f"num_nextn_predict_layers = 0\n{sizes}")
        sound = load(text, tmp_path)
        families = base_families(resolve_shape(sound.model), base_dtype)
        try:
            load(f'{text}base_dtype = "{base_dtype}"\n', tmp_path)
        except UserError as error:
            assert not families and "no projection of this model" in str(error)
        else:
            assert families, sizes


@pytest.mark.parametrize("extra", ["", "expert_rank = 16", 'targets = ["attention"]\nlayers = [3, 3]'])
def test_sound_adapter_is_taken(extra, tmp_path):
    assert load(SOUND + extra + "\n", tmp_path).adapter.rank == 8
    fp32 = (SOUND + "expert_rank = 4\n").replace("[training]", '[training]\nmixed_precision_param = "float32"')
    assert load(fp32, tmp_path).adapter.expert_rank == 4


def test_the_scale_is_that_of_rank(tmp_path):
    adapter = load(SOUND + "expert_rank = 16\nalpha = 4.0\n", tmp_path).adapter
    assert adapter.scale == 0.5


def test_the_rank_of_experts_divides_evenly_where_each_expert_is_sharded():
    """FSDP2 shards A of an expert along its rank where the ranks do not divide the number of experts."""
    for adapter, is_even in (({"expert_rank": 8}, False), ({}, True), ({"targets": ["attention"], "rank": 8}, True)):
        config = RunConfig.model_validate({
            "model": model_table(flavor="debug", n_routed_experts=24, num_nextn_predict_layers=0), "adapter": adapter,
            "training": {"seq_len": 128}, "parallelism": {"data_parallel_shard_degree": 16},
        })  # fmt: skip
        faults = [fault.message for fault in broken_rules(config, 16, (rules_layout,))]
        assert bool(faults) != is_even
        assert all("and 8 rows" in message and "data_parallel_shard_degree = 16" in message for message in faults)
