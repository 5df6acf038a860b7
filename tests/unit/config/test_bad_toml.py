"""Every kind of mistake in a TOML file, and the message it earns: where it was written, key, value, rule, remedy.

Text of others does not reach a terminal with its control characters.
"""

import errno
import itertools
import json
import os
import struct
import sys
import time
from pathlib import Path

import pytest

from glm46.commands.prepare import read_recipe
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.config.printable import printable
from glm46.config.rules_pipeline import _wanted
from glm46.storage.huggingface.folder_tensors import find_tensors

SOUND = """
[model]
flavor = "debug"
[model.shape]
[training]
steps = 10
seq_len = 128
[[data.sources]]
name = "a"
path = "data/a"
"""


def faults_of(text: str, folder: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    """Messages about a file of this text, without the file's folder."""
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, world_size=world_size)
    return [fault.replace(str(path), "run.toml") for fault in caught.value.faults]


def test_the_sound_file_is_sound(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    assert load_config(path).training.seq_len == 128


def test_all_faults_come_at_once(tmp_path):
    """Types, ranges, unknown keys and rules across sections in one go; a rule that reads a faulty key keeps quiet."""
    text = """
        [model]
        flavor = "debug"
        [model.shape]
        num_attention_heads = 7
        [training]
        seq_len = "long"
        global_batch_size = 7
        local_batch_size = 2
        tokens = 5
        steps = 5
        [optimizer]
        lr = -1.0
        beta3 = 0.1
    """
    assert faults_of(text, tmp_path) == [
        'run.toml: training.seq_len = "long": must be a valid integer (Tokens per sequence)',
        "run.toml: optimizer.lr = -1.0: must be greater than 0 (Peak learning rate)",
        "run.toml: optimizer.beta3: unknown key; did you mean 'beta2'?",
        "run.toml: training.tokens = 5, training.steps = 5: both given; remove one of them",
        "run.toml: data.sources: no source to train on; add a [[data.sources]] table with name and path",
        "run.toml: model.shape.num_attention_heads = 7: must be a multiple of model.shape.num_key_value_heads = 2; "
        "take 6 or 8",
        "run.toml: training.global_batch_size = 7: must be a multiple of 2 (training.local_batch_size = 2 times 1 "
        "data-parallel rank); take 6 or 8",
    ]


def test_gather_in_fp8_needs_even_shards(tmp_path):
    text = SOUND.replace("[training]", "n_routed_experts = 12\n[training]")  # which 3 ranks divide
    text += '[float8]\nrecipe_name = "tensorwise"\nenable_fsdp_float8_all_gather = true\n'
    (fault,) = faults_of(text, tmp_path, world_size=3)
    assert "float8.enable_fsdp_float8_all_gather = true: layers.0.self_attn.q_proj has" in fault
    assert "rows, which 3 ranks" in fault and "set it to false" in fault
    # Of GLM-4.7-Flash the latents of keys have 576 rows, no multiple of 128.
    (fault,) = faults_of(text.replace('"debug"\n', '"GLM-4.7-Flash"\n').replace("n_routed_experts = 12", ""), tmp_path,
                         world_size=128)  # fmt: skip
    assert "layers.0.self_attn.kv_a_proj_with_mqa has 576 rows, which 128 ranks" in fault


def test_batch_is_checked_against_the_processes(tmp_path):
    text = SOUND.replace("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = 12")
    text = text.replace("[training]", "n_routed_experts = 12\n[training]")  # which 3 ranks divide
    (tmp_path / "sound.toml").write_text(text)
    assert load_config(tmp_path / "sound.toml", world_size=3).training.global_batch_size == 12
    (fault,) = faults_of(text, tmp_path, world_size=2)
    assert "must be a multiple of 8 (training.local_batch_size = 4 times 2 data-parallel ranks); take 8 or 16" in fault
    (fault,) = faults_of(text, tmp_path, world_size=4)
    assert fault.endswith("; take 16")


def test_broken_toml_names_line_and_column(tmp_path):
    (fault,) = faults_of("[model]\nflavor 'debug'\n", tmp_path)
    assert fault.startswith("run.toml:2:8: not valid TOML: Expected '=' after a key")
    assert fault.endswith("; the line reads: flavor 'debug'")


@pytest.mark.parametrize(("content", "words"), [
    (b"[model]\n\xff", "byte 8 is not UTF-8 text; save the TOML file as UTF-8"),
    ("a = 'é'".encode("latin-1"), "byte 5 is not UTF-8 text; save"), ("a = 1".encode("utf-16"), "byte 0 is not"),
    (bytes(range(256)), "not UTF-8 text; save"), (b"a = 1\0", ":1:6: not valid TOML: .*; the line reads"),
    ("folder", "cannot be read: Is a directory; name the TOML file of a run"),
    ("run.toml", "cannot be read: Too many levels of symbolic links; name the TOML file of a run"),
    ("other", "cannot be read: Too many levels of symbolic links; name the TOML file of a run"),
])  # fmt: skip
@pytest.mark.parametrize("verb", ["train", "recipe"])
def test_a_file_that_cannot_be_read_is_one_line(content, words, verb, tmp_path):
    """Other content, a folder, and links that lead to themselves or to each other."""
    path = tmp_path / "run.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to(content)
        (tmp_path / "other").symlink_to(path)
    with pytest.raises(UserError, match=words) as caught:
        load_config(path) if verb == "train" else read_recipe(path, {})
    assert len(caught.value.faults) == 1 and caught.value.faults[0].startswith(str(path))


def test_a_file_without_permission_is_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root reads every file
    with pytest.raises(UserError, match="cannot be read: Permission denied; name the TOML file of a run"):
        load_config(path)


def test_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "debug.toml").write_text(SOUND)
    with pytest.raises(UserError, match=r"cannot be read: No such file or directory; did you mean .*debug\.toml\?"):
        load_config(tmp_path / "debgu.toml")
    with pytest.raises(UserError, match="there is no folder"):
        load_config(tmp_path / "nowhere" / "debug.toml")
    with pytest.raises(UserError, match="Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "wanted"),
    [
        ("1F1B", 2, 1, "at least 2"), ("1F1B", 2, 2, None), ("GPipe", 2, 1, None),
        ("DualPipeV", 2, 3, "at least 4"), ("DualPipeV", 2, 4, None), ("ZBVZeroBubble", 2, 1, None),
        ("Interleaved1F1B", 2, 3, None), ("Interleaved1F1B", 2, 5, "a number that divides into 2 equal rounds"),
        ("Interleaved1F1B", 2, 6, None),
        ("InterleavedZeroBubble", 2, 7, "a number that divides into 3 equal rounds"),
    ],
)  # fmt: skip
def test_micro_batches_fit_the_schedule(schedule, ranks, micro_batches, wanted, tmp_path):
    """The bounds are those at which the schedules of torch raise."""
    text = SOUND.replace(
        "[training]",
        f'[parallelism]\npipeline_parallel_degree = {ranks}\npipeline_parallel_schedule = "{schedule}"\n[training]',
    ).replace("steps = 10", f"steps = 10\nlocal_batch_size = 2\nglobal_batch_size = {2 * micro_batches}")
    if wanted is None:
        (tmp_path / "sound.toml").write_text(text)
        assert load_config(tmp_path / "sound.toml", world_size=ranks).parallelism.stages >= ranks
        return
    (fault,) = faults_of(text, tmp_path, world_size=ranks)
    begin, _, fitting = fault.partition("; take ")
    assert begin == (
        f"run.toml: training.global_batch_size = {2 * micro_batches}: a step of "
        f"{counted(micro_batches, 'micro-batch')} of 2 sequences; schedule {schedule} over {ranks} ranks needs {wanted}"
    )
    load_config(tmp_path / "run.toml", (f"--training.global_batch_size={fitting}",), world_size=ranks)


