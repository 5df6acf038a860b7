"""AdamW over this rank's parts of the parameters: torch's fused kernel for FP32 states, a plain update for others.

The update is entry-wise, so a step runs no DTensor operation, and parameters of different meshes share one fused
kernel. The saved states are DTensors like the parameters and share the memory of the parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.optim.compact_state import State, StateType, load_state, local_state, make_state, store_state
from glm46.compute.optim.muon_layout import local_gradient
from glm46.compute.optim.state_offload import StatePlace, StateStream, zeros_at
from glm46.config.optimizer import OptimizerConfig

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Names of the states, and True if they can be negative."""

# States in host memory are copied in items of at least this size: large enough for the full rate of the link, small
# compared with the gradients.
OFFLOADED_ITEM_BYTES = 64 << 20


@dataclass(frozen=True)
class _Entry:
    """One parameter, this rank's part of it, its step count and this rank's parts of its moments."""

    parameter: Tensor
    part: Tensor
    step: Tensor
    moments: tuple[State, State]


class AdamW:
    """AdamW over this rank's parts, with ``param_groups``, ``state`` and ``step`` as in torch: torch's fused kernel for
    FP32 states on the device, plain operations for other states. All states exist from the start."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        kinds: Sequence[tuple[bool, float]],
        config: OptimizerConfig,
        place: StatePlace,
    ):
        """``kinds``: for each parameter, True if weight decay applies, and the ratio of its rate to that of the others.
        ``place`` has the states between steps."""
        self._config, self._place = config, place
        self._names = [name for name, _ in parameters]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        dtype: StateType = "8bit" if config.state_dtype == "8bit" else getattr(torch, config.state_dtype)
        parts = [local_tensor(parameter) for _, parameter in parameters]
        # torch's kernel needs states of the parameter's type.
        self._is_torch = all(part.dtype == dtype == torch.float32 for part in parts)
        entries = [
            self._entry(name, parameter, part, dtype) for (name, parameter), part in zip(parameters, parts, strict=True)
        ]
        self.param_groups: list[dict] = []
        self._items: list[tuple[dict, list[_Entry]]] = []
        for decay, lr_ratio in dict.fromkeys([(True, 1.0), (False, 1.0), *kinds]):
            mine = [entry for entry, kind in zip(entries, kinds, strict=True) if kind == (decay, lr_ratio)]
            group = {
                "params": [entry.parameter for entry in mine],
                "weight_decay": config.weight_decay if decay else 0.0,
                "lr": (config.adamw_lr or config.lr) * lr_ratio,
            }
            self.param_groups.append(group)
            self._items += [(group, item) for item in self._chunks(mine)]
        states = [[state for entry in item for state in entry.moments] for _, item in self._items]
        device = parts[0].device if parts else torch.device("cpu")
        self._moments = StateStream(states, device, place)

    def _entry(self, name: str, parameter: Tensor, part: Tensor, dtype: StateType) -> _Entry:
        # The fused kernel counts on the device, the plain update on the host.
        step = torch.zeros((), dtype=torch.float32, device=part.device if self._is_torch else "cpu")
        self.state[parameter] = {"step": step}
        moments = []
        for key, signed in MOMENTS:
            tensors = make_state(name, parameter, dtype, signed, zeros_at(self._place))
            self.state[parameter] |= {f"{key}{end}": tensor for end, tensor in tensors.items()}
            moments.append(local_state(tensors, signed))
        return _Entry(parameter, part, step, (moments[0], moments[1]))

    def _chunks(self, entries: list[_Entry]) -> list[list[_Entry]]:
        """The entries to update at a time: all, or chunks large enough to be worth a transfer."""
        if self._place == "none":
            return [entries] if entries else []
        items: list[list[_Entry]] = []
        room = 0
        for entry in entries:
            if room <= 0:
                items.append([])
                room = OFFLOADED_ITEM_BYTES
            items[-1].append(entry)
            room -= 2 * 4 * entry.part.numel()  # of both moments in FP32, for any type of states
        return items

    def state_tensors(self) -> dict[str, Tensor]:
        """The live states by ``<parameter>.<state>``."""
        named = zip(self._names, self.state.values(), strict=True)
        return {f"{name}.{key}": tensor for name, states in named for key, tensor in states.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self._moments.begin()
        for group, item in self._items:
            with self._moments.take() as states:
                present = []
                for entry, moments in zip(item, zip(states[::2], states[1::2], strict=True), strict=True):
                    gradient = local_gradient(entry.parameter)
                    if gradient is not None:
                        present.append((entry.part, gradient, moments, entry.step))
                if self._is_torch:
                    self._update_by_torch(present, group)
                else:
                    for part, gradient, moments, step in present:
                        self._update(part, gradient, moments, step, group)
        self._moments.end()

    def _update_by_torch(self, present: list[tuple], group: dict) -> None:
        config = self._config
        adamw(
            [part for part, *_ in present],
            [gradient for _, gradient, *_ in present],
            [moments[0] for *_, moments, _ in present],
            [moments[1] for *_, moments, _ in present],
            [],
            [step for *_, step in present],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=config.eps,
            maximize=False,
        )

    def _update(self, part: Tensor, gradient: Tensor, moments: tuple[State, State], count: Tensor, group: dict) -> None:
        """One entry-wise update in FP32. Source: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""
        beta1, beta2, lr = self._config.beta1, self._config.beta2, group["lr"]
        count += 1
        # The count is on the host here, so .item() does not wait for the device.
        step = count.item()
        average, square = (load_state(moment, part) for moment in moments)
        gradient = gradient.to(average.dtype)
        average.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        for moment, values in zip(moments, (average, square), strict=True):
            store_state(moment, values)
        # From the values before rounding: a second moment that rounds to zero must not be a divisor.
        divisor = square.sqrt_().div_(math.sqrt(1.0 - beta2**step)).add_(self._config.eps)
        part.mul_(1.0 - lr * group["weight_decay"])
        part.sub_(average.div_(divisor).mul_(lr / (1.0 - beta1**step)).to(part.dtype))
