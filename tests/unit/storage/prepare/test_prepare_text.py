"""From a user's files to a source that the loader reads, through the command line and in this process."""

import hashlib
import json
import os
import random
import resource

import numpy as np
import pytest

from glm46.cli import main
from glm46.commands.prepare import read_recipe
from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.tokenizer_files import tokenizer_files
from glm46.storage.prepare import duplicates, parts, sharding
from glm46.storage.prepare.pipeline import prepare_text
from glm46.storage.prepare.tally import amount
from tests.builders import call_here


def write_lines(file, texts):
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return file


def texts_of(manifest, split="train"):
    tokenizer, part = load_tokenizer("builtin"), manifest.splits[split]
    tokens = np.empty(part.tokens, np.int64)
    _, ends = TokenStream(manifest.folder, part, manifest.vocab_size).read(0, tokens)
    return [tokenizer.decode(t[:-1]) for t in np.split(tokens, np.concatenate(ends)[:-1])]


def prepare(tmp_path, target="out", report=print, **keys):
    recipe = {
        "input": (str(tmp_path / "in"),),
        "output": str(tmp_path / target),
        "held_out": 0.0,
        "processes": 1,
    } | keys
    return prepare_text(TextRecipe(**recipe), report=report)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Input of a preparation in this process, which starts faster and sees patches."""
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def folder_of_processes(tmp_path):
    """Input of a preparation in processes of its own, as a user has it."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_the_verb_makes_a_source_and_inspect_shows_it(folder_of_processes, tmp_path, capsys):
    write_lines(folder_of_processes / "a.jsonl", [f"story number {i} " * 30 for i in range(40)])
    output = str(tmp_path / "web")
    options = ["--input", str(folder_of_processes), "--output", output, "--held_out", "0.2", "--deduplicate", "exact"]
    assert main(["prepare", *options]) == 0
    manifest = load_manifest(output)
    assert manifest.source == "web"
    assert manifest.splits["train"].documents + manifest.splits["validation"].documents == 40
    capsys.readouterr()
    assert main(["inspect", output, "--rows", "1", "--seq_len", "200"]) == 0
    shown = capsys.readouterr().out
    assert f"{manifest.splits['train'].tokens:,} tokens" in shown and "story number" in shown
    assert "ends here, its last position has no target" in shown


@pytest.mark.parametrize("piece_bytes", [pytest.param(100, marks=pytest.mark.slow), 3_000, 10**9])
def test_small_pieces_change_nothing(folder, tmp_path, monkeypatch, piece_bytes):
    texts = [f"{i} " * (i % 50 + 1) for i in range(300)]
    write_lines(folder / "a.jsonl", texts)
    monkeypatch.setattr(parts, "PIECE_BYTES", piece_bytes)
    # Hundreds of pieces, but not all of them open at once.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, limits[1]))
    try:
        manifest = prepare(tmp_path, deduplicate="near" if piece_bytes == 100 else "exact")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # Repeated numbers are not similar texts.
    assert texts_of(manifest) == texts


@pytest.mark.slow
def test_neither_the_memory_for_duplicates_nor_interruptions_change_a_byte(folder, tmp_path, monkeypatch):
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["one", "two", "three", "four"], k=60)) for _ in range(150)]
    texts += [rng.choice(texts) + rng.choice(["", "", " five"]) for _ in range(250)]
    write_lines(folder / "a.jsonl", texts)
    monkeypatch.setattr(parts, "PIECE_BYTES", 8_000)
    roomy = prepare(tmp_path, "roomy", name="s")
    assert roomy.dropped["near duplicate"] > 20 and roomy.dropped["exact duplicate"] > 100
    # Memory for a few keys: they are read many times.
    monkeypatch.setattr(duplicates, "_KEY_BYTES", 10**6)
    monkeypatch.setattr(sharding, "DUPLICATES_BYTES", 16 * 10**6)
    read, calls = sharding.map_arrays, []
    for stop in (3, 40, 300):

        def interrupted(file, remedy, stop=stop):
            calls.append(file)
            if len(calls) == stop:
                raise KeyboardInterrupt
            return read(file, remedy)

        for module in (sharding, duplicates):
            monkeypatch.setattr(module, "map_arrays", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, "tight", name="s")
        calls.clear()
    for module in (sharding, duplicates):
        monkeypatch.setattr(module, "map_arrays", read)
    tight = prepare(tmp_path, "tight", name="s")
    assert (tight.splits, tight.dropped) == (roomy.splits, roomy.dropped)
    assert sorted(f.name for f in (tmp_path / "tight").iterdir()) == ["manifest.json", "train-00000.safetensors"]


