"""What networks compute for the tokens of a rollout."""

import torch

from glm46.tasks.rl import stepping
from glm46.tasks.rl.packing import collect


def test_ranks_put_the_values_of_their_rows_together(monkeypatch):
    """A pipeline stage without the head has none, and takes part."""
    first, second, stage = (torch.full((3,), -torch.inf) for _ in range(3))
    collect(torch.tensor([[-0.5, 9.0], [9.0, -0.25]]), {"place": torch.tensor([[0, -1], [-1, 2]])}, first)
    collect(torch.tensor([[9.0, -2.0]]), {"place": torch.tensor([[-1, 1]])}, second)
    sent = [first.clone(), second.clone(), stage.clone()]
    monkeypatch.setattr(stepping.dist, "all_reduce", lambda values, _: values.copy_(torch.stack(sent).amax(0)))
    assert stepping.gathered(stage).tolist() == [-0.5, -2.0, -0.25]
