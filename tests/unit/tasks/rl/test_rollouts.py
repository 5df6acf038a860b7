"""The journal of rollouts, their samples as micro-batches, and what networks compute for their tokens."""

import json
from dataclasses import fields
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm46.compute.model.cross_entropy import IGNORE
from glm46.config.errors import UserError
from glm46.config.rules_pipeline import fitting_micro_batches
from glm46.engine.observe.metrics import find_metric
from glm46.run.context_keys import SHARED_KEYS
from glm46.tasks.rl import stepping
from glm46.tasks.rl.journal import read_fields, read_rollout, write_fields, write_rollout
from glm46.tasks.rl.journal_files import rollout_steps
from glm46.tasks.rl.packing import Item, PackShape, build_batch, collect, items_of, join, pack, spread
from glm46.tasks.rl.rollout.records import Completion, Episode, KeptTokens, SamplingRules
from glm46.tasks.rl.rollouts import _columns, validate_sets
from glm46.tasks.rl.samples import Samples, to_samples


def sample(group: int, prompt: list[int], tokens: list[int], reward: float) -> Episode:
    logprobs = [-token / 7 for token in tokens]
    versions = [3] + [4] * (len(tokens) - 1)
    completion = Completion(tokens, logprobs, "stop", versions, None, prompt=prompt)
    return Episode([completion], group=group, reward=reward, parts={"exact": reward})


def rollout_of(*ends: Episode) -> Samples:
    return to_samples(ends, ["exact"], step=4, first_prompt=8, next_prompt=10, figures={"reward": 0.5})


@pytest.fixture
def rollout() -> Samples:
    return rollout_of(sample(8, [5, 6], [7, 8, 9], 1.0), sample(8, [5, 6], [10], 0.0), sample(9, [11], [12, 13], 0.5))


