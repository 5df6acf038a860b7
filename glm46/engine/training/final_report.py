"""Last message of a run: a sample of what the model does, and the paths of all outputs."""

import shlex
from pathlib import Path

from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task
from glm46.storage.checkpoint.integrity import step_folder


def final_report(task: Task, progress: Progress, stop: StopRequest, *, is_finished: bool) -> str:
    """The last message of a run. Collective: all ranks compute the sample."""
    config = task.plan.config
    folder = Path(config.job.dump_folder)
    checkpoint = step_folder(config.checkpoint_folder, progress.step)
    saved = (
        f"checkpoint   {checkpoint}" if config.checkpoint.enable else "checkpoint   none (checkpoint.enable = false)"
    )
    if is_finished:
        lines = task.sample(stop, progress)
    else:
        reason = f"{stop.signal_name} " if stop.signal_name else ""
        lines = [f"Stopped by {reason}after step {progress.step}. The same command continues from here."]
    lines += [
        saved,
        f"metrics      {folder / 'metrics.jsonl'}",
        f"log          {folder / 'log.txt'}",
    ]
    if config.metrics.enable_tensorboard:
        lines.append(f"TensorBoard  {shlex.join(['tensorboard', '--logdir', str(config.tensorboard_folder)])}")
    return "\n".join(lines)
