"""Random conversations."""

import random


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
