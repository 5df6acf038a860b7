"""AdamW over this rank's parts of the parameters.

FP32 weights with FP32 states use torch's fused kernel. Other dtypes use plain operations in FP32, whose results are
rounded stochastically. The update is entry-wise, so a step runs no DTensor operation, and parameters of different
meshes share one fused kernel. The saved states are DTensors like the parameters and share the memory of the parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.optim.compact_state import (
    Quantized,
    State,
    StateType,
    load_state,
    local_state,
    make_state,
    store_state,
)
from glm46.compute.optim.muon_layout import local_gradient
from glm46.compute.optim.rounding import EntryNumbers, entry_numbers, row_slices, store_bfloat16
from glm46.compute.optim.state_offload import StatePlace, StateStream, zeros_at
from glm46.config.optimizer import OptimizerConfig

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Names of the states, and whether they can be negative."""

# States in host memory are copied in items of at least this size: large enough for the full rate of the link, small
# compared with the gradients.
OFFLOADED_ITEM_BYTES = 64 << 20


_Moments = tuple[State, State]
"""This rank's parts of the first and the second moment."""


@dataclass(frozen=True)
class _Entry:
    """Parameter with this rank's part of it, its step count and this rank's parts of its moments."""

    parameter: Tensor
    part: Tensor
    step: Tensor
    moments: _Moments
    numbers: EntryNumbers | None
    """Numbers for stochastic rounding; None for torch's kernel, which does not round."""


class _Due(NamedTuple):
    """An entry with a gradient, and its moments on the device."""

    entry: _Entry
    gradient: Tensor
    moments: _Moments


