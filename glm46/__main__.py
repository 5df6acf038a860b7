"""Entry point of ``python -m glm46``."""

import signal
import sys


def run() -> int:
    """Run the command line of `sys.argv`; returns the exit code."""
    # Block signals until the handlers are installed: a signal during the import would cause a different exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    from glm46.cli import run_process

    return run_process()


if __name__ == "__main__":
    sys.exit(run())
