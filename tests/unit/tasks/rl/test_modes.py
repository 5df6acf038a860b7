"""Bounds that end a run, and the size of the journal, with a small policy in one process."""

import errno
import json
import math
import re
import time
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from glm46.commands.rl import _token_lines, rl_command
from glm46.config.errors import UserError
from glm46.engine.reliability.run_lock import refuse_small_disk
from glm46.engine.reliability.stop import EXIT_STOPPED, StopRequest
from glm46.files import array_file
from glm46.operate.launch.train_rank import train
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.plan import resolve_plan
from glm46.storage.checkpoint.integrity import published_steps, step_folder
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata
from glm46.tasks.rl import journal, loop, packing, rollouts
from glm46.tasks.rl.journal import read_rollout, removable
from glm46.tasks.rl.journal_files import rollout_steps
from glm46.tasks.rl.rollout import local
from tests.builders import metric_rows
from tests.step_tensors import tensor_hashes
from tests.terminal import terminal


def rows(config) -> list[dict]:
    return metric_rows(config.job.dump_folder)


@pytest.mark.slow
def test_a_stop_between_a_rollout_and_its_first_step_loses_no_prompt(make_run, monkeypatch):
    """As while rewards are judged. The run goes on with that rollout, and ends as one that was never stopped."""
    seldom = {"interval": 10, "keep_latest_k": 2, "async_mode": "disabled"}  # so that the stop saves
    whole, stopped = (make_run(name, 3, checkpoint=seldom) for name in ("whole", "stopped"))
    torch.seed()  # as each process begins
    assert train(whole) == 0
    stop, generated, generate = StopRequest(), [], loop.generate_rollout

    def draw_then_stop(*arguments):
        generated.append(generate(*arguments))
        if len(generated) == 2:
            stop.signal_name = "SIGTERM"
        return generated[-1]

    monkeypatch.setattr(loop, "generate_rollout", draw_then_stop)
    torch.seed()
    assert train(stopped, stop) == EXIT_STOPPED and published_steps(stopped.checkpoint_folder) == [1]
    torch.seed()
    assert train(stopped) == 0 and len(generated) == 3
    assert tensor_hashes(stopped.checkpoint_folder, 3) == tensor_hashes(whole.checkpoint_folder, 3)


@pytest.mark.slow
def test_a_run_on_kept_tokens_agrees_with_its_engine(make_run, monkeypatch):
    """The first step has the engine's distributions, of policy and reference; without the sets it has not."""
    kl = {"weight": 0.1, "where": "loss", "estimator": "k3"}
    rollout = {"top_p": 0.7, "top_k": 40, "max_new_tokens": 12}
    config = make_run("kept", 2, {"algorithm": "grpo", "kl": kl}, rollout)
    assert train(config) == 0
    first = rows(config)[0]
    assert first["mismatch_logprob"] < 1e-6 and abs(first["mismatch_kl"]) < 1e-10 and abs(first["reference_kl"]) < 1e-10
    samples = read_rollout(Path(config.job.dump_folder, "rollouts"), 0)
    assert 1 < samples.most_kept < 40, "both filters exclude tokens"
    assert first["entropy"] < math.log(samples.most_kept)
    monkeypatch.setattr(packing, "_kept", lambda samples, place: torch.full((len(place), 1, place.shape[1]), -1))
    other = make_run("whole", 1, {"algorithm": "grpo", "kl": kl}, rollout)
    assert train(other) == 0
    assert rows(other)[0]["mismatch_logprob"] > 0.1


@pytest.mark.slow
def test_drafts_change_no_sample_and_those_that_were_kept_are_a_column(make_run, tmp_path, monkeypatch, capsys):
    began, made = local._continuation, []

    def begin(request):
        made.append(began(request))
        made[-1].accepted = 1  # a policy whose prediction layers were never trained keeps no drafts
        return made[-1]

    monkeypatch.setattr(local, "_continuation", begin)
    for name in ("plain", "drafts"):
        made.clear()
        rollout, model = {"speculative": name == "drafts"}, {"num_nextn_predict_layers": 1}
        config = make_run(name, 2, rollout=rollout, model=model)
        assert train(config) == 0
        kept = [row["draft_acceptance_ratio"] for row in rows(config) if "draft_acceptance_ratio" in row]
        generated = [made[start : start + 8] for start in (3, 11)] if name == "drafts" else []
        assert kept == [sum(one.accepted for one in of) / sum(one.drafted for one in of) for of in generated]
        assert ("drafts kept" in capsys.readouterr().out) == (name == "drafts")
    one, other = (read_rollout(tmp_path / name / "rollouts", 1) for name in ("plain", "drafts"))
    assert one.targets.tolist() == other.targets.tolist() and len(one.logprobs) > 8
    assert abs(one.logprobs - other.logprobs).max() < 1e-5  # FP32 sums of longer calls


