"""An agent of two turns with the client of OpenAI, which waits between them until the test has updated the weights."""

import json
import os
import time
from pathlib import Path

from openai import OpenAI

folder, task = Path(os.environ["STEPS_FOLDER"]), json.loads(os.environ["GLM46_TASK"])
client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
tool = {"name": "look_up", "description": "A value", "parameters": {"type": "object", "properties": {}}}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task["prompt"]}]


def turn() -> None:
    found = client.chat.completions.create(
        model="any", messages=messages, tools=[{"type": "function", "function": tool}], max_completion_tokens=16
    )
    messages.append(found.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "And now?"})


turn()
(folder / f"asked-{os.getpid()}").touch()
while not (folder / "updated").exists():
    time.sleep(0.02)
turn()
print(len(messages))
