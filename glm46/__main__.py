"""``python -m glm46``."""

import sys

from glm46.cli import main

if __name__ == "__main__":
    sys.exit(main())
