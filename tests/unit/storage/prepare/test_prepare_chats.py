"""From files of conversations to a source: formats, targets, splits, duplicates, counts and bad input."""

import gzip
import hashlib
import importlib.util
import json
import random

import numpy as np
import pytest

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.config.text_recipe import CHAT_FORMATS, PAIRS, TextRecipe
from glm46.operate.models.chat_documents import sampled_parts, shown_text
from glm46.run.plan import resolve_plan
from glm46.storage.chats import chat_rows
from glm46.storage.chats.chat import ChatOptions, render
from glm46.storage.chats.conversation import parse_conversation
from glm46.storage.data.corpus import describe_sources, load_text, plan_sources
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.shards import NOT_A_TARGET, open_shard
from glm46.storage.data.tokenizer import GLM_SPECIAL_TOKENS, load_tokenizer
from glm46.storage.data.tokenizer_hf import byte_characters
from glm46.storage.prepare import pipeline, readers
from glm46.storage.prepare import rows as row_reader
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import call_here

WORDS = ("a", "cat", "sat", "on", "the", "mat", "and", "saw", "many", "things", "that", "were", "not", "there", "again")
TOKENIZER = load_tokenizer("builtin")
needs_parquet = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")


def chat(number, turns=2, reasoning=True):
    """A conversation of this number; each turn with reasoning gives a document of its own."""
    draw = random.Random(number)
    text = lambda: " ".join(draw.choices(WORDS, k=6))  # noqa: E731
    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": f"{number} {text()}"})
        messages.append({"role": "assistant", "content": text()} | ({"reasoning_content": text()} if reasoning else {}))
    return {"messages": messages}


def write(file, rows):
    data = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


def prepare(tmp_path, target="out", report=print, **keys):
    recipe = {"input": (str(tmp_path / "in"),), "output": str(tmp_path / target), "held_out": 0.0, "processes": 1}
    recipe |= {"format": "messages", "max_tokens": 256} | keys
    return prepare_text(TextRecipe(**recipe), report=report)


def documents(manifest, split="train"):
    """Ids and targets of each document, as bytes."""
    found = []
    for shard in manifest.splits[split].shards:
        opened = open_shard(manifest.folder / shard.file)
        for tokens in np.split(opened.tokens, opened.doc_ends[:-1]):
            found.append(((tokens & ~np.uint32(NOT_A_TARGET)).tobytes(), (tokens < NOT_A_TARGET).tobytes()))
    return found


def rendered(rows, **options):
    made = [render(parse_conversation(row, "messages"), TOKENIZER, ChatOptions(**options)).documents for row in rows]
    return [(ids.tobytes(), is_target.tobytes()) for of_row in made for ids, is_target in of_row]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    return tmp_path


def test_the_recipe_names_the_formats_of_the_reader():
    assert ("chat", *chat_rows.ROWS) == CHAT_FORMATS
    assert (*CHAT_FORMATS[1:], PAIRS) == tuple(row_reader._CHAT_FIELDS)


@pytest.mark.parametrize("history", ["expand", "last", "all"])
def test_shards_hold_the_documents_that_the_chat_format_makes(here, history):
    rows = [chat(i, turns=1 + i % 3, reasoning=i % 2 == 0) for i in range(30)]
    write(here / "in" / "a.jsonl", rows[:20])
    write(here / "in" / "b.jsonl.gz", rows[20:])
    manifest = prepare(here, history=history)
    train = manifest.splits["train"]
    assert documents(manifest) == rendered(rows, history=history)
    assert train.documents == len(documents(manifest)) and manifest.noted["conversations, train"] == 30
    assert train.targets == train.labels == sum(sum(is_target) for _, is_target in documents(manifest)) > 0
    assert train.text_bytes < sum(len(json.dumps(row)) for row in rows)