def validation_of(ends: list[Episode], samples: int) -> dict[str, float]:
    """The columns of a validation whose prompts got these scored answers."""
    sampler = SimpleNamespace(
        config=SimpleNamespace(rewards=[SimpleNamespace(name="exact")]), rules=SamplingRules(1.0, frozenset(), 8),
        generate=lambda *_: ends, score=lambda scored, _: scored,
    )  # fmt: skip
    table = SimpleNamespace(name="set", samples=samples, temperature=1.0)
    return validate_sets(sampler, [(table, [None] * (len(ends) // samples))])


def test_a_validation_counts_the_samples_that_failed():
    right = sample(0, [5], [7], 1.0)
    failed = right._replace(reward=None, parts={}, fault="rl.environment: it ended with code 3")
    columns = validation_of([right, failed, failed, right], samples=2)
    assert columns["validation_reward/set"] == 1.0 and columns["validation_dropped/set"] == 2
    assert columns["validation_pass/set@1"] == 0.5
    assert validation_of([right, right], samples=2)["validation_dropped/set"] == 0
    columns = validation_of([failed, failed], samples=2)
    assert columns["validation_reward/set"] == 0.0 and columns["validation_dropped/set"] == 2
    for name in columns:
        assert find_metric(name).name == name.partition("/")[0]


def test_a_reward_of_1_up_to_rounding_passes():
    ends = [sample(0, [5], [7], reward) for reward in (sum([0.1] * 10), 1.0, 0.999, 0.0)]
    assert validation_of(ends, samples=1)["validation_pass/set@1"] == 0.5


def content_of(samples: Samples) -> dict:
    found = {one.name: getattr(samples, one.name) for one in fields(samples)}
    return {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in found.items()}


def test_a_rollout_comes_back_as_it_was_written(rollout, tmp_path):
    write_rollout(tmp_path, rollout, "same")
    found = read_rollout(tmp_path, 4, "same")
    assert content_of(found) == content_of(rollout)
    assert found.tokens.tolist() == [5, 6, 7, 8, 9, 5, 6, 10, 11, 12, 13] and found.ends.tolist() == [5, 8, 11]
    assert found.targets.tolist() == [-1, -1, 7, 8, 9, -1, -1, 10, -1, 12, 13]
    assert found.versions.tolist() == [3, 4, 4, 3, 3, 4] and found.group.tolist() == [8, 8, 9]
    assert read_rollout(tmp_path, 4, "other") is None
    assert read_rollout(tmp_path, 5, "same") is None
    assert rollout_steps(tmp_path) == [4]


def test_a_rollout_without_samples_can_be_written(tmp_path):
    write_rollout(tmp_path, rollout_of(), "same")
    assert len(read_rollout(tmp_path, 4, "same")) == 0


def test_a_rollout_of_another_format_is_generated_again_or_refused_inside(rollout, tmp_path):
    write_rollout(tmp_path, rollout, "same")
    manifest = tmp_path / "step_000004.json"
    facts = json.loads(manifest.read_text())
    del facts["format"]  # as in the first one
    manifest.write_text(json.dumps(facts))
    assert read_rollout(tmp_path, 4, "same") is None
    with pytest.raises(UserError, match=r"another version of glm46 wrote it.*use that version.*load_step"):
        read_rollout(tmp_path, 4)


def test_damaged_files_are_refused_and_incomplete_ones_do_not_exist(rollout, tmp_path):
    write_rollout(tmp_path, rollout, "same")
    data, manifest = tmp_path / "step_000004.safetensors", tmp_path / "step_000004.json"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match=r"step_000004\.safetensors.*load_step"):
        read_rollout(tmp_path, 4, "same")
    manifest.unlink()  # killed before it was written
    assert read_rollout(tmp_path, 4, "same") is None


def test_fields_of_a_rollout_are_needed_inside_of_it(tmp_path):
    write_fields(tmp_path, 4, {"old_logprobs": torch.tensor([0.25, -1.0])})
    assert read_fields(tmp_path, 4)["old_logprobs"].tolist() == [0.25, -1.0]
    with pytest.raises(UserError, match=r"step_000005.*load_step"):
        read_fields(tmp_path, 5)


def batch_of(rollout: Samples, rows: list[list[int]], shape: PackShape) -> dict:
    return build_batch(rollout, rows, 0, shape, items_of(rollout, range(len(rollout)), shape), shape.seq_len)


def alone(lengths: list[int]) -> list[Item]:
    return [Item(number, 0, length) for number, length in enumerate(lengths)]


def test_a_batch_holds_prompt_and_completion_of_each_sample(rollout):
    shape = PackShape(seq_len=8, rows=2, ranks=1, micro_batches=None, mtp_depth=0)
    batch = batch_of(rollout, [[0, 2], []], shape)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 11, 12, 0, 0], [0] * 8]
    assert batch["labels"][0].tolist() == [IGNORE, 7, 8, 9, 12, 13, IGNORE, IGNORE]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1, -1, -1], [-1] * 8]
    assert batch["sample"][0].tolist() == [-1, 0, 0, 0, 2, 2, -1, -1]
    values = torch.arange(1.0, len(rollout.logprobs) + 1)
    assert spread(values, batch)[0].tolist() == [0, 1, 2, 3, 5, 6, 0, 0]
    assert spread(torch.zeros(0), batch_of(rollout_of(), [[], []], shape)).count_nonzero() == 0
    into = torch.zeros(len(rollout.logprobs))
    collect(spread(values, batch), batch, into)
    assert into.tolist() == [1, 2, 3, 0, 5, 6]


