"""Conversations of all kinds, which every reader must understand in the same way, and random ones."""

import random


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


class Writer:
    """Random conversations."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def text(self, most=10):
        return "".join(self._random.choices("ab é中🙂<>/{}\"'1\n\t ", k=self._random.randrange(most)))

    def value(self, depth=2):
        kinds = [self.text, lambda: None, lambda: True, lambda: 1.5, lambda: -3]
        if depth:
            kinds += [lambda: [self.value(depth - 1)], lambda: {self.text(): self.value(depth - 1)}]
        return self._random.choice(kinds)()

    def values(self):
        return {self.text(): self.value() for _ in range(self._random.randrange(3))}

    def assistant(self, calls):
        content, thought, kind = self.text(), self.text(), self._random.randrange(4)
        if not calls and not content.strip():
            content += "answer"
        message = {"role": "assistant", "content": content}
        if kind == 0:
            message["content"] = f"<think>\n{thought}</think>{content}"
        elif kind < 3:
            message["reasoning_content"] = thought
        else:
            message["reasoning_content"] = None
        if calls and not content.strip() and kind:
            message["content"] = self._random.choice(["", None])
        elif self._random.random() < 0.3:
            text = message["content"]
            message["content"] = [text[:3], {"type": "text", "text": text[3:]}]
        return message | ({"tool_calls": calls} if calls else {})

    def deferring_conversation(self):
        """A conversation with deferred tools, results that refer to them, and results in lists."""
        messages, tools = self.conversation()
        chance = self._random.random
        tools = [{"type": "function", "function": tool} if chance() < 0.5 else tool for tool in tools]
        for tool in tools:
            function = tool.get("function", tool)
            function |= {"strict": True} if chance() < 0.3 else {}
            function |= {"defer_loading": chance() < 0.7} if chance() < 0.5 else {}
        names = [tool.get("function", tool)["name"] for tool in tools]
        for message in messages:
            if message["role"] == "tool" and any(names) and chance() < 0.4:
                chosen = self._random.choices([name for name in names if name], k=self._random.randint(1, 2))
                message["content"] = [{"type": "tool_reference", "name": name} for name in chosen]
        return messages, tools

    def conversation(self):
        chance, messages = self._random.random, []
        if chance() < 0.5:
            messages.append({"role": "system", "content": self.text()})
        for _ in range(self._random.randint(1, 3)):
            messages.append({"role": "user", "content": self.text() + self._random.choice(["", "", "/nothink"])})
            for _ in range(self._random.randrange(3)):
                calls = [{"name": "now", "arguments": self.values()} for _ in range(self._random.randint(1, 2))]
                wrapped = [{"type": "function", "function": call} if chance() < 0.5 else call for call in calls]
                messages.append(self.assistant(wrapped))
                messages += [{"role": "tool", "content": self.text()} for _ in calls]
            messages.append(self.assistant([]))
        tools = [{"name": self.text(), "parameters": self.values()} for _ in range(self._random.randrange(3))]
        return messages, tools
