"""``python -m glm46 schema``: the JSON schema of a config, for editors."""

import argparse
import json
from collections.abc import Sequence

from glm46.commands.options import parse_without_overrides
from glm46.config.schema import json_schema


def schema_command(argv: Sequence[str]) -> int:
    """Print the schema; returns the exit code.

    Raises:
        UserError: a key is overridden.
    """
    parse_without_overrides(argparse.ArgumentParser(prog="python -m glm46 schema", allow_abbrev=False), argv)
    print(json.dumps(json_schema(), indent=2))
    return 0
