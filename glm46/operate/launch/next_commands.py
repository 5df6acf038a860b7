"""Commands to type after a finished run."""

from pathlib import Path
from shlex import quote

from glm46.config.command_line import Start, module_command, replace_overrides, short
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.checkpoint.integrity import published_steps, step_folder
from glm46.storage.checkpoint.store_mirror import shown
from glm46.storage.data.corpus import check_epochs
from glm46.storage.data.manifest import load_manifest

_LONGER = 4
"""Factor on the budget of the longer run that is suggested at the end."""


def describe_next(plan: Plan, start: Start) -> str:
    """Return commands to type after a finished run: a longer run, if its config has no faults, and the help."""
    world_size = plan.layout.world_size
    values = {
        "training.tokens": str(_LONGER * plan.budget_tokens),
        "job.dump_folder": f"{plan.config.job.dump_folder}_longer",
        **{key: f"{folder}_longer" for key, folder in plan.config.folders_apart.items()},
    }
    if plan.config.checkpoint_url is not None:
        values["checkpoint.folder"] = f"{plan.config.checkpoint_url}_longer"
    lines = [f"all keys      {module_command()} train --help keys"]
    folder = plan.config.checkpoint_folder
    ask_command = f"ask it        {module_command()} generate"
    is_chat = plan.config.finetune or plan.config.rl
    prompt = f"{'--chat ' if is_chat else ''}--prompt '...'"
    if plan.config.adapter is not None:
        base = plan.config.checkpoint.initial_load_path
        exports = Path(plan.config.job.dump_folder).glob("huggingface/step-*/adapter_config.json")
        exported = sorted(exports) if base else []
        if base and exported:
            adapter = exported[-1].parent
            lines.insert(0, f"{ask_command} --model {quote(base)} --adapter {quote(short(adapter))} {prompt}")
    elif plan.config.head == "lm":
        steps = published_steps(folder)
        if steps:
            newest = step_folder(folder, steps[-1])
            place = short(newest) if plan.config.checkpoint_url is None else shown(newest)
            lines.insert(0, f"{ask_command} --checkpoint {quote(place)} {prompt}")
    try:
        config = load_config(start.config, replace_overrides(start.overrides, values), world_size=world_size)
        manifests = {source.name: load_manifest(Path(source.path), full=False) for source in config.data.sources}
        check_epochs(resolve_plan(config, world_size), manifests)
        lines.insert(0, f"train longer  {start.command(values)}")
    except UserError:
        pass
    return "\n".join(f"{'      ' if number else 'Next: '}{line}" for number, line in enumerate(lines))
