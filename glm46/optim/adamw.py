"""AdamW over this rank's parts of the parameters: torch's own for FP32 states, a plain one for smaller states.

The rule works on entries, so the parts are all it needs: no DTensor operation runs in a step, and parameters of
different meshes share one fused kernel. The saved states are DTensors like the parameters and share the parts' memory.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from glm46.config.optimizer import Optimizer
from glm46.optim.compact_state import load_state, local_state, make_state, store_state
from glm46.optim.muon_layout import local_gradient, local_part

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Names of the states, and whether they hold values below zero."""


class AdamW:
    """``param_groups`` and ``step`` as in torch; all states exist from the start."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], decays: Sequence[bool], config: Optimizer):
        """``decays`` says of each parameter whether it is decayed."""
        self._parts = [(parameter, local_part(parameter)) for _, parameter in parameters]
        self._config = config
        self._states: dict[str, Tensor] = {}
        dtype = "8bit" if config.state_dtype == "8bit" else getattr(torch, config.state_dtype)
        # torch's kernels want states of the parameter's type.
        self._is_torch = all(part.dtype == dtype == torch.float32 for _, part in self._parts)
        self._moments = {}
        for (name, parameter), (_, part) in zip(parameters, self._parts, strict=True):
            # The fused kernel counts on the device, the others count on the host.
            on_device = self._is_torch and config.implementation == "fused"
            step = torch.zeros((), dtype=torch.float32, device=part.device if on_device else "cpu")
            self._states[f"{name}.step"] = step
            self._moments[part] = {"step": step}
            for key, signed in MOMENTS:
                tensors = make_state(name, parameter, dtype, signed)
                self._states |= {f"{name}.{key}{end}": tensor for end, tensor in tensors.items()}
                self._moments[part][key] = local_state(tensors, signed)
        self.param_groups = [
            {
                "params": [part for (_, part), mine in zip(self._parts, decays, strict=True) if mine == decay],
                "weight_decay": config.weight_decay if decay else 0.0,
                "lr": config.adamw_lr or config.lr,
            }
            for decay in (True, False)
        ]
        if self._is_torch:
            self._torch = torch.optim.AdamW(
                [group for group in self.param_groups if group["params"]] or [{"params": []}],
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=config.implementation == "fused",
                foreach=config.implementation == "foreach",
            )
            self._torch.state.update(self._moments)
            self.param_groups = self._torch.param_groups

    def state_tensors(self) -> dict[str, Tensor]:
        """The live states by ``<parameter>.<state>``."""
        return self._states

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for parameter, part in self._parts:
            part.grad = local_gradient(parameter)
        if self._is_torch:
            self._torch.step()
        else:
            for group in self.param_groups:
                for part in group["params"]:
                    if part.grad is not None:
                        self._update(part, self._moments[part], group["lr"], group["weight_decay"])
        for _, part in self._parts:
            part.grad = None

    def _update(self, part: Tensor, states: dict, lr: float, weight_decay: float) -> None:
        """One entry-wise update in FP32. Source: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""
        beta1, beta2 = self._config.beta1, self._config.beta2
        states["step"] += 1
        # The count lives on the host here: no wait for the device.
        step = states["step"].item()
        average = load_state(states["exp_avg"], part)
        square = load_state(states["exp_avg_sq"], part)
        gradient = part.grad.to(average.dtype)
        average.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        store_state(states["exp_avg"], average)
        store_state(states["exp_avg_sq"], square)
        # From the values before rounding: a second moment rounded to zero must not become a divisor.
        divisor = square.sqrt_().div_(math.sqrt(1.0 - beta2**step)).add_(self._config.eps)
        part.mul_(1.0 - lr * weight_decay)
        part.sub_(average.div_(divisor).mul_(lr / (1.0 - beta1**step)).to(part.dtype))
