# /// script
# dependencies = ["verifiers>=0.4,<0.5"]
# ///
"""Episodes of an environment of verifiers (0.4) against the policy: the program of `[rl.environment]`, run by a Python
that has verifiers.

    [rl.environment]
    kind = "worker"
    command = ["environments/verifiers/bin/python", "deploy/environments/verifiers_worker.py", "--taskset", "my_tasks"]

The harness talks to verifiers' own server on the loopback interface, and that to the endpoint of the episode: the
harness never has the key of the episode. `[[rl.rewards]]` with name = "score" takes the reward.

    python verifiers_worker.py --taskset my_tasks --write-prompts prompts.jsonl

writes the file for `rl.prompts.file`: a line for each task, whose number the program gets back.
"""

import argparse
import asyncio
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

_RELEASE = "0.4."


def options() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taskset", required=True, help="an installed task set, or a module on PYTHONPATH")
    parser.add_argument("--harness", help="an installed harness; without it that of the task set, else bash")
    parser.add_argument("--runtime", default="subprocess", help="of the harness: subprocess, docker, apptainer, ...")
    parser.add_argument("--env", default="{}", help="more of verifiers' [env] table, as JSON")
    parser.add_argument("--write-prompts", metavar="FILE", help="write the tasks as prompts, and end")
    parser.add_argument("--most-prompts", type=int, metavar="N", help="of a task set without an end")
    return parser.parse_args()


def raise_for_release() -> None:
    """Ends the program if this Python has no release of verifiers that it is written for."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith(_RELEASE):
        sys.exit(
            f"verifiers: {sys.executable} has {found}, and the program is written for {_RELEASE}*; make an environment "
            "with Python 3.11 or newer and pip install 'verifiers>=0.4,<0.5', and name its Python in the command"
        )


def make_environment(given: argparse.Namespace) -> object:
    """verifiers' environment of the command line."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    table = json.loads(given.env)
    table["taskset"] = {**table.get("taskset", {}), "id": given.taskset}
    agent = {"runtime": {"type": given.runtime}, **table.get("agent", {})}
    table["agent"] = agent | ({"harness": {**agent.get("harness", {}), "id": given.harness}} if given.harness else {})
    return load_environment(resolve_env_config(table))


def write_prompts(environment: object, file: Path, most: int | None) -> None:
    """Write a line for each task."""
    tasks = environment.taskset if most is None else environment.taskset.take(most)
    with file.open("w", encoding="utf-8") as lines:
        for task in tasks:
            prompt = task.data.prompt
            if isinstance(prompt, list):
                prompt = [message.model_dump(exclude_none=True) for message in prompt]
            row = {"prompt": prompt or task.data.name or "a task without a prompt", "task": task.data.idx}
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


async def play(environment: object, number: int) -> dict[str, object]:
    """What is said of one episode of a task: its reward, or why it has none."""
    from verifiers.v1 import EvalClientConfig, ModelContext

    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = ModelContext(model="policy", client=client)
    (task,) = environment.taskset.include(idx=[f"{number}:{number + 1}"])
    episode = await environment.run_episode(task, context)
    faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if faults:
        return {"error": f"verifiers: {faults[0].type}: {faults[0].message}"}
    if len(episode.traces) != 1:
        return {"error": f"verifiers: {len(episode.traces)} agents, and one is trained; take an environment with one"}
    return {"score": episode.traces[0].reward}


async def serve(environment: object, lines: TextIO, output: int) -> None:
    """Run the episodes of some lines, one after another."""
    async with environment.serving():
        while line := await asyncio.to_thread(lines.readline):
            given = json.loads(line)
            os.environ.update(given["variables"])
            said = await play(environment, given["task"]["task"])
            os.write(output, f"{json.dumps({'episode': given['episode'], **said})}\n".encode())


def main() -> None:
    """Run episodes, or write the prompts."""
    given = options()
    raise_for_release()
    lines, output = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    os.dup2(2, 1)  # what others print is no outcome, and harnesses read no lines of later episodes
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    environment = make_environment(given)
    if given.write_prompts:
        write_prompts(environment, Path(given.write_prompts), given.most_prompts)
    else:
        asyncio.run(serve(environment, lines, output))


if __name__ == "__main__":
    main()
