"""The one exception for what a user can mend."""


class UserError(Exception):
    """Mistakes of the user, all that are known at once; the command line prints them without a traceback, exit code 2.

    Each fault is one message that names the key or file, the value, the rule and the remedy.

    Attributes:
        exit_code: that the command line ends with.
    """

    exit_code = 2

    def __init__(self, *faults: str):
        self.faults = faults
        super().__init__("\n".join(faults))
