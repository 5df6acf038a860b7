"""An agent with a tool, by the package "openai" (of the Python that rl.environment.command names): it sorts digits, and
the last line that it prints is its score."""

import json
import os

from openai import BadRequestError, OpenAI

task = json.loads(os.environ["GLM46_TASK"])
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
tools = [
    {
        "type": "function",
        "function": {
            "name": "smaller",
            "description": "The smaller of two digits",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
messages = [{"role": "user", "content": task["prompt"]}]
try:
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(min(given.values(), default=""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
except BadRequestError:
    pass  # no turn or no room is left
said = messages[-1].get("content") or ""
digits = sorted(task["prompt"])
print(sum(one == other for one, other in zip(said, digits, strict=False)) / len(digits))
