"""Muon and AdamW as one optimizer: roles, rates, states and resuming; every pair of options trains.

States in host memory or in a file: what a slot holds while it is worked on, and that every item comes back whole.
"""

import itertools
import time
import typing

import pytest
import torch
import torch.nn.functional as F

from glm46.compute.optim.compact_state import BLOCK, MIN_ENTRIES, Quantized, local_state, make_state
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.optimizers import build_optimizers
from glm46.compute.optim.roles import assign_roles
from glm46.compute.optim.rounding import entry_numbers
from glm46.compute.optim.state_file import StateFile, StateRing
from glm46.compute.optim.state_offload import StateStream
from glm46.config import rules_layout
from glm46.config.errors import UserError
from glm46.config.optimizer import OptimizerConfig
from glm46.engine.observe.role_table import format_role_table, role_rows
from glm46.files.local_disk import local_disk_fault
from glm46.run.parameters import PARAMETERS
from glm46.run.sizes import OFFLOAD_SLOTS

SHAPES = {
    "embed_tokens.weight": (32, 16), "layers.0.input_layernorm.weight": (16,),
    "layers.0.self_attn.q_proj.weight": (24, 16), "layers.0.self_attn.q_proj.bias": (24,),
    "layers.0.mlp.router.weight": (4, 16), "layers.0.mlp.experts.gate_up": (4, 12, 16),
    "layers.0.mlp.experts.down": (4, 16, 6), "lm_head.weight": (32, 16),
}  # fmt: skip
MATRICES = {name for name in SHAPES if "layers" in name and len(SHAPES[name]) > 1}


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def train(parameters, group, steps, lr_factor=1.0):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        group.step(lr_factor, step)


def test_states_exist_before_the_first_step_under_their_names():
    parameters = make_parameters()
    states = build_optimizers(list(parameters.items()), OptimizerConfig()).state_tensors()
    expected = {f"{name}.momentum_buffer" for name in MATRICES}
    expected |= {f"{name}.{key}" for name in set(SHAPES) - MATRICES for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(states) == expected
    assert all(state.count_nonzero() == 0 for state in states.values())


def test_adamw_equals_torch_with_lazy_states():
    config = OptimizerConfig(name="AdamW", lr=0.01)
    mine, theirs = make_parameters(), make_parameters()
    group = build_optimizers(list(mine.items()), config)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.005,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    train(mine, group, range(4), lr_factor=0.5)
    for step in range(4):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in theirs.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        reference.step()
    assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


def test_own_rate_of_adamw_and_factor():
    config = OptimizerConfig(lr=0.01, adamw_lr=0.002, weight_decay=0.0)
    moved = {}
    for factor in (1.0, 0.5):
        parameters, start = make_parameters(), make_parameters()
        group = build_optimizers(list(parameters.items()), config, ns_dtype=torch.float32)
        train(parameters, group, range(1), factor)
        moved[factor] = {name: (parameters[name] - start[name]).abs().mean().item() for name in SHAPES}
    # AdamW's first step is the rate in every entry.
    assert moved[1.0]["lm_head.weight"] == pytest.approx(0.002, rel=1e-3)
    for name in SHAPES:
        assert moved[0.5][name] == pytest.approx(0.5 * moved[1.0][name], rel=1e-3)


def test_parameters_without_gradient_stay():
    parameters, start = make_parameters(), make_parameters()
    group = build_optimizers(list(parameters.items()), OptimizerConfig())
    group.step(1.0)
    assert all(torch.equal(parameters[name], start[name]) for name in SHAPES)
    assert all(state.count_nonzero() == 0 for state in group.state_tensors().values())


def test_zero_grad_forgets_all_gradients():
    parameters = make_parameters()
    group = build_optimizers(list(parameters.items()), OptimizerConfig())
    train(parameters, group, range(1))
    group.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())


BIG = {"layers.0.mlp.experts.gate_up": (4, 96, 100), "lm_head.weight": (80, 130), "norm.weight": (130,)}


def trained_with_states(state_dtype, name, steps, **options):
    generator = torch.Generator().manual_seed(0)
    parameters = {key: torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for key, shape in BIG.items()}
    config = OptimizerConfig(name=name, lr=0.01, state_dtype=state_dtype, weight_decay=0.0, **options)
    group = build_optimizers(list(parameters.items()), config, ns_dtype=torch.float32)
    train(parameters, group, range(steps))
    return parameters, group


