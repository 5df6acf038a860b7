"""The server from which all programs of these tests are forked, and the rows of their cases."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_config, source_folder, tokenizer
from tests.harness import Cases, session

__all__ = ["make_config", "source_folder", "tokenizer"]


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory) -> Iterator[None]:
    with session(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def case_row(request) -> Iterator[Callable[..., Any]]:
    """A function that returns the row of one named case; its arguments are those of `Cases`.

    ``case`` is the value of the test's parameter of this name. The first call starts a program for all cases of this
    world size (the parameter ``ranks``, if the test has it) whose tests are selected in this session.
    """
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = [item.callspec.params for item in items if "case" in item.callspec.params]
    started: dict[tuple, Cases] = {}

    def row(
        function: Callable[[list[str], Any], Iterator[Any]],
        world_size: int,
        *,
        case: str,
        at_once: int,
        prepare: Callable[[list[str], int, Path], Any] | None = None,
    ) -> Any:
        key = (function, world_size)
        if key not in started:
            names = [params["case"] for params in selected if params.get("ranks", world_size) == world_size]
            names = list(dict.fromkeys(names))  # several tests of a module may read one case
            started[key] = Cases(function, world_size, names, prepare, at_once)
        return started[key].row(case)

    yield row
    for cases in started.values():
        cases.close()
