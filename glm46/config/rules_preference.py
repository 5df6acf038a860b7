"""Rules about [finetune.preference]."""

from glm46.config.faults import Fault, Faults, show
from glm46.config.model import ModelShape
from glm46.config.run_config import RunConfig


def preference_is_possible(config: RunConfig, shape: ModelShape) -> Faults:
    """The reference is what the policy begins as, and nothing else is asked of pairs than their loss."""
    if config.preference is None:
        return
    yield from _reference_is_the_start(config)
    if shape.num_nextn_predict_layers:
        yield Fault(
            ("model.num_nextn_predict_layers", "finetune.preference"),
            f"model.num_nextn_predict_layers = {shape.num_nextn_predict_layers}: must be 0 under "
            "[finetune.preference], which does not train them: those of the start are left as they are; set it to 0",
        )
    if config.validation.tasks:
        yield Fault(
            ("validation.tasks", "finetune.preference"),
            "validation.tasks: not possible under [finetune.preference], whose held-out documents are pairs; remove "
            "them",
        )


def _reference_is_the_start(config: RunConfig) -> Faults:
    checkpoint, adapter = config.checkpoint, config.adapter
    if adapter is not None:  # rules of [adapter] ask for the base
        if adapter.initial_load_path is not None:
            yield Fault(
                ("adapter.initial_load_path", "finetune.preference"),
                f"adapter.initial_load_path = {show(adapter.initial_load_path)}: not possible under "
                "[finetune.preference], whose reference is the base without adapters; merge them with 'convert merge' "
                "and start from the merged folder",
            )
        return
    key = "checkpoint.initial_load_path"
    if checkpoint.initial_load_path is None and checkpoint.load_path is not None:  # else a rule of [finetune] says it
        yield Fault(
            (key, "finetune.preference"),
            f"{key}: absent, but the reference of [finetune.preference] is read from it at every start, "
            "checkpoint.load_path or not; name the weights that the first start had",
        )
    for name in ("initial_load_include", "initial_load_exclude"):
        if patterns := getattr(checkpoint, name):
            yield Fault(
                (f"checkpoint.{name}", "finetune.preference"),
                f"checkpoint.{name} = {show(patterns)}: not possible under [finetune.preference], whose policy begins "
                f"as its reference; remove checkpoint.{name}",
            )
