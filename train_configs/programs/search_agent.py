"""Answers a question with a tool that searches passages: the program of air_rl_search.toml and glm47_rl_search.toml. It
answers with few words, which the reward "exact" compares with the row's label.

    python3 search_agent.py INDEX --make passages.jsonl

makes the index, once, of lines {"title": "...", "text": "..."}: a file of SQLite, of which an episode reads only the
pages that it needs. Give it a folder of its own, which each episode can read."""

import argparse
import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

MOST_FOUND, MOST_SHOWN, MOST_WORDS = 5, 1000, 32
"""Passages, characters of each, and words of a query."""
TOOL = {
    "name": "search",
    "description": f"The {MOST_FOUND} passages that fit words best.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
RULES = "Search for what you need, as often as you like. Then answer with the answer alone, in a few words."


def make_index(index: Path, passages: Path) -> None:
    """Write the index of a file of passages, whole or not at all."""

    def rows() -> Iterator[tuple[str, str]]:
        with passages.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    yield str(row.get("title", "")), str(row["text"])
                except (AttributeError, KeyError, ValueError) as error:
                    raise SystemExit(f'{passages}:{number}: {error!r}; write {{"title": ..., "text": ...}}') from error

    index.parent.mkdir(parents=True, exist_ok=True)
    part = index.with_name(f"{index.name}.part")
    part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part)) as made, made:
            made.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')")
            made.executemany("INSERT INTO passages VALUES (?, ?)", rows())
        part.replace(index)
    finally:
        part.unlink(missing_ok=True)


def search(index: Path, call: dict) -> str:
    """The passages that a call of the tool finds, the best first, by BM25."""
    try:
        words = re.findall(r"\w+", json.loads(call["function"]["arguments"])["query"])[:MOST_WORDS]
        if not words:
            return "error: query: no words"
        # Unchanging, because an index in a sandbox can have no files of locks beside it.
        of = sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        query = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
        found = of.execute(query, (" OR ".join(f'"{word}"' for word in words), MOST_FOUND)).fetchall()
        of.close()
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
    return "\n\n".join(f"{title}\n{text[:MOST_SHOWN]}" for title, text in found) or "(nothing was found)"


def ask(messages: list[dict]) -> dict:
    """The policy's answer to messages."""
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection = HTTPConnection(address.netloc)
    body = json.dumps({"messages": messages, "tools": [{"type": "function", "function": TOOL}]})
    connection.request("POST", f"{address.path}/chat/completions", body, headers)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    if reply.status != 200:  # no turn or no room is left, and the episode is cut
        raise SystemExit(f"{reply.status}: {content['error']['message']}")
    return content["choices"][0]["message"]


def main() -> None:
    """One episode: turns with calls of the tool, until one has none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, metavar="INDEX")
    parser.add_argument("--make", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.make is not None:
        if not given.make.is_file():
            parser.error(f"--make {given.make}: no such file")
        make_index(given.index, given.make)
        return
    if not given.index.is_file():
        parser.error(f"{given.index}: no such index; make it with --make FILE")
    task = json.loads(os.environ["GLM46_TASK"])["prompt"]
    asked = task if isinstance(task, list) else [{"role": "user", "content": task}]
    messages = [{"role": "system", "content": RULES}, *asked]
    while calls := (answer := ask(messages)).get("tool_calls"):
        messages.append(answer)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": search(given.index, call)} for call in calls
        ]


if __name__ == "__main__":
    main()
