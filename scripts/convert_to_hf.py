#!/usr/bin/env python3
"""A training checkpoint as a Hugging Face folder: see --help, and docs/huggingface.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glm46.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
