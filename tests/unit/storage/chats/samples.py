"""Conversations of all kinds, which every reader of conversations must understand in the same way."""


def function(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "é 中", "parameters": parameters}}


def user(content="Weather in Köln? 🙂"):
    return {"role": "user", "content": content}


def calls(*pairs):
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in pairs]


PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
THOUGHT = {"role": "assistant", "content": "Hello", "reasoning_content": "  why 中\n"}
STEP = {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": calls(("now", {"zone": 1}))}
TWO = STEP | {"content": "Wait.", "tool_calls": calls(("weather", {"city": "Köln", "days": [1, 2]}), ("now", {}))}
RESULTS = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "noon"}]
TOOLS = [function("weather", city="string", days="array"), function("now", zone="integer")]
CONVERSATIONS = [
    ([user()], None),
    ([{"role": "developer", "content": "Be brief."}, user("Hi/nothink")], None),
    ([{"role": "system", "content": "S"}, user(), THOUGHT, user("And?")], []),
    ([user(), {"role": "assistant", "content": "<think>why</think>\nHello"}, user("And?")], None),
    ([user(), STEP, RESULTS[0]], TOOLS),
    ([user(), TWO, *RESULTS, {"role": "assistant", "content": "Rain."}, user("And now?"), STEP, RESULTS[1]], TOOLS[:1]),
    ([user(), {"role": "system", "content": "Be brief."}], None),
    ([user(), TWO, {"role": "tool", "content": ["rain", "noon"]}], TOOLS),
    ([user(), TWO, {"role": "tool", "content": [{"output": "rain"}, {"output": ""}]}], TOOLS),
    (
        [
            user(),
            {"role": "assistant", "content": "<think>look</think>"} | {"tool_calls": STEP["tool_calls"]},
            RESULTS[0],
            {"role": "assistant", "content": "", "tool_calls": calls(("now", {}))},
            RESULTS[1],
        ],
        TOOLS,
    ),
    (
        [
            {"role": "system", "content": "S"},
            user(),
            {"role": "assistant", "content": "Hello", "tool_calls": []},
            user("And?"),
        ],
        None,
    ),
    (
        [
            {"role": "system", "content": "S"},
            {"role": "developer", "content": "T"},
            user(),
            {"role": "assistant", "content": "Hi", "reasoning_content": None},
            user("No?/nothink"),
            STEP,
            RESULTS[0],
        ],
        TOOLS,
    ),
]
