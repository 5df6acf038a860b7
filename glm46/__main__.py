"""``python -m glm46``."""

import sys

from glm46.reliability.stop import EXIT_SIGNAL, code_before_training, end_on_signals


def _run() -> int:
    # Before the imports, which take seconds, and where the exception of a Ctrl-C can get lost.
    trains = sys.argv[1:2] in (["launch"], ["train"])
    end_on_signals(code_before_training if trains else lambda number: EXIT_SIGNAL + number)
    from glm46.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(_run())
