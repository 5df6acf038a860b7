"""What networks compute for the tokens of a rollout."""

import torch

from glm46.tasks.rl import stepping
from glm46.tasks.rl.rollout.records import Completion, EpisodeEnd, SessionSample
from glm46.tasks.rl.samples import Prompt, Rollout, Sample, to_arrays


def test_ranks_put_the_values_of_their_rows_together(monkeypatch):
    """A pipeline stage without the head has none, and takes part."""
    end = EpisodeEnd([SessionSample([5], Completion([7, 8, 9], [-1.0] * 3, "stop", [], None))])
    sample = Sample(Prompt([5], "", None), 0, end, 1.0, {"exact": 1.0})
    rollout = Rollout(0, 0, 1, ("exact",), False, to_arrays([sample], ["exact"]))
    first, second, stage = (stepping.TokenRecord(rollout) for _ in range(3))
    first.add({"place": torch.tensor([[0, -1], [-1, 2]])}, torch.tensor([[-0.5, 9.0], [9.0, -0.25]]))
    second.add({"place": torch.tensor([[-1, 1]])}, torch.tensor([[9.0, -2.0]]))
    sent = [record._values for record in (first, second, stage)]
    monkeypatch.setattr(stepping.dist, "all_reduce", lambda values, _: values.copy_(torch.stack(sent).amax(0)))
    assert stage.of_all_ranks().tolist() == [-0.5, -2.0, -0.25]
