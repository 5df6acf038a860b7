#!/usr/bin/env python3
"""A Hugging Face folder as a checkpoint to start training from: see --help, and docs/huggingface.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glm46.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "from-hf", *sys.argv[1:]]))
