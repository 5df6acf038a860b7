"""Readers: every format gives the same documents for any cuts into parts, and damage is reported with its place."""

import gzip
import importlib.util
import json
import random

import pytest

from glm46.config.errors import UserError
from glm46.prepare import input_files, readers
from glm46.prepare.input_files import find_files
from glm46.prepare.readers import parts_of, read_part
from glm46.prepare.rows import BadDocument, Document, Fields

TEXTS = ["one\nline", "größe 中", "  x  ", "a" * 5_000, *(f"text {i} " * (i % 40 + 1) for i in range(300))]

needs_zstd = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")
needs_parquet = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")


def lines(texts):
    return b"".join(
        json.dumps({"id": 1, "text": t}, ensure_ascii=i % 2 == 0).encode() + b"\n" for i, t in enumerate(texts)
    )


def read(files, key="text"):
    return [
        document
        for part in parts_of(find_files([str(f) for f in files], "input"), Fields(key))
        for document in read_part(part, Fields(key))
    ]


def texts_of(documents):
    return [d.text for d in documents if isinstance(d, Document)]


def write_zstd(file, data):
    import pyarrow

    file.write_bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def write_parquet(file, texts):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts)))}), file, row_group_size=50)


@pytest.mark.parametrize("name", [
    "x.jsonl", "x.jsonl.gz", pytest.param("x.jsonl.zst", marks=needs_zstd),
    pytest.param("x.parquet", marks=needs_parquet),
])  # fmt: skip
def test_every_format_gives_the_same_documents(tmp_path, name):
    file = tmp_path / name
    if name.endswith(".parquet"):
        write_parquet(file, TEXTS)
    elif name.endswith(".zst"):
        write_zstd(file, lines(TEXTS))
    else:
        file.write_bytes(gzip.compress(lines(TEXTS)) if name.endswith(".gz") else lines(TEXTS))
    assert texts_of(read([file])) == TEXTS


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1_000, 10**9])
def test_lines_are_read_once_wherever_the_ranges_are_cut(tmp_path, monkeypatch, part_bytes):
    texts = TEXTS[:3] + TEXTS[4:40]
    (tmp_path / "x.jsonl").write_bytes(lines(texts)[:-1])  # the last line without its newline
    monkeypatch.setattr(readers, "PART_BYTES", part_bytes)
    assert texts_of(read([tmp_path / "x.jsonl"])) == texts


def test_folders_and_globs_name_each_file_once_in_order(tmp_path):
    for name in ("b/2.txt", "a/1.md", "a/.hidden", "c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "c.py")
    found = find_files([str(tmp_path), str(tmp_path / "**" / "*.txt")], "input")
    assert [f.relative_to(tmp_path.resolve()).as_posix() for f in found] == ["a/1.md", "b/2.txt", "c.py"]
    assert texts_of(read([tmp_path])) == ["a/1.md", "b/2.txt", "c.py"]


@pytest.mark.parametrize("line, reason", [
    (b'{"text": "x"', "not JSON"), (b"[1]", "no text in field 'text'"), (b'{"body": "x"}', "no text in field 'text'"),
    (b'{"text": 3}', "no text in field 'text'"), (b'{"text": "  "}', "empty"),
    (b'{"text": "gr\xf6\xdfe"}', "not UTF-8"), (b'{"text": "\\ud83d"}', "not UTF-8"), (b"[" * 100_000, "not JSON"),
])  # fmt: skip
def test_a_bad_line_is_skipped_with_its_reason_and_number(tmp_path, line, reason):
    good = b'{"text": "good"}\n'
    (tmp_path / "x.jsonl").write_bytes(good + line + b"\n\n" + good)
    documents = read([tmp_path / "x.jsonl"])
    assert texts_of(documents) == ["good", "good"]
    (bad,) = [d for d in documents if isinstance(d, BadDocument)]
    assert bad.args == (reason, f"{tmp_path.resolve() / 'x.jsonl'} line 2")


def test_bad_lines_of_any_range_get_their_number(tmp_path, monkeypatch):
    rows = [b'{"text": "good"}\n'] * 50
    for bad in (3, 30, 49):
        rows[bad] = b"rubbish\r\n"
    (tmp_path / "x.jsonl").write_bytes(b"".join(rows))
    monkeypatch.setattr(readers, "PART_BYTES", 100)
    places = [d.args[1] for d in read([tmp_path / "x.jsonl"]) if isinstance(d, BadDocument)]
    name = tmp_path.resolve() / "x.jsonl"
    assert [readers.with_line(place) for place in places] == [f"{name} line {bad + 1}" for bad in (3, 30, 49)]
    assert any(" byte " in place for place in places)


def test_hidden_files_and_folders_are_skipped_unless_named(tmp_path):
    for name in ("a.txt", ".git/config", "b/.cache/x.txt", "b/.y"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    assert texts_of(read([tmp_path])) == ["a.txt"]
    assert texts_of(read([tmp_path / ".git"])) == [".git/config"]
    assert texts_of(read([tmp_path / ".git" / "config"])) == [".git/config"]
    (tmp_path / "c" / ".d").mkdir(parents=True)
    (tmp_path / "c" / ".d" / "x").write_text("x")
    with pytest.raises(UserError, match="hidden files"):
        find_files([str(tmp_path / "c")], "input")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "mark"])
