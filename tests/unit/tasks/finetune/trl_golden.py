"""Write trl_golden.json: losses, gradients and metrics of pairs as TRL's own DPOTrainer computes them.

    PYTHONPATH=. python tests/unit/tasks/finetune/trl_golden.py

Needs trl 1.16 with its dependencies (datasets, accelerate); the tests need only the file. Each case is one pair: TRL's
cross-entropy of chosen completions is a mean within a batch, and its label smoothing is that of the loss ``aot``, which
for one pair is that of conservative DPO; ``sigmoid`` has none.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.trainer.dpo_trainer import DPOTrainer

FILE = Path(__file__).with_name("trl_golden.json")
LOSSES = [
    ({"beta": 0.1}, {"sigmoid": 1.0}),
    ({"beta": 0.7, "label_smoothing": 0.2}, {"aot": 1.0}),
    ({"beta": 0.3, "sft_weight": 0.5}, {"sigmoid": 1.0, "sft": 0.5}),
]
LENGTHS = [(4, 2), (1, 6), (3, 3)]
LOGGED = {
    "reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies", "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected", "chosen_logprob": "logps/chosen", "rejected_logprob": "logps/rejected",
}  # fmt: skip
"""TRL's names of our metrics."""


def compute(policy: list, reference: list, keys: dict, losses: dict) -> dict:
    """One case: the log-probabilities of both halves under policy and reference, and what TRL makes of them."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    logged = {"train": {name: [] for name in (*LOGGED.values(), "entropy", "mean_token_accuracy")}}
    logged["train"] |= {"logits/chosen": [], "logits/rejected": []}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=list(losses), use_weighting=False,
        loss_weights=list(losses.values()), beta=keys["beta"], label_smoothing=keys.get("label_smoothing", 0.0),
        _metrics=logged, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    longest = max(map(len, policy))
    mask = torch.tensor([[0] + [1] * len(half) + [0] * (longest - len(half)) for half in policy])
    leaf = torch.zeros(2, longest)
    for row, half in zip(leaf, policy, strict=True):
        row[: len(half)] = half
    leaf.requires_grad_()
    nothing = torch.zeros(2, longest)
    outputs = SimpleNamespace(log_probs=leaf, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": reference[0].sum()[None], "ref_rejected_logps": reference[1].sum()[None]}
    loss = DPOTrainer._compute_loss(trainer, lambda **arguments: outputs, inputs, False)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {
        "keys": keys,
        "policy": [half.tolist() for half in policy],
        "reference": [half.tolist() for half in reference],
        "loss": loss.item(),
        "gradient": [row[: len(half)].tolist() for row, half in zip(gradient, policy, strict=True)],
        "metrics": {ours: logged["train"][theirs][0] for ours, theirs in LOGGED.items()},
    }


def main() -> None:
    """Draw the log-probabilities and write the file."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for lengths in LENGTHS:
        policy, reference = ([-3 * torch.rand(n, generator=generator) for n in lengths] for _ in range(2))
        cases += [compute(policy, reference, keys, losses) for keys, losses in LOSSES]
    FILE.write_text(json.dumps({"trl": trl.__version__, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
