"""The journal's fields of the tokens of a rollout."""

from types import SimpleNamespace

import torch

from glm46.tasks.rl import stepping
from glm46.tasks.rl.stepping import StepBuilder

VALUES = {"advantages": 1.0, "returns": 2.0, "correction": 3.0, "old_logprobs": 4.0}


def test_fields_of_pipeline_stages_with_and_without_the_head_have_one_order(monkeypatch):
    """Only the stage with the head has corrections and old log-probabilities of a rollout of one step."""
    place = torch.tensor([[0, 1, -1]])
    sent, written = [], []
    monkeypatch.setattr(stepping.dist, "all_reduce", lambda values, operation: sent.append(values))
    for names in (VALUES, ("advantages", "returns")):
        batch = {"place": place} | {name: torch.full((1, 3), VALUES[name]) for name in names}
        builder = StepBuilder.__new__(StepBuilder)
        builder._unwritten = SimpleNamespace(tokens=2, is_demonstration=False, step=0), [[batch]], {}
        builder._is_on_policy, builder._writer = True, SimpleNamespace(start=lambda write: None)
        fields = builder._unwritten[2]
        builder.write_fields()
        written.append(fields)
    assert [list(fields) for fields in written] == [sorted(VALUES)] * 2
    found = dict(zip(written[0], torch.maximum(*sent), strict=True))
    assert {name: row.tolist() for name, row in found.items()} == {name: [value] * 2 for name, value in VALUES.items()}
