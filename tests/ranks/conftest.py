"""One process with torch imported, from which all programs of these tests are forked."""

from collections.abc import Iterator

import pytest

from tests.ranks.server import Server
from tests.small_run import make_config, source_folder, tokenizer

__all__ = ["make_config", "source_folder", "tokenizer"]


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("programs"))
    yield one
    one.close()
