"""MuonWithAdamW on modules that are not ours: torch's own optimizers, schedulers and state dicts are the judges."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from glm46 import MuonWithAdamW
from glm46.compute.model.transformer import Transformer
from glm46.compute.optim.optimizers import build_optimizers
from glm46.config.errors import UserError
from glm46.config.optimizer import OptimizerConfig
from glm46.config.presets import PRESETS
from tests.unit.compute.optim.test_muon import FP32, plain_newton_schulz, relative_error

PAGE = Path(__file__).parents[4] / "docs" / "api.md"


class Network(nn.Module):
    """A convolution, an encoder layer of torch and a head; tied to the embedding if asked."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=48, dropout=0.0, batch_first=True)
        self.mixers = nn.Parameter(0.02 * torch.randn(3, 16, 24))
        self.head = nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.convolution(self.embedding(tokens).mT).mT
        return self.head(self.layer(x) + sum(x @ mixer @ mixer.T for mixer in self.mixers))


MATRICES = [
    "mixers", "layer.self_attn.in_proj_weight", "layer.self_attn.out_proj.weight", "layer.linear1.weight",
    "layer.linear2.weight", "head.weight",
]  # fmt: skip


def network(tied: bool = False, dtype: torch.dtype = torch.float32) -> Network:
    torch.manual_seed(0)
    return Network(tied).to(dtype)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(model: nn.Module, optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()


def groups(optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_equals_the_optimizers_of_torch(monkeypatch, adjust_lr):
    """Muon where torch has the same mathematics, in FP32; AdamW to the bit."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", plain_newton_schulz)
    start = network()
    for name, parameter in start.named_parameters():
        if name in MATRICES:  # no larger than the update: otherwise their own rounding is what would be compared
            parameter.data.mul_(0.05)
    mine, theirs = copy.deepcopy(start), copy.deepcopy(start)
    options = dict(muon_lr=0.01, adamw_lr=3e-3, weight_decay=0.1, beta2=0.98, eps=1e-7)
    run(mine, MuonWithAdamW(mine, adjust_lr=adjust_lr, ns_dtype=torch.float32, **options), range(5))
    named = dict(theirs.named_parameters())
    # torch's Muon takes no stack of matrices: each of its matrices is a parameter there.
    stack = [nn.Parameter(matrix.detach().clone()) for matrix in theirs.mixers]
    matrices = [*stack, *(named[name] for name in MATRICES[1:])]
    rest = [named[name] for name in named if name not in MATRICES]
    adamw = dict(lr=3e-3, betas=(0.9, 0.98), eps=1e-7, fused=True)
    judges = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust_lr),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], weight_decay=0.1, **adamw),
        torch.optim.AdamW([p for p in rest if p.ndim < 2], weight_decay=0.0, **adamw),
    ]
    for step in range(5):
        give_gradients(theirs, step)
        for parameter, gradient in zip(stack, theirs.mixers.grad, strict=True):
            parameter.grad = gradient.clone()
        for judge in judges:
            judge.step()
    theirs.mixers.data.copy_(torch.stack([matrix.detach() for matrix in stack]))
    before = dict(start.named_parameters())
    for name, parameter in mine.named_parameters():
        if name in MATRICES:
            moved, expected = parameter - before[name], named[name] - before[name]
            assert relative_error(moved.detach(), expected.detach()) <= FP32, name
        else:
            assert torch.equal(parameter, named[name]) and not torch.equal(parameter, before[name]), name


def test_trains_a_module_that_is_not_ours():
    model = network()
    optimizer = MuonWithAdamW(model, ns_dtype=torch.float32)
    tokens = torch.randint(40, (4, 12))

    def loss():
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        value.backward()
        return value

    losses = [optimizer.step(loss).item() for _ in range(30)]
    assert losses[-1] < losses[0] / 3


def test_roles_follow_from_modules_shapes_and_patterns():
    model = network()
    rest = [name for name, _ in model.named_parameters() if name not in MATRICES]
    wide = [name for name in rest if model.get_parameter(name).ndim > 1]
    assert wide == ["embedding.weight", "convolution.weight"]
    decayed, plain, *others = [g["weight_decay"] for g in MuonWithAdamW(model, weight_decay=0.3).param_groups][1:]
    assert (decayed, plain, others) == (0.3, 0.0, [])
    assert groups(MuonWithAdamW(model)) == [MATRICES, wide, [name for name in rest if name not in wide]]
    # A tied head is the embedding; the same holds if the head comes first.
    assert "embedding.weight" in groups(MuonWithAdamW(network(tied=True)))[1]
    head_first = nn.ModuleDict({"head": nn.Linear(16, 40, bias=False), "embedding": nn.Embedding(40, 16)})
    head_first["head"].weight = head_first["embedding"].weight
    assert groups(MuonWithAdamW(head_first)) == [["head.weight"]]
    muon, adamw, _ = groups(MuonWithAdamW(model, adamw=["head.*", "mixers"]))
    assert muon == MATRICES[1:-1] and {"head.weight", "mixers"} < set(adamw)
    model.layer.requires_grad_(False)
    assert groups(MuonWithAdamW(model))[0] == ["mixers", "head.weight"]


def test_row_blocks_are_matrices_of_their_own():
    """Fused queries, keys and values move as three matrices do."""
    fused, apart = nn.Linear(8, 24, bias=False), nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    with torch.no_grad():
        fused.weight.copy_(torch.cat([part.weight for part in apart]))
    fused.weight.grad = torch.randn(24, 8)
    for part, gradient in zip(apart, fused.weight.grad.chunk(3), strict=True):
        part.weight.grad = gradient.clone()
    MuonWithAdamW(fused, row_blocks={"weight": 3}, ns_dtype=torch.float32).step()
    MuonWithAdamW(apart, ns_dtype=torch.float32).step()
    torch.testing.assert_close(fused.weight, torch.cat([part.weight for part in apart]), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_our_own_model_gets_the_roles_of_training():
    shape = PRESETS["debug"].model_copy(update={"num_hidden_layers": 2, "vocab_size": 64})
    mine = Transformer(shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    theirs = copy.deepcopy(mine)
    run(mine, MuonWithAdamW(mine, 0.02, 3e-4, ns_dtype=torch.float32), range(2))
    config = OptimizerConfig(lr=0.02, adamw_lr=3e-4, adjust_lr="original")
    training = build_optimizers(list(theirs.named_parameters()), config, ns_dtype=torch.float32)
    for step in range(2):
        give_gradients(theirs, step)
        training.step(1.0)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        # Stacks of another size round their products in another way.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_a_scheduler_of_torch_sets_both_rates():
    model = network()
    optimizer = MuonWithAdamW(model, 0.02, 3e-4, ns_dtype=torch.float32)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.5, 0.0)[step])
    moved = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        run(model, optimizer, range(step, step + 1))
        moved.append([not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)])
        if step < 2:
            scheduler.step()
    assert all(moved[0]) and all(moved[1]) and not any(moved[2])
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.02, 3e-4, 3e-4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
def test_continues_from_its_state_dict_bit_for_bit(tmp_path, dtype, state_dtype):
    model = network(dtype=dtype)
    optimizer = MuonWithAdamW(model, state_dtype=state_dtype)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for step in range(3):
        run(model, optimizer, range(step, step + 1))
        scheduler.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = network(dtype=dtype)
    other.load_state_dict(saved["model"])
    resumed = MuonWithAdamW(other, muon_lr=1.0, adamw_lr=1.0, state_dtype=state_dtype)
    resumed.load_state_dict(saved["optimizer"])
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]
    run(model, optimizer, range(3, 6))
    run(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_sharded_module_gets_the_same_update():
    """DTensors of FSDP2, over a real process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        plain, sharded = network(), network()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        optimizer = MuonWithAdamW(sharded, ns_dtype=torch.float32)
        run(plain, MuonWithAdamW(plain, ns_dtype=torch.float32), range(3))
        for step in range(3):
            give_gradients(plain, step)
            for parameter, like in zip(sharded.parameters(), plain.parameters(), strict=True):
                parameter.grad = torch.distributed.tensor.distribute_tensor(
                    like.grad, parameter.device_mesh, parameter.placements
                )
            optimizer.step()
        for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b)
    finally:
        torch.distributed.destroy_process_group()


def test_unfit_arguments_are_refused():
    model = network()
    with pytest.raises(UserError, match="optimizer.momentun: unknown key; did you mean 'momentum'"):
        MuonWithAdamW(model, momentun=0.9)
    with pytest.raises(UserError, match=r"optimizer.lr = -1.0"):
        MuonWithAdamW(model, muon_lr=-1.0)
    with pytest.raises(TypeError, match="lr"):
        MuonWithAdamW(model, lr=0.1)
    with pytest.raises(ValueError, match="'lm_head' matches no matrix under Muon; names: mixers, embedding.weight"):
        MuonWithAdamW(model, adamw=["lm_head"])
    with pytest.raises(UserError, match="mixers is float16, which loses small updates; convert"):
        MuonWithAdamW(network().half())
    with pytest.raises(ValueError, match=r"row_blocks\['head.weight'\] = 3: must divide the 40 of head.weight"):
        MuonWithAdamW(model, row_blocks={"head.weight": 3})
    with pytest.raises(ValueError, match="empty"):
        MuonWithAdamW(nn.ReLU())
    optimizer = MuonWithAdamW(model)
    with pytest.raises(NotImplementedError, match="at construction"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    with pytest.raises(ValueError, match="of other parameters"):
        optimizer.load_state_dict(MuonWithAdamW(model, adamw=["head.*"]).state_dict())
    saved = optimizer.state_dict()
    saved["state"].pop(0)
    with pytest.raises(ValueError, match=r"has \[\] of parameter 0"):
        optimizer.load_state_dict(saved)


def test_the_examples_of_the_page_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    examples = [example for example in examples if "glm46.load" not in example]
    assert len(examples) == 2
    scope: dict = {}
    exec(examples[0], {})
    assert capsys.readouterr().out in PAGE.read_text(encoding="utf-8")
    exec(examples[1], scope)
    # An untrained model guesses one of 100 tokens: 4.6.
    assert scope["loss"] < 4.0
    assert scope["optimizer"].param_groups[0]["row_blocks"] == (32, 32, 32)