def test_samples_of_a_row_share_their_prompt():
    """But its last token, which predicts the first one of each completion."""
    rollout = rollout_of(
        sample(8, [5, 6, 3], [7, 8, 9], 1.0), sample(8, [5, 6, 3], [10], 0.0), sample(9, [5, 6], [12, 13], 0.5)
    )
    shape = PackShape(seq_len=10, rows=1, ranks=1, micro_batches=None, mtp_depth=0, shares_prompts=True)
    (((row,),),) = pack(items_of(rollout, range(3), shape), shape)
    assert row == [0, 1, 2]
    batch = {name: values[0].tolist() for name, values in batch_of(rollout, [row], shape).items()}
    assert batch["input_ids"] == [5, 6, 3, 7, 8, 3, 5, 6, 12, 0]
    assert batch["labels"] == [IGNORE, IGNORE, 7, 8, 9, 10, IGNORE, 12, 13, IGNORE]
    assert batch["positions"] == [0, 1, 2, 3, 4, 2, 0, 1, 2, 0]
    assert batch["document_ids"] == [0, 0, 1, 1, 1, 2, 3, 3, 3, -1]
    assert batch["prefix_ids"] == [-1, -1, 0, 0, 0, 0, -1, -1, -1, -1]
    assert batch["sample"] == [-1, -1, 0, 0, 0, 1, -1, 2, 2, -1]


def test_tokens_that_the_engine_kept_stand_at_the_labels(tmp_path):
    """Tokens of a reply and prompts have none; the journal has them; samples that share a prompt keep their own."""
    counts = np.array([1, 0, 0, 3, 2], np.int32)
    ids = np.array([7, 50, 8, 60, 9, 61], np.int32)
    answer = Completion(
        [7, 4, 4, 8, 9], [-1.0] * 5, "stop", [3] * 5, None, ((1, 3),), prompt=[5, 6], kept=KeptTokens(ids, counts)
    )
    other = sample(8, [5, 6], [1, 2], 0.0)
    other.samples[0] = other.completion._replace(
        kept=KeptTokens(np.array([1, 2, 70, 71, 72, 73], np.int32), np.array([1, 5], np.int32))
    )
    write_rollout(tmp_path, rollout_of(Episode([answer], group=8, reward=1.0, parts={"exact": 1.0}), other), "same")
    rollout = read_rollout(tmp_path, 4, "same")
    assert rollout.kept_counts.tolist() == [1, 3, 2, 1, 5] and rollout.most_kept == 5
    shape = PackShape(seq_len=12, rows=1, ranks=1, micro_batches=None, mtp_depth=0, restricts=True)
    for shares in (False, True):
        batch = batch_of(rollout, [[0, 1]], shape._replace(shares_prompts=shares))
        assert batch["kept"].dtype == torch.int32 and batch["kept"].shape == (1, 8, 12), "a power of two"
        found = {
            int(label): [int(token) for token in kept if token >= 0]
            for label, kept in zip(batch["labels"][0], batch["kept"][0].T, strict=True)
        }
        assert found == {IGNORE: [], 7: [7], 8: [50, 8, 60], 9: [9, 61], 1: [1], 2: [2, 70, 71, 72, 73]}


def test_labels_as_completions_are_restricted_to_nothing(rollout):
    shape = PackShape(seq_len=8, rows=2, ranks=1, micro_batches=None, mtp_depth=0, restricts=True)
    batch = batch_of(rollout, [[0, 2], []], shape)
    assert batch["kept"].shape == (2, 1, 8) and (batch["kept"] == -1).all()


def test_prediction_layers_predict_drawn_tokens_behind_those_of_the_main_model():
    """A label where the main model has one. Samples that share a prompt have the tokens of those that do not."""
    answer = Completion(
        [7, 4, 4, 8, 9], [-1.0] * 5, "stop", [3] * 5, None, ((1, 3),), prompt=[5, 6]
    )  # 4: of an environment
    replied = Episode([answer], group=8, reward=1.0, parts={"exact": 1.0})
    rollout, none = rollout_of(replied, sample(8, [5, 6], [1, 2, 3], 0.0)), IGNORE
    shape = PackShape(seq_len=12, rows=1, ranks=1, micro_batches=None, mtp_depth=2)
    batch = {name: values[0].tolist() for name, values in batch_of(rollout, [[0, 1]], shape).items()}
    assert batch["input_ids"] == [5, 6, 7, 4, 4, 8, 5, 6, 1, 2, 0, 0]
    assert batch["labels"] == [none, 7, none, none, 8, 9, none, 1, 2, 3, none, none]
    # The last tokens of a sample are repeated where it has none so far ahead: nobody learns from or attends to that.
    assert batch["mtp_input_ids"] == [[6, 7, 4, 4, 8, 9, 6, 1, 2, 3, 0, 0], [7, 4, 4, 8, 9, 9, 1, 2, 3, 3, 0, 0]]
    assert batch["mtp_labels"] == [
        [none, none, none, none, 9, none, none, 2, 3, none, none, none],
        [none, none, none, none, none, none, none, 3, none, none, none, none],
    ]
    shape = shape._replace(mtp_depth=1, shares_prompts=True)
    shared = {name: values[0].tolist() for name, values in batch_of(rollout, [[0, 1]], shape).items()}
    assert shared["input_ids"] == [5, 6, 7, 4, 4, 8, 6, 1, 2, 0, 0, 0]
    for name in ("mtp_input_ids", "mtp_labels"):
        assert shared[name][0] == [*batch[name][0][:6], *batch[name][0][7:10], *batch[name][0][10:], batch[name][0][-1]]