@pytest.mark.parametrize(("state_dtype", "tolerance"), [("bfloat16", 0.02), ("8bit", 0.1)])
@pytest.mark.parametrize("name", ["Muon", "AdamW"])
def test_small_states_follow_float32(state_dtype, tolerance, name):
    start, _ = trained_with_states("float32", name, steps=0)
    exact, _ = trained_with_states("float32", name, steps=20)
    rounded, group = trained_with_states(state_dtype, name, steps=20)
    for key in BIG:
        # BF16 rounds each state to 2**-9, eight bits to about 2 % of the block's values at the usual sizes.
        assert (rounded[key] - exact[key]).norm() <= tolerance * (exact[key] - start[key]).norm(), key
    states = group.state_tensors()
    stored = sum(state.numel() * state.element_size() for name, state in states.items() if "norm" not in name)
    entries = sum(torch.Size(shape).numel() for key, shape in BIG.items() if key != "norm.weight")
    entries += torch.Size(BIG["lm_head.weight"]).numel()
    if name == "Muon":
        # One state for experts, two for the head; scales and counts on top.
        assert stored <= entries * {"bfloat16": 2.001, "8bit": 1.13}[state_dtype]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("name", ["Muon", "AdamW"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_offloaded_states_change_no_bit_and_no_name(monkeypatch, tmp_path, place, state_dtype, name):
    # So small that every parameter is an item of its own.
    monkeypatch.setattr("glm46.compute.optim.adamw.OFFLOADED_ITEM_BYTES", 1)
    plain, group = trained_with_states(state_dtype, name, steps=4)
    keys = {"state_offload": place} | ({"state_offload_folder": str(tmp_path)} if place == "nvme" else {})
    offloaded, other = trained_with_states(state_dtype, name, steps=4, **keys)
    assert all(torch.equal(plain[key], offloaded[key]) for key in BIG)
    states, host = group.state_tensors(), other.state_tensors()
    assert states.keys() == host.keys()
    for key in states:
        assert torch.equal(states[key], host[key]) and states[key].dtype == host[key].dtype, key


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("name", ["Muon", "AdamW"])
def test_states_written_in_place_continue_bit_for_bit(state_dtype, name):
    first, group = trained_with_states(state_dtype, name, steps=2)
    second, resumed = trained_with_states(state_dtype, name, steps=0)
    with torch.no_grad():
        for key, parameter in second.items():
            parameter.copy_(first[key])
        for key, state in resumed.state_tensors().items():
            state.copy_(group.state_tensors()[key])
    train(first, group, range(2, 4))
    train(second, resumed, range(2, 4))
    assert all(torch.equal(first[key], second[key]) for key in BIG)


def test_quantised_values_are_near_and_zero_stays_zero():
    parameter = torch.zeros(64, 100)
    random_bits = entry_numbers("x", parameter).random_bits(0, "state")
    state = local_state(make_state("x", parameter, "8bit", True), True)
    assert state.load().count_nonzero() == 0
    values = torch.randn(64, 100, generator=torch.Generator().manual_seed(3))
    state.store(values, random_bits)
    # One of the two nearest of 256 levels, spaced by at most 1/64 of the block's largest value near its top.
    largest = values[:, :64].abs().amax(-1, keepdim=True)
    errors = (state.load() - values)[:, :64].abs() / largest
    assert errors.max() <= 1 / 64 + 1e-6
    # The largest value is exact with either sign.
    assert errors[values[:, :64].abs() == largest].max() < 1e-6
    state.store(torch.zeros(64, 100), random_bits)
    assert state.load().count_nonzero() == 0


EXPERTS, WIDTH, VOCABULARY = 3, 64, 80
SMALL_SHAPES = {
    "embed_tokens.weight": (VOCABULARY, WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),  # square, with 8-bit states
    "layers.0.mlp.router.weight": (EXPERTS, WIDTH),
    "layers.0.mlp.experts.gate_up": (EXPERTS, 2 * 24, WIDTH),
    "layers.0.mlp.experts.down": (EXPERTS, WIDTH, 24),
    "norm.weight": (WIDTH,),
    "lm_head.weight": (VOCABULARY, WIDTH),
}


def choices() -> dict[str, tuple]:
    """The values of every option that has a list of them, read from [optimizer], and the types of master weights."""
    found: dict[str, tuple] = {"weights": (torch.float32, torch.bfloat16)}
    for name, field in OptimizerConfig.model_fields.items():
        if field.annotation is bool:
            found[name] = (True, False)
        elif typing.get_origin(field.annotation) is typing.Literal:
            found[name] = typing.get_args(field.annotation)
    return found


def covering_rows() -> list[dict]:
    """Few rows of options in which every pair of values of two options occurs, found greedily."""
    options = choices()
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(options, 2)
        for a, b in itertools.product(options[one], options[other])
    }
    rows = []
    while missing:
        first = min(missing, key=str)
        row = dict(first)
        for name in options:
            if name not in row:
                row[name] = max(
                    options[name],
                    key=lambda value, name=name: sum(
                        tuple(sorted(((name, value), entry), key=lambda e: list(options).index(e[0]))) in missing
                        for entry in row.items()
                    ),
                )
        missing -= set(itertools.combinations([(name, row[name]) for name in options], 2))
        rows.append({name: row[name] for name in options})
    return rows


ROWS = covering_rows()


def loss_of(parameters, tokens) -> torch.Tensor:
    """A small mixture of experts that learns to repeat its input; the last expert gets no token."""
    p = {name: parameter.float() for name, parameter in parameters.items()}
    x = F.rms_norm(p["embed_tokens.weight"][tokens], (WIDTH,), p["norm.weight"])
    x = x + x @ p["layers.0.self_attn.o_proj.weight"].T
    weights = (x @ p["layers.0.mlp.router.weight"].T).sigmoid()
    for expert in range(EXPERTS - 1):
        gate, up = (x @ p["layers.0.mlp.experts.gate_up"][expert].T).chunk(2, -1)
        y = F.silu(gate) * up @ p["layers.0.mlp.experts.down"][expert].T
        x = x + weights[:, expert, None] * y
    return F.cross_entropy(x @ p["lm_head.weight"].T, tokens)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(str(value).removeprefix("torch.") for value in row.values())
)
def test_every_pair_of_options_trains(row, tmp_path):
    options = {name: value for name, value in row.items() if name != "weights"}
    if row["state_offload"] == "nvme":
        options["state_offload_folder"] = str(tmp_path)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(
            (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)).to(
                row["weights"]
            )
        )
        for name, shape in SMALL_SHAPES.items()
    }
    optimizer = build_optimizers(list(parameters.items()), OptimizerConfig(lr=0.01, **options))
    tokens = torch.randint(0, VOCABULARY, (64,), generator=generator)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = loss_of(parameters, tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step(1.0)
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    assert all(state.isfinite().all() for state in optimizer.state_tensors().values())
    assert losses[-1] < 0.9 * losses[0], losses


def test_limits_that_the_rules_state_are_those_of_the_code():
    assert (BLOCK, MIN_ENTRIES) == (rules_layout.STATE_BLOCK, rules_layout.STATE_MIN_ENTRIES)


BLOCK_ROLES = [
    ("input_layernorm.weight", "adamw", False), ("self_attn.q_proj.weight", "muon", True),
    ("self_attn.q_proj.bias", "adamw", False), ("self_attn.k_proj.weight", "muon", True),
    ("self_attn.k_proj.bias", "adamw", False), ("self_attn.v_proj.weight", "muon", True),
    ("self_attn.v_proj.bias", "adamw", False), ("self_attn.o_proj.weight", "muon", True),
    ("self_attn.q_norm.weight", "adamw", False), ("self_attn.k_norm.weight", "adamw", False),
    ("post_attention_layernorm.weight", "adamw", False),
]  # fmt: skip
DENSE_ROLES = [(f"mlp.{part}_proj.weight", "muon", True) for part in ("gate", "up", "down")]
SPARSE_ROLES = [
    ("mlp.router.weight", "muon", True),
    ("mlp.experts.gate_up", "muon", True),
    ("mlp.experts.down", "muon", True),
    *((f"mlp.shared_experts.{part}_proj.weight", "muon", True) for part in ("gate", "up", "down")),
]
INDEXER_ROLES = [
    ("self_attn.indexer.wq_b.weight", "adamw", True),
    ("self_attn.indexer.wk.weight", "adamw", True),
    ("self_attn.indexer.k_norm.weight", "adamw", False),
    ("self_attn.indexer.k_norm.bias", "adamw", False),
    ("self_attn.indexer.weights_proj.weight", "adamw", True),
]
EXPECTED_ROLES = {
    name: (optimizer, decay)
    for prefix, entries in {
        "": [
            ("embed_tokens.weight", "adamw", True),
            ("norm.weight", "adamw", False),
            ("lm_head.weight", "adamw", True),
        ],
        "layers.0.": BLOCK_ROLES + DENSE_ROLES,
        "layers.17.": BLOCK_ROLES + SPARSE_ROLES,
        "layers.18.": INDEXER_ROLES,
        "mtp.0.": [
            ("enorm.weight", "adamw", False),
            ("hnorm.weight", "adamw", False),
            ("eh_proj.weight", "muon", True),
            ("norm.weight", "adamw", False),
        ],
        "mtp.0.block.": BLOCK_ROLES + SPARSE_ROLES,
    }.items()
    for name, optimizer, decay in ((prefix + entry[0], *entry[1:]) for entry in entries)
}


def test_every_name_of_the_model_has_its_role():
    roles = assign_roles(list(EXPECTED_ROLES), OptimizerConfig())
    assert {
        name: (role.optimizer, role.decay) for name, role in zip(EXPECTED_ROLES, roles, strict=True)
    } == EXPECTED_ROLES
    assert {role.rule for role in roles} == {row.group for row in PARAMETERS if row.part != "value"}
    (value_head,) = assign_roles(["value_head.weight"], OptimizerConfig())
    assert (value_head.rule, value_head.optimizer, value_head.decay) == ("value head", "adamw", True)


def test_only_the_fused_gate_and_up_is_split():
    roles = assign_roles(list(EXPECTED_ROLES), OptimizerConfig())
    split = {name for name, role in zip(EXPECTED_ROLES, roles, strict=True) if role.row_blocks == 2}
    assert split == {"layers.17.mlp.experts.gate_up", "mtp.0.block.mlp.experts.gate_up"}


def test_adamw_takes_everything_with_the_same_decay():
    roles = assign_roles(list(EXPECTED_ROLES), OptimizerConfig(name="AdamW"))
    assert {role.optimizer for role in roles} == {"adamw"}
    assert [role.decay for role in roles] == [decay for _, decay in EXPECTED_ROLES.values()]


def test_names_without_a_rule_are_all_reported():
    with pytest.raises(UserError) as caught:
        assign_roles(["layers.0.mlp.extra.weight", "norm.weight", "layers.x.input_layernorm.weight"], OptimizerConfig())
    assert len(caught.value.faults) == 2
    assert "layers.0.mlp.extra.weight" in caught.value.faults[0]


def test_table_counts_tensors_and_parameters():
    tensors = [torch.empty(2, 3) for _ in EXPECTED_ROLES]
    config = OptimizerConfig()
    rows = role_rows(tensors, assign_roles(list(EXPECTED_ROLES), config), config)
    assert sum(row.tensors for row in rows) == len(EXPECTED_ROLES)
    assert sum(row.parameters for row in rows) == 6 * len(EXPECTED_ROLES)
    assert {row.rule: row.weight_decay for row in rows}["norms"] == 0.0
    assert len(format_role_table(rows).splitlines()) == len(rows) + 1


CPU = torch.device("cpu")


@pytest.mark.parametrize("place", ["cpu", "disk", "slow disk"])
def test_every_item_comes_in_order_and_goes_back_where_it_was(place, tmp_path, monkeypatch):
    """Eleven items through three slots; some are scattered over rows of a matrix, as the up rows of fused experts are.
    A disk is read ahead and written behind."""
    if place == "slow disk":
        read, write = StateRing._read, StateRing._write
        monkeypatch.setattr(StateRing, "_read", lambda *a: (time.sleep(0.01), read(*a)))
        monkeypatch.setattr(StateRing, "_write", lambda *a: (time.sleep(0.01), write(*a)))
    file = StateFile(tmp_path)

    def zeros(*size, dtype=torch.float32):
        return torch.zeros(size, dtype=dtype) if place == "cpu" else file.zeros(torch.Size(size), dtype, torch.zeros(0))

    whole = [zeros(4, 6, 5) for _ in range(5)]
    for number, state in enumerate(whole):
        state.copy_(torch.arange(120.0).view(4, 6, 5) + 1000 * number)
    items = [part for state in whole for part in ([state[:2, :3]], [state[:2, 3:], state[2:]])]
    codes = zeros(3, 10, dtype=torch.uint8)
    items.append([Quantized(codes, zeros(3, 1), True)])
    expected = [state.clone() for state in whole]
    stream = StateStream(items, CPU, "cpu" if place == "cpu" else file)
    for step in range(3):
        stream.begin()
        for item in items:
            with stream.take() as states:
                for state, kept in zip(states, item, strict=True):
                    if isinstance(state, Quantized):
                        assert (state.codes == step).all() and (state.scales == step).all() and state.signed
                        state.codes.add_(1)
                        state.scales.add_(1.0)
                    else:
                        assert torch.equal(state, kept) and state.is_contiguous()
                        assert state.data_ptr() != kept.data_ptr()
                        state.mul_(2.0).add_(1.0)
        stream.end()
        expected = [2.0 * state + 1.0 for state in expected]
        assert all(torch.equal(*pair) for pair in zip(whole, expected, strict=True)) and (codes == step + 1).all()
    assert not list(tmp_path.iterdir())  # the file has no name


def test_an_item_may_be_empty():
    items = [[torch.ones(5)], [torch.ones(2, 4), torch.zeros(0, 4)]]
    stream = StateStream(items, CPU, "cpu")
    stream.begin()
    for item in items:
        with stream.take() as states:
            assert [state.shape for state in states] == [state.shape for state in item]
    stream.end()


def test_an_error_of_the_disk_ends_the_step(tmp_path, monkeypatch):
    file = StateFile(tmp_path)
    items = [[file.zeros(torch.Size((4,)), torch.float32, torch.zeros(0))] for _ in range(5)]
    stream = StateStream(items, CPU, file)

    def fail(*_arguments):
        raise OSError("the disk is gone")

    monkeypatch.setattr(StateRing, "_write", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        stream.begin()
        for _ in items:
            with stream.take():
                pass


def test_folders_that_cannot_have_the_file_are_refused(tmp_path, small_disk):
    with pytest.raises(UserError, match="optimizer.state_offload_folder = .*no such folder; name a folder on a local"):
        StateFile(tmp_path / "missing")
    file = StateFile(small_disk[0])
    with pytest.raises(UserError, match="no room for .* GiB of this rank: No space left on device; name a folder"):
        file.zeros(torch.Size((1 << 28,)), torch.float32, torch.zeros(0))
    mounts = tmp_path / "mounts"
    kinds = {"/": "ext4", tmp_path: "nfs4", tmp_path / "a": "xfs"}
    mounts.write_text("".join(f"device {folder} {kind} rw 0 0\n" for folder, kind in kinds.items()))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert local_disk_fault(tmp_path / "b", mounts) == "on a network file system (nfs4)"
    assert local_disk_fault(tmp_path / "a", mounts) is None


def test_device_memory_is_a_few_slots_of_the_largest_item():
    items = [[torch.zeros(1000)] for _ in range(50)]
    stream = StateStream(items, CPU, "cpu")
    stream.begin()
    seen = set()
    for _ in items:
        with stream.take() as states:
            seen.add(states[0].data_ptr())
    stream.end()
    assert len(seen) == OFFLOAD_SLOTS


def test_states_that_stay_are_not_copied():
    items = [[torch.zeros(3)], [torch.zeros(4)]]
    stream = StateStream(items, CPU, "none")
    stream.begin()
    for item in items:
        with stream.take() as states:
            assert states[0] is item[0]
    stream.end()


def test_step_that_leaves_an_item_out_is_a_fault_of_ours():
    stream = StateStream([[torch.zeros(3)]], CPU, "cpu")
    stream.begin()
    with pytest.raises(AssertionError, match="every item"):
        stream.end()


def test_muon_refuses_unknown_places_and_mixed_devices():
    matrix = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="state_offload"):
        Muon([matrix], state_offload="disk")
    with pytest.raises(ValueError, match="one device"):
        Muon([matrix, torch.nn.Parameter(torch.zeros(4, 4, device="meta"))], state_offload="cpu")
    with pytest.raises(ValueError, match="updates on meta of parameters elsewhere need state_offload"):
        Muon([matrix], device=torch.device("meta"))
