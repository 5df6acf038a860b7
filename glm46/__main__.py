"""Entry point of ``python -m glm46``."""

import signal
import sys


def run() -> int:
    """Run the command line of `sys.argv`; returns the exit code."""
    # Block signals until the handlers are installed: a signal during the imports would cause a different exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    from glm46.engine.reliability.stop import EXIT_SIGNAL, code_before_training
    from glm46.operate.launch.process_end import end_on_signals, wait_if_ending

    # Before the import of the command line, which takes seconds and can swallow a KeyboardInterrupt.
    is_training = sys.argv[1:2] in (["launch"], ["train"], ["ablate"])
    end_on_signals(code_before_training if is_training else lambda number: EXIT_SIGNAL + number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    from glm46.cli import main

    try:
        return main()
    finally:
        wait_if_ending()


if __name__ == "__main__":
    sys.exit(run())
