#!/usr/bin/env python3
"""Let a model answer prompts, and write its answers as rows of text that `python -m glm46 prepare` reads.

    python scripts/write_synthetic_rows.py --prompts prompts.jsonl --output rows.jsonl --model models/GLM-4.5-Air
    python scripts/write_synthetic_rows.py --prompts prompts.jsonl --output rows.jsonl --model mine \\
        --url http://127.0.0.1:8000/v1

A prompt is a line of JSON with the field "prompt". Each output row has all fields of its prompt and two more: "text"
for ``format = "text"`` and "messages" for ``format = "messages"``. An interrupted run continues with the same command.
docs/synthetic_text.md has the whole way to a source. With --url it needs openai: pip install openai
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glm46.config.errors import UserError

Answers = Callable[[list[str], int], list[str]]
"""Answers the prompts with a seed."""
BATCH = 32
"""Prompts that are answered together, and written together."""


def main() -> int:
    arguments = _parser().parse_args()
    try:
        prompts = list(read_prompts(arguments.prompts))
        answers = served_answers(arguments) if arguments.url else local_answers(arguments)
        count = write_rows(prompts, answers, arguments.output, samples=arguments.samples, text=arguments.text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {count:,} rows")
    return 0


def read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of prompts. Raises UserError if a line is no JSON object with a text "prompt"."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise UserError(f'{path}:{number}: must be a JSON object with a text "prompt"; correct the line')
        yield row


def local_answers(arguments: argparse.Namespace) -> Answers:
    """Answers of a model in this process: ``--model`` is a folder."""
    import glm46

    model = glm46.load(arguments.model)

    def answer(prompts: list[str], seed: int) -> list[str]:
        options = {"max_new_tokens": arguments.max_tokens, "temperature": arguments.temperature, "seed": seed}
        return model.generate(prompts, chat=True, **options)

    return answer


def served_answers(arguments: argparse.Namespace) -> Answers:
    """Answers of a server with OpenAI's API: ``--model`` is its name there. Raises UserError if a request fails."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=arguments.url, api_key=arguments.api_key)

    def answer_one(prompt: str, seed: int) -> str:
        reply = client.chat.completions.create(
            model=arguments.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            seed=seed,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        return reply.choices[0].message.content or ""

    def answer(prompts: list[str], seed: int) -> list[str]:
        try:
            with ThreadPoolExecutor(BATCH) as requests:
                return list(requests.map(answer_one, prompts, [seed] * len(prompts)))
        except OpenAIError as error:
            raise UserError(f"{arguments.url}: {error}; correct it and repeat the command, which continues") from error

    return answer


def write_rows(prompts: list[dict[str, Any]], answers: Answers, output: Path, *, samples: int, text: str) -> int:
    """Append the rows that ``output`` lacks, and return how many it has then.

    Args:
        samples: answers to each prompt; the seed of the n-th is n.
        text: what the field "text" is, see ``--text``.
    """
    work = [(seed, row) for seed in range(samples) for row in prompts]
    rows = output.read_bytes() if output.exists() else b""
    written = rows.count(b"\n")
    with output.open("a", encoding="utf-8") as file:
        file.truncate(rows.rfind(b"\n") + 1)  # a killed run may leave a part of a row
        while written < len(work):
            seed = work[written][0]
            batch = [row for other, row in work[written : written + BATCH] if other == seed]
            for row, answer in zip(batch, answers([row["prompt"] for row in batch], seed), strict=True):
                file.write(json.dumps(finished_row(row, answer, text), ensure_ascii=False) + "\n")
            file.flush()
            written += len(batch)
    return written


def finished_row(row: dict[str, Any], answer: str, text: str) -> dict[str, Any]:
    """The row of a prompt, with its answer as "text" and as "messages"."""
    answer = answer.strip()
    blocks = re.findall(r"(?ms)^```\w*\n(.*?)^```", answer)
    kinds = {"both": f"{row['prompt']}\n\n{answer}", "answer": answer, "code": blocks[-1] if blocks else ""}
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
    return row | {"text": kinds[text], "messages": messages}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with the field prompt")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write, or to continue")
    parser.add_argument("--model", required=True, help="folder or hf://owner/name; with --url the server's name of it")
    parser.add_argument("--url", help="a server with OpenAI's API, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="if the server requires one")
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=1024)
    text = 'the field "text": prompt and answer, the answer, or its last fenced block of code'
    parser.add_argument("--text", choices=["both", "answer", "code"], default="both", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