@pytest.mark.parametrize("format, row", [
    ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
    ("prompt_completion", {"prompt": "Hi", "completion": "Hello"}),
    ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello"}),
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", pytest.param("a.parquet", marks=needs_parquet)])
def test_every_format_is_read_from_every_kind_of_file(here, format, row, name):
    file = here / "in" / name
    if name == "a.parquet":
        import pyarrow
        import pyarrow.parquet

        file.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        write(file, [row] if name == "a.jsonl" else [json.dumps([row], indent=1)])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert documents(prepare(here, format=format)) == rendered([{"messages": messages}])


def test_documents_of_a_conversation_stay_together_and_duplicates_are_whole_conversations(here):
    rows = [chat(i, turns=3) for i in range(30)]
    # Equal conversations, whatever else their rows say; and one that shares its first two turns with another.
    again = [row | {"id": i} for i, row in enumerate(rows[:7])]
    longer = {"messages": rows[0]["messages"][:4] + chat(1000, turns=1)["messages"]}
    write(here / "in" / "a.jsonl", [*rows, *again, longer])
    manifest = prepare(here, held_out=0.3)
    assert manifest.dropped == {"exact duplicate": 7}
    train, held_out = documents(manifest), documents(manifest, "validation")
    splits = [{"train" if d in train else "validation" for d in rendered([row])} for row in rows]
    assert all(len(split) == 1 for split in splits) and {"train"} in splits and {"validation"} in splits
    assert len(train) + len(held_out) == 3 * 31
    assert manifest.noted["conversations, train"] + manifest.noted["conversations, validation"] == 31
    # Another option for the documents moves no conversation to another split.
    last = prepare(here, "last", held_out=0.3, history="last")
    assert last.noted["conversations, train"] == manifest.noted["conversations, train"]


def test_similar_conversations_are_removed_only_on_request(here):
    tools = " ".join(f"instruction {i}" for i in range(200))
    rows = [{"messages": [{"role": "system", "content": tools}, *chat(i, turns=1)["messages"]]} for i in range(9)]
    write(here / "in" / "a.jsonl", rows)
    assert prepare(here, max_tokens=2048).dropped == {}
    assert prepare(here, "near", max_tokens=2048, deduplicate="near").dropped["near duplicate"] >= 5


def test_a_conversation_with_evaluation_text_is_left_out_whole(here):
    exam = "the exam asks which of seven colours a river has at night in a dry and cold winter"
    held = chat(1, turns=3)
    held["messages"][2]["content"] = f"Tell me: {exam}"
    write(here / "in" / "a.jsonl", [chat(0), held, chat(2)])
    write(here / "exam.jsonl", [{"question": exam}])
    manifest = prepare(here, decontaminate=(str(here / "exam.jsonl"),), text_key="question")
    assert manifest.dropped == {"holds evaluation text": 1} and documents(manifest) == rendered([chat(0), chat(2)])


def test_long_documents_are_left_out_or_cut_and_counted(here):
    rows = [chat(0), chat(1, turns=1), chat(2, turns=6)]
    rows[1]["messages"][1]["content"] = "word " * 200
    write(here / "in" / "a.jsonl", rows)
    lengths = [len(ids) // 4 for ids, _ in rendered(rows)]
    limit = sorted(lengths)[5]
    long = [i for i, length in enumerate(lengths) if length > limit]
    lines = []
    dropped = prepare(here, "drop", max_tokens=limit, report=lines.append)
    assert documents(dropped) == [d for i, d in enumerate(rendered(rows)) if i not in long]
    assert dropped.dropped == {"above max_tokens": 1}
    # The document of the conversation that is skipped whole is not counted twice.
    assert dropped.noted["documents above max_tokens left out"] == len(long) - 1
    assert f"skipped, above max_tokens: 1, such as {here}/in/a.jsonl line 2" in "\n".join(lines)


def test_a_conversation_that_is_too_long_is_counted_once(here):
    write(here / "in" / "a.jsonl", [chat(0, turns=1), chat(1, turns=1)])
    rows = [chat(2, turns=1)]
    rows[0]["messages"][1]["content"] = "word " * 400
    write(here / "in" / "b.jsonl", rows)
    manifest = prepare(here)
    assert manifest.dropped == {"above max_tokens": 1}
    assert "documents above max_tokens left out" not in manifest.noted


def test_a_refused_preparation_names_the_folder_of_its_work(here):
    write(here / "in" / "a.jsonl", [chat(0), "rubbish\n"])
    lines = []
    with pytest.raises(UserError, match="max_bad = 0"):
        prepare(here, max_bad=0, report=lines.append)
    assert (here / "out.partial").is_dir() and lines[-1].startswith(f"{here}/out.partial: holds finished work")
    prepare(here)
    assert not (here / "out.partial").exists()


def test_bad_lines_are_counted_by_reason_with_their_place(here):
    rows = [
        chat(0), "{broken\n", json.dumps({"messages": [{"role": "wizard", "content": "x"}]}) + "\n",
        {"messages": [{"role": "user", "content": "x"}]}, {"messages": []}, {"messages": chat(1)["messages"][:3]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]},
    ]  # fmt: skip
    file, lines = write(here / "in" / "a.jsonl", rows), []
    manifest = prepare(here, report=lines.append)
    assert manifest.dropped == {
        "no assistant": 1, "no messages": 1, "no target": 1, "not JSON": 1, "not UTF-8": 1, "unknown role": 1,
    }  # fmt: skip
    assert manifest.noted == {"conversations, train": 2, "conversations, validation": 0,
                              "trailing messages left out": 1, "turns of weight 0": 1}  # fmt: skip
    text = "\n".join(lines)
    assert f"skipped, unknown role: 1, such as {file} line 3 ('wizard')" in text
    assert f"skipped, no target: 1, such as {file} line 8" in text
    with pytest.raises(UserError, match="5 documents cannot be read, max_bad = 4") as caught:
        prepare(here, "strict", max_bad=4)
    assert any(f"unknown role: 1, such as {file} line 3" in fault for fault in caught.value.faults)


def test_without_any_target_the_run_is_refused(here):
    row = chat(0)
    row["messages"] = [message | {"weight": 0} for message in row["messages"]]
    write(here / "in" / "a.jsonl", [row])
    with pytest.raises(UserError, match="no documents remain.*no target: 1.*change format"):
        prepare(here)


@pytest.mark.parametrize("question, answer, warned", [(1, 2000, True), (1, 30, False), (2000, 1, True)])
def test_an_unusual_share_of_targets_is_warned_of(here, question, answer, warned):
    texts = {"user": "word " * question, "assistant": "word " * answer}
    row = {"messages": [{"role": role, "content": text} for role, text in texts.items()]}
    write(here / "in" / "a.jsonl", [row])
    lines = []
    train = prepare(here, max_tokens=5000, report=lines.append).splits["train"]
    assert f"targets: {train.targets:,} of {train.tokens:,} tokens" in lines[-1] and ("warning" in lines[-1]) == warned


def test_what_cannot_be_read_as_chats_is_refused_before_work(here, tmp_path, capsys):
    write(here / "in" / "a.txt", ["text"])
    for keys, said in (
        ({}, "a.txt: does not hold rows with 'messages'; format = 'messages' reads .jsonl"),
        ({"max_tokens": None}, 'max_tokens: absent, and format = "messages" needs it; set it'),
    ):
        with pytest.raises(UserError, match=said):
            prepare(here, **keys)
    write(here / "few" / "tokenizer.json", [_tokenizer_without("<|observation|>")])
    with pytest.raises(UserError, match=r"has no <\|observation\|>; chats need GLM's special tokens"):
        prepare(here, tokenizer=str(here / "few"))
    write(here / "other" / "tokenizer.json", [_tokenizer_without("<|image|>")])
    write(here / "other" / "chat_template.jinja", ["{{ messages[0].content }}"])
    with pytest.raises(UserError, match="chat_template.jinja: this chat template is not that of GLM-4.5"):
        prepare(here, tokenizer=str(here / "other"))
    arguments = ["--format", "alpaca", "--max_tokens", "99", "--filter", "prose"]
    assert main(["prepare", "--input", str(here / "in"), "--output", str(here / "o"), *arguments]) == 2
    assert 'filter = "prose": has no effect without format = "text"' in capsys.readouterr().err
    assert not (here / "out").exists() and not (here / "o").exists()


def _tokenizer_without(name):
    tokens = [t for t in GLM_SPECIAL_TOKENS if t != name]
    letters = byte_characters()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    added = [{"content": token, "id": 256 + i, "special": True} for i, token in enumerate(tokens)]
    pretokenizer = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps({"model": model, "added_tokens": added, "pre_tokenizer": pretokenizer})


@pytest.mark.slow
def test_processes_and_interruptions_do_not_change_a_byte(tmp_path, monkeypatch):
    write(tmp_path / "in" / "a.jsonl", [chat(i, turns=1 + i % 4) for i in range(300)])
    monkeypatch.setattr(readers, "PART_BYTES", 20_000)
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)

    def digest(folder):
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}

    prepare(tmp_path, "a", held_out=0.1, name="x", deduplicate="near")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_splits", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, "b", held_out=0.1, name="x", deduplicate="near")
    pieces = sorted((tmp_path / "b.partial" / "parts").iterdir())
    for piece in pieces[len(pieces) // 2 :]:
        piece.unlink()
    assert len(pieces) > 5
    monkeypatch.undo()
    monkeypatch.setattr(readers, "PART_BYTES", 20_000)
    prepare(tmp_path, "b", held_out=0.1, name="x", deduplicate="near", processes=2)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_run_makes_its_chats_and_counts_their_rows_as_epochs(make_config, here):
    write(here / "in" / "a.jsonl", [chat(i) for i in range(40)])
    recipe = {"input": [str(here / "in")], "format": "messages", "max_tokens": 96, "held_out": 0.0}
    source = {"name": "chats", "path": str(here / "chats"), "packing": "best_fit", "recipe": recipe}
    config = make_config(data={"sources": [source]}, training={"seq_len": 96, "steps": 6})
    plan = resolve_plan(config)
    manifests = pipeline.prepare_run(plan, report=print)
    rows = 12  # 6 steps of 2
    (planned,) = plan_sources(plan, manifests)
    packs = len(list(here.glob("chats/packs-96-*")))
    held = manifests["chats"].splits["train"]
    assert packs == 1 and rows * 96 / held.tokens > planned.epochs >= 0.9 * rows * 96 / held.tokens
    (line,) = describe_sources(plan, manifests)
    assert f" tokens each; targets: {held.targets:,} of {held.tokens:,} tokens" in line
    # A budget of what the line says is one epoch.
    epoch = int(line.split(" tokens each")[0].rpartition(" ")[2].replace(",", ""))
    once = make_config(data={"sources": [source]}, training={"seq_len": 96, "steps": None, "tokens": epoch})
    assert plan_sources(resolve_plan(once), manifests)[0].epochs == 1.0 and epoch % 96 == 0
    # The same folder without its recipe is held to the same rules.
    bare = {"name": "chats", "path": str(here / "chats")}
    config = make_config(data={"sources": [bare], "document_mask": False}, training={"seq_len": 64})
    with pytest.raises(UserError) as caught:
        load_text(resolve_plan(config))
    faults = "\n".join(caught.value.faults)
    assert "data.sources[0].packing" in faults and "data.document_mask = false" in faults
    assert f"{here / 'chats'}: max_tokens = 96: longer than" in faults
    assert load_manifest(here / "chats", full=True) == manifests["chats"]


def test_inspect_shows_targets_in_brackets_or_in_colour(here, capsys):
    file = write(here / "in" / "a.jsonl", [chat(0, turns=1), json.dumps({"messages": []}) + "\n"])
    manifest = prepare(here)
    capsys.readouterr()
    assert main(["inspect", str(manifest.folder)]) == 0
    shown = capsys.readouterr().out
    question, answer = json.loads(file.read_text().splitlines()[0])["messages"]
    target = f"<think>{answer['reasoning_content']}</think>\n{answer['content']}<|user|>"
    assert f"[gMASK]<sop><|user|>\n{question['content']}<|assistant|>[[\n{target}]]" in shown
    train = manifest.splits["train"]
    assert f"targets: {train.targets} of {train.tokens} tokens" in shown and f"{train.targets} targets" in shown
    assert "skipped, no messages: 1" in shown and "conversations, train: 1" in shown
    (part,) = sampled_parts(manifest, TOKENIZER, rows=1)
    text = shown_text(part, TOKENIZER, max_tokens=20, brackets=False)
    assert "[[" not in text.plain and text.plain.endswith(f"… {train.tokens - 20} more tokens")
    coloured = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert "".join(coloured) and target.startswith("".join(coloured).lstrip("\n"))