class AdamW:
    """AdamW over this rank's parts, with ``param_groups``, ``state`` and ``step`` as in torch.

    All states exist from the start. ``updates`` of a group counts its updates; it seeds stochastic rounding.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        decays: Sequence[bool],
        config: OptimizerConfig,
        place: StatePlace,
    ):
        """``decays``: for each parameter, whether weight decay applies. ``place``: where the states are between
        steps."""
        self._config = config
        self._place = place
        self._names = [name for name, _ in parameters]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        dtype: StateType = "8bit" if config.state_dtype == "8bit" else getattr(torch, config.state_dtype)
        parts = [local_tensor(parameter) for _, parameter in parameters]
        # torch's kernel needs states of the parameter's dtype.
        self._uses_fused_kernel = all(part.dtype == dtype == torch.float32 for part in parts)
        entries = [
            self._make_entry(name, parameter, part, dtype)
            for (name, parameter), part in zip(parameters, parts, strict=True)
        ]
        self.param_groups: list[dict[str, Any]] = []
        self._items: list[tuple[dict[str, Any], list[_Entry]]] = []
        for decay in (True, False):
            members = [entry for entry, is_decayed in zip(entries, decays, strict=True) if is_decayed == decay]
            group = {
                "params": [entry.parameter for entry in members],
                "weight_decay": config.weight_decay if decay else 0.0,
                "lr": config.adamw_lr or config.lr,
                "updates": 0,
            }
            self.param_groups.append(group)
            self._items += [(group, item) for item in self._chunks(members)]
        states = [[state for entry in item for state in entry.moments] for _, item in self._items]
        device = parts[0].device if parts else torch.device("cpu")
        self._moment_stream = StateStream(states, device, place)

    def _make_entry(self, name: str, parameter: Tensor, part: Tensor, dtype: StateType) -> _Entry:
        # The fused kernel counts on the device, the plain update on the host.
        step = torch.zeros((), dtype=torch.float32, device=part.device if self._uses_fused_kernel else "cpu")
        self.state[parameter] = {"step": step}
        moments = []
        for key, signed in MOMENTS:
            tensors = make_state(name, parameter, dtype, signed, zeros_at(self._place))
            self.state[parameter] |= {f"{key}{suffix}": tensor for suffix, tensor in tensors.items()}
            moments.append(local_state(tensors, signed))
        numbers = None if self._uses_fused_kernel else entry_numbers(name, parameter)
        return _Entry(parameter, part, step, (moments[0], moments[1]), numbers)

    def _chunks(self, entries: list[_Entry]) -> list[list[_Entry]]:
        """Divide the entries into items that are updated together: all, or chunks large enough to be worth a
        transfer."""
        if self._place == "none":
            return [entries] if entries else []
        items: list[list[_Entry]] = []
        free_bytes = 0
        for entry in entries:
            if free_bytes <= 0:
                items.append([])
                free_bytes = OFFLOADED_ITEM_BYTES
            items[-1].append(entry)
            # Count two moments in FP32, whatever the dtype of the states.
            free_bytes -= 2 * torch.float32.itemsize * entry.part.numel()
        return items

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live states by ``<parameter>.<state>``."""
        named = zip(self._names, self.state.values(), strict=True)
        return {f"{name}.{key}": tensor for name, states in named for key, tensor in states.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self._moment_stream.begin()
        for group, item in self._items:
            with self._moment_stream.take() as states:
                due = []
                # Each entry of an item has two consecutive states, its first and its second moment.
                pairs = zip(states[::2], states[1::2], strict=True)
                for entry, moments in zip(item, pairs, strict=True):
                    gradient = local_gradient(entry.parameter)
                    if gradient is not None:
                        due.append(_Due(entry, gradient, moments))
                if self._uses_fused_kernel:
                    self._update_by_torch(due, group)
                else:
                    for entry, gradient, moments in due:
                        self._update_entry(entry, gradient, moments, group)
        self._moment_stream.end()
        for group in self.param_groups:
            group["updates"] += 1

    def _update_by_torch(self, due: list[_Due], group: dict[str, Any]) -> None:
        """Update FP32 parameters with FP32 states by torch's fused kernel."""
        averages = []
        squares = []
        for _, _, (average, square) in due:
            assert isinstance(average, Tensor) and isinstance(square, Tensor), "FP32 states are not quantised"
            averages.append(average)
            squares.append(square)
        config = self._config
        adamw(
            [entry.part for entry, _, _ in due],
            [gradient for _, gradient, _ in due],
            averages,
            squares,
            [],  # no maximum of squares, see `amsgrad`
            [entry.step for entry, _, _ in due],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=config.eps,
            maximize=False,
        )

    def _update_entry(self, entry: _Entry, gradient: Tensor, moments: _Moments, group: dict[str, Any]) -> None:
        """Update a parameter and its moments, some rows at a time."""
        assert entry.numbers is not None
        entry.step.add_(1)
        # The count is on the host here, so .item() does not wait for the device.
        step = int(entry.step.item())
        for rows in row_slices(entry.part):
            row_moments = (moments[0][rows], moments[1][rows])
            self._update(entry.part[rows], gradient[rows], row_moments, entry.numbers[rows], step, group)

    def _update(
        self,
        part: Tensor,
        gradient: Tensor,
        moments: _Moments,
        numbers: EntryNumbers,
        step: int,
        group: dict[str, Any],
    ) -> None:
        """Update entry-wise in FP32. Source: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""
        config = self._config
        lr = group["lr"]
        average = load_state(moments[0], part)
        square = load_state(moments[1], part)
        gradient = gradient.to(average.dtype)
        average.lerp_(gradient, 1.0 - config.beta1)
        square.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
        for (name, _), moment, values in zip(MOMENTS, moments, (average, square), strict=True):
            store_state(moment, values, numbers.random_bits(group["updates"], name))
        if isinstance(moments[1], Quantized):
            # The moments are rounded independently. A second moment that was rounded down could give a step many
            # times too large, so raise it to the smallest value that exact moments can have.
            ratio = largest_squared_ratio(config.beta1, config.beta2)
            square = torch.maximum(square, average.square().div_(ratio))
        # The moments start at zero; the divisions by 1 - beta**step correct this bias.
        divisor = square.sqrt_().div_(math.sqrt(1.0 - config.beta2**step)).add_(config.eps)
        change = average.div_(divisor).mul_(lr / (1.0 - config.beta1**step))
        decay = 1.0 - lr * group["weight_decay"]
        if part.dtype == torch.bfloat16:
            weights = part.float().mul_(decay).sub_(change)
            store_bfloat16(part, weights, numbers.random_bits(group["updates"], "weight"))
        else:
            part.mul_(decay)
            part.sub_(change.to(part.dtype))


def largest_squared_ratio(beta1: float, beta2: float) -> float:
    """Bound the squared first moment relative to the second moment, by the Cauchy-Schwarz inequality.

    The first moment is the sum of (1 - beta1) beta1^k g over the age k of each gradient g, the second is the sum of
    (1 - beta2) beta2^k g^2. Their ratio has a bound if beta1^2 < beta2, or if both are 0; otherwise the result is
    infinite.
    """
    if beta1 == beta2 == 0.0:
        return 1.0  # the moments are g and g^2 of the last gradient
    if beta1**2 >= beta2:
        return math.inf
    return (1.0 - beta1) ** 2 / (1.0 - beta2) / (1.0 - beta1**2 / beta2)
