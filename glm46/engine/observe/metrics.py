"""All metrics that a run can write, with unit and meaning, for files, TensorBoard and console."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Group = Literal["progress", "loss", "policy", "reward", "optimizer", "speed", "hardware", "experts", "validation"]


@dataclass(frozen=True)
class Metric:
    """One column of metrics.jsonl. TensorBoard shows it as ``group/name``."""

    name: str
    unit: str
    group: Group
    meaning: str
    per: str | None = None
    """Kind of part in further columns ``name/<part>``, such as depth or source."""
    training: str | None = None
    """Training metric in the same chart of TensorBoard, for a validation metric."""

    @property
    def part_label(self) -> str:
        """Label of Prometheus that holds the part of a column ``name/<part>``."""
        if self.per == SPREAD:
            return "ranks"
        if self.per is None:
            return "network"  # see `find_metric`: no other parts exist without `per`
        return self.per.partition("@")[0]  # "set" for "set@k", whose parts are such as `gsm8k@8`


SPREAD = "min, mean or max over all ranks"
"""`Metric.per` of a metric that each rank measures."""
_GROUPS = "group@reach"
"""Axis of the mesh, and ``node`` if its groups are within a node, else ``nodes``."""

METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "progress", "Optimizer steps done since the start of the run."),
    Metric("unix_seconds", "s", "progress", "Time at which the row was written, since 1970 in UTC."),
    Metric("tokens", "tokens", "progress", "Tokens of the batches trained on since the start of the run."),
    Metric("curriculum_tokens", "tokens", "progress", "Tokens since the curriculum began, earlier phases included."),
    Metric("batch_tokens", "tokens", "progress", "Tokens of the last optimizer step, over all ranks."),
    Metric(
        "loss",
        "nats/token",
        "loss",
        "Mean cross-entropy of the next token over the last step's labels; with [rl] the loss of policy or critic; of "
        "pairs, the mean of their loss, with the cross-entropy that is added to it.",
    ),
    Metric("loss_mean", "nats/token", "loss", "Mean of loss over the labels of all good steps since the previous row."),
    Metric("perplexity", "1", "loss", "exp(loss)."),
    Metric("mtp_loss", "nats/token", "loss", "Mean cross-entropy of the multi-token prediction layers.", "depth"),
    Metric(
        "mtp_acceptance",
        "ratio",
        "loss",
        "Positions where a prediction layer's most likely token is the main model's for the same place.",
        "depth",
    ),
    Metric(
        "mtp_acceptance_length",
        "tokens",
        "loss",
        "Mean tokens of a step of speculative decoding: one of the main model, and the drafts before the first that "
        "differs from the main model's most likely token.",
    ),
    Metric("rewards/margins", "nats", "loss", "Mean reward of chosen completions less that of rejected ones."),
    Metric("rewards/accuracies", "ratio", "loss", "Pairs with a margin above 0; one of exactly 0 counts half."),
    Metric(
        "rewards/chosen",
        "nats",
        "loss",
        "beta times the log-ratio of policy and reference; mean of chosen or desirable completions. Without a "
        "reference beta times the log-probability per token.",
    ),
    Metric("rewards/rejected", "nats", "loss", "The same of rejected or undesirable completions."),
    Metric(
        "logps/chosen",
        "nats",
        "loss",
        "Log-probability of the policy; mean of chosen completions. Without a reference per token.",
    ),
    Metric("logps/rejected", "nats", "loss", "The same of rejected completions."),
    Metric("nll_loss", "nats/token", "loss", "Mean cross-entropy of chosen completions, or of a student's targets."),
    Metric("kl", "nats", "loss", "KTO's estimate of the divergence from the reference."),
    Metric("balance_loss", "1", "loss", "Sequence-level balance loss, mean over tokens, before its weight."),
    Metric("z_loss", "1", "loss", "Router z-loss, mean over tokens, before its weight."),
    Metric("index_loss", "nats/token", "loss", "Divergence of index scores from attention, mean over sparse layers."),
    Metric("index_mass", "ratio", "loss", "Attention on the keys that the indexers would choose, while dense."),
    Metric("explained_variance", "ratio", "loss", "1 - variance of return - value over variance of the return."),
    Metric("return_mean", "1", "loss", "Mean return of the tokens, the target of the critic."),
    Metric("clip_fraction", "ratio", "policy", "Tokens whose loss is that of the bound."),
    Metric("entropy", "nats/token", "policy", "Mean entropy of the policy at the tokens of the samples."),
    Metric("ratio_deviation", "1", "policy", "Root mean square of the ratio of new to old policy - 1."),
    Metric("ratio_far", "ratio", "policy", "Tokens whose ratio is above 2 or below 1/2."),
    Metric("old_policy_kl", "nats/token", "policy", "KL of the old policy from the new one, estimator k3."),
    Metric("reference_kl", "nats/token", "policy", "KL of the policy from the reference, estimator k3."),
    Metric(
        "mismatch_kl", "nats/token", "policy", "KL of the rollout's policy from the trainer's old one, estimator k3."
    ),
    Metric("mismatch_logprob", "nats", "policy", "Mean absolute difference of their log-probabilities of a token."),
    Metric("correction_mean", "ratio", "policy", "Mean weight of the tokens by [rl.correction]."),
    Metric("correction_dropped", "ratio", "policy", "Tokens with the weight 0."),
    Metric("reward", "1", "reward", "Mean reward of all samples generated for the rollout, used or not."),
    Metric("reward_std", "1", "reward", "Standard deviation of these rewards."),
    Metric("reward_part", "1", "reward", "Mean of one part of the reward, before its weight.", "reward"),
    Metric("overlong_penalty", "1", "reward", "Mean penalty for length (rl.overlong_share); 0 to -1, not in reward."),
    Metric("completion_tokens", "tokens", "reward", "Mean length of these completions."),
    Metric("completion_tokens_max", "tokens", "reward", "Length of the longest one."),
    Metric("truncated_ratio", "ratio", "reward", "Completions that were cut at the longest length."),
    Metric("equal_groups_ratio", "ratio", "reward", "Groups whose rewards are all equal, of those with two or more."),
    Metric("generated_samples", "samples", "reward", "Samples generated for the rollout."),
    Metric("dropped_samples", "samples", "reward", "Samples dropped because a reward failed."),
    Metric("dropped_groups", "", "reward", "Groups dropped because too few samples remained for a baseline."),
    Metric(
        "draft_acceptance_ratio",
        "ratio",
        "reward",
        "Drafted tokens of the rollout that were kept, with rollout.speculative (spec_accept_rate of SGLang).",
    ),
    Metric("staleness", "steps", "policy", "Age of the weights that made a token, mean over the rollout at its begin."),
    Metric("staleness_max", "steps", "policy", "Age of the oldest of them."),
    Metric("stale_groups", "", "policy", "Groups that were dropped for their age (rollout.when_stale)."),
    Metric("rollout_seconds", "s", "speed", "Time to generate the rollout."),
    Metric("reward_seconds", "s", "speed", "Time to judge it."),
    Metric("logprob_seconds", "s", "speed", "Time of log-probabilities and values of the rollout before its steps."),
    Metric("lr", "1", "optimizer", "Learning rate of the last step."),
    Metric("grad_norm", "1", "optimizer", "Global norm of the gradient before clipping."),
    Metric("index_grad_norm", "1", "optimizer", "Norm of the gradient of indexers, which is clipped apart."),
    Metric("skipped_steps", "steps", "optimizer", "Steps skipped since the start: a spike, or a non-finite value."),
    Metric("mtp_loss_weight", "1", "optimizer", "Weight of the multi-token prediction loss."),
    Metric("bias_update_rate", "1", "optimizer", "Step of the routers' selection bias."),
    Metric("router_temperature", "1", "optimizer", "Divisor of the router logits."),
    Metric("sequence_aux_loss_weight", "1", "optimizer", "Weight of the sequence-level balance loss."),
    Metric("z_loss_weight", "1", "optimizer", "Weight of the router z-loss."),
    Metric("tokens_per_second", "tokens/s", "speed", "Tokens per second over all ranks since the previous row."),
    Metric("tokens_per_second_per_device", "tokens/s", "speed", "The same, divided by the number of ranks."),
    Metric("budget_tokens_per_second", "tokens/s", "speed", "Tokens of training.tokens per second, if others."),
    Metric("tflops_per_device", "TFLOP/s", "speed", "FLOPs of the model, without recomputation, per second and rank."),
    Metric("mfu", "ratio", "speed", "tflops_per_device over the GPU's BF16 peak; absent on a CPU."),
    Metric("step_seconds", "s", "speed", "Mean duration of a step since the previous row."),
    Metric("data_seconds", "s", "speed", "Mean wait for the loader per step since the previous row."),
    Metric("allreduce_ms", "ms", "speed", "Time of the bandwidth probe's all-reduce, on its slowest rank.", _GROUPS),
    Metric("allreduce_bandwidth", "GB/s", "speed", "Its bytes (64 MiB, on a CPU 1 MiB) per second.", _GROUPS),
    Metric("bus_bandwidth", "GB/s", "speed", "allreduce_bandwidth x 2 (n - 1)/n of n ranks, as nccl-tests.", _GROUPS),
    Metric("bandwidth_probe_seconds", "s", "speed", "Time that training waited for this bandwidth probe."),
    Metric("overhead_ratio", "ratio", "speed", "Time of steps outside of generation, forward and backward."),
    Metric("checkpoint_seconds", "s", "speed", "Time that training waited for the last checkpoint."),
    Metric("checkpoint_save_seconds", "s", "speed", "Time from the start of the last checkpoint to its publication."),
    Metric("checkpoint_gib", "GiB", "speed", "Size of the last checkpoint on disk, all ranks."),
    Metric("failed_saves", "saves", "progress", "Checkpoints that could not be saved since this start of the run."),
    Metric("memory_peak_gib", "GiB", "hardware", "Peak memory of tensors on a GPU since the previous row.", SPREAD),
    Metric("memory_reserved_gib", "GiB", "hardware", "Peak memory reserved on a GPU since the previous row.", SPREAD),
    Metric("memory_peak_ratio", "ratio", "hardware", "memory_reserved_gib over the GPU's memory.", SPREAD),
    Metric("resident_memory_gib", "GiB", "hardware", "Main memory of a process.", SPREAD),
    Metric(
        "gpu_utilization_ratio",
        "ratio",
        "hardware",
        "Time with a kernel on a GPU, in the last second at most; not how busy its cores were.",
        SPREAD,
    ),
    Metric("gpu_temperature_celsius", "degrees C", "hardware", "Temperature of a GPU.", SPREAD),
    Metric("gpu_power_watts", "W", "hardware", "Power drawn by a GPU.", SPREAD),
    Metric("extreme_rank", "rank", "hardware", "Rank with the least or most of a figure of this group.", "figure"),
    Metric("expert_balance_cv", "ratio", "experts", "Deviation of tokens per expert over their mean; mean of layers."),
    Metric("expert_balance_cv_max", "ratio", "experts", "The same, maximum of layers."),
    Metric("expert_load_max_ratio", "ratio", "experts", "Busiest expert over an even share; maximum of layers."),
    Metric("expert_load_min_ratio", "ratio", "experts", "Idlest expert over an even share; minimum of layers."),
    Metric("expert_overflow_count", "assignments", "experts", "Assignments dropped by the capacity in the last step."),
    Metric("expert_overflow_ratio", "ratio", "experts", "expert_overflow_count over all assignments."),
    Metric("dead_experts", "experts", "experts", "Experts without tokens, over all layers."),
    Metric("expert_bias_max", "1", "experts", "Largest absolute selection bias."),
    Metric("validation_loss", "nats/token", "validation", "loss on held-out documents.", "source", "loss"),
    Metric("validation_bits_per_byte", "bit/byte", "validation", "The same per byte of UTF-8 text.", "source"),
    Metric(
        "validation_mtp_acceptance",
        "ratio",
        "validation",
        "mtp_acceptance on held-out documents.",
        None,
        "mtp_acceptance",
    ),
    Metric(
        "validation_mtp_acceptance_length",
        "tokens",
        "validation",
        "mtp_acceptance_length on held-out documents.",
        None,
        "mtp_acceptance_length",
    ),
    Metric(
        "validation_rewards/margins",
        "nats",
        "validation",
        "rewards/margins of held-out pairs.",
        "source",
        "rewards/margins",
    ),
    Metric(
        "validation_rewards/accuracies",
        "ratio",
        "validation",
        "rewards/accuracies of held-out pairs.",
        "source",
        "rewards/accuracies",
    ),
    Metric("validation_reward", "1", "validation", "Mean reward of the answers to held-out prompts.", "set", "reward"),
    Metric(
        "validation_dropped",
        "samples",
        "validation",
        "Samples whose episode or reward failed. They are not in validation_reward, and pass nothing.",
        "set",
    ),
    Metric("validation_pass", "ratio", "validation", "Prompts that one of k answers solves, unbiased.", "set@k"),
    Metric("validation_tokens", "tokens", "validation", "Mean length of these answers.", "set", "completion_tokens"),
    Metric("validation_seconds", "s", "validation", "Duration of the validation."),
)


class Shown(NamedTuple):
    """A metric that people watch: a part of each line of the console and the log, and a chart of `plot` and of the
    dashboards. A line shows the metrics of its row that fit, see `MOST_IMPORTANT`, in the order of `SHOWN`."""

    column: str
    text: str = ""
    """Format of the value on a line, with a width that aligns lines; empty for a chart only."""
    title: str = ""
    """Title of the chart; empty for a line only."""
    validation: str | None = None
    """Column of validation rows in the same chart and on their lines."""
    mean: str | None = None
    """Column of the mean since the previous row, the thick line of the chart."""
    starts_at_zero: bool = False
    unit: str | None = None
    """Unit of the chart; None for the unit of the metric."""


SHOWN: tuple[Shown, ...] = (
    Shown("reward", "reward {:6.3f}", "Reward", "validation_reward"),
    Shown("validation_pass", "pass {:5.1%}", "Pass@k", "validation_pass"),
    Shown("rewards/accuracies", "accuracy {:6.1%}", "Accuracy of preferences", "validation_rewards/accuracies"),
    Shown("rewards/margins", "margin {:7.3f}", "Margin of preferences", "validation_rewards/margins"),
    Shown("loss", "loss {:7.4f}", "Loss", "validation_loss", mean="loss_mean"),
    Shown("kl", "kl {:8.4f}", validation="validation_kl"),
    Shown("grad_norm", "grad {:7.3f}", "Gradient norm"),
    Shown("lr", "lr {:.2e}", "Learning rate", starts_at_zero=True),
    Shown("tokens_per_second", "{:9,.0f} tok/s", "Tokens per second", starts_at_zero=True),
    Shown("completion_tokens", "length {:6.1f}", "Length of completions", "validation_tokens", starts_at_zero=True),
    Shown("entropy", "entropy {:6.3f}", "Entropy", starts_at_zero=True),
    Shown("reference_kl", "kl {:7.1e}", "KL from the reference"),
    Shown("mismatch_kl", "mismatch {:7.1e}", "KL of rollout and trainer"),
    Shown("draft_acceptance_ratio", "drafts kept {:4.0%}"),
    Shown("mfu", "mfu {:5.1%}", "MFU", starts_at_zero=True),
    Shown("mtp_loss", "mtp {:7.4f}", "Loss of prediction layers"),
    Shown("index_loss", "index {:7.4f}", "Loss of indexers", starts_at_zero=True),
    Shown("expert_balance_cv", "balance {:5.2f}", "Deviation of tokens per expert", starts_at_zero=True),
    Shown("memory_peak_gib/max", "GiB {:5.1f}"),
)

MOST_IMPORTANT = (
    "reward",
    "validation_pass",
    "rewards/accuracies",
    "rewards/margins",
    "entropy",
    "loss",
    "kl",
    "grad_norm",
    "completion_tokens",
    "reference_kl",
    "draft_acceptance_ratio",
    "tokens_per_second",
    "lr",
    "mfu",
    "memory_peak_gib/max",
    "index_loss",
    "mtp_loss",
    "mismatch_kl",
    "expert_balance_cv",
)
"""Columns of `SHOWN`, the most important first. A line contains as many of them as it has room for."""

OPTIMISED = (("reward",), ("rewards/margins", "rewards/accuracies"), ("entropy",), ("loss",))
"""Columns of the quantity that a run optimises: the first group that its rows have. Rollouts with labels as answers
(rl.warm_up_rollouts) have no reward."""
_EXPORTED_NAMES = {
    "lr": "training_learning_rate",
    "mfu": "training_mfu_ratio",
    "mtp_acceptance": "training_mtp_acceptance_ratio",
    "validation_mtp_acceptance": "training_validation_mtp_acceptance_ratio",
    "tflops_per_device": "training_device_flops",
    "memory_peak_gib": "training_memory_peak_bytes",
    "memory_reserved_gib": "training_memory_reserved_bytes",
    "resident_memory_gib": "training_resident_memory_bytes",
    "checkpoint_gib": "training_checkpoint_bytes",
    "allreduce_ms": "nccl_allreduce_time_ms",
    "allreduce_bandwidth": "nccl_bandwidth_gbps",
    "bus_bandwidth": "nccl_busbw_gbps",
    "dead_experts": "dead_experts",
    "expert_overflow_count": "expert_overflow_assignments",
    "validation_bits_per_byte": "training_validation_bpb",
}
"""Exported names that are not ``training_`` plus the column. Sizes and rates have Prometheus's base units; a name such
as ``nccl_bandwidth_gbps`` is fixed by the requirements of glm46."""
_OF_NETWORKS = ("loss", "policy", "optimizer", "experts")
_BY_NAME = {metric.name: metric for metric in METRICS}


def find_metric(column: str) -> Metric:
    """Return the metric of a column of metrics.jsonl. A column ``name/part`` needs a metric with ``per``, or one that
    each network of a job has: then the part is the name of a network other than the main one.

    Raises:
        KeyError: no such metric, which is a bug in glm46.
    """
    name, part = split_column(column)
    metric = _BY_NAME[name]
    if part and metric.per is None and metric.group not in _OF_NETWORKS:
        raise KeyError(f"{column}: {name} is not split")
    return metric


def split_column(column: str) -> tuple[str, str]:
    """Return the name of a column's metric, and its part, which may be empty. A name may have one slash itself, such
    as ``rewards/margins``."""
    name, _, part = column.partition("/")
    second, _, rest = part.partition("/")
    return (f"{name}/{second}", rest) if f"{name}/{second}" in _BY_NAME else (name, part)


def exported_name(column: str) -> str:
    """Return the Prometheus name of a column of metrics.jsonl, without its part."""
    if column in _EXPORTED_NAMES:
        return _EXPORTED_NAMES[column]
    return column if column.startswith("expert_") else f"training_{column.replace('/', '_')}"


def plain_row(row: Mapping[str, int | float]) -> dict[str, int | float | None]:
    """Convert a row to JSON values: check that all columns exist and all values are plain numbers; non-finite values
    become None."""
    plain: dict[str, int | float | None] = {}
    for column, value in row.items():
        find_metric(column)
        assert isinstance(value, int | float), f"{column}: {type(value).__name__} is not a plain number"
        plain[column] = value if math.isfinite(value) else None
    return plain
