"""``python -m glm46 schema``: the JSON schema of a config, for editors."""

import json
from collections.abc import Sequence

from glm46.config.options import verb_parser
from glm46.config.schema import json_schema


def schema_command(argv: Sequence[str]) -> int:
    """Print the schema; returns the exit code."""
    verb_parser("schema").parse_args(argv)
    print(json.dumps(json_schema(), indent=2))
    return 0
