"""The section [rollout]: how completions are generated for reinforcement learning."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from glm46.config.generation_degrees import Degrees
from glm46.config.section import LocalPath, Needs, Section

_SERVED = Needs("kind", ("vllm", "sglang"))
_LOCAL = Needs("kind", "local")


def server_address(url: str) -> str:
    """An address of a server without a path; raises ValueError for anything else."""
    if not re.fullmatch(r"https?://[^/:]+(:\d+)?/?", url):
        raise ValueError("is not the address of a server; write http://HOST:PORT")
    return url.rstrip("/")


def _different(urls: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(urls)) < len(urls):
        raise ValueError("an address is there twice; remove one")
    return urls


class RolloutConfig(Section):
    """[rollout]: how completions are generated: from the whole distribution, without top-p and top-k, whose support the
    trainer would not know."""

    refused = dict.fromkeys(
        ("top_p", "top_k", "min_p"),
        "samples are of the whole distribution, because the trainer would not know which tokens were left out; "
        "remove it",
    )

    kind: Literal["local", "vllm", "sglang"] = "local"
    """local: by the ranks that train. vllm, sglang: by inference servers, which are started beforehand and load the
    policy after each update."""

    max_new_tokens: int = Field(ge=1)
    """Longest completion in tokens. With the longest prompt it fits into training.seq_len."""

    temperature: float = Field(1.0, gt=0.0)
    """Logits are divided by it when tokens are generated, and in training."""

    tensor_parallel_degree: Annotated[int, _LOCAL] = Field(1, ge=1)
    """Ranks that share each matrix, and the keys and values of a sample, while they generate; independent of
    [parallelism], like the next two. With all of them 1 each rank holds a whole model."""

    pipeline_parallel_degree: Annotated[int, _LOCAL] = Field(1, ge=1)
    """Ranks that hold different layers while they generate. They work one after another."""

    expert_parallel_degree: Annotated[int, _LOCAL] = Field(1, ge=1)
    """Ranks over which the experts of a layer are spread while they generate, borrowed from all ranks of a pipeline
    stage."""

    max_num_seqs: int | None = Field(None, ge=1)
    """Samples at once: by a rank or the ranks that share a model, or by a server. Absent: 64, or 1024 by
    a server, which queues those that it has no room for. In a rank each has keys and values of training.seq_len tokens
    in memory; more of them generate faster as long as a step of decoding is not bound by arithmetic."""

    speculative: Annotated[bool, _LOCAL] = False
    """Draft tokens with the multi-token prediction layers. It changes no sample. [rl] trains these layers on the
    samples, by mtp.loss_weight."""

    keep_latest_k: int = Field(10, ge=0)
    """Rollouts that the journal keeps, beside those that a resume from a checkpoint needs; older ones are removed. 0:
    keep all."""

    max_staleness: Annotated[int, _SERVED] = Field(0, ge=0)
    """Rollouts that the weights which generate a sample may be older than those that it first trains. 0: the servers
    wait while the policy trains, and it waits while they generate. 1: they generate the next one while this
    one trains. More: so many rollouts are on their way at once, and long samples go on through updates, each token by
    the weights of its time. Local rollouts have none: the ranks that generate are those that train."""

    when_stale: Annotated[Literal["wait", "drop"], _SERVED] = "wait"
    """Of a group that is not finished when it reaches ``max_staleness``. wait: training waits for it. drop: another
    prompt takes its place, and at the next rollout it is ended and left out, so that one long episode stops no
    training."""

    urls: Annotated[
        tuple[Annotated[str, AfterValidator(server_address)], ...], AfterValidator(_different), _SERVED
    ] = ()
    """Addresses of the servers, such as ``"http://127.0.0.1:8000"``."""

    launch: Annotated[tuple[str, ...], _SERVED] = ()
    """Command, as a list of words, that starts a server of vLLM or SGLang on this machine, for each of ``urls``;
    ``{folder}`` and ``{port}`` in it stand for the model and the port. The servers end with the run. Absent: they run
    already."""

    weights: Annotated[Literal["disk", "broadcast"], _SERVED] = "disk"
    """How servers get the policy. disk: all ranks write a folder, which each server loads. broadcast: rank 0 sends the
    tensors to the workers of the servers, over NCCL between GPUs and else over gloo, without a disk that they share."""

    weights_dtype: Annotated[Literal["fp8-block", "fp8-channel"] | None, _SERVED] = None
    """Servers get the projections in FP8, with a scale for each 128 x 128 weights or each row, as ``convert to-hf
    --dtype`` writes them; start them with such a folder. The samples are those of rounded weights, which rl.correction
    weighs. Absent: in training.mixed_precision_param."""

    weights_folder: Annotated[LocalPath | None, _SERVED] = None
    """Folder, of this run alone, in which servers find the policy: on a disk that all ranks and servers see under this
    path. Absent: a folder in job.dump_folder."""

    send_adapters: Annotated[bool, _SERVED] = False
    """The servers have the base of [adapter], and each update sends the adapters alone, by the server's own call.
    Otherwise each update is the base with the adapters added, which servers of any options take."""

    deadline_seconds: Annotated[float, _SERVED] = Field(1800.0, gt=0.0)
    """Longest time for one completion, its wait in the server included, and for one server's update. A completion that
    takes longer is aborted; what was generated by then is kept."""

    @property
    def samples_at_once(self) -> int:
        """``max_num_seqs``, if it is absent the number for this kind of engine."""
        return self.max_num_seqs or (64 if self.kind == "local" else 1024)

    @property
    def degrees(self) -> Degrees:
        """Ranks over which the local engine splits a model."""
        return Degrees(self.tensor_parallel_degree, self.pipeline_parallel_degree, self.expert_parallel_degree)
