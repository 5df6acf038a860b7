"""Which rollouts and groups of an earlier start a run takes up."""

import json
import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.run.plan import resolve_plan
from glm46.tasks.rl import source_files as source_module
from glm46.tasks.rl.journal import Journal
from glm46.tasks.rl.rollout.background import BackgroundGeneration
from glm46.tasks.rl.rollout.records import Completion, Episode, Request
from glm46.tasks.rl.samples import Samples, to_samples
from glm46.tasks.rl.source_files import source_files


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


def rollout_of(sample: Completion, step: int, first: int, following: int) -> Samples:
    end = Episode([sample], group=8, reward=1.0, parts={"format": 1.0})
    return to_samples([end], ["format"], step=step, first_prompt=first, next_prompt=following)


def written(journal: Journal, rollout: Samples) -> None:
    journal.write(rollout)
    journal.finish()


def test_keys_that_do_not_decide_what_is_generated_change_nothing(journal_of, tmp_path):
    folder = journal_of().ahead_folder
    held_out = {"validation": [{"name": "all", "file": str(tmp_path / "prompts.jsonl"), "samples": 2}]}
    for rl, rollout in (
        (held_out, {}),
        ({}, {"urls": ["http://127.0.0.1:8001", "http://127.0.0.1:8002"], "launch": ["serve", "{folder}", "{port}"]}),
        ({}, {"deadline_seconds": 5.0, "weights": "broadcast", "weights_folder": "elsewhere"}),
        ({}, {"max_staleness": 1}),
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


@pytest.mark.parametrize(("where", "tables"), [
    ("judges.py", {"rewards": [{"name": "judges:judge"}]}),
    ("judges.py", {"environment": {"function": "judges:judge"}}),
    ("tables/prices.py", {"rewards": [{"name": "judges:judge"}]}),
    ("tables/__init__.py", {"rewards": [{"name": "judges:judge"}]}),
    ("tables/deep/rates.py", {"rewards": [{"name": "judges:judge"}]}),
    ("prices.json", {"rewards": [{"name": "judges:judge", "options": {"file": "FOLDER/prices.json"}}]}),
    ("helpers.py", {"environment": {"kind": "command", "command": ["python3", "FOLDER/agent.py"]}}),
    ("helpers.py", {"environment": {"kind": "worker", "command": ["python3", "FOLDER/agent.py"]}}),
    ("helpers.py", {"environment": {"kind": "command", "command": ["sh", "x"],
                                    "score_command": ["python3", "FOLDER/agent.py"]}}),
    ("prices.json", {"environment": {"kind": "command", "command": ["python3", "x", "--prices=FOLDER/prices.json"]}}),
    ("shop/agent.py", {"environment": {"kind": "command", "command": ["python3", "-m", "shop.agent"]}}),
    ("shop/__main__.py", {"environment": {"kind": "command", "command": ["python3", "-m", "shop"]}}),
])  # fmt: skip
def test_corrected_code_of_the_user_decides_what_is_generated(journal_of, tmp_path, monkeypatch, where, tables):
    """Also the modules that a function or a program imports; none is run to find them."""
    folder = tmp_path / "code"
    fails = "raise AssertionError('this was run')\n"
    for name, text in {
        "judges.py": "import json, numpy, missing_module\nfrom tables import prices\n",
        "tables/__init__.py": "", "tables/prices.py": "from .deep import rates\n",
        "tables/deep/rates.py": "import judges\n",
        "prices.json": "{}", "agent.py": "def main():\n    import helpers\n", "helpers.py": "",
        "shop/agent.py": "", "shop/__main__.py": "from shop.agent import main\n", "unused.py": "",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + fails)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    tables = json.loads(json.dumps(tables).replace("FOLDER", str(folder)))
    before = journal_of(tables).ahead_folder
    (folder / "unused.py").write_text("changed = 1")
    assert journal_of(tables).ahead_folder == before
    (folder / where).write_text((folder / where).read_text() + "changed = 1\n")
    assert journal_of(tables).ahead_folder != before


def test_what_judges_in_glm46_decides_and_installed_packages_do_not(make_run, tmp_path):
    """A corrected built-in reward is a corrected reward."""
    prompts = {"file": str(tmp_path / "prompts.jsonl"), "label_key": "label"}
    config = make_run("run", 6, {"rewards": [{"name": "math"}, {"name": "code"}], "prompts": prompts})
    names = {file.name for file in source_files(config.rl)}
    assert {"answer.py", "equal_results.py", "maths.py", "code.py", "tested_program.py", "limited.py"} <= names
    assert all("site-packages" not in file.parts for file in source_files(config.rl)) and len(names) < 40


def test_a_large_file_of_a_command_is_known_by_its_size_and_time(journal_of, tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "_LARGE", 8)
    index = tmp_path / "index.db"
    index.write_text("many passages")
    environment = {"environment": {"kind": "command", "command": ["python3", str(index)]}}
    hash_file = source_module.hash_file
    monkeypatch.setattr(
        source_module, "hash_file", lambda path: pytest.fail("it is read") if path == index else hash_file(path)
    )
    folder = journal_of(environment).ahead_folder
    assert journal_of(environment).ahead_folder == folder
    os.utime(index, (1, 1))
    assert journal_of(environment).ahead_folder != folder


def test_groups_of_another_form_of_lines_go(journal_of, monkeypatch):
    of = journal_of()
    earlier = of.ahead_folder.with_name(of.ahead_folder.name.partition("-")[0])  # before forms had numbers
    earlier.mkdir(parents=True)
    (earlier / "prompt_00000000").write_bytes(b"AAAA\n")
    assert "group" not in of.outlook(0, 0, 0)
    sample = Completion([7], [-1.0], "length", [0], None, prompt=[5])
    written(of, rollout_of(sample, 0, 0, 1))
    assert not earlier.exists()


def test_the_number_of_steps_matters_where_the_learning_rate_depends_on_it(journal_of):
    fixed = {"lr_scheduler": {"total_tokens": 10_000}}
    assert journal_of(steps=6).ahead_folder != journal_of(steps=7).ahead_folder
    assert journal_of(steps=6, **fixed).ahead_folder == journal_of(steps=7, **fixed).ahead_folder


def test_a_start_says_which_rollouts_it_reads(journal_of):
    journal = journal_of({}, {"max_staleness": 2})
    assert journal.outlook(0, 0, 0) == "", "a new run"
    for step in (3, 4, 5, 7):
        answer = Completion([7], [-1.0], "length", [step - (step == 5)], None, prompt=[5])
        made = rollout_of(answer, step, 2 * step, 2 * step + 2)
        made.figures["staleness_max"] = int(step == 5)
        written(journal, made)

    def check_steps(journal: Journal, *at: int) -> list[int]:
        """Those that `read` takes, after which the line is checked."""
        step, within, prompt = at
        found, first = [], step - within
        while (one := journal.read(first, is_inside=within > 0 and not found, first_prompt=prompt)) is not None:
            found, first, prompt = [*found, first], first + 1, one.next_prompt
        line = journal.outlook(*at)
        if found:
            assert line.startswith(f"rollout: steps {step + 1} to {found[-1] + 1} are read from the journal"), line
        else:
            assert f"none is read from the journal {journal.folder}: it has none for step {step + 1}" in line
        return found

    assert check_steps(journal, 3, 0, 6) == [3, 4, 5], "that of step 6 is missing"
    assert check_steps(journal, 3, 0, 7) == check_steps(journal, 6, 0, 12) == [] and check_steps(journal, 7, 0, 14) == [
        7
    ]
    assert check_steps(journal_of({}, {"max_staleness": 0}), 3, 0, 6) == [3, 4], "the next one has older samples"
    other = journal_of({}, {"temperature": 0.5})
    assert check_steps(other, 3, 0, 6) == []
    two_steps = {"steps": 6, "global_batch_size": 4, "local_batch_size": 1, "seq_len": 32}
    inside = journal_of({}, {"temperature": 0.5}, training=two_steps).outlook(4, 1, 8)
    assert inside.startswith("rollout: steps 5 to 5 are read"), "weights have been trained on that of step 3"


def test_a_start_says_which_groups_of_other_rollouts_go_on(journal_of):
    """Those that wait or will be handed out, not those that were taken before a kill."""
    journal = journal_of()
    made_samples = [Completion([7], [-1.0], "length", [3], None, prompt=[5])]
    made = rollout_of(*made_samples, 3, 6, 9)
    made.waiting = [(6, 3)]
    journal.ahead_folder.mkdir(parents=True)
    requests = SimpleNamespace(goes_on=True, error=None, start=lambda: None)
    begun: list = []
    generating = BackgroundGeneration(requests, journal.ahead_folder, lambda _, members: begun.extend(members))
    for number in (6, 8, 9):
        generating.add(number, [Request([5], 1, 1)], 3)
    generating.start()
    for member in begun:
        member.finish(Episode(made_samples))
    generating.take(3, set(), lambda: False)
    left = journal.ahead_folder / "prompt_00000009.host.7.tmp"
    left.touch()  # by a kill
    written(journal, made)
    behind = f"in {journal.ahead_folder} go on, unless they are too old"
    assert journal.outlook(3, 0, 6).endswith(f"not generated again; 2 groups {behind}")
    none = journal.outlook(4, 0, 10)
    assert none.startswith("rollout: none is read from the journal") and none.endswith(
        f"functions, keys and this format; samples and rewards are made anew; 1 group {behind}"
    )


def test_a_rollout_with_older_samples_than_allowed_is_generated_anew(journal_of):
    completion = Completion([7, 9], [-1.0, -1.0], "length", [2, 4], None, prompt=[5, 6])
    generated = rollout_of(completion, 4, 8, 9)
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