def test_of_equal_texts_the_first_is_kept_over_all_files(folder, tmp_path):
    write_lines(folder / "a.jsonl", ["one", "two", "one"])
    write_lines(folder / "b.jsonl", ["two", "three"])
    manifest = prepare(tmp_path, deduplicate="exact")
    assert texts_of(manifest) == ["one", "two", "three"]
    assert manifest.dropped == {"exact duplicate": 2}


def test_bad_documents_are_counted_and_named(folder, tmp_path):
    (folder / "a.jsonl").write_text('{"text": "good"}\nrubbish\n{"body": 1}\n')
    lines = []
    manifest = prepare(tmp_path, report=lines.append)
    assert manifest.dropped == {"no text in field 'text'": 1, "not JSON": 1}
    assert f"skipped, not JSON: 1, such as {folder / 'a.jsonl'} line 2" in "\n".join(lines)


def test_too_many_bad_documents_stop_the_work(folder, tmp_path):
    (folder / "a.jsonl").write_text('{"text": "good"}\n' + "rubbish\n" * 4)
    with pytest.raises(UserError, match="4 documents cannot be read, max_bad = 3") as caught:
        prepare(tmp_path, max_bad=3)
    assert "a.jsonl line 2" in caught.value.faults[1]
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.lock").exists()
    # Finished work is kept: raising max_bad is enough.
    assert texts_of(prepare(tmp_path, max_bad=4)) == ["good"]


def test_an_option_of_many_values_may_be_repeated(folder, tmp_path, capsys):
    write_lines(folder / "a.jsonl", ["of a"])
    write_lines(folder / "b.jsonl", ["of b"])
    command = ["prepare", "--input", str(folder / "a.jsonl"), "--input", str(folder / "b.jsonl")]
    command += ["--held_out", "0", "--output", str(tmp_path / "out")]
    assert main(command) == 0, capsys.readouterr().err
    assert texts_of(load_manifest(tmp_path / "out")) == ["of a", "of b"]


def test_a_source_without_a_document_to_train_on_is_refused(folder, tmp_path):
    write_lines(folder / "a.jsonl", ["alone"])
    with pytest.raises(UserError, match="held_out = 0.999999 .*1 document, which is all.*held_out = 0"):
        prepare(tmp_path, held_out=0.999999)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]  # nor unfinished work
    assert texts_of(prepare(tmp_path, held_out=0.0)) == ["alone"]


