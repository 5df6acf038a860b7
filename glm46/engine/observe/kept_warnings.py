"""Warnings of glm46's modules, printed and stored for log.txt, which is opened after the weights are read."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from glm46.config.printable import printable


class KeptWarnings(logging.Handler):
    """Handler that prints each warning to standard error, and stores it until log.txt is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[str] = []
        self._write: Callable[[str], None] = self._kept.append

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, and write or store it."""
        print(printable(record.getMessage()), file=sys.stderr, flush=True)
        self._write(record.getMessage())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the warnings of all modules inside the context."""
        logger = logging.getLogger("glm46")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)

    @contextmanager
    def written(self, write: Callable[[str], None]) -> Iterator[None]:
        """Write the stored warnings, and each warning inside the context."""
        for text in self._kept:
            write(text)
        self._kept.clear()
        self._write = write
        try:
            yield
        finally:
            self._write = self._kept.append