def test_a_group_of_one_sample_has_no_equal_rewards():
    pair, alone = [sample(8, [5], [7], 1.0), sample(8, [5], [7], 0.0)], sample(9, [6], [7], 0.5)
    equal = [sample(10, [5], [7], 1.0)] * 2
    assert _columns([*pair, alone], ["exact"], 2)["equal_groups_ratio"] == 0.0
    assert _columns([*pair, *equal, alone], ["exact"], 2)["equal_groups_ratio"] == 0.5
    assert "equal_groups_ratio" not in _columns([alone], ["exact"], 1), "nothing is compared"


@given(groups=st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 10), min_size=1, max_size=8)), max_size=12))
def test_rows_of_shared_prompts_have_room_for_their_tokens_and_keys(groups):
    items = [Item(number, shared, own) for number, (shared, owns) in enumerate(groups) for own in owns]
    shape = PackShape(seq_len=16, rows=1, ranks=1, micro_batches=None, mtp_depth=0, shares_prompts=True)
    rows = [row for (row,) in pack(items, shape)[0]]
    assert sorted(number for row in rows for number in row) == list(range(len(items)))
    for row in rows:
        prompts = [items[number].prompt for number in row]
        assert len(set(prompts)) == 1 + sum(a != b for a, b in pairwise(prompts)) if row else True
        shared = sum({items[number].prompt: items[number].shared for number in row}.values())
        assert shared + sum(items[number].unshared for number in row) <= 16
        assert shared + sum(items[number].length for number in row) <= SHARED_KEYS * 16


