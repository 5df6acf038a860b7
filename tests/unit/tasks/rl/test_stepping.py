"""What networks compute for the tokens of a rollout."""

import torch

from glm46.tasks.rl import stepping


def test_ranks_put_the_values_of_their_rows_together(monkeypatch):
    """A pipeline stage without the head has none, and takes part."""
    first, second, stage = (stepping.TokenRecord(3) for _ in range(3))
    first.add({"place": torch.tensor([[0, -1], [-1, 2]])}, torch.tensor([[-0.5, 9.0], [9.0, -0.25]]))
    second.add({"place": torch.tensor([[-1, 1]])}, torch.tensor([[9.0, -2.0]]))
    sent = [record._values for record in (first, second, stage)]
    monkeypatch.setattr(stepping.dist, "all_reduce", lambda values, _: values.copy_(torch.stack(sent).amax(0)))
    assert stage.of_all_ranks().tolist() == [-0.5, -2.0, -0.25]