def test_rearranging_needs_the_tokens_for_it(folder, tmp_path):
    write_lines(folder / "a.jsonl", ["text"])
    content = json.loads(tokenizer_files(load_tokenizer("builtin"), max_length=64)["tokenizer.json"])
    content["added_tokens"] = [token for token in content["added_tokens"] if "code_middle" not in token["content"]]
    (tmp_path / "own.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="fim_rate = 0.5: .*own.json.*<|code_middle|>.*fim_rate = 0"):
        prepare(tmp_path, fim_rate=0.5, tokenizer=str(tmp_path / "own.json"))


def test_input_without_any_text_is_refused(folder, tmp_path):
    (folder / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="no documents remain"):
        prepare(tmp_path)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_recipe_keys_are_checked_all_at_once(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('input = ["x"]\nholdout = 0.1\nfilter = "poetry"\n')
    with pytest.raises(UserError) as caught:
        read_recipe(file, {"held_out": 2})
    faults = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 4
    for part in (
        f"{file}: output: required, but absent (Folder to write",
        f"{file}: holdout: unknown key; did you mean 'held_out'?",
        f"{file}: filter = \"poetry\": must be 'none' or 'prose'",
        "command line: held_out = 2: must be less than 1 (Share of the documents",
    ):
        assert part in faults


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('input = ["x"]\noutput = "y"\nheld_out = 0.1\n')
    recipe = read_recipe(file, {"held_out": 0.3})
    assert (recipe.input, recipe.output, recipe.held_out) == (("x",), "y", 0.3)


def test_every_rule_filters_and_counts_its_documents(folder, tmp_path):
    good = [f"def f{i}(x):\n    return x * {i} + {i * i} - sum(range({i + 3}))\n" * (i + 1) for i in range(60)]
    exam = "assert solve([3, 1, 2], key=lambda pair: pair[1]) == [(1, 2), (3, 4)], 'not sorted at all'"
    longest = good[-1]
    write_lines(folder / "a.jsonl", [*good, longest + "# tail\n", good[3], "def broken(:\n", exam + "\nx = 1\n"])
    write_lines(tmp_path / "exam.jsonl", [exam])
    manifest = prepare(tmp_path, verify="python", decontaminate=(str(tmp_path / "exam.jsonl"),), held_out=0.3)
    assert manifest.dropped["does not parse as Python"] == 1
    assert manifest.dropped["exact duplicate"] == 1
    assert manifest.dropped["holds evaluation text"] == 1
    assert manifest.dropped["near duplicate"] >= 1
    kept = texts_of(manifest) + texts_of(manifest, "validation")
    assert longest in kept and longest + "# tail\n" not in kept
    assert len(kept) == len(good) + 4 - sum(manifest.dropped.values())


def test_evaluation_text_behind_a_linked_folder_is_compared_with(folder, tmp_path):
    exam = " ".join(f"word{i}" for i in range(40))
    write_lines(folder / "a.jsonl", ["other text " * 20, "before " + exam])
    (tmp_path / "away").mkdir()
    write_lines(tmp_path / "away" / "exam.jsonl", [exam])
    (tmp_path / "exams").mkdir()
    (tmp_path / "exams" / "link").symlink_to(tmp_path / "away")
    manifest = prepare(tmp_path, decontaminate=(str(tmp_path / "exams"),))
    assert manifest.dropped == {"holds evaluation text": 1}


@pytest.mark.parametrize("name", ["exam.jsonl", "exam.json"])
def test_evaluation_text_without_the_field_stops_the_work(folder, tmp_path, name):
    """Otherwise nothing would be compared with it."""
    write_lines(folder / "a.jsonl", ["text"])
    (tmp_path / name).write_text('{"prompt": "a question"}')
    with pytest.raises(UserError, match=f"decontaminate: .*{name} line 1: no text in field 'text'.*text_key = 'text'"):
        prepare(tmp_path, decontaminate=(str(tmp_path / name),))


@pytest.mark.parametrize("held_out, texts, remedy", [
    (0.01, 5, "set held_out = 0.5, which holds out about 2 of 5 documents"),
    (0.001, 50, "set held_out = 0.1, which holds out about 5 of 50 documents"),
    (0.01, 1, "give more documents"),
])  # fmt: skip
def test_a_share_that_holds_out_nothing_is_said_with_one_that_does(folder, tmp_path, held_out, texts, remedy):
    write_lines(folder / "a.jsonl", [f"text number {i}" for i in range(texts)])
    said = []
    manifest = prepare(tmp_path, held_out=held_out, deduplicate="exact", report=said.append)
    assert manifest.splits["validation"].documents == 0
    assert f"no document is held out with held_out = {held_out}; to validate on this source, {remedy}" in said[-1]


@pytest.mark.parametrize("count, words", [
    (0, "0 tokens"), (999, "999 tokens"), (1234, "1.23 k tokens"), (5_678_900, "5.68 M tokens"), (2e9, "2 G tokens"),
])  # fmt: skip
def test_amounts_are_given_in_the_unit_that_they_reach(count, words):
    assert amount(count, "tokens") == words
    assert amount(1500, "B") == "1.5 kB" and amount(12, "B") == "12 B"


def test_held_out_text_is_not_rearranged(folder, tmp_path):
    texts = [f"x = {i}\nprint(x)\n" * 5 for i in range(80)]
    write_lines(folder / "a.jsonl", texts)
    manifest = prepare(tmp_path, deduplicate="exact", held_out=0.3, fim_rate=1.0)
    assert all("<|code_middle|>" in text for text in texts_of(manifest))
    assert set(texts_of(manifest, "validation")) < set(texts)


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_bytes_and_another_one_starts_anew(folder_of_processes, tmp_path):
    write_lines(folder_of_processes / "a.jsonl", [f"text {i} " * 20 for i in range(50)])
    one, two = prepare(tmp_path, "one", name="s"), prepare(tmp_path, "two", name="s", processes=2)
    assert [s.sha256 for s in one.splits["train"].shards] == [s.sha256 for s in two.splits["train"].shards]
    other = prepare(tmp_path, "three", name="s", fim_rate=0.5)
    assert [s.sha256 for s in one.splits["train"].shards] != [s.sha256 for s in other.splits["train"].shards]


STEPS = "Step 1: two\nStep 2: four\n#### 4"
SOLUTIONS = {
    "maths": ([("Half of 1? It is \\boxed{\\frac12}.", 0.5), ("2 + 2? The answer is 5.", "4"), ("3 + 4? Seven.", "7"),
               ("1 + 1?\n#### 2", None)],
              1, {"wrong answer": 1, "states no final answer": 1, "no answer to check against": 1}),
    "steps": ([(STEPS, 4), (f"Again.\n{STEPS}", None), (f"No.\n{STEPS}", "5"), ("Four.", None)],
              2, {"wrong answer": 1, "no steps": 1}),
}  # fmt: skip
"""By rule: texts with the known result, if there is one, of which the first ones are kept; and causes of the others."""


@pytest.mark.parametrize("rule", SOLUTIONS)
def test_solutions_are_compared_with_the_known_result(folder, tmp_path, rule):
    solutions, kept, dropped = SOLUTIONS[rule]
    keys = {"text_key": "problem", "answer_key": "result"} if rule == "maths" else {}
    of_text, of_answer = keys.values() or ("text", "answer")
    rows = [{of_text: text} | ({} if result is None else {of_answer: result}) for text, result in solutions]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = prepare(tmp_path, verify=rule, deduplicate="exact", **keys)
    assert texts_of(manifest) == [text for text, _ in solutions[:kept]] and manifest.dropped == dropped


@pytest.mark.parametrize("form, kept", [
    ("none", ["une cl\u00e9\r\nde\rla", "une cle\u0301\nde\nla", "une cl\u00e9\nde\nla"]),
    ("newlines", ["une cl\u00e9\nde\nla", "une cle\u0301\nde\nla"]),
    ("nfc", ["une cl\u00e9\nde\nla"]),
])  # fmt: skip
def test_texts_in_other_spellings_are_equal_once_they_are_normal(folder, tmp_path, form, kept):
    write_lines(folder / "a.jsonl", ["une cl\u00e9\r\nde\rla", "une cle\u0301\nde\nla", "une cl\u00e9\nde\nla"])
    manifest = prepare(tmp_path, normalize=form, deduplicate="exact")
    assert texts_of(manifest) == kept and manifest.dropped.get("exact duplicate", 0) == 3 - len(kept)


def test_a_recipe_that_changed_does_not_pass_for_the_old_one(folder, tmp_path):
    write_lines(folder / "a.jsonl", [f"text {i} " * 20 for i in range(5)])
    prepare(tmp_path)
    prepare(tmp_path, processes=2, max_bad=3)  # keys without effect on the bytes
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, filter="prose", held_out=0.5)
    assert len(caught.value.faults) == 2
    assert "made with held_out = 0.0, the recipe says 0.5; remove the folder" in caught.value.faults[0]
    said = []
    prepare(tmp_path, report=said.append)
    assert [line for line in said if "made from" in line] == []
    write_lines(folder / "b.jsonl", ["one more text"])
    prepare(tmp_path, report=said.append)
    (line,) = [line for line in said if "made from" in line]
    assert "made from 1 file, " in line and "input holds 2 files, " in line and "remove the folder" in line
    with pytest.raises(UserError, match="made with input = .*, the recipe says .*elsewhere.*; remove the folder"):
        prepare(tmp_path, input=[str(tmp_path / "elsewhere")])


@pytest.mark.parametrize("target", ["data/out", "data"])
@pytest.mark.parametrize("kind", ["file", "link to itself", "link to nothing"])
def test_what_is_in_the_place_of_a_folder_is_named(folder, tmp_path, kind, target):
    place = tmp_path / "data"
    if kind == "file":
        place.write_text("")
    else:
        place.symlink_to(place if kind == "link to itself" else tmp_path / "away")
    with pytest.raises(UserError, match=r"data(.*: .* while preparing .*data/out .*give another path|: a )"):
        prepare(tmp_path, target=target)
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "in", "texts", ".data.lock"}


@pytest.mark.slow
def test_a_full_disk_stops_the_work_with_its_name_and_the_same_command_goes_on(
    folder_of_processes, tmp_path, small_disk, capsys, monkeypatch
):
    disk, resize = small_disk
    rng = random.Random(0)
    for name in ("a", "b", "c"):
        write_lines(folder_of_processes / f"{name}.jsonl", [rng.randbytes(300).hex() for _ in range(600)])
    command = ["prepare", "--input", str(folder_of_processes), "--name", "s", "--processes", "1", "--output"]
    for size in (None, "4m"):  # full while the pieces are written, then while the shards are
        if size:
            assert resize(size) == 0
        assert main([*command, str(disk / "out")]) == 2
        (fault,) = [line for line in capsys.readouterr().err.splitlines() if line]
        assert "No space left on device while preparing" in fault and "free disk space" in fault
        assert [f.name for f in disk.iterdir()] == ["out.partial"]
    assert resize("40m") == 0
    assert main([*command, str(disk / "out")]) == 0
    assert main([*command, str(tmp_path / "roomy")]) == 0
    shards = [
        {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.safetensors")}
        for folder in (disk / "out", tmp_path / "roomy")
    ]
    assert shards[0] == shards[1] and shards[0]
