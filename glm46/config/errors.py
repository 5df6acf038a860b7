"""UserError: mistakes that the user can fix."""

from collections.abc import Sequence


class UserError(Exception):
    """One or more mistakes of the user. The command line prints them without a traceback and exits with code 2.

    Each fault is one message that names the key or file, the value, the rule and the remedy.

    Attributes:
        exit_code: exit code of the command line.
    """

    exit_code = 2

    def __init__(self, *faults: str):
        self.faults = faults
        super().__init__("\n".join(faults))


def raise_if(faults: Sequence[str]) -> None:
    """Raise a `UserError` with all faults, unless there are none."""
    if faults:
        raise UserError(*faults)


class UnreadableError(UserError):
    """The system cannot read a file of the run, as after its storage was lost. The exit code, that of a failed rank,
    allows a restart, which waits for storage."""

    exit_code = 1
