"""Episodes of programs: they learn as a function does, and a hostile one ends its own episode and nothing else."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.config.rl import RLConfig
from glm46.config.rollout import RolloutConfig as RolloutSection
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.storage.judge.jail import NO_JAIL
from glm46.tasks.rl import episodes
from glm46.tasks.rl.episode_checks import TASK_NAME, require_episodes, task_of, without
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import RewardRule
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rewards.function_pool import FunctionPool, environment_pool
from glm46.tasks.rl.rollout import programs, workers
from glm46.tasks.rl.rollout.records import Completion, SamplingRules
from glm46.tasks.rl.rollout.workers import task_text
from glm46.tasks.rl.rollouts import answered_lines, generate_rollout
from glm46.tasks.rl.sampling import Sampler
from tests.processes import HANG_SECONDS, wait_until
from tests.unit.tasks.rl.samples import InRounds
from tests.unit.tasks.rl.test_conversations import replying

PROGRAM, WORKER = (str(Path(__file__).with_name(name)) for name in ("program.py", "worker.py"))


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Echo(InRounds):
    """An engine whose answer depends on prompt and seed."""

    def __init__(self, tokenizer):
        self._tokenizer, self.rounds = tokenizer, []

    def generate(self, requests, rules):
        self.rounds.append(len(requests))
        found = []
        for request in requests:
            text = f"\n{(request.seed + sum(request.prompt)) % 997} of {len(request.prompt)}"
            tokens = [*self._tokenizer.encode(text).tolist(), self._tokenizer.special["<|user|>"]]
            found.append(Completion(tokens, [-0.5] * len(tokens), "stop", [7] * len(tokens), None))
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def make_sampler(tokenizer, request, tmp_path, monkeypatch):
    def make(kinds: list[str], environment: dict, rewards: tuple[str, ...] = ("format",)) -> Sampler:
        """``environment``: [rl.environment], and ``tries``, the runs of an episode that fails."""
        table = {"max_turns": 2, **environment}
        monkeypatch.setattr(episodes, "TRIES", table.pop("tries", 2))
        config = RLConfig.model_validate({
            "prompts_per_rollout": len(kinds), "group_size": 2, "prompts": {"file": "p.jsonl"},
            "rewards": [{"name": name} for name in rewards], "environment": table,
        }).resolved()  # fmt: skip
        engine, rules = Echo(tokenizer), SamplingRules(1.0, frozenset(stop_ids(tokenizer)), tokenizer.vocab_size)
        prompts = []
        for number, kind in enumerate(kinds):
            tokens = chat_prompt(tokenizer, [Message("user", f"Say {number}")], thinking=False)
            row = {"prompt": f"Say {number}", "label": str(number), "kind": kind}
            prompts.append(Prompt(tokens, row["prompt"], row["label"], f"p.jsonl:{number + 1}", row))
        made = Sampler(
            config, RolloutSection.model_validate({"max_new_tokens": 200}), tokenizer, engine, prompts, rules, 0,
            FunctionPool([RewardRule(name) for name in rewards]),
        )  # fmt: skip
        if config.environment.kind != "function":
            made.environment = CommandEpisodes(
                config.environment, config.prompts, tokenizer, tmp_path / "failed", needs_score="score" in rewards
            )
            request.addfinalizer(made.environment.close)
        return made

    return make


@pytest.fixture
def length(monkeypatch):
    """The reward "format" is the length of what the last turn says, computed in this process."""
    from glm46.tasks.rl.rewards import function_pool

    monkeypatch.setitem(function_pool._HERE, "format", lambda answer, options: float(len(answer.result)))


def score(of: Sampler, ends: list) -> list:
    return of.score(ends, {one.group: of.prompt(one.group) for one in ends})


def command(**keys) -> dict:
    return {"kind": "command", "command": [sys.executable, "-S", PROGRAM], "seconds": 100.0, **keys}


def worker(**keys) -> dict:
    return command(kind="worker", command=[sys.executable, "-S", WORKER], **keys)


KINDS = pytest.mark.parametrize("program", [command, worker])


@pytest.fixture
def starts(monkeypatch):
    """The commands of programs that were started."""
    found, started = [], programs.Programs.started

    def start(self, command, *others):
        found.append(command)
        return started(self, command, *others)

    monkeypatch.setattr(programs.Programs, "started", start)
    return found


@KINDS
def test_a_program_has_the_samples_of_a_function_that_replies_alike(program, make_sampler, length, starts):
    of_program = make_sampler(["two tries"] * 3, program(at_once=2))
    of_function = make_sampler(["two tries"] * 3, {"function": "a:b"})
    reply = lambda answer: (None if answer.history else answer.prompt, "")  # noqa: E731
    of_function.environment = replying(reply, of_function.tokenizer, 2)
    one, other = (generate_rollout(of, of.generate_groups, 7, 0) for of in (of_program, of_function))
    assert len(one) == 6 and len(one.logprobs) < (one.lengths - one.prompt_lengths).sum() and one.reward.min() > 0
    for field in fields(other):
        if field.name != "figures":
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name
    seconds = ("rollout_seconds", "reward_seconds")
    figures, expected = ({k: v for k, v in of.figures.items() if k not in seconds} for of in (one, other))
    assert figures == expected and sum(of_program.engine.rounds) == 12
    assert len(starts) == (2 if program is worker else 6)


@KINDS
def test_an_episode_of_two_samples_counts_once(program, make_sampler, length):
    of = make_sampler(["edited"], program())
    rollout = generate_rollout(of, of.generate_groups, 7, 0)
    assert rollout.episode.tolist() == [0, 0, 1, 1] and rollout.group.tolist() == [0] * 2
    assert rollout.figures["generated_samples"] == 2
    is_last = ["Another" in of.tokenizer.decode(rollout.prompt(number)) for number in range(4)]
    assert is_last == [True, False] * 2, "the sample with the last turn comes first"


@KINDS
def test_the_answer_of_a_program_that_made_room_is_finished(program, make_sampler, length):
    of = make_sampler(["compacts"], program())
    for end in of.generate_groups(0, 1):
        assert not end.fault and end.completion.finish == "stop"
        assert "A summary, after status 400." in of.tokenizer.decode(end.samples[0].prompt)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("others", [["two tries"], pytest.param(["two tries", "hang"], marks=pytest.mark.thorough)])
def test_hostile_programs_end_their_own_episodes_and_nothing_else(program, others, make_sampler, length):
    kinds = [*others, "flood", "large", "other session", "other key", "many turns", "two tries"]
    of, alone = (make_sampler(some, program(seconds=20.0, tries=1)) for some in (kinds, kinds[:1] * len(kinds)))
    samples, undisturbed = of.generate_groups(0, len(kinds)), alone.generate_groups(0, len(kinds))
    assert {sample.group for sample in samples} == {*range(len(kinds))}
    for sample, other in zip(samples, undisturbed, strict=True):
        kind = of.prompt(sample.group).row["kind"]
        said = {
            "hang": "it took more than 20 s", "flood": "more than 140 requests", "large": "10,000,000 bytes",
            "other session": "status 404", "other key": "status 401",
        }.get(kind)  # fmt: skip
        if said is None:
            assert not sample.fault, sample.fault
            cut = other.completion._replace(finish="length") if kind == "many turns" else other.completion
            assert sample.completion == cut and sample.samples[0].prompt == other.samples[0].prompt
        else:
            assert sample.fault.startswith("rl.environment: ") and said in sample.fault, (
                kind,
                sample.fault,
            )
    scored = score(of, samples)
    assert [one.reward is None for one in scored] == [bool(one.fault) for one in samples], "a failure is no reward of 0"


_NAMED = 'its line is not {"episode": "%s", "score": a number or null, "error": a text or null}: '


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("dies", "it ended with code 1: out of memory"), ("endless", f"{_NAMED}'more than 65,536 bytes'"),
        ("words", f"{_NAMED}'a debugging line'; write other words to standard error"),
        ("another episode", f"""{_NAMED}'{{"episode": "%s"}}'; write other words to standard error"""),
    ],
)  # fmt: skip
def test_a_worker_that_answers_wrongly_ends_its_episode_and_is_replaced(answers, said, make_sampler, length, starts):
    of = make_sampler([f"cut/{answers}", "cut"], worker(at_once=1, tries=1))
    ends = of.generate_groups(0, 2)
    is_bad = [of.prompt(one.group).row["kind"] != "cut" for one in ends]
    assert [bool(one.fault) for one in ends] == is_bad and sum(is_bad) == 2
    pattern = re.escape(said).replace("%s", "[0-9a-f]{16}")
    assert all(re.search(pattern, one.fault) for one in ends if one.fault), ends
    assert len(starts) == 2 + (not is_bad[-1]), "one for each that was ended, and one for the others"


@pytest.mark.parametrize(("answers", "count"), [("twice", 1), ("leaves", 4)])
def test_what_a_worker_does_behind_its_episode_is_no_fault_of_the_next_one(
    answers, count, make_sampler, length, starts
):
    of = make_sampler([f"cut/{answers}"] * 2, worker(at_once=1, tries=1))
    assert not any(one.fault for one in of.generate_groups(0, 2)) and len(starts) == count


@pytest.mark.slow
def test_a_silent_worker_is_ended(make_sampler, length):
    of = make_sampler(["cut/silent"], worker(seconds=2.0, tries=1))
    words = "it took more than 2 s (rl.environment.seconds) to write and flush its line"
    assert {one.fault for one in of.generate_groups(0, 1)} == {f"rl.environment: {words}"}


@pytest.mark.slow
def test_a_worker_has_its_scores_and_those_that_are_killed_between_rollouts_are_replaced(make_sampler, starts):
    of, said = make_sampler(["own score", "own score", "two tries", "many turns"], worker(), ("score",)), []
    of.environment._say = said.append
    ends = score(of, of.generate_groups(0, 4))
    found = {(of.prompt(one.group).row["kind"], of.prompt(one.group).label, one.reward) for one in ends}
    expected = [("own score", 0.0), ("own score", 1.0), ("two tries", None), ("many turns", None)]
    assert found == {(kind, str(number), reward) for number, (kind, reward) in enumerate(expected)}
    faults = {of.prompt(one.group).row["kind"]: one.fault for one in ends}
    why = 'its line has no number as "score", which [[rl.rewards]] reads; add it'
    assert faults["two tries"] == f"rl.environment.command: {why}"
    assert (
        faults["many turns"].startswith("rl.environment.command: a request was refused (")
        and why in faults["many turns"]
    )
    before, idle = len(starts), [one.program.process for one in of.environment._workers._idle]
    descriptors = [os.pidfd_open(process.pid) for process in idle]
    for process in idle:
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: all(process.returncode is not None for process in idle))
    said.clear()
    of.prompts = of.prompts[:2]
    assert not any(one.fault for one in of.generate_groups(0, 2)) and not said and len(starts) > before
    descriptors += [os.pidfd_open(one.program.process.pid) for one in of.environment._workers._idle]
    of.environment.close()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], HANG_SECONDS)[0], "it runs on"
        os.close(descriptor)
    assert len(descriptors) > len(idle)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"episode": "a", "score": 0.5}', ("", 0.5)), ('{"episode": "a", "score": null, "more": 1}', ("", None)),
        ('{"episode": "a"}', ("", None)), ('{"episode": "a", "score": true}', ("", 1.0)),
        ('{"episode": "a", "error": "no tool"}', ("no tool", None)), ('{"episode": "a", "error": null}', ("", None)),
        ('{"episode": "a", "error": "\\ud83d"}', ("?", None)),
        ('{"episode": "a", "error": "cut", "score": 1}', ("cut", 1.0)),
        ('{"episode": "b", "score": 0.5}', None), ('{"score": 0.5}', None), ('{"episode": "a", "score": "0.5"}', None),
        ('{"episode": "a", "score": NaN}', None), ('{"episode": "a", "score": 1e999}', None),
        (f'{{"episode": "a", "score": 1{"0" * 400}}}', None), ('{"episode": "a", "error": 1}', None),
        ('{"episode": "a", "score": [1]}', None), ("0.5", None), ("[]", None), ("", None), ("[" * 60_000, None),
    ],
)  # fmt: skip
def test_the_line_of_a_worker(line, found):
    assert workers._outcome(line.encode(), "a") == found


def test_a_failed_episode_is_run_again_and_a_group_of_one_is_left_out(make_sampler, length, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "jail_of_programs", lambda: NO_JAIL)  # it marks the first try of a prompt
    monkeypatch.setenv("STEPS_FOLDER", str(tmp_path / "marks"))
    said = []
    of = make_sampler(["fails once"] * 2, command(variables=["STEPS_FOLDER"]))
    of.environment._say = said.append
    assert not any(one.fault for one in of.generate_groups(0, 2)) and len(list(tmp_path.glob("marks-*"))) == 2
    assert said[0].startswith("rl.environment: it ended with code 3 (try 1 of 2") and len(said) == 2
    # Each prompt fails once more, and has no other try.
    for path in tmp_path.glob("marks-*"):
        path.unlink()
    of = make_sampler(["fails once", "cut"], command(variables=["STEPS_FOLDER"], tries=1))
    taken = of.generate_groups(0, 2)
    assert sorted(bool(one.fault) for one in taken) == [False, False, False, True]
    rollout = generate_rollout(of, lambda *_: taken, 7, 0)
    (left,) = {one.group for one in taken if of.prompt(one.group).row["kind"] == "cut"}
    assert rollout.group.tolist() == [left] * 2 and rollout.figures["dropped_samples"] == 1
    assert rollout.figures["dropped_groups"] == 1, "its other sample has a reward, but no baseline"
    undisturbed = generate_rollout(of, lambda *_: [one for one in taken if one.group == left], 7, 0)
    assert undisturbed.figures["dropped_groups"] == 0


def test_a_first_request_without_room_ends_the_run_before_a_step_with_key_and_remedy(make_sampler, length):
    of, said = make_sampler(["long"] * 2, command(tries=1)), []
    of.say = of.environment._say = said.append
    remedy = (
        r"rl\.environment: the prompt has \d+ tokens, and a conversation has at most \d+: \d+ of the row's prompt and "
        r"200 of rollout\.max_new_tokens, .* system prompt and tools count too; raise rollout\.max_new_tokens above "
        r"(\d+), within training\.seq_len"
    )
    with pytest.raises(UserError, match=f"2 of 2 samples have no reward, the first one because of {remedy}"):
        answered_lines(of, of.prompts, 0)
    causes = [line for line in said if "failure 1" in line or "2 of 2 samples are dropped" in line]
    assert len(causes) == 2 and all(re.search(remedy, line) for line in causes), said
    most = int(re.search(remedy, causes[0])[1])
    of.section = of.section.model_copy(update={"max_new_tokens": most})
    assert any("no reward: rl.environment: the prompt" in line for line in answered_lines(of, of.prompts, 8))
    of.section = of.section.model_copy(update={"max_new_tokens": most + 1})
    (one, *_) = of.generate_groups(0, 1)
    assert not one.fault and len(one.completion.tokens) > 1, "the engine of this test has no limit"


@pytest.mark.slow
def test_the_output_of_a_failed_program_can_be_read_afterwards(make_sampler, length, tmp_path):
    said = []
    of = make_sampler(["fails"], command(tries=5))
    of.config, of.environment._say = of.config.model_copy(update={"group_size": 1}), said.append
    of.generate_groups(0, 1)
    files = sorted((tmp_path / "failed").iterdir())
    assert [file.name for file in files] == [f"failure_{number:06d}.txt" for number in (1, 2, 4)]
    assert all(str(file) in line for file, line in zip(files, said, strict=True))
    content = files[2].read_text()
    assert "it ended with code 1: ValueError: no tool" in content and "try 4 of 5; failure 4" in content
    assert "it begins\n" in content and "Traceback" in content and 'raise ValueError("no tool")' in content
    assert "p.jsonl:1" in content
    # A program that scores: its own output. A folder that cannot be written ends nothing.
    of = make_sampler(
        ["two tries"], command(score_command=[sys.executable, "-c", "print('much')"], tries=1), ("score",)
    )
    of.generate_groups(0, 1)
    assert (tmp_path / "failed/failure_000001.txt").read_text().endswith("much\n")
    of.environment._folder, of.environment._failures, of.environment._say = tmp_path / "no folder", 0, said.append
    of.environment._folder.touch()
    samples = of.generate_groups(0, 1)
    assert said[3].startswith("rl.environment.score_command: ") and "no folder" in said[3] and len(said) == 5
    assert "(try 1 of 1; failure 1; its output cannot be written: " in said[3] and all(one.fault for one in samples)


def test_a_row_too_large_for_a_variable_is_refused_before_work(tmp_path):
    given = {"prompts_per_rollout": 1, "prompts": {"file": "p.jsonl"}, "environment": command()}
    table = RLConfig.model_validate(given)
    prompts = [Prompt([1], "", None, f"p.jsonl:{line}", {"files": "x", "label": "y" * 10**6}) for line in (1, 2)]
    require_episodes(table.environment, table.prompts, prompts)  # the label is not handed over
    most = 32 * os.sysconf("SC_PAGE_SIZE") - len(f"{TASK_NAME}=") - 1 - len(json.dumps({"files": ""}))

    def start() -> int:
        return subprocess.run(["true"], env={TASK_NAME: task_text(task_of(prompts[1], table.prompts))}).returncode

    prompts[1] = prompts[1]._replace(row={"files": "x" * most})
    require_episodes(table.environment, table.prompts, prompts)
    assert start() == 0
    prompts[1] = prompts[1]._replace(row={"files": "x" * (most + 1)})
    with pytest.raises(OSError, match="too long"):
        start()
    said = rf"^p.jsonl:2: the row has {most + 14:,} bytes .*\(1 of 2 rows .*leave large values out"
    with pytest.raises(UserError, match=said):
        require_episodes(table.environment, table.prompts, prompts)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("", ""),
        ('# /// script\n# dependencies = ["numpy>=1", "no-such-package; sys_platform == \'win32\'"]\n# ///\n', ""),
        ('# /// script\n# dependencies = [\n#     "no-such-package>=2",\n# ]\n# ///\n',
         "agent.py declares 'no-such-package>=2', and .*PackageNotFoundError.*install it for that Python"),
        ('# /// script\n# dependencies = ["numpy<1"]\n# ///\n', f"'numpy<1', and .* its version: {np.__version__};"),
        ('# /// script\n# dependencies = ["numpy<"]\n# ///\n', "agent.py: .*PEP 723.*; correct it"),
        ('# /// script\n# dependencies = [\n# ///\n', "agent.py: .*PEP 723.*; correct it"),
    ],
)  # fmt: skip
def test_packages_that_a_script_declares_are_looked_for_before_work(head, said, tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(f"#!/usr/bin/env python3\n{head}raise SystemExit('it must not run')\n")
    for words in ([sys.executable, "-u", str(file)], [sys.executable, "-c", "pass", str(file)]):
        table = RLConfig.model_validate({"prompts_per_rollout": 1, "environment": command(command=words)})
        if said and "-c" not in words:
            with pytest.raises(UserError, match=said):
                require_episodes(table.environment, table.prompts, [])
        else:
            require_episodes(table.environment, table.prompts, [])


@pytest.mark.slow
def test_the_scoring_program_sees_label_messages_and_files_and_the_first_one_neither(make_sampler, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    script = (
        "import json, os, sys\ngiven = json.load(sys.stdin)\nfolder = os.environ['GLM46_EPISODE_FOLDER']\n"
        "assert open(folder + '/found.txt').read() == 'None False' and not os.listdir('.')\n"
        "assert given['messages'][-1]['role'] == 'assistant'\nprint('score')\nprint(int(given['row']['label']) + 0.5)"
    )
    of = make_sampler(
        ["file"] * 2, command(score_command=[sys.executable, "-c", script], timeout_seconds=100.0), ("score",)
    )
    rollout = generate_rollout(of, of.generate_groups, 7, 0)
    assert sorted(rollout.reward.tolist()) == [0.5, 0.5, 1.5, 1.5]
    of = make_sampler(["file"], command(score_command=[sys.executable, "-c", "print('much')"]), ("score",))
    samples = score(of, of.generate_groups(0, 1))
    assert all(one.reward is None and "no number" in one.fault for one in samples)
    of = make_sampler(["own score", "own score", "two tries"], command(), ("score",))
    ends = score(of, of.generate_groups(0, 3))
    own = {(of.prompt(one.group).row["kind"], of.prompt(one.group).label, one.reward) for one in ends}
    assert own == {("own score", "0", 0.0), ("own score", "1", 1.0), ("two tries", "2", None)}
    assert all("it printed nothing; print the score" in one.fault for one in ends if one.reward is None)
    # Refused turns end a program that does not expect it; the words of its error are not the cause.
    of = make_sampler(["many turns"], command(), ("score",))
    faults = {one.fault for one in score(of, of.generate_groups(0, 1))}
    words = ("a request was refused (", "max_turns", "it printed nothing; print the score in the last line")
    assert all(word in fault for word in words for fault in faults) and faults


def test_standard_error_is_no_score_and_hides_none(make_sampler):
    sampler = make_sampler(["score and warning", "score in errors"], command(tries=1), ("score",))
    ends = score(sampler, sampler.generate_groups(0, 2))
    rewards = {(sampler.prompt(end.group).row["kind"], end.reward) for end in ends}
    assert rewards == {("score and warning", 0.75), ("score in errors", None)}
    assert all("it printed nothing; print the score" in end.fault for end in ends if end.reward is None)
    for script, expected in (("print(0.5); sys.stderr.write('late')", 0.5), ("sys.stderr.write('1.0')", None)):
        judge = [sys.executable, "-c", f"import sys; {script}"]
        sampler = make_sampler(["cut"], command(score_command=judge, tries=1, timeout_seconds=100.0), ("score",))
        assert {end.reward for end in score(sampler, sampler.generate_groups(0, 1))} == {expected}


def test_a_folder_that_cannot_be_walked_ends_nothing(make_sampler, length, tmp_path, monkeypatch):
    """Nested deeper than Python recurses; a fault that a program causes in the trainer fails its own episode."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sampler = make_sampler(["nests folders"], command(tries=1))
    assert not any(end.fault for end in sampler.generate_groups(0, 1))
    assert not [path for path in tmp_path.iterdir() if path.name != "failed"], "no folder stays"

    def full_disk():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full_disk)
    faults = {end.fault for end in sampler.generate_groups(0, 1)}
    assert faults == {"rl.environment: OSError: [Errno 28] No space left on device"}


