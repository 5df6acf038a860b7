#!/usr/bin/env python3
"""Gather node-local checkpoint files on shared storage: see --help, and docs/checkpoints.md."""

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path.insert(0, str(SCRIPT.parents[1]))

from glm46.operate.cluster.consolidation import consolidate_command  # noqa: E402

if __name__ == "__main__":
    sys.exit(consolidate_command(sys.argv[1:], SCRIPT))
