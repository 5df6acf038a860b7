"""Write golden.json: what verl's, TRL's and slime's own functions make of fixed samples.

    pip download --no-deps verl==0.9.1; unzip -d verl_folder verl-0.9.1-*.whl
    git -C slime show 624b824a:examples/train_infer_mismatch_helper/mis.py > mis.py
    python tests/unit/tasks/rl/golden_vectors.py verl_folder mis.py > tests/unit/tasks/rl/golden.json

None is imported, for verl needs Ray, slime Megatron, and TRL's trainer pandas: their functions are cut out of their
files and run with stubs; TRL 1.16 is an installed package. The test compares with the numbers; no code of them is in
this project.
"""

import ast
import json
import math
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

GROUPS = [0, 0, 0, 1, 1, 1, 1]
SAMPLES, LONGEST = len(GROUPS), 6


class Stub(dict):
    """Any config: keys as attributes, all others None."""

    __getattr__ = dict.get


def functions_of(path: Path, given: dict[str, Any]) -> SimpleNamespace:
    """All functions and methods of a file, without decorators and annotations, beside its constants."""
    tree = ast.parse(path.read_text())
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    kept = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    for node in kept:
        node.decorator_list, node.returns = [], None
        for argument in ast.walk(node):
            if isinstance(argument, ast.arg):
                argument.annotation = None
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None]
    constants = [
        ast.Assign([target], node.value)
        for node in assigned
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(target).isupper()
    ]
    names = dict(given)
    for node in (*constants, *kept):
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(path), "exec"), names)
    return SimpleNamespace(**names)


def inputs() -> dict[str, Tensor]:
    """FP64 [N, T], rounded so that the file has all digits."""
    generator = torch.Generator().manual_seed(0)

    def generate(scale: float, shift: float = 0.0) -> Tensor:
        return (torch.randn(SAMPLES, LONGEST, generator=generator, dtype=torch.float64) * scale + shift).round(
            decimals=4
        )

    old = -generate(1.0).abs()
    lengths = torch.tensor([6, 3, 4, 1, 5, 6, 2])
    mask = torch.arange(LONGEST) < lengths.unsqueeze(1)
    mask[0, 2:4] = mask[5, 1] = False  # tokens of a tool
    return {
        "mask": mask.double(), "old": old, "new": old + generate(0.25), "rollout": old + generate(0.5),
        "reference": old + generate(0.3), "values": generate(0.5), "new_values": generate(0.5),
        "rewards": torch.tensor([1.0, 0.0, 0.25, 1.0, 1.0, 0.0, 0.5], dtype=torch.float64),
    }  # fmt: skip


