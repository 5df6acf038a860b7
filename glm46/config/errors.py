"""Exceptions for mistakes that the user can fix."""

from collections.abc import Sequence

from glm46.config.printable import printable


class UserError(Exception):
    """One or more mistakes of the user. The command line prints them without a traceback and exits with code 2.

    Each fault is one message that names the key or file, the value, the rule and the remedy. Values may come from
    untrusted files, so control characters are replaced.

    Attributes:
        exit_code: exit code of the command line.
    """

    exit_code = 2

    def __init__(self, *faults: str):
        self.faults = tuple(map(printable, faults))
        super().__init__("\n".join(self.faults))


def raise_if(faults: Sequence[str]) -> None:
    """Raise a `UserError` with all faults, unless there are none."""
    if faults:
        raise UserError(*faults)


class UnreadableError(UserError):
    """A file of the run cannot be read, for example because its storage was lost. The exit code is the same as for a
    failed rank, so that the run restarts, which waits for the storage."""

    exit_code = 1
