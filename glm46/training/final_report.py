"""Last message of a run: a continuation of the prompt, and the paths of all outputs."""

from pathlib import Path

import torch
import torch.distributed as dist

from glm46.config.command_line import module_command
from glm46.inference.generation import continue_tokens
from glm46.reliability.stop import StopRequest
from glm46.training.build import Parts
from glm46.training.state import Progress


def final_report(parts: Parts, progress: Progress, stop: StopRequest, *, is_finished: bool) -> str:
    """The last message of a run. Collective: all ranks compute the continuation."""
    config = parts.config
    folder = Path(config.job.dump_folder)
    checkpoint = folder / config.checkpoint.folder / f"step-{progress.step:06d}"
    saved = (
        f"checkpoint   {checkpoint}" if config.checkpoint.enable else "checkpoint   none (checkpoint.enable = false)"
    )
    lines = []
    if not is_finished:
        reason = f"{stop.signal_name} " if stop.signal_name else ""
        lines.append(f"Stopped by {reason}after step {progress.step}. The same command continues from here.")
    elif config.inference.prompt and parts.layout.non_dp_degree > 1:
        # Generation does not support ranks with parts of a sequence or of the layers.
        if config.checkpoint.enable:
            lines.append(f"To see text: {module_command()} generate --checkpoint {checkpoint} --prompt '...'")
    elif config.inference.prompt:
        lines += ["Continuation of the prompt (prompt, then generated text):", "", _continuation(parts, stop), ""]
    lines += [
        saved,
        f"metrics      {folder / 'metrics.jsonl'}",
        f"log          {folder / 'log.txt'}",
    ]
    if config.metrics.enable_tensorboard:
        lines.append(f"TensorBoard  tensorboard --logdir {folder / 'tb'}")
    return "\n".join(lines)


def _continuation(parts: Parts, stop: StopRequest) -> str:
    def is_stopped() -> bool:
        """True if any rank has received a signal. Collective."""
        requested = torch.tensor(stop.signal_name is not None, dtype=torch.int32)
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested)

    config, tokenizer = parts.config, parts.tokenizer
    prompt = tokenizer.encode(config.inference.prompt).tolist()
    new = continue_tokens(
        parts.models[0],
        prompt,
        max_new_tokens=config.inference.max_new_tokens,
        temperature=config.inference.temperature,
        stop=frozenset({tokenizer.eos_id}),
        vocab_size=tokenizer.vocab_size,
        device=parts.process.device,
        is_stopped=is_stopped,
    )
    return config.inference.prompt + "│" + tokenizer.decode(new)