@pytest.mark.slow
def test_prediction_layers_learn_from_samples_and_the_policy_does_not_learn_from_them(make_run, tmp_path):
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{number} is", "label": "abcab"}) + "\n" for number in range(20)))
    rl, found, learned = {"algorithm": "grpo", "warm_up_rollouts": 10, "prompts": {"file": str(file)}}, {}, {}
    for weight in (0.0, 0.3):
        config = make_run(
            f"run {weight}", 5, rl, model={"num_nextn_predict_layers": 1},
            mtp={"loss_weight": weight}, optimizer={"lr": 1e-2},
            training={
                "steps": 5, "global_batch_size": 8, "local_batch_size": 1, "seq_len": 32, "max_norm": 1e9,
            },
        )  # fmt: skip
        assert train(config) == 0
        found[weight] = tensor_hashes(config.checkpoint_folder, 5)
        learned[weight] = [row.get("mtp_loss") for row in rows(config)]
    assert set(learned[0.0]) == {None}, "nothing is computed with the weight 0"
    losses = [loss for loss in learned[0.3] if loss is not None]
    assert losses[0] > losses[-1] + 0.5 and losses[0] < 7
    different = {name for name in found[0.0] if found[0.0][name] != found[0.3][name]}
    assert different and all(".mtp." in name for name in different), different
    assert "model.mtp.0.eh_proj.weight" in different
    said = " ".join(type(config.rollout).model_fields["speculative"].description.split())
    assert "[rl] trains these layers on the samples, by mtp.loss_weight." in said


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["whole", "stopped"])
def test_a_terminal_shows_the_reward_of_each_step_and_no_bar_stands_above_the_end(make_run, monkeypatch, ends):
    """However a run ends."""
    config, stop = make_run("run", 3), StopRequest()

    def generate_then_stop(self, progress):
        if ends == "stopped" and progress.step == 1:
            stop.signal_name = "SIGINT"
        return begin(self, progress)

    begin = loop.RolloutLoop.rollout
    monkeypatch.setattr(loop.RolloutLoop, "rollout", generate_then_stop)
    with terminal() as shown:
        train(config, stop)
        screen = re.sub(r"\x1b\[[0-9;]*m", "", shown())
    bars = re.findall(r"step (\d) \u2501.*?% (\S+) (\S+)", screen)
    assert {word for _, word, _ in bars} == {"reward"} and "non-finite" not in screen, screen
    rewards = {row["step"]: f"{row['reward']:.3f}" for row in rows(config) if "reward" in row}
    assert rewards and all(rewards[int(step)] == value for step, _, value in bars if int(step) in rewards)
    log = (Path(config.job.dump_folder) / "log.txt").read_text()
    lines = [line.split("  ", 1)[1] for line in log.splitlines() if " reward " in line and " left" in line]
    assert len(lines) == len(rewards) and all(line in screen for line in lines)
    last = {"whole": "metrics      "}.get(ends, "The same command continues")
    assert screen.rindex("\u2501") < screen.rindex("\x1b[?25h") < screen.rindex(last)


