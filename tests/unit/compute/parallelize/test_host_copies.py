"""What checkpointed layers keep leaves the device one layer later, and comes back one layer before it is read."""

import weakref

import torch

from glm46.compute.parallelize.host_copies import HostCopies


def layers_of(copies: HostCopies, count: int) -> list[tuple]:
    """Forwards of so many layers, each with its input and one result."""
    found = []
    for number in range(count):
        layer = copies.begin(is_first=number == 0)
        found.append((layer, [layer.copy(torch.full((3,), float(number + part / 2))) for part in range(2)]))
    return found


def where(layers: list[tuple]) -> list[bool]:
    """Whether the tensors of each layer are on the device."""
    here = [{copied.on_device is not None for copied in both} for _, both in layers]
    assert all(len(each) == 1 for each in here)  # all of a layer, or none
    return [each.pop() for each in here]


def test_two_layers_are_on_the_device_and_the_one_before_is_fetched_ahead():
    layers = layers_of(HostCopies(), 5)
    assert where(layers) == [False, False, False, True, True]
    for number, (_, both) in reversed([*enumerate(layers)]):
        taken = [copied.take() for copied in both]
        assert [each.tolist() for each in taken] == [[float(number)] * 3, [number + 0.5] * 3]
        assert where(layers)[:number] == [place == number - 1 or place >= 3 for place in range(number)]
        assert all(copied.host is None for copied in both)


def test_a_backward_of_an_earlier_micro_batch_frees_the_later_one():
    copies = HostCopies()
    first, second = layers_of(copies, 3), layers_of(copies, 3)
    assert where(first) == [False] * 3 and where(second) == [False, True, True]
    assert first[2][1][0].take().tolist() == [2.0] * 3
    assert where(second) == [False] * 3 and where(first[:2]) == [False, True]


def test_what_no_backward_reads_is_let_go():
    copies = HostCopies()
    layers = layers_of(copies, 4)
    hosts = [weakref.ref(copied.host) for _, both in layers for copied in both]
    layers.clear()
    layers_of(copies, 2)
    assert not any(ref() is not None for ref in hosts)


def test_a_tensor_comes_back_as_it_was():
    x = torch.arange(6.0).view(2, 3).t().requires_grad_()
    layer = HostCopies().begin(is_first=True)
    copied, frozen = layer.copy(x), layer.copy(torch.ones(2, dtype=torch.int64))
    layer.release()
    back = copied.take()
    assert torch.equal(back, x) and back.stride() == x.stride() and back.requires_grad and back.is_leaf
    assert not frozen.take().requires_grad
