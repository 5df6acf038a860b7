"""The section [rollout]: how completions are generated for reinforcement learning."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from glm46.config.field_rules import AtMost, Excludes, Needs, Requires
from glm46.config.generation_degrees import Degrees
from glm46.config.section import DISTINCT, LocalPath, Removed, Section

_SERVERS = ("vllm", "sglang")
_SERVED = Needs("kind", _SERVERS)
_LOCAL = Needs("kind", "local")


def server_address(url: str) -> str:
    """Return the address of a server without a trailing slash. Raises ValueError if it is not ``http://HOST:PORT``."""
    if not re.fullmatch(r"https?://[^/:]+(:\d+)?/?", url):
        raise ValueError("is not the address of a server; write http://HOST:PORT")
    return url.rstrip("/")


class RolloutConfig(Section):
    """[rollout]: how completions are generated."""

    refused = {"min_p": "the trainer does not know which tokens it excludes; remove it, or take rollout.top_p"}

    removed = {
        "keep_latest_k": Removed("the newest ten rollouts stay, and all with checkpoint.keep_latest_k = 0; remove it"),
        "pipeline_parallel_degree": Removed("spread the weights by tensor_parallel_degree and expert_parallel_degree"),
    }

    kind: Annotated[
        Literal["local", "vllm", "sglang"],
        Requires("urls", when=_SERVERS, remedy='name the servers: set rollout.urls = ["http://127.0.0.1:8000"]'),
    ] = "local"
    """local: by the ranks that train. vllm, sglang: by inference servers, which are started beforehand and load the
    policy after each update."""

    max_new_tokens: Annotated[int, AtMost("training.seq_len", is_exclusive=True)] = Field(ge=1)
    """Longest completion in tokens. Together with the longest prompt it must fit into training.seq_len."""

    temperature: float = Field(1.0, gt=0.0)
    """Divisor of the logits, in generation and in training."""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sample only among the fewest most likely tokens whose probabilities sum to at least this. The engine returns
    these tokens, and log-probabilities, ratios, KL penalties and entropies of policy and reference are those of the
    distribution over them (sampling replay). Validation samples from the whole distribution. 1: no limit."""

    top_k: int | None = Field(None, ge=1)
    """Sample only among this many most likely tokens, before ``top_p``; used in training like that. Absent: no
    limit."""

    tensor_parallel_degree: Annotated[int, _LOCAL] = Field(1, ge=1)
    """Ranks that share each matrix, and the keys and values of a sample, while they generate; independent of
    [parallelism], like the next one. With both of them 1 each rank holds a whole model."""

    expert_parallel_degree: Annotated[int, _LOCAL] = Field(1, ge=1)
    """Ranks over which the experts of a layer are spread while they generate, borrowed from all ranks."""

    max_num_seqs: int | None = Field(None, ge=1)
    """Samples generated at the same time, by a rank or the ranks that share a model, or by a server. Absent: 64, or
    1024 for a server, which queues samples that it has no room for. On a rank each sample has keys and values of
    training.seq_len tokens in memory; more samples are faster until decoding is bound by arithmetic."""

    speculative: Annotated[bool, _LOCAL, Needs("model.shape.num_nextn_predict_layers", above=0)] = False
    """Draft tokens with the multi-token prediction layers. It changes no sample. [rl] trains these layers on the
    samples, by mtp.loss_weight."""

    max_staleness: Annotated[int, _SERVED] = Field(0, ge=0)
    """Maximum age of the weights that generate a sample, in rollouts. 0: servers and trainer take turns. 1: the servers
    generate the next rollout while this one trains. More: this many rollouts are generated ahead, and long samples
    continue across updates, each token from the weights that are loaded at that time. Without servers it is 0: the same
    ranks generate and train."""

    when_stale: Annotated[
        Literal["wait", "drop"],
        _SERVED,
        Excludes(
            "max_staleness",
            0,
            when="drop",
            reason="because nothing is ever stale",
            remedy="raise rollout.max_staleness, or remove rollout.when_stale",
        ),
    ] = "wait"
    """What to do with a group that is not finished when it reaches ``max_staleness``. wait: training waits for it.
    drop: another prompt replaces it, and at the next rollout it is aborted and skipped, so that one long episode does
    not stop training."""

    urls: Annotated[tuple[Annotated[str, AfterValidator(server_address)], ...], DISTINCT, _SERVED] = ()
    """Addresses of the servers, such as ``"http://127.0.0.1:8000"``."""

    launch: Annotated[tuple[str, ...], _SERVED] = ()
    """Command, as a list of words, that starts a server of vLLM or SGLang on this machine, for each of ``urls``;
    ``{folder}`` and ``{port}`` in it stand for the model and the port. The servers end with the run. Absent: the
    servers are already running."""

    weights: Annotated[Literal["disk", "broadcast"], _SERVED] = "disk"
    """How servers get the policy. disk: all ranks write a folder, which each server loads. broadcast: rank 0 sends the
    tensors to the workers of the servers, over NCCL between GPUs, else over gloo, without a shared disk."""

    weights_dtype: Annotated[Literal["fp8-block", "fp8-channel"] | None, _SERVED] = None
    """Servers get the projections in FP8, with a scale for each 128 x 128 weights or each row, as ``convert to-hf
    --dtype`` writes them; start them with such a folder. Samples then come from rounded weights, which rl.correction
    corrects for. Absent: weights in training.mixed_precision_param."""

    weights_folder: Annotated[LocalPath | None, _SERVED] = None
    """Folder of this run alone from which servers load the policy, on a disk that all ranks and servers see under this
    path. Absent: a folder in job.dump_folder."""

    send_adapters: Annotated[
        bool,
        _SERVED,
        Needs("adapter.name", "lora"),
        Excludes("weights", "broadcast", reason="because servers take adapters from a folder"),
        Excludes("weights_dtype", reason="because adapters are not quantised"),
    ] = False
    """The servers hold the base of [adapter], and each update sends only the adapters, with the server's own call.
    Otherwise each update sends the base with the adapters added, which works with any server options."""

    deadline_seconds: Annotated[float, _SERVED] = Field(1800.0, gt=0.0)
    """Longest time in seconds for one completion, waiting in the server included, and for the update of one server. A
    completion that takes longer is aborted; what was generated by then is kept."""

    @property
    def samples_at_once(self) -> int:
        """``max_num_seqs``, or the default for this kind of engine."""
        return self.max_num_seqs or (64 if self.kind == "local" else 1024)

    @property
    def is_filtered(self) -> bool:
        """True if tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k is not None

    @property
    def degrees(self) -> Degrees:
        """Ranks over which the local engine splits a model."""
        return Degrees(tensor_parallel=self.tensor_parallel_degree, expert_parallel=self.expert_parallel_degree)