def test_every_step_of_a_ramp_fits_the_schedule(tmp_path):
    text = SOUND.replace(
        "[training]",
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n[training]',
    ).replace("steps = 10", "steps = 10\nlocal_batch_size = 1\nglobal_batch_size = [[0, 4], [99, 8]]")
    (fault,) = faults_of(text, tmp_path, world_size=2)
    assert "a step of 5 micro-batches of 1 sequence; schedule Interleaved1F1B over 2 ranks needs" in fault
    assert "needs a number that divides into 2 equal rounds; change the ramp" in fault
    # A jump takes only the values on its two sides.
    (tmp_path / "run.toml").write_text(text.replace("[[0, 4], [99, 8]]", "[[0, 4], [99, 4], [99, 8]]"))
    load_config(tmp_path / "run.toml", world_size=2)


def test_a_wrong_number_of_micro_batches_comes_soon_or_never():
    """So that a ramp to any number, as a slip of the hand makes it, is judged at once."""
    for schedule, ranks in itertools.product(PIPELINE_SCHEDULES, (2, 3, 4, 7)):
        wrong = [count for count in range(1, 200) if _wanted(schedule, ranks, count)]
        for first in range(1, 100):
            soon = {count for count in wrong if first <= count <= first + 2 * ranks}
            assert bool(soon) == any(count >= first for count in wrong), (schedule, ranks, first)


