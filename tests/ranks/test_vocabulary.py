"""An output head split over ranks gives what a whole one gives, in both forms: values, predictions, gradients."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.process import join, leave
from glm46.compute.model.cross_entropy import IGNORE, HeadForm, HeadOutput, summed_loss, token_logprobs
from glm46.compute.model.transformer import OutputHead
from glm46.compute.parallelize.tensor import vocabulary_parallel_head
from tests.harness import run_ranks
from tests.unit.compute.model.test_cross_entropy import kept_tokens, plain_over

ROWS, LENGTH, VOCABULARY, WIDTH = 3, 16, 64, 12
FORMS = {
    "summed": partial(summed_loss, chunk_tokens=7),
    "by token": partial(token_logprobs, chunk_tokens=7),
    "with entropy": partial(token_logprobs, chunk_tokens=7, entropy=True, temperature=0.7),
}
CASES = ("random", "huge logits", "every logit twice", "labels of one rank", "no labels")


def make_example(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, whole."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.2] = IGNORE
    if case == "huge logits":
        hidden *= 1e3
    elif case == "every logit twice":
        weight = weight[: VOCABULARY // 2].repeat(2, 1)
    elif case == "labels of one rank":
        labels = labels.clamp(max=3)
    elif case == "no labels":
        labels.fill_(IGNORE)
    return hidden.to(dtype), weight.to(dtype), labels


def objective(output: HeadOutput) -> Tensor:
    """Of which no two tokens have the same weight."""
    if output.loss is not None:
        return output.loss * 0.37
    weights = torch.linspace(-1.0, 2.0, ROWS * LENGTH).view(ROWS, LENGTH)
    total = (weights * output.logprobs).sum()
    return total if output.entropy is None else total + (weights.flip(0) * output.entropy).sum()


def run_whole(form: HeadForm, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Numbers, predictions and gradients of one process."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    output = form(hidden, weight, labels, None)
    return [*numbers(output), *torch.autograd.grad(objective(output), (hidden, weight))]


def run_split(form: HeadForm, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """The same, put together from what the ranks have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        head = OutputHead(VOCABULARY // ranks, WIDTH)
    head.weight = torch.nn.Parameter(weight.chunk(ranks)[rank].clone())
    part = hidden.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    output = vocabulary_parallel_head(head, dist.group.WORLD)(part, labels, form)
    gradients = torch.autograd.grad(objective(output), (part, head.weight))
    if output.loss is not None:  # of the sum a rank has its share
        shares = output.loss.detach().clone()
        dist.all_reduce(shares)
        output = output._replace(loss=shares)
    return [*numbers(output), gather(gradients[0], 1), gather(gradients[1], 0)]


def numbers(output: HeadOutput) -> list[Tensor]:
    """All that a form gives."""
    return [x.detach() for x in output if x is not None]


def gather(part: Tensor, dim: int) -> Tensor:
    """The parts of all ranks along a dimension."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts, dim=dim)


def error(found: Tensor, want: Tensor) -> float:
    """Relative; absolute where all is zero."""
    return ((found.double() - want.double()).norm() / (want.double().norm() or 1.0)).item()


def compare_forms() -> list[dict]:
    """On each rank."""
    process, rows = join(300), []
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            example = make_example(case, dtype)
            for name, form in FORMS.items():
                found, want = run_split(form, *example), run_whole(form, *example)
                same_predictions = torch.equal(found[0], want[0])
                worst: list = [None] * process.world_size
                here = [error(a, b) for a, b in zip(found[1:], want[1:], strict=True)]
                dist.all_gather_object(worst, (max(here[:-2]), max(here[-2:]), same_predictions))
                values, gradients, predictions = zip(*worst, strict=True)
                row = {"case": case, "form": name, "dtype": str(dtype), "value_error": max(values)}
                row |= {"gradient_error": max(gradients), "predictions_equal": all(predictions)}
                rows.append(row)
    leave()
    return rows


def compare_kept() -> list[dict]:
    """Errors of a head split over the ranks against a formula in FP64. On each rank."""
    process = join(300)
    rows = []
    for case in ("random", "labels of one rank"):  # in the second, most sets lie on one rank too
        hidden, weight, labels = make_example(case, torch.float32)
        flat = labels.reshape(-1)
        kept = kept_tokens(flat, 4 if case == "labels of one rank" else VOCABULARY, most=4)
        form = partial(
            token_logprobs, chunk_tokens=7, entropy=True, temperature=0.7,
            kept=kept.view(4, ROWS, LENGTH).transpose(0, 1),
        )  # fmt: skip
        found = run_split(form, hidden, weight, labels)
        exact = [x.double().requires_grad_() for x in (hidden, weight)]
        output = plain_over(kept, exact[0].view(-1, WIDTH), exact[1], flat, 0.7)
        wide = HeadOutput(output.predictions, None, *(x.view(ROWS, LENGTH) for x in output[2:]))
        want = [*numbers(wide), *torch.autograd.grad(objective(wide), exact)]
        rows.append({"case": case, "errors": [error(a, b) for a, b in zip(found[1:], want[1:], strict=True)]})
    leave()
    assert process.world_size > 1
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_head_over_kept_tokens_equals_the_formula(ranks):
    for of_rank in run_ranks(compare_kept, ranks):
        for row in of_rank:
            assert len(row["errors"]) == 4 and max(row["errors"]) < 1e-6, row


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_head_equals_a_whole_one(ranks):
    rows = run_ranks(compare_forms, ranks)[0]
    assert len(rows) == 2 * 5 * 3
    for row in rows:
        assert row["predictions_equal"], row
        # The same logits on both sides: what differs is the order of FP32 sums. Between the ranks, the gradient of
        # hidden states is a sum of BF16 numbers, each rounded by 2**-8 of itself.
        assert row["value_error"] < 1e-6, row
        assert row["gradient_error"] < (2e-6 if row["dtype"] == "torch.float32" else 1e-2), row
