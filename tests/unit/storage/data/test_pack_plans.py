"""Plans of best-fit packing on disk: the same rows as without, whoever makes them, whatever became of the file."""

import errno
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.storage.data import best_fit, pack_plans
from glm46.storage.data.best_fit import concatenate, plan_groups
from glm46.storage.data.loader import BatchLayout, SampleSpan, TrainSource, build_train_loader
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.pack_plans import keep_plan, plan_of
from glm46.storage.data.packing import open_tokens

LENGTHS = np.random.default_rng(0).geometric(1 / 20, 400).tolist()


@pytest.fixture
def source(make_source, counting_documents, tmp_path):
    return make_source(tmp_path / "s", counting_documents(LENGTHS), documents_per_shard=90)


def equal(one, two):
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True))


def planned(folder, seq_len, share=(0.0, 1.0)):
    manifest = load_manifest(folder)
    return concatenate(plan_groups([open_tokens(manifest, "train", share).doc_ends()], seq_len))


def unwritable(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def never(*_, **__):
    raise AssertionError("planned again")


@settings(max_examples=50)
@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 12), st.lists(st.integers(0, 60), max_size=4))
def test_groups_do_not_depend_on_the_blocks_that_documents_come_in(lengths, group, cuts):
    ends = np.cumsum(lengths, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "_GROUP", group)
        blocks = concatenate(list(plan_groups(np.split(ends, sorted(cuts)), 32)))
        assert equal(blocks, concatenate(plan_groups([ends], 32)))
        assert blocks.piece_lengths.sum() == sum(lengths)


@pytest.mark.parametrize("share", [(0.0, 1.0), (0.25, 0.75)])
def test_the_stream_is_the_same_with_and_without_a_file(source, monkeypatch, tmp_path, share):
    def batches():
        chosen = [TrainSource("s", load_manifest(source), 1.0, "best_fit")]
        layout = BatchLayout(64, 1, 2, 0, 1, True)
        loader = build_train_loader(chosen, layout, seed=3, start_sample=5, span=SampleSpan(documents=share))
        return [batch for batch, _ in zip(loader, range(40), strict=False)]

    with monkeypatch.context() as patch:
        patch.setattr(pack_plans, "_write", unwritable)
        without = batches()
    assert not list(source.glob("packs-*"))
    made = batches()
    (file,) = source.glob("packs-64-*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(pack_plans, "plan_groups", never)
        read = batches()
        # A folder that cannot be written is no hindrance where the plan is there.
        patch.setattr(pack_plans.FileLock, "acquire", unwritable)
        assert equal(plan_of(load_manifest(source), 64, share), planned(source, 64, share))
    for one, two, three in zip(without, made, read, strict=True):
        assert all(torch.equal(one[key], two[key]) and torch.equal(one[key], three[key]) for key in one)


def test_a_damaged_plan_is_made_again_and_another_ones_is_not_taken(source):
    manifest, expected = load_manifest(source), planned(source, 64)
    keep_plan(manifest, 64)
    (file,) = source.glob("packs-64-*")
    whole = file.read_bytes()
    other = bytearray(whole)
    other[-9] ^= 1  # one bit of a length
    keep_plan(manifest, 32)
    (stranger,) = source.glob("packs-32-*")
    for content in (whole[:-1], whole[:5], b"", bytes(other), b"rubbish" * 99, stranger.read_bytes()):
        file.write_bytes(content)
        assert equal(keep_plan(manifest, 64), expected)
        assert file.read_bytes() == whole
    # What a process that was killed at work left behind does not stay.
    (source / ".packs.partial").mkdir()
    (source / ".packs.partial" / "row_starts").write_bytes(b"x" * 100)
    file.unlink()
    assert equal(keep_plan(manifest, 64), expected)
    assert sorted(f.name for f in source.iterdir() if "packs" in f.name) == [".packs.lock", stranger.name, file.name]


def test_other_text_has_another_plan(source, make_source, counting_documents, tmp_path):
    keep_plan(load_manifest(source), 64)
    other = make_source(tmp_path / "t", counting_documents(LENGTHS[1:]), documents_per_shard=90)
    keep_plan(load_manifest(other), 64)
    assert [f.name for f in source.glob("packs-*")] != [f.name for f in other.glob("packs-*")]


_BUILDER = """
import sys, time
from pathlib import Path
from glm46.storage.data import pack_plans
from glm46.storage.data.manifest import load_manifest
folder, start = Path(sys.argv[1]), Path(sys.argv[2])
original = pack_plans.plan_groups
def slow(*arguments):
    print("planning")
    time.sleep(0.3)
    return original(*arguments)
pack_plans.plan_groups = slow
manifest = load_manifest(folder)
print("ready", flush=True)
while not start.exists():
    time.sleep(0.002)
plan = pack_plans.plan_of(manifest, 64)
print(pack_plans._hash(plan))
"""


@pytest.mark.slow
def test_of_many_processes_one_plans(source, tmp_path):
    command = [sys.executable, "-c", _BUILDER, str(source), str(tmp_path / "start")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    (tmp_path / "start").touch()
    outputs = [run.communicate()[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert sorted(map(len, outputs)) == [1, 1, 1, 2]
    assert {output[-1] for output in outputs} == {pack_plans._hash(planned(source, 64))}