@pytest.mark.parametrize(
    ("output", "is_cut", "score"),
    [
        ("0.5\n", False, 0.5), ("talk\n1", False, 1.0), ("1\ntalk", False, None), ("nan", False, None),
        ("", True, None),
        ("0.25\nTraceback\nBadRequestError: 400", True, 0.25), ("Traceback\nBadRequestError", True, None),
    ],
)  # fmt: skip
def test_the_score_of_a_program_is_its_last_line_and_of_one_that_was_cut_its_last_number(output, is_cut, score):
    assert workers.last_number(output, is_cut=is_cut) == score


def test_a_script_that_is_not_there_is_refused_before_a_program_starts():
    with pytest.raises(
        UserError, match=r"rl.environment.command = .*: mine/agnt.py: no such file from .*; correct this word"
    ):
        found_program([sys.executable, "mine/agnt.py"])


@KINDS
def test_a_stop_ends_the_programs(program, make_sampler, length, monkeypatch):
    started, end_of = list[int](), programs.end_of

    def end_and_see(process):
        started.append(os.pidfd_open(process.pid))
        return end_of(process)

    monkeypatch.setattr(programs, "end_of", end_and_see)
    of = make_sampler(["hang"], program())
    of.is_stopped = lambda: bool(of.engine.rounds)
    assert of.generate_groups(0, 1) is None
    for descriptor in list(started):
        assert select.select([descriptor], [], [], HANG_SECONDS)[0], "it runs on"
        os.close(descriptor)
    assert started
    of.is_stopped = lambda: False
    generate = of.engine.generate
    of.engine.generate = lambda *_: [Completion([], [], "abort", [], None)] * 2
    assert of.generate_groups(0, 1) is None, "another rank was stopped first"
    of.engine.generate = generate
    of.prompts = [of.prompts[0]._replace(row={**of.prompts[0].row, "kind": "two tries"})]
    assert not any(one.fault for one in of.generate_groups(0, 1)), "it can go on afterwards"


def test_a_file_of_a_command_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("agent.py", "words"):
        (tmp_path / name).touch()
    assert found_program(["python3", "agent.py", "words"]) == ["python3", str(tmp_path / "agent.py"), "words"]


def test_what_is_no_program_is_refused(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("print(1)\n")
    refused = {
        ("no-such-program",): "no-such-program: no such program", (str(file),): "not executable; put its inter",
        ("python3 agent.py",): r'write each word by itself: \["python3", "agent.py"\]',
    }  # fmt: skip
    for words, message in refused.items():
        for key in ("command", "score_command"):
            table = command(**{key: list(words)})
            with pytest.raises(UserError, match=rf"rl.environment.{key} = .*{message}"):
                environment_pool(RLConfig.model_validate({"prompts_per_rollout": 1, "environment": table}).environment)


def test_a_row_is_shown_without_its_label():
    row = {"prompt": "a", "reward_model": {"ground_truth": 1, "style": 2}}
    assert without(row, "reward_model.ground_truth") == {"prompt": "a", "reward_model": {"style": 2}}
    assert without(row, "label") == row and without({"label": 1}, "label") == {}
    assert json.dumps(row) and row["reward_model"]["ground_truth"] == 1
