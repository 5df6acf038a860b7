"""The commands of docs/synthetic_text.md: rows of a local and of a served model, checked and prepared as a source."""

import json
import re
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from glm46 import cli
from scripts import write_synthetic_rows
from tests.builders import model_folder, random_model, tiny_shape

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "synthetic_text.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for code in re.findall(r"(?s)```bash\n(.*?)```", PAGE) for line in code.strip().splitlines()]
EXAM = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
ANSWERS = {
    "What is 17 + 25? End with the result.": "First add 17 and 20, which is 37. Then add 5. The answer is 42.",
    "What is 6 * 7? End with the result.": "Six rows of seven are forty-one. The answer is 41.",
    "Count, then say 3.": f"{EXAM}. The answer is 3.",
}
LABELS = ["42", "42", "3"]


class Server(BaseHTTPRequestHandler):
    """Answers as `ANSWERS`; requests with the seed of ``failing_seed`` are refused."""

    failing_seed: int | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = ANSWERS[body["messages"][-1]["content"]]
        reply = {
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}]
        }
        is_refused = body["seed"] == Server.failing_seed
        data = json.dumps(
            {"error": {"message": "too many"}} if is_refused else reply | {"id": "1", "model": "mine"}
        ).encode()
        self.send_response(400 if is_refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Print nothing."""


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the prompts and the exam of the page."""
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": prompt, "label": label} for prompt, label in zip(ANSWERS, LABELS, strict=True)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"text": EXAM}) + "\n")
    return tmp_path


def words_of(containing: str, **replaced: str) -> list[str]:
    """The words of the page's command that contains a text, with other values of some options."""
    (line,) = [line for line in COMMANDS if containing in line]
    words = shlex.split(line)
    for option, value in replaced.items():
        words[words.index(f"--{option}") + 1] = value
    return words


def write_rows(words: list[str], monkeypatch, capsys) -> tuple[int, str]:
    """Run the script of a command; return its exit code and what it printed."""
    assert words[:2] == ["python", "scripts/write_synthetic_rows.py"]
    monkeypatch.setattr(sys, "argv", words[1:])
    code = write_synthetic_rows.main()
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_rows_of_a_served_model_become_a_source(folder, url, monkeypatch, capsys):
    """Of three prompts with four answers each, one is wrong, one is in the exam, and one remains once."""
    done = write_rows(words_of("--url", url=url), monkeypatch, capsys)
    assert done == (0, "rows.jsonl: 12 rows\n")
    assert {row["label"] for row in rows_of(folder)} == set(LABELS)
    words = words_of("glm46 prepare")
    assert words[:3] == ["python", "-m", "glm46"]
    assert cli.main([*words[3:], "--processes", "1"]) == 0
    manifest = json.loads((folder / "data" / "synthetic" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == 1
    assert manifest["dropped"] == {"exact duplicate": 3, "holds evaluation text": 4, "wrong answer": 4}


def test_an_interrupted_run_continues(folder, url, monkeypatch, capsys):
    monkeypatch.setattr(Server, "failing_seed", 2)
    code, printed = write_rows(words_of("--url", url=url), monkeypatch, capsys)
    assert code == 2 and printed.startswith(f"error: {url}: ") and "repeat the command" in printed
    written = (folder / "rows.jsonl").read_text()
    assert len(rows_of(folder)) == 6
    (folder / "rows.jsonl").write_text(written + '{"prompt": "cut o')
    monkeypatch.setattr(Server, "failing_seed", None)
    assert write_rows(words_of("--url", url=url), monkeypatch, capsys)[0] == 0
    assert (folder / "rows.jsonl").read_text().startswith(written) and len(rows_of(folder)) == 12


def test_rows_of_a_local_model_are_its_answers(folder, monkeypatch, capsys):
    """Each answer of a prompt has a seed of its own."""
    model = model_folder(folder / "model", random_model(tiny_shape(), seed=1))
    words = [*words_of("step-000160", model=str(model), samples="2"), "--max-tokens", "8"]
    assert write_rows(words, monkeypatch, capsys) == (0, "rows.jsonl: 6 rows\n")
    first, second = rows_of(folder)[0], rows_of(folder)[3]
    assert first["prompt"] == second["prompt"] and first["text"] != second["text"]
    assert first["text"].strip() == f"{first['prompt']}\n\n{first['messages'][1]['content']}".strip()


def test_a_line_without_a_prompt_is_one_message(folder, monkeypatch, capsys):
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    code, printed = write_rows(words_of("--url"), monkeypatch, capsys)
    message = 'error: prompts.jsonl:2: must be a JSON object with a text "prompt"; correct the line\n'
    assert (code, printed) == (2, message)


def test_code_is_the_last_fenced_block():
    answer = "First:\n```python\nx = 1\n```\nBetter:\n```python\ny = 2\n```\nDone."
    finished_row = write_synthetic_rows.finished_row
    assert finished_row({"prompt": "p"}, answer, "code")["text"] == "y = 2\n"
    assert finished_row({"prompt": "p"}, "no code", "code")["text"] == ""
    assert finished_row({"prompt": "p"}, answer, "answer")["text"] == answer