@given(lengths=st.lists(st.integers(1, 16), max_size=40), ranks=st.sampled_from([1, 2, 4]), rows=st.integers(1, 3))
def test_every_sample_is_in_one_row_and_ranks_have_equally_many_micro_batches(lengths, ranks, rows):
    shape = PackShape(seq_len=16, rows=rows, ranks=ranks, micro_batches=None, mtp_depth=0)
    of_ranks = pack(alone(lengths), shape)
    assert len(of_ranks) == ranks
    assert len({len(batches) for batches in of_ranks}) == 1
    assert of_ranks[0], "at least one micro-batch, so that all ranks compute"
    found = [row for batches in of_ranks for batch in batches for row in batch]
    (height,) = {len(batch) for batches in of_ranks for batch in batches}
    padding, number = sum(not row for row in found), len(of_ranks[0])
    assert height <= rows and number == max(-(-(len(found) - padding) // (ranks * rows)), 1)
    assert padding < ranks * number or not lengths, "one row less in each micro-batch would not do"
    assert sorted(number for row in found for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 16 for row in found)


@given(
    groups=st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 10), min_size=1, max_size=8)), max_size=12),
    ranks=st.sampled_from([1, 2]),
    rows=st.integers(1, 3),
)
def test_joined_rows_have_all_samples_and_only_the_padding_of_the_longest_one(groups, ranks, rows):
    items = [Item(number, shared, own) for number, (shared, owns) in enumerate(groups) for own in owns]
    shape = PackShape(seq_len=16, rows=rows, ranks=ranks, micro_batches=None, mtp_depth=0, shares_prompts=True)
    apart = pack(items, shape)
    joined, width = join(apart, items, 4, 16 * rows)
    assert [len(batches) for batches in joined] == [len(batches) for batches in apart]
    lengths = []
    for batch, before in zip((b for batches in joined for b in batches), (b for bs in apart for b in bs), strict=True):
        (row,) = batch
        assert sorted(row) == sorted(number for one in before for number in one)
        prompts = [items[number].prompt for number in row]
        assert len(set(prompts)) == 1 + sum(a != b for a, b in pairwise(prompts)) if row else True
        shared = sum({items[number].prompt: items[number].shared for number in row}.values())
        lengths.append(shared + sum(items[number].unshared for number in row))
    assert width == max(-(-max(lengths) // 4) * 4, 4)


def test_samples_of_one_prompt_in_two_rows_share_it_in_a_joined_row():
    rollout = rollout_of(*(sample(8, [5, 6, 3], [20 + i, 30 + i, 40 + i], 1.0) for i in range(3)))
    shape = PackShape(seq_len=9, rows=2, ranks=1, micro_batches=None, mtp_depth=0, shares_prompts=True)
    items = items_of(rollout, range(3), shape)
    apart = pack(items, shape)
    assert [[len(row) for row in batch] for batch in apart[0]] == [[2, 1]]
    (((row,),),), width = join(apart, items, 4, 18)
    batch = build_batch(rollout, [row], 0, shape, items, width)
    assert batch["input_ids"].tolist() == [[5, 6, 3, 20, 30, 3, 21, 31, 3, 22, 32, 0]]
    assert batch["prefix_ids"].tolist() == [[-1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1]]
    into = torch.zeros(len(rollout.logprobs))
    collect(spread(torch.arange(1.0, 10.0), batch), batch, into)
    assert into.tolist() == list(range(1, 10))


def test_rows_are_dealt_so_that_ranks_compute_equally_much():
    lengths = [16] * 4 + [1] * 4 + [8, 7, 6, 5]
    shape = PackShape(seq_len=16, rows=1, ranks=2, micro_batches=None, mtp_depth=0)
    loads = [
        sum(sum(lengths[i] for i in row) for batch in batches for row in batch)
        for batches in pack(alone(lengths), shape)
    ]
    assert np.ptp(loads) <= 16


def test_a_pipeline_has_its_number_of_micro_batches():
    shape = PackShape(seq_len=16, rows=2, ranks=2, micro_batches=partial(max, 3), mtp_depth=1)
    assert [len(batches) for batches in pack(alone([4, 4]), shape)] == [3, 3]
    # More rows than a step has room for, as of episodes with several samples each.
    assert [[len(rows) for rows in batches] for batches in pack(alone([16] * 13), shape)] == [[2] * 4] * 2


@pytest.mark.parametrize(("schedule", "expected"), [("1F1B", [4, 9, 10, 11]), ("Interleaved1F1B", [1, 10, 10, 12])])
def test_a_pipeline_gets_a_number_of_micro_batches_that_its_schedule_takes(schedule, expected):
    assert [fitting_micro_batches(schedule, 4, least) for least in (1, 9, 10, 11)] == expected


def test_ranks_put_the_values_of_their_rows_together(monkeypatch):
    """A pipeline stage without the head has none, and takes part."""
    first, second, stage = (torch.full((3,), -torch.inf) for _ in range(3))
    collect(torch.tensor([[-0.5, 9.0], [9.0, -0.25]]), {"place": torch.tensor([[0, -1], [-1, 2]])}, first)
    collect(torch.tensor([[9.0, -2.0]]), {"place": torch.tensor([[-1, 1]])}, second)
    sent = [first.clone(), second.clone(), stage.clone()]
    monkeypatch.setattr(stepping.dist, "all_reduce", lambda values, _: values.copy_(torch.stack(sent).amax(0)))
    assert stepping.gathered(stage).tolist() == [-0.5, -2.0, -0.25]
