"""Where an adapter such as LoRA sits in a model: our weight matrices and what they are called in `transformers`' model.

`hf_names.py` has the names of files, where every expert is alone. In memory `transformers` 5 stacks experts as we do:
an adapter of experts is one for the whole stack, which PEFT finds with `target_parameters` instead of
`target_modules`. Prediction layers are left out: `transformers` does not load them.
"""

import re
from dataclasses import dataclass

from glm46.config.model import ModelShape
from glm46.huggingface.names import HFNames

_EXPERT = re.compile(r"(.*mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class AdapterTarget:
    """A weight matrix, or a stack of them, beside which an adapter can be put."""

    hf_name: str
    """The module, such as `model.layers.3.self_attn.q_proj`, or, for experts, the parameter,
    `model.layers.3.mlp.experts.gate_up_proj`. An adapter's file has `base_model.model.` before it."""
    shape: tuple[int, ...]
    """[O, I], or [E, O, I]; the same on both sides."""

    @property
    def is_parameter(self) -> bool:
        """Whether PEFT finds it through `target_parameters`."""
        return len(self.shape) == 3


def adapter_targets(shape: ModelShape) -> dict[str, AdapterTarget]:
    """Our name, such as `layers.3.self_attn.q_proj.weight` -> its target: all projections of attention, dense layers,
    experts and shared experts."""
    main = shape.model_copy(update={"num_nextn_predict_layers": 0})
    targets = {}
    for entry in HFNames(main, with_copies=False).entries.values():
        hf_name = entry.parts[0].hf_name
        if of_expert := _EXPERT.fullmatch(hf_name):
            leaf = "down_proj" if of_expert[2] == "down" else "gate_up_proj"
            targets[entry.name] = AdapterTarget(f"{of_expert[1]}.{leaf}", entry.shape)
        elif hf_name.endswith("_proj.weight"):
            targets[entry.name] = AdapterTarget(hf_name.removesuffix(".weight"), entry.shape)
    return targets
