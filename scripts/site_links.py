"""A hook of mkdocs.yml: links of the documentation to files beside docs/ are names of files on the site."""

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page of docs/ without links that leave the folder: ``[CONTRIBUTING](../CONTRIBUTING.md#tests)``
    becomes ``CONTRIBUTING``."""
    above = r"\.\./" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({above}[^)]*\)", r"\1", markdown)
