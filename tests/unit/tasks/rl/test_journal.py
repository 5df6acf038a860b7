"""Which rollouts and groups of an earlier start a run takes up."""

import pytest
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.run.plan import resolve_plan
from glm46.tasks.rl.journal import Journal
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout.records import Completion, EpisodeEnd, SessionSample, VersionSpan
from glm46.tasks.rl.samples import Rollout, Sample, to_arrays


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


SERVED = {"kind": "vllm", "urls": ["http://127.0.0.1:8000"], "max_staleness": 2}
CORRECTED = {"correction": {"level": "token"}}


@pytest.fixture
def journal_of(make_run):
    def make(rl: dict | None = None, rollout: dict | None = None, *, steps: int = 6, **tables) -> Journal:
        config = make_run("run", steps, CORRECTED | (rl or {}), SERVED | (rollout or {}), **tables)
        return Journal(resolve_plan(config, 1), "data", "tokenizer")

    return make


def written(journal: Journal, rollout: Rollout) -> None:
    journal.write(rollout)
    journal.finish()


def test_keys_that_do_not_decide_what_is_generated_change_nothing(journal_of, tmp_path):
    folder = journal_of().ahead_folder
    held_out = {"validation": [{"name": "all", "file": str(tmp_path / "prompts.jsonl"), "samples": 2}]}
    for rl, rollout in (
        (held_out, {}),
        ({}, {"urls": ["http://127.0.0.1:8001", "http://127.0.0.1:8002"], "launch": ["serve", "{folder}", "{port}"]}),
        ({}, {"deadline_seconds": 5.0, "weights": "broadcast", "weights_folder": "elsewhere"}),
        ({}, {"max_staleness": 1, "keep_latest_k": 3}),
    ):
        assert journal_of(rl, rollout).ahead_folder == folder, (rl, rollout)
    for rl, rollout, tables in (
        ({}, {"temperature": 0.7}, {}),
        ({}, {"max_new_tokens": 5}, {}),
        ({}, {"weights_dtype": "fp8-channel"}, {}),
        ({"rewards": [{"name": "format", "weight": 2.0}]}, {}, {}),
        ({}, {}, {"optimizer": {"lr": 1e-4}}),
    ):
        assert journal_of(rl, rollout, **tables).ahead_folder != folder, (rl, rollout, tables)


def test_a_program_that_was_edited_decides_what_is_generated(journal_of, tmp_path):
    file = tmp_path / "agent.py"
    environment = {"environment": {"kind": "command", "command": ["python3", str(file), "--hard"]}}
    file.write_text("print(0.5)")
    folder = journal_of(environment).ahead_folder
    assert journal_of(environment).ahead_folder == folder != journal_of().ahead_folder
    file.write_text("print(0.75)")
    assert journal_of(environment).ahead_folder != folder


def test_the_number_of_steps_matters_where_the_learning_rate_depends_on_it(journal_of):
    fixed = {"lr_scheduler": {"total_tokens": 10_000}}
    assert journal_of(steps=6).ahead_folder != journal_of(steps=7).ahead_folder
    assert journal_of(steps=6, **fixed).ahead_folder == journal_of(steps=7, **fixed).ahead_folder


def test_a_rollout_with_older_samples_than_allowed_is_generated_anew(journal_of):
    versions = [VersionSpan(0, 2), VersionSpan(1, 4)]
    completion = Completion([7, 9], [-1.0, -1.0], "length", versions, None)
    end = EpisodeEnd([SessionSample([5, 6], completion)])
    sample = Sample(Prompt([5, 6], "", None), 8, end, 1.0, {"format": 1.0})
    generated = Rollout(4, 8, 9, ("format",), False, to_arrays([sample], ["format"]))
    written(journal_of(), generated)
    other = journal_of().ahead_folder.parent / "0123456789abcdef"
    other.mkdir(parents=True)
    for staleness, is_read in ((2, True), (1, False)):
        journal = journal_of({}, {"max_staleness": staleness})
        assert (journal.read(4, is_inside=False, first_prompt=8) is not None) == is_read
        assert journal.read(4, is_inside=True, first_prompt=8) is not None, "weights have been trained on it"
    with pytest.raises(UserError, match="step_000008.json: missing, and the run goes on inside of this rollout"):
        journal_of().read(8, is_inside=True, first_prompt=9)
    written(journal_of(), generated)
    assert not other.exists(), "groups of another configuration are taken up by none"
