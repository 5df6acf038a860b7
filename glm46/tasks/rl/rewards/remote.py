"""The reward that a server gives."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from glm46.tasks.rl.rewards.answer import Answer, usable_seconds

_LARGEST_REPLY = 1 << 20
_PAUSE_SECONDS = 1.0


def remote(answer: Answer, options: Mapping[str, Any]) -> float:
    """POST prompt, text and label as JSON to ``url``; the reply is a number, or a table with the key ``reward``. An
    answer without a result gets 0 and is not sent.

    Args:
        answer: what is sent.
        options: ``url``; ``tries`` (3), with a second between them, as far as `usable_seconds` has time for them;
            ``seconds`` (5) for each.

    Raises:
        OSError, ValueError: no try gave a number.
    """
    if not answer.result:
        return 0.0
    body = json.dumps({"prompt": answer.prompt, "response": answer.text, "label": answer.label}).encode()
    tries, end = options.get("tries", 3), time.monotonic() + usable_seconds(options)
    for number in range(1, tries + 1):
        request = urllib.request.Request(options["url"], body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(
                request, timeout=min(options.get("seconds", 5), end - time.monotonic())
            ) as reply:
                found = json.loads(reply.read(_LARGEST_REPLY))
            return found["reward"] if isinstance(found, dict) else found
        except (OSError, ValueError, KeyError):
            if number == tries or time.monotonic() + _PAUSE_SECONDS >= end:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise ValueError(f"tries = {tries}: must be at least 1")
