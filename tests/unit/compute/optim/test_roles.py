"""Every parameter has exactly one role."""

import pytest
import torch

from glm46.compute.optim.roles import assign_roles
from glm46.config.errors import UserError
from glm46.config.optimizer import OptimizerConfig
from glm46.engine.observe.role_table import format_role_table, role_rows
from glm46.run.parameters import PARAMETERS

BLOCK = [
    ("input_layernorm.weight", "adamw", False), ("self_attn.q_proj.weight", "muon", True),
    ("self_attn.q_proj.bias", "adamw", False), ("self_attn.k_proj.weight", "muon", True),
    ("self_attn.k_proj.bias", "adamw", False), ("self_attn.v_proj.weight", "muon", True),
    ("self_attn.v_proj.bias", "adamw", False), ("self_attn.o_proj.weight", "muon", True),
    ("self_attn.q_norm.weight", "adamw", False), ("self_attn.k_norm.weight", "adamw", False),
    ("post_attention_layernorm.weight", "adamw", False),
]  # fmt: skip
DENSE = [(f"mlp.{part}_proj.weight", "muon", True) for part in ("gate", "up", "down")]
SPARSE = [
    ("mlp.router.weight", "muon", True),
    ("mlp.experts.gate_up", "muon", True),
    ("mlp.experts.down", "muon", True),
    *((f"mlp.shared_experts.{part}_proj.weight", "muon", True) for part in ("gate", "up", "down")),
]
EXPECTED = {
    name: (optimizer, decay)
    for prefix, entries in {
        "": [
            ("embed_tokens.weight", "adamw", True),
            ("norm.weight", "adamw", False),
            ("lm_head.weight", "adamw", True),
        ],
        "layers.0.": BLOCK + DENSE,
        "layers.17.": BLOCK + SPARSE,
        "mtp.0.": [
            ("enorm.weight", "adamw", False),
            ("hnorm.weight", "adamw", False),
            ("eh_proj.weight", "muon", True),
            ("norm.weight", "adamw", False),
        ],
        "mtp.0.block.": BLOCK + SPARSE,
    }.items()
    for name, optimizer, decay in ((prefix + entry[0], *entry[1:]) for entry in entries)
}


def test_every_name_of_the_model_has_its_role():
    roles = assign_roles(list(EXPECTED), OptimizerConfig())
    assert {name: (role.optimizer, role.decay) for name, role in zip(EXPECTED, roles, strict=True)} == EXPECTED
    assert {role.rule for role in roles} == {row.group for row in PARAMETERS if row.part != "value"}
    (value_head,) = assign_roles(["value_head.weight"], OptimizerConfig())
    assert (value_head.rule, value_head.optimizer, value_head.decay) == ("value head", "adamw", True)


def test_only_the_fused_gate_and_up_is_split():
    roles = assign_roles(list(EXPECTED), OptimizerConfig())
    split = {name for name, role in zip(EXPECTED, roles, strict=True) if role.row_blocks == 2}
    assert split == {"layers.17.mlp.experts.gate_up", "mtp.0.block.mlp.experts.gate_up"}


def test_adamw_takes_everything_with_the_same_decay():
    roles = assign_roles(list(EXPECTED), OptimizerConfig(name="AdamW"))
    assert {role.optimizer for role in roles} == {"adamw"}
    assert [role.decay for role in roles] == [decay for _, decay in EXPECTED.values()]


def test_names_without_a_rule_are_all_reported():
    with pytest.raises(UserError) as caught:
        assign_roles(["layers.0.mlp.extra.weight", "norm.weight", "layers.x.input_layernorm.weight"], OptimizerConfig())
    assert len(caught.value.faults) == 2
    assert "layers.0.mlp.extra.weight" in caught.value.faults[0]


def test_table_counts_tensors_and_parameters():
    tensors = [torch.empty(2, 3) for _ in EXPECTED]
    config = OptimizerConfig()
    rows = role_rows(tensors, assign_roles(list(EXPECTED), config), config)
    assert sum(row.tensors for row in rows) == len(EXPECTED)
    assert sum(row.parameters for row in rows) == 6 * len(EXPECTED)
    assert {row.rule: row.weight_decay for row in rows}["norms"] == 0.0
    assert len(format_role_table(rows).splitlines()) == len(rows) + 1
