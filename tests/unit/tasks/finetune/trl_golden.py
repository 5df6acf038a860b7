"""Write trl_golden.json: losses, gradients and metrics of preferences as TRL's own trainers compute them.

    PYTHONPATH=. python tests/unit/tasks/finetune/trl_golden.py

Needs trl 1.16 with its dependencies (datasets, accelerate); the tests need only the file. A case is one pair, or some
labelled examples of KTO: TRL's cross-entropy of chosen completions is a mean within a batch.
"""

import functools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

FILE = Path(__file__).with_name("trl_golden.json")
DPO = [
    ({"beta": 0.1}, {"sigmoid": 1.0}),
    ({"beta": 0.7}, {"sigmoid": 1.0}),
    ({"beta": 0.3, "sft_weight": 0.5}, {"sigmoid": 1.0, "sft": 0.5}),
    ({"loss_type": "ipo", "beta": 0.4}, {"ipo": 1.0}),
    ({"loss_type": "ipo", "beta": 0.2, "sft_weight": 0.3}, {"ipo": 1.0, "sft": 0.3}),
]
WITHOUT_REFERENCE = [
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
    {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.2, "sft_weight": 0.2},
    {"loss_type": "orpo", "beta": 0.1},
    {"loss_type": "orpo", "beta": 0.6},
]
KTO = [{"loss_type": "kto", "beta": 0.3}, {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.5,
                                           "undesirable_weight": 0.75}]  # fmt: skip
LENGTHS = [(4, 2), (1, 6), (3, 3)]
OF_EXAMPLES = [((4, 2, 3), (True, False, True), 2.0), ((1, 6), (False, False), -6.0)]
"""Tokens and labels of examples, and what is added to log-ratios of mismatched ones: one estimate is below 0."""
NAMES = ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected", "logps/chosen",
         "logps/rejected", "kl")  # fmt: skip
ACCELERATOR = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def padded(halves: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities as rows, a leaf, and the mask of completions, which begin behind one token of a prompt."""
    longest = max(map(len, halves))
    mask = torch.tensor([[0] + [1] * len(half) + [0] * (longest - len(half)) for half in halves])
    leaf = torch.zeros(len(halves), longest)
    for row, half in zip(leaf, halves, strict=True):
        row[: len(half)] = half
    return leaf.requires_grad_(), mask


def outputs_of(leaf: torch.Tensor) -> SimpleNamespace:
    """What TRL's fused head returns."""
    nothing = torch.zeros_like(leaf)
    return SimpleNamespace(log_probs=leaf, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def dpo(policy: list, reference: list, keys: dict, losses: dict) -> tuple:
    """Loss, gradient and metrics of `DPOTrainer`."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=list(losses), use_weighting=False,
        loss_weights=list(losses.values()), beta=keys["beta"], label_smoothing=0.0,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    leaf, mask = padded(policy)
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": reference[0].sum()[None], "ref_rejected_logps": reference[1].sum()[None]}
    loss = DPOTrainer._compute_loss(trainer, lambda **arguments: outputs_of(leaf), inputs, False)
    return loss, leaf, trainer._metrics["train"]


def without_reference(policy: list, keys: dict) -> tuple:
    """Loss, gradient and metrics by the loss functions of `CPOTrainer` and `ORPOTrainer`, added up as they do."""
    leaf, mask = padded(policy)
    means = leaf.sum(1) / mask.sum(1)
    nll = -leaf[0, : len(policy[0])].mean()
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR, beta=keys["beta"], alpha=0.0, loss_type="simpo",
        label_smoothing=0.0, simpo_gamma=keys.get("simpo_gamma"),
    )  # fmt: skip
    if keys["loss_type"] == "simpo":
        losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, means[:1], means[1:])
        loss = losses.mean() + keys.get("sft_weight", 0.0) * nll
    else:
        losses, chosen, rejected, _, _ = ORPOTrainer.odds_ratio_loss(trainer, means[:1], means[1:])
        loss = nll - losses.mean()
    metrics = {
        "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(), "logps/chosen": means[0], "logps/rejected": means[1],
    }  # fmt: skip
    return loss, leaf, {name: [value.mean().item()] for name, value in metrics.items()}


def kto(policy: list, reference: list, mismatched: torch.Tensor, labels: tuple, keys: dict) -> tuple:
    """Loss, gradient and metrics of `KTOTrainer`.

    Args:
        mismatched: [2, examples], log-probabilities of completions of other prompts, of policy and reference.
    """
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, aux_loss_enabled=False, calculate_KL=True,
        precompute_ref_logps=True, loss_type="kto", beta=keys["beta"], _metrics={"train": defaultdict(list)},
        desirable_weight=keys.get("desirable_weight", 1.0), undesirable_weight=keys.get("undesirable_weight", 1.0),
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    trainer._compute_kl_logps = functools.partial(KTOTrainer._compute_kl_logps, trainer)
    leaf, mask = padded(policy)
    ids, other_ids = torch.zeros_like(mask), torch.ones(len(policy), 2, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": mask, "label": torch.tensor(labels)}
    inputs |= {f"KL_{name}": other_ids for name in ("input_ids", "attention_mask", "completion_mask")}
    inputs |= {"ref_logps": torch.stack([half.sum() for half in reference]), "ref_KL_logps": mismatched[1]}

    def model(input_ids, **arguments):
        return outputs_of(mismatched[0][:, None] if input_ids.any() else leaf)

    loss = KTOTrainer._compute_loss(trainer, model, inputs, False)
    return loss, leaf, trainer._metrics["train"]


def case(keys: dict, policy: list, reference: list, result: tuple, **more) -> dict:
    """A case as the file has it."""
    loss, leaf, metrics = result
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {
        "keys": keys,
        "policy": [half.tolist() for half in policy],
        "reference": [half.tolist() for half in reference],
        "loss": loss.item(),
        "gradient": [row[: len(half)].tolist() for row, half in zip(gradient, policy, strict=True)],
        "metrics": {name: float(metrics[name][0]) for name in NAMES if name in metrics},
    } | more  # fmt: skip


def main() -> None:
    """Generate the log-probabilities and write the file."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for lengths in LENGTHS:
        policy, reference = ([-3 * torch.rand(n, generator=generator) for n in lengths] for _ in range(2))
        cases += [case(keys, policy, reference, dpo(policy, reference, keys, losses)) for keys, losses in DPO]
        cases += [case(keys, policy, reference, without_reference(policy, keys)) for keys in WITHOUT_REFERENCE]
    for lengths, labels, shift in OF_EXAMPLES:
        policy, reference = ([-3 * torch.rand(n, generator=generator) for n in lengths] for _ in range(2))
        mismatched = -8 * torch.rand(2, len(lengths), generator=generator) - torch.tensor([[0.0], [shift]])
        for keys in KTO:
            result = kto(policy, reference, mismatched, labels, keys)
            cases.append(case(keys, policy, reference, result, labels=labels, mismatched=mismatched.tolist()))
    FILE.write_text(json.dumps({"trl": trl.__version__, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
