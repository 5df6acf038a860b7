"""One process with torch imported, from which all programs of these tests are forked."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.server import CaseRows, Server
from tests.small_run import make_config, source_folder, tokenizer

__all__ = ["make_config", "source_folder", "tokenizer"]


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("programs"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def case_row(server, request) -> Iterator[Callable[..., dict]]:
    """A function that returns the row of one named case of a program.

    Its arguments: the program; the values of the test's other parameters, which go to the program; ``case``, the value
    of the test's parameter of this name. The first call starts the program
    for all cases whose tests are selected in this session; other calls read what it prints.
    """
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = [item.callspec.params for item in items if "case" in item.callspec.params]
    started: dict[tuple, CaseRows] = {}

    def row(program: str, *arguments: int, case: str) -> dict:
        key = (program, *arguments)
        if key not in started:
            others = [[value for name, value in params.items() if name != "case"] for params in selected]
            asked = [p["case"] for p, other in zip(selected, others, strict=True) if other == [*arguments]]
            names = list(dict.fromkeys(asked))  # several tests of a module may ask for one case
            started[key] = CaseRows(server.start(*key, *names), names)
        return started[key].row(case)

    yield row
    for rows in started.values():
        rows.close()
