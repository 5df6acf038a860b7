"""Servers without a model."""

import pytest

from tests.unit.tasks.rl.rollout.stub_server import StubServer


@pytest.fixture
def stubs():
    made = [StubServer(), StubServer()]
    yield made
    for stub in made:
        stub.stop()