def loss_of_trl(of: dict[str, Tensor], advantages: Tensor, loss_type: str, **keys: Any) -> dict[str, Any]:
    """Gradient of a step of TRL's GRPOTrainer, whose model is the given log-probabilities."""
    path = Path(find_spec("trl").submodule_search_locations[0], "trainer/grpo_trainer.py")
    methods = functions_of(path, {"torch": torch, "nanmin": MagicMock(), "nanmax": MagicMock()})  # of metrics
    new, mask = of["new"].clone().requires_grad_(), of["mask"]
    given = {"importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0} | keys
    trainer = MagicMock(
        loss_type=loss_type, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, _entropy_bonus_enabled=False,
        aux_loss_enabled=False, use_adaptive_entropy=False, **given,
    )  # fmt: skip
    trainer.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.accelerator.num_processes, trainer.model.training = 1, True
    trainer._get_per_token_logps_and_entropies.return_value = (new, torch.zeros_like(new), None)
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": of["old"], "ref_per_token_logps": of["reference"],
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    methods._compute_loss(trainer, None, inputs).backward()
    return {"gradient": new.grad}


def main(folder: Path, of_slime: Path) -> None:
    functional = functions_of(folder / "verl/utils/torch_functional.py", {"torch": torch})
    given = {"torch": torch, "np": np, "defaultdict": defaultdict, "verl_F": functional, "Optional": Optional}
    given |= {"ActorConfig": Stub, "AlgoConfig": type("AlgoConfig", (), {}), "Any": Any, "math": math}
    core = functions_of(folder / "verl/trainer/ppo/core_algos.py", given)
    corrections = functions_of(folder / "verl/trainer/ppo/rollout_corr_helper.py", given)
    slime = functions_of(of_slime, {"torch": torch, "Any": Any})
    of = inputs()
    mask, index = of["mask"], np.array(GROUPS)
    last = [int(row.nonzero().max()) for row in mask]

    def scores(kl: tuple[float, str] | None = None) -> Tensor:
        """Rewards of the tokens, after the penalty."""
        tokens = torch.zeros_like(mask)
        tokens[range(SAMPLES), last] = of["rewards"]
        return tokens if kl is None else tokens - kl[0] * core.kl_penalty(of["old"], of["reference"], kl[1]) * mask

    def loss_of(name: str, advantages: Tensor, mode: str, weights=None, kl=None, **clip) -> dict[str, Any]:
        """Loss and gradient, with a KL penalty to one of the inputs."""
        new = of["new"].clone().requires_grad_()
        config = Stub({"global_batch_info": {}, "clip_ratio": 0.2, "clip_ratio_c": 1e9} | clip)
        loss, metrics = getattr(core, f"compute_policy_loss_{name}")(
            of["old"], new, advantages, mask, mode, config=config, rollout_is_weights=weights
        )
        if kl is not None:
            penalty = core.kl_penalty(new, of[kl[2]], kl[1])
            loss = loss + kl[0] * core.agg_loss(penalty, mask, mode)
        loss.backward()
        found = {"advantages": advantages * mask, "gradient": new.grad, "clipped": metrics["actor/pg_clipfrac"]}
        return found | ({"correction": weights * mask} if weights is not None else {})

    def grpo(norm: bool = True, kl=None) -> Tensor:
        return core.compute_grpo_outcome_advantage(scores(kl), mask, index, norm_adv_by_std_in_grpo=norm)[0]

    log_ratio = (of["old"] - of["rollout"]) * mask

    def weights(level: str, bound: float | str, normalize: bool = False) -> Tensor:
        return corrections.compute_rollout_correction_weights(log_ratio, mask, level, bound, normalize)[0]

    def kept(option: str, low: float, high: float) -> Tensor:
        """verl bounds the inverse of the ratio."""
        bounds = f"{1 / high}_{1 / low}"
        return corrections.compute_rollout_rejection_mask(log_ratio, mask, option, bounds)[0]

    def weights_of_slime(**keys: Any) -> Tensor:
        given, masks, _ = slime.compute_mis_weights(
            Stub(use_tis=True, **keys),
            train_log_probs=list(of["old"]), rollout_log_probs=list(of["rollout"]), loss_masks=list(mask),
        )  # fmt: skip
        return torch.stack(given) * torch.stack(masks)

    mean, tokens = "seq-mean-token-mean", "token-mean"
    gae, gae_returns = core.compute_gae_advantage_return(scores((0.1, "k2")), of["values"], mask, 0.9, 0.8)
    discounted = core.compute_reinforce_plus_plus_outcome_advantage(scores((0.1, "k1")), mask, Stub(gamma=0.9))[0]
    baseline = core.compute_reinforce_plus_plus_baseline_outcome_advantage(scores(), mask, index)[0]
    every = {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.0, "rs_upper_bound": 1e9}
    cases = {
        "grpo": loss_of("vanilla", grpo(), mean, kl=(0.1, "k3", "reference")),
        "dr_grpo": loss_of("vanilla", grpo(False), "seq-mean-token-sum-norm"),
        "dapo": loss_of("vanilla", grpo(), tokens, clip_ratio_high=0.28),
        "gspo": loss_of(
            "gspo", grpo(), mean, weights("token", 1.5), clip_ratio_low=0.01, clip_ratio_high=0.02
        ),
        "cispo": loss_of("cispo", grpo(), tokens, clip_ratio_low=0.3, clip_ratio_high=0.2),
        "ppo": loss_of("vanilla", gae, tokens, clip_ratio_c=1.3) | {"returns": gae_returns * mask},
        "reinforce++": loss_of("vanilla", discounted, tokens),
        "reinforce++_baseline": loss_of("vanilla", baseline, tokens),
        "rloo": loss_of("vanilla", core.compute_rloo_outcome_advantage(scores((0.2, "k3")), mask, index)[0], mean),
        "tv": loss_of("dppo_tv", grpo(False), tokens, kl=(2e-3, "k2", "old"), clip_ratio=0.05),
        "icepop": loss_of("vanilla", grpo(), mean, weights("token", "0.7_1.4")),
        "mis": loss_of("vanilla", grpo(), mean, weights("sequence", 2.0, True) * kept("seq_mean_k1", 0.8, 1.25)),
        "reject_token": loss_of("vanilla", grpo(), mean, weights("token", 1.5) * kept("token_k1", 0.6, 1.8)),
        "reject_sequence": loss_of("vanilla", grpo(), mean, weights("token", 1.5) * kept("seq_sum_k1", 0.3, 1.2)),
        "slime_clip": loss_of("vanilla", grpo(), mean, weights_of_slime(
            tis_level="geometric", tis_mode="clip", tis_lower_bound=0.75, tis_upper_bound=1.0,
        )),
        "slime_veto": loss_of("vanilla", grpo(), mean, weights_of_slime(
            tis_level="token", tis_mode="truncate", tis_upper_bound=1.5, rs_veto_threshold=0.47, **every,
        )),
        "slime_mask": loss_of("vanilla", grpo(), mean, weights_of_slime(
            tis_level="sequence", tis_mode="mask", tis_lower_bound=0.3, tis_upper_bound=1.2, use_rs=True,
            rs_level="token", rs_lower_bound=0.6, rs_upper_bound=2.5,
        )),
        "slime_sequence": loss_of("vanilla", grpo(), mean, weights_of_slime(
            tis_level="geometric", tis_mode="truncate", tis_upper_bound=1.0, use_rs=True, rs_level="sequence",
            rs_lower_bound=0.25, rs_upper_bound=1.2,
        )),
    }  # fmt: skip
    cases |= {
        "trl_gspo": loss_of_trl(of, grpo(), "grpo", importance_sampling_level="sequence", epsilon_low=0.01, beta=0.1),
        "trl_dapo": loss_of_trl(of, grpo(), "dapo"),
        "trl_dr_grpo": loss_of_trl(of, grpo(False), "dr_grpo"),
        "trl_cispo": loss_of_trl(of, grpo(), "cispo", epsilon_high=1.2),  # the ratio itself, not its distance from 1
    }
    value = of["new_values"].clone().requires_grad_()
    loss, clipped = core.compute_value_loss(value, gae_returns, of["values"], mask, 0.2)
    loss.backward()
    cases["value"] = {"gradient": value.grad, "clipped": float(clipped), "loss": loss.item()}

    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(1, 13))
    overlong = {"longest": 10, "buffer": 4, "lengths": lengths}
    overlong["penalty"] = get_soft_overlong_punishment(10, 4)([[0] * length for length in lengths])

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    table = {"inputs": of, "cases": cases}
    table = {name: {key: plain(one) for key, one in part.items()} for name, part in table.items()}
    table["cases"] = {name: {key: plain(one) for key, one in case.items()} for name, case in cases.items()}
    print(json.dumps(table | {"groups": GROUPS, "overlong": overlong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
