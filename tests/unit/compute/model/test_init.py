"""Initial weights: the right distribution, and the same bits whoever makes which part of them."""

import hashlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.compute.model import init
from glm46.compute.model.init import fill_normal, fill_parameter, normal_at
from glm46.compute.model.transformer import Transformer


def whole(shape, *, seed=7, name="layers.3.self_attn.q_proj.weight", std=0.02, dtype=torch.float32):
    tensor = torch.full(shape, torch.nan, dtype=dtype)
    fill_normal(tensor, [torch.arange(n) for n in shape], shape, seed=seed, name=name, std=std)
    return tensor


def test_golden_values():
    """A checkpoint that is started again must start from these numbers on every machine and release.

    The first value by hand, in Python integers: SplitMix64 of index + key, twice, then Box-Muller.
    """
    name, seed = "embed_tokens.weight", 42
    mask = (1 << 64) - 1

    def mix(x):
        x = x * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    key = int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")
    places = [0, 1, 2, 12345678901]
    expected = []
    for place in places:
        bits = mix(mix(place + key & mask))
        first, second = ((bits >> 32) + 0.5) * 2.0**-32, (bits & 0xFFFFFFFF) * 2.0**-32
        expected.append(math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second))
    got = normal_at(seed, name, torch.tensor(places)).tolist()
    assert got == pytest.approx(expected, rel=1e-6)
    assert got == pytest.approx(GOLDEN, rel=1e-6)


GOLDEN = [-1.2298125, -0.3057004, 1.3618569, 0.12371375]


def test_moments_are_those_of_a_normal_distribution():
    x = whole((1 << 10, 1 << 11), std=1.0).double().flatten()
    n = x.numel()  # standard errors of the first four moments: 1, sqrt(2), sqrt(15), sqrt(96) over sqrt(n)
    for power, moment, error in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert (x**power).mean().item() == pytest.approx(moment, abs=4 * error * n**-0.5)
    # Largest distance of the distribution function from the normal one; its 1e-4 quantile is 2.23 / sqrt(n).
    places = torch.arange(1, n + 1) / n
    assert (x.sort().values.div(2**0.5).erf().add(1).div(2) - places).abs().max() < 2.23 * n**-0.5
    assert 4.5 < x.abs().max() < 6.8  # 32 bits reach as far as sqrt(2 * 33 * log 2)


def test_neighbours_are_uncorrelated():
    x = whole((1 << 10, 1 << 10), std=1.0)
    bound = 5 / 1024  # five standard errors of a mean of a million products
    for shifted in (x.roll(1, 0), x.roll(1, 1), x.roll(16, 1), x.flip(0)):
        assert abs((x * shifted).mean().item()) < bound


@pytest.mark.parametrize("other", [
    dict(seed=8), dict(name="layers.4.self_attn.q_proj.weight"), dict(name="layers.3.self_attn.k_proj.weight"),
    dict(name="mtp.0.block.self_attn.q_proj.weight"),
], ids=str)  # fmt: skip
def test_other_names_and_seeds_give_other_numbers(other):
    x, y = whole((512, 512), std=1.0), whole((512, 512), std=1.0, **other)
    assert abs((x * y).mean().item()) < 5 / 512
    # One stream must not be a piece of the other: of 4,096 numbers, chance repeats about one in 10,000.
    assert torch.isin(x.flatten()[:4096], y.flatten()).float().mean() < 0.1


@pytest.mark.parametrize("shape", [(64,), (24, 40), (8, 12, 20)], ids=str)
def test_a_shard_has_the_bits_of_the_whole(shape):
    """Blocks, strides (as FSDP over tensor parallelism cuts), single rows and empty shards, of every dimension."""
    reference = whole(shape)
    for dim, size in enumerate(shape):
        cuts = [torch.arange(0, size // 2), torch.arange(size // 4, size), torch.arange(0, size, 4)]
        cuts += [torch.tensor([size - 1]), torch.arange(size).view(2, -1, 2)[:, 1].flatten()]
        cuts.append(torch.arange(0))
        for cut in cuts:
            indices = [torch.arange(n) for n in shape]
            indices[dim] = cut
            local = torch.full_like(reference.index_select(dim, cut), torch.nan)
            fill_normal(local, indices, shape, seed=7, name="layers.3.self_attn.q_proj.weight", std=0.02)
            assert torch.equal(local, reference.index_select(dim, cut))


def test_both_dimensions_cut_at_once():
    reference = whole((24, 40))
    rows, columns = torch.arange(6, 18), torch.arange(1, 40, 3)
    local = torch.empty(12, 13)
    fill_normal(local, [rows, columns], (24, 40), seed=7, name="layers.3.self_attn.q_proj.weight", std=0.02)
    assert torch.equal(local, reference[rows][:, columns])


class MostElements(TorchDispatchMode):
    """Remembers the most elements that one operation makes outside the tensor it fills."""

    def __init__(self, filled):
        super().__init__()
        self.filled, self.most = filled.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.filled:
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("shape", [(1000, 16), (4, 50, 80), (2, 4000), (2, 2, 4000)], ids=str)
def test_the_size_of_a_chunk_changes_no_bit_and_bounds_what_is_made_at_once(shape, monkeypatch):
    reference = whole(shape)
    monkeypatch.setattr(init, "_CHUNK_ELEMENTS", 500)
    local = torch.empty(shape)
    indices = [torch.arange(n) for n in shape]
    with MostElements(local) as recorder:
        fill_normal(local, indices, shape, seed=7, name="layers.3.self_attn.q_proj.weight", std=0.02)
    assert torch.equal(local, reference)
    assert recorder.most <= max(500, *shape)


def test_bf16_is_the_rounded_fp32():
    assert torch.equal(whole((32, 32), dtype=torch.bfloat16), whole((32, 32)).bfloat16())


def test_every_parameter_of_the_model_is_filled_by_its_kind(tiny_shape):
    shape = tiny_shape(num_nextn_predict_layers=2)
    model = Transformer(shape)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.detach().fill_(torch.nan)
        indices = [torch.arange(n) for n in tensor.shape]
        fill_parameter(tensor, indices, tuple(tensor.shape), seed=1, name=name, std=shape.initializer_range)
        if tensor.dim() == 1 and "norm" in name:
            assert (tensor == 1).all(), name
        elif tensor.dim() == 1:
            assert (tensor == 0).all(), name
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=5 * (2 * tensor.numel()) ** -0.5), name
    # A fresh model is as unsure as a uniform guess.
    tokens = torch.randint(0, 97, (4, 32))
    loss = model(tokens, labels=tokens.roll(-1, 1)).loss / tokens.numel()
    assert loss.item() == pytest.approx(math.log(97), abs=0.05)


def test_a_of_an_adapter_is_uniform_in_the_inputs_of_its_matrix():
    """Of each expert's matrix, not of the stack of them."""
    shape = (6, 8, 100)
    for name in ("layers.3.mlp.experts.down_lora_A", "layers.3.self_attn.q_proj.lora_A"):
        tensor = torch.full(shape, torch.nan)
        fill_parameter(tensor, [torch.arange(n) for n in shape], shape, seed=1, name=name, std=0.02)
        assert 0.0998 < tensor.abs().max() <= 0.1 and abs(tensor.mean()) < 3e-3
        assert tensor.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
        half = torch.empty(6, 4, 100)
        fill_parameter(half, [torch.arange(6), torch.arange(4, 8), torch.arange(100)], shape, seed=1, name=name, std=1)
        assert torch.equal(half, tensor[:, 4:])
