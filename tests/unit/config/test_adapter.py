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