@pytest.mark.slow
def test_the_planned_size_of_a_checkpoint_is_that_on_the_disk_and_no_checkpoint_needs_no_disk(make_run):
    """With the critic. A disk is refused by this size, which therefore is never more than a save writes."""
    config = make_run("run", 1, {"algorithm": "ppo"})
    assert train(config) == 0
    planned = checkpoint_size(resolve_plan(config, 1)).total
    kinds = read_metadata(step_folder(config.checkpoint_folder, 1))[0].state_dict_metadata
    written = {name: prod(kind.size) * kind.properties.dtype.itemsize for name, kind in kinds.items()}
    assert any(name.startswith("critic.") for name in written)
    small = sum(size for name, size in written.items() if size <= 64 or name.startswith("rng."))  # routers' biases
    assert sum(written.values()) - small <= planned <= sum(written.values())
    huge = {"model": {"vocab_size": 2**40}}
    refuse_small_disk(resolve_plan(make_run("none", 1, checkpoint={"enable": False}, **huge), 1), 1)
    with pytest.raises(UserError, match=r"checkpoint\.folder = .*GiB"):
        refuse_small_disk(resolve_plan(make_run("none", 1, **huge), 1), 1)


@pytest.mark.slow
def test_samples_are_shown_with_what_was_computed_for_their_tokens(make_run, tmp_path, capsys):
    """The penalty for length is a column, and a run on other prompts is refused by their file."""
    overlong = {"overlong_share": 0.5}

    def refusal(rl: dict) -> str:
        with pytest.raises(UserError) as caught:
            train(make_run("run", 2, rl))
        return caught.value.faults[0]

    config = make_run("run", 1, overlong)
    assert train(config) == 0
    assert "reads labels" not in (said := capsys.readouterr().out) and "rounds" not in said
    (row,) = [row for row in rows(config) if "loss" in row]
    shown = ["--samples", "3", "--tokens"]
    with pytest.raises(UserError, match=r"generated with the tokenizer .*this one is .*--tokenizer"):
        rl_command(["inspect", config.job.dump_folder, *shown, "--tokenizer", "builtin"])
    assert rl_command(["inspect", config.job.dump_folder, *shown]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_run = ["--tokenizer", config.model.tokenizer_path]
    assert rl_command(["inspect", config.job.dump_folder, *shown, *of_run]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    heads = [number for number, line in enumerate(lines) if line.startswith("── sample")]
    rollout = read_rollout(Path(config.job.dump_folder, "rollouts"), 0)
    assert len(heads) == 3 and "8 samples of prompts 0 to 1" in lines[0]
    lengths = rollout.lengths - rollout.prompt_lengths
    assert row["overlong_penalty"] == pytest.approx(-(lengths - 3).clip(0).mean() / 3) and row["overlong_penalty"] < 0
    names = ["logprob", "old", "ratio", "advantage", "weight"]
    for sample, head in enumerate(heads):
        assert f"reward {rollout.reward[sample]:g} " in lines[head]
        first = 1 + next(at for at in range(head, len(lines)) if lines[at].startswith("advantage "))  # a text has lines
        start = first + 1 + len(rollout.prompt(sample))
        assert lines[first].split() == ["token", "mask", *names]
        assert all(line.endswith("    0") for line in lines[first + 1 : start]), "nothing of the prompt"
        table = lines[start : start + len(rollout.completion(sample))]
        assert {line.split()[-len(names) - 1] for line in table} == {"1"}
        values = [float(line.split()[-len(names)]) for line in table]
        assert values == pytest.approx(rollout.logprobs[rollout.of_targets == sample], abs=1e-4)
        old, ratio, _, weight = zip(*(map(float, line.split()[-4:]) for line in table), strict=True)
        assert old == pytest.approx(values, abs=1e-4) and set(ratio) == set(weight) == {1.0}, "they agree"
    prompts, other = tmp_path / "prompts.jsonl", tmp_path / "other.jsonl"
    other.write_text(prompts.read_text().replace("is", "was"))
    fault = refusal(overlong | {"prompts": {"file": str(other)}})
    assert fault.startswith(f'rl.prompts.file = "{other}": ') and f'was saved with "{prompts}"' in fault, fault
    other.rename(prompts)
    assert refusal(overlong).startswith("rl.prompts.file: holds other prompts than before")


def test_columns_of_tokens_stand_below_their_names_however_wide_text_and_numbers_are():
    texts = ["a", "\n", " " * 30, "漢字", "e\u0301", "antidisestablishment"]
    tokenizer = SimpleNamespace(decode=lambda ids: texts[ids[0]])
    columns = {"logprob": np.array([-1.0, -123456.5, 0.0, -2.0]), "weight": np.array([1.0, 2.0, 1e9, 4.0])}
    mask = np.array([False, False, True, True, True, True])
    head, *lines = _token_lines(tokenizer, np.arange(6), mask, columns)
    assert len({cell_len(line) for line in (head, *lines[2:])}) == 1
    ends = [cell_len(head[: head.index(name) + len(name)]) for name in ("mask", "logprob", "weight")]
    for line, is_generated in zip(lines, mask, strict=True):
        cells = [
            next(at for at in range(len(line) + 1) if cell_len(line[:at]) >= end)
            for end in ends[: 1 + 2 * is_generated]
        ]
        assert all(line[at - 1] != " " and line[at : at + 1] in ("", " ") for at in cells), line


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gspo", "ppo"])
def test_a_rollout_of_equal_rewards_says_so_and_unread_labels_are_named(
    make_run, tmp_path, capsys, monkeypatch, algorithm
):
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{number} is", "label": "1"}) + "\n" for number in range(20)))
    rl = {
        "rewards": [{"name": "repetition"}],
        "dynamic_sampling": True,
        "prompts": {"file": str(file)},
    }
    monkeypatch.setattr(rollouts, "MOST_ROUNDS", 2)
    config = make_run("run", 3, rl)
    assert train(config) == 0
    said = capsys.readouterr().out
    assert "none of these reads labels, and 20 prompts have one under 'label'" in said
    shown = [line for line in said.splitlines() if "after 2 rounds only 0 of 2 groups are worth a step" in line]
    assert [line.partition("; ")[2] for line in shown] == [
        f"the rollout of step {step} goes on with 0 samples" for step in (0, 1)
    ], "the first, second, fourth and so on"
    assert [row["generated_samples"] for row in rows(config) if "generated_samples" in row] == [16] * 3
    skipped = [line for line in said.splitlines() if "skipped: no rank has a token to learn from" in line]
    assert len(skipped) == 3 and {row["skipped_steps"] for row in rows(config) if "loss" in row} == {0}


@pytest.mark.slow
def test_a_checkpoint_waits_for_the_journal_and_a_full_disk_ends_the_run(make_run, tmp_path, monkeypatch):
    """The journal is bounded."""
    monkeypatch.setattr(journal, "NEWEST_KEPT", 1)
    seen, write, save = [], journal.replace_durably, CheckpointManager.save

    def slow(*arguments):
        time.sleep(0.2)
        return write(*arguments)

    def look(*arguments, **options):
        seen.append(sorted(path.name for path in (tmp_path / "run" / "rollouts").glob("step_*"))[-3:])
        return save(*arguments, **options)

    def full(path, _):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for module in (journal, array_file):
        monkeypatch.setattr(module, "replace_durably", slow)
    monkeypatch.setattr(CheckpointManager, "save", look)
    config, folder = make_run("run", 4), tmp_path / "run" / "rollouts"
    assert train(config) == 0
    assert seen == [[f"step_{step:06d}.{kind}" for kind in ("fields", "json", "safetensors")] for step in range(4)]
    assert all(row["overhead_ratio"] < 1 for row in rows(config) if "loss" in row)
    # Steps 2 and 3 had a checkpoint when rollout 3 was written; they lie behind rollouts 1 and 2.
    assert rollout_steps(folder) == [1, 2, 3]
    assert {path.stem for path in folder.iterdir()} == {f"step_{step:06d}" for step in (1, 2, 3)}
    monkeypatch.setattr(array_file, "replace_durably", full)
    with pytest.raises(UserError, match=r"step_000000\.safetensors cannot be written: No space left"):
        train(make_run("full", 2))


def test_a_resume_finds_its_rollouts_and_older_ones_go():
    steps = [0, 4, 8, 12, 16, 20]
    # From step 10, inside of rollout 8: that one. From step 16, the newest: 12, which ends there, and all later ones.
    assert removable(steps, [10, 16], 1) == [0, 4]
    assert removable(steps, [16], 1) == [0, 4, 8]
    assert removable(steps, [16], 4) == [0, 4]
    assert removable(steps, [], 1) == [], "without a checkpoint a run begins anew, and all rollouts are read again"
