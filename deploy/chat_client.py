#!/usr/bin/env python
"""Ask a served model a question and print its answer while it is written: reasoning, text, calls of tools.

    pip install openai
    python deploy/chat_client.py --model GLM-4.6 "Explain quantum computing"

It needs a server that runs as docs/deployment.md says, and nothing of glm46.
"""

import argparse
import json
import sys

from openai import OpenAI


def main() -> None:
    arguments = _parser().parse_args()
    client = OpenAI(base_url=arguments.url, api_key=arguments.api_key)
    options = {}
    if arguments.tools is not None:
        with open(arguments.tools, encoding="utf-8") as file:
            options["tools"] = json.load(file)
    stream = client.chat.completions.create(
        model=arguments.model,
        messages=[{"role": "user", "content": arguments.message}],
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": not arguments.no_thinking}},
        **options,
    )
    for chunk in stream:
        for choice in chunk.choices:
            # vLLM calls it reasoning, SGLang reasoning_content.
            thought = getattr(choice.delta, "reasoning", None) or getattr(choice.delta, "reasoning_content", None)
            print(thought or "", end="", file=sys.stderr, flush=True)
            print(choice.delta.content or "", end="", flush=True)
            for call in choice.delta.tool_calls or []:
                print(call.function.name or "", call.function.arguments or "", end="", flush=True)
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Asks a served model; its reasoning goes to standard error.")
    parser.add_argument("message")
    parser.add_argument("--model", required=True, help="as --served-model-name of the server")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none", help="if the server was started with --api-key")
    parser.add_argument("--tools", help="JSON file of tools that the model may call, as OpenAI describes them")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--no-thinking", action="store_true", help="answer at once")
    return parser


if __name__ == "__main__":
    main()
