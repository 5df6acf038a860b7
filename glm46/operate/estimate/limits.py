"""Limits of the speed of a step: its largest losses with their reasons, and what a larger batch would change."""

from glm46.config.faults import counted
from glm46.operate.estimate.step_time import StepTime, step_time
from glm46.operate.estimate.target_cluster import TargetCluster, groups
from glm46.operate.estimate.units import token_count
from glm46.run.plan import Plan

_SHOWN = 3
_LEAST_SHARE = 0.03
"""Of a step: smaller losses are not explained."""
_LARGER = 16
_GAIN = 1.2
"""Factor in speed from which the batch is said to be the limit."""
_KERNELS = ("products", "experts", "attention")
"""Causes whose time contains what the model's FLOPs take at the peak."""


def limits(plan: Plan, index: int, step: StepTime, cluster: TargetCluster) -> list[str]:
    """Sentences, the most important first.

    Args:
        index: of the stage of text.
        step: the predicted step of that stage.
    """
    losses = dict(step.parts)
    computed = {name: losses.pop(name) for name in _KERNELS if name in losses}
    # Frozen weights and FP8 reach more than the formula's FLOPs at the BF16 peak: then nothing is lost here.
    losses["kernels"] = max(sum(computed.values()) - step.mfu * step.seconds, 0.0)
    ranked = sorted(losses.items(), key=lambda loss: -loss[1])[:_SHOWN]
    causes = [(name, lost / step.seconds) for name, lost in ranked if lost >= _LEAST_SHARE * step.seconds]
    return [
        _batch_line(plan, index, step, cluster),
        *(f"{share:.0%}: {_reason(name, plan, index, step, cluster)}" for name, share in causes),
    ]


def _batch_line(plan: Plan, index: int, step: StepTime, cluster: TargetCluster) -> str:
    """The tokens of a GPU, and whether more of them would help: the same step planned with a larger batch, both with
    the bubble of equal stages."""
    sequences = step.tokens // plan.text_stages[index].seq_len
    of_gpu = step.tokens / cluster.gpus
    each = "one GPU" if cluster.gpus == 1 else f"each of {cluster.gpus:,} GPUs"
    text = f"{token_count(step.tokens)} tokens in a step leave {of_gpu:,.0f} for {each}"
    now, larger = (step_time(plan, index, rows, cluster, None).mfu for rows in (sequences, _LARGER * sequences))
    if larger >= _GAIN * now:
        return f"the batch is a limit: {text}; with {_LARGER} times as many, MFU would be {step.mfu * larger / now:.1%}"
    return f"the batch is not the limit: {text}; {_LARGER} times as many would gain {larger / now - 1:.0%}"


def _reason(name: str, plan: Plan, index: int, step: StepTime, cluster: TargetCluster) -> str:
    layout, config = plan.layout, plan.config
    mode = config.activation_checkpoint.mode
    length, rows = plan.text_stages[index].seq_len, config.training.local_batch_size
    of_micro_batch = f"{rows * length / (layout.cp * layout.tp):,.0f} tokens of a micro-batch on a GPU"
    if name == "kernels":
        return f"products and attention run below the GPU's peak; they work on {of_micro_batch}"
    if name == "pipeline bubble":
        micro_batches = step.tokens // length // plan.rows_per_micro_batch
        return (
            f"pipeline bubble: {counted(micro_batches, 'micro-batch')} through {layout.pp} stages on as many GPUs, "
            "which wait at its start and end"
        )
    axis = {"waiting for ep": "ep", "waiting for tp": "tp", "waiting for cp": "cp"}.get(name)
    if axis is not None:
        what = {"ep": "tokens travel to their experts and back", "tp": "ranks of a tensor-parallel group add up "
                "the results of each layer", "cp": "keys and values travel along the row"}[axis]  # fmt: skip
        link = cluster.link(*groups(plan)[axis])
        where = "inside a node" if link.inside_node else f"over nodes with {cluster.network_gbits:,.0f} Gbit/s per GPU"
        return f"{name}: {what}, {getattr(layout, axis)} GPUs {where}"
    return {
        "memory": f"kernels that only read and write memory, such as norms, for {of_micro_batch}",
        "recomputation": f'activations are computed again: activation_checkpoint.mode = "{mode}"',
        "waiting for weights and gradients": "FSDP2 gathers weights and reduces gradients for longer than the kernels "
        f"of {of_micro_batch} take",
        "copies of weights and gradients": "FSDP2 copies gathered weights and gradients in memory",
        "launches": f"the host launches kernels more slowly than the GPU runs them, for {of_micro_batch}",
        "optimizer": f"the update of the weights, once for {step.tokens / cluster.gpus:,.0f} tokens of a GPU",
    }.get(name, name)