@pytest.mark.parametrize(("override", "said"), [
    ("--model.shape.num_hidden_layers=1000000000", "must be less than or equal to 1024"),
    ("--model.shape.num_nextn_predict_layers=1000000000", "must be less than or equal to 1024"),
    ("--model.shape.n_routed_experts=1000000000000", "must be less than or equal to 65536"),
    ("--parallelism.data_parallel_shard_degree=1000000000000", "16 experts of a layer sharded over 1000000000000"),
    ("--parallelism.expert_parallel_degree=1000000000", "must divide model.shape.n_routed_experts = 16"),
    ("--validation.steps=0", "validation.steps = 0: must be at least 1, or -1 for all"),
    ("--job.dump_folder=s3://bucket/x", 'job.dump_folder = "s3://bucket/x": is a URL'),
    ("--checkpoint.load_path=s3://bucket/x", 'checkpoint.load_path = "s3://bucket/x": is a URL'),
    ("--checkpoint.folder=https://bucket/x", 'checkpoint.folder = "https://bucket/x": is a URL'),
    ("--checkpoint.folder=s3://bucket/../x", 'checkpoint.folder = "s3://bucket/../x": is not one prefix of a store'),
    ("--checkpoint.initial_load_path=s3://b/a?x", 'initial_load_path = "s3://b/a?x": is not one prefix of a store'),
    ("--model.tokenizer_path=https://a.b/c", 'model.tokenizer_path = "https://a.b/c": is a URL'),
])  # fmt: skip
def test_a_slip_of_the_hand_is_answered_at_once(override, said, tmp_path):
    """Nothing that rules and planner compute grows with a number that a person may write."""
    began = time.process_time()
    text = SOUND.replace("[[data", "[validation]\nenable = true\n[[data")
    faults = faults_of(text, tmp_path, override)
    assert said in faults[0] and time.process_time() - began < 60


def test_no_message_has_the_password_of_a_url(tmp_path):
    for key in ("checkpoint.folder", "job.dump_folder", "checkpoint.initial_load_path"):
        fault = faults_of(SOUND, tmp_path, f"--{key}=s3://user:pass-word@host/x")[0]
        assert key in fault and "pass-word" not in fault


@pytest.mark.parametrize(("number", "noun", "text"), [(1, "step", "1 step"), (0, "step", "0 steps"),
                                                      (2, "process", "2 processes"), (1, "process", "1 process"),
                                                      (4096, "rank", "4,096 ranks")])  # fmt: skip
def test_a_number_agrees_with_its_noun(number, noun, text):
    assert counted(number, noun) == text


TITLE = "\x1b]0;OWNED\x07"
"""The sequence that changes the title of a terminal's window."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünï\tcode\n", "plain, ünï\tcode\n"),
        (TITLE, "\ufffd]0;OWNED\ufffd"),
        ("a\rb\bc\x9bd\u202ee", "a\ufffdb\ufffdc\ufffdd\ufffde"),
    ],
)
def test_control_characters_are_replaced_one_by_one(text, shown):
    assert printable(text) == shown


def test_the_message_of_an_error_names_a_tensor_without_its_control_characters(tmp_path):
    header = json.dumps({TITLE: {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    shard = tmp_path / "model-00001-of-00001.safetensors"
    shard.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard.name}}))
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe"}')
    with pytest.raises(UserError) as raised:
        find_tensors(tmp_path)
    assert "OWNED" in str(raised.value)
    assert TITLE not in str(raised.value)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_goes_to_a_pipe_as_it_is(is_terminal, monkeypatch):
    from glm46.engine.inference.display import _shown

    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert (TITLE in _shown(TITLE)) is not is_terminal