@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "X.JSON"])
@pytest.mark.parametrize("form", ["array", "indented array", "lines", "lines of windows"])
def test_rows_in_a_json_file_are_documents(tmp_path, form, name, mark):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    data = {
        "array": json.dumps(rows).encode(),
        "indented array": json.dumps(rows, indent=2).encode(),
        "lines": lines(TEXTS),
        "lines of windows": lines(TEXTS).replace(b"\n", b"\r\n"),
    }[form]
    (tmp_path / name).write_bytes(gzip.compress(mark + data) if name.endswith(".gz") else mark + data)
    assert texts_of(read([tmp_path / name])) == TEXTS


@pytest.mark.parametrize(
    "content", ['{"name": "x",\n "text": "y"}', "[1, 2]", '[{"body": "x"}]', '{"body": "x"}\n', "{"]
)
def test_other_json_files_are_texts(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    assert texts_of(read([tmp_path / "x.json"])) == [content]


def test_rows_of_an_array_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "x.json").write_text('[{"text": "good"}, {"body": 1}, 3]')
    bad = [d.args for d in read([tmp_path / "x.json"]) if isinstance(d, BadDocument)]
    name = tmp_path.resolve() / "x.json"
    assert bad == [("no text in field 'text'", f"{name} row {i}") for i in (1, 2)]
    (tmp_path / "x.json").write_text('[{"text": "good"}, {"text": "cut')
    with pytest.raises(UserError, match="x.json.*jsonl"):
        read([tmp_path / "x.json"])


def test_endings_in_capitals_are_the_same(tmp_path):
    (tmp_path / "X.JSONL").write_bytes(lines(TEXTS))
    (tmp_path / "Y.JSONL.GZ").write_bytes(gzip.compress(lines(TEXTS)))
    assert texts_of(read([tmp_path])) == TEXTS * 2


def test_a_file_that_ends_inside_a_line_says_so(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n{"text": "cut o')
    assert [d.args[0] for d in read([tmp_path / "x.jsonl"]) if isinstance(d, BadDocument)] == ["truncated line"]


def test_text_files_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfmarked")
    documents = read([tmp_path])
    assert [d.args[0] for d in documents[:2]] == ["not UTF-8", "empty"]
    assert documents[0].args[1].endswith("a.txt line 1")
    assert documents[2].text == "marked"


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.txt.gz", pytest.param("x.jsonl.zst", marks=needs_zstd)])
@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_a_damaged_archive_stops_with_its_name(tmp_path, name, damage):
    file, rng = tmp_path / name, random.Random(0)
    data = lines([rng.randbytes(400).hex() for _ in range(300)])
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(data))
    else:
        write_zstd(file, data)
    if name.endswith(".zst"):
        # Frames one after another, as parallel compressors write them, are one text.
        file.write_bytes(file.read_bytes() * 2)
        assert len(texts_of(read([file]))) == 600
    whole = bytearray(file.read_bytes())
    if damage == "cut":
        whole = whole[: len(whole) // 3]
    elif damage == "flip":
        # Any middle byte: gzip keeps a checksum of the text, zstd fails on an impossible sequence.
        whole[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)
    else:
        whole = b"plain text"
    file.write_bytes(whole)
    with pytest.raises(UserError, match=f"{name}: damaged archive"):
        read([file])


@needs_parquet
def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    write_parquet(tmp_path / "x.parquet", TEXTS[:3])
    with pytest.raises(UserError, match="no column 'body'; .* text, n; set text_key"):
        read([tmp_path / "x.parquet"], key="body")


@needs_parquet
def test_a_damaged_parquet_file_stops_with_its_name(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UserError, match="damaged Parquet"):
        read([tmp_path / "x.parquet"])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setattr(input_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs pyarrow; pip install 'glm46\[data\]'"):
        find_files([str(tmp_path)], "input")


def test_all_missing_files_are_reported_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        find_files([str(tmp_path / "*.jsonl"), str(tmp_path / "gone")], "input")
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("name", ["x.jsonl", pytest.param("x.parquet", marks=needs_parquet)])
def test_known_results_are_read_beside_the_text(tmp_path, name):
    file, answers = tmp_path / name, ["1/2", "3", None]
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "answer": answers}), file)
    else:
        rows = [{"text": "a", "answer": "1/2"}, {"text": "b", "answer": 3}, {"text": "c", "answer": True}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (part,) = parts_of([file], Fields("text"))
    assert [d.answer for d in read_part(part, Fields("text", "answer"))] == answers
    assert [d.answer for d in read_part(part, Fields("text"))] == [None] * 3


@needs_parquet
def test_a_parquet_file_without_the_results_is_refused(tmp_path):
    write_parquet(tmp_path / "x.parquet", TEXTS[:3])
    (part,) = parts_of([tmp_path / "x.parquet"], Fields("text"))
    with pytest.raises(UserError, match="no column 'solution'; .* text, n; set answer_key"):
        list(read_part(part, Fields("text", "solution")))


def test_text_of_this_machine_is_an_input_too(tmp_path):
    (tmp_path / "own.txt").write_text("mine")
    found = find_files(["builtin:package_docs", str(tmp_path)], "input")
    assert tmp_path.resolve() / "own.txt" in found and len(found) > 10
    assert any(file.name == "METADATA" for file in found)
    with pytest.raises(
        UserError, match="'wikipedia': unknown; the embedded sources are python_stdlib, python_packages"
    ):
        find_files(["builtin:wikipedia"], "input")
