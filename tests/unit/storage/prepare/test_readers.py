"""Readers: every format gives the same documents for any cuts into parts, and damage is reported with its place."""

import base64
import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import random
import re
import tarfile
import tracemalloc
import zipfile

import pytest

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.storage.prepare import input_files, json_rows, readers
from glm46.storage.prepare.input_files import find_files
from glm46.storage.prepare.readers import parts_of, read_part
from glm46.storage.prepare.rows import BadDocument, Document, Fields, read_row

TEXTS = ["one\nline", "größe 中", "  x  ", "a" * 5_000, *(f"text {i} " * (i % 40 + 1) for i in range(300))]

needs_zstd = pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="needs zstandard")
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


def zstd(data):
    import zstandard

    return zstandard.compress(data)


def write_parquet(file, texts):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts)))}), file, row_group_size=50)


@needs_parquet
def test_parquet_gives_the_documents_of_its_row_groups(tmp_path):
    write_parquet(tmp_path / "x.parquet", TEXTS)
    assert texts_of(read([tmp_path / "x.parquet"])) == TEXTS


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
    (b'{"text": "gr\xf6\xdfe"}', "not UTF-8"), (b'{"text": "\\ud83d"}', "not UTF-8"),
    (b'{"text": "a\\u0000b"}', "holds NUL characters"), (b"[" * 100_000, "not JSON"),
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


LONG = json.dumps({"id": 1, "notes": "n" * 3_000_000, "text": "behind 3 MB"})


@pytest.mark.parametrize("name", ["X.JSON", "x.jsonl", "x.json.gz", "x.json.bz2", "x.json.xz", "x.json.lzma"])
@pytest.mark.parametrize("content, texts, bad", [
    (LONG, ["behind 3 MB"], 0),
    (LONG + '\n{"text": "b"}\n', ["behind 3 MB", "b"], 0),
    (f"[{LONG}, {LONG}]", ["behind 3 MB"] * 2, 0),
    (f'\ufeff \n [\n{{"text": "a"}},{LONG}]\n', ["a", "behind 3 MB"], 0),
    ('{"name": "x",\n "text": "y"}', ["y"], 0),
    ('{\n"text": "a"\n}\n{\n"text": "b"\n}', ["a", "b"], 0),
    ('[{"text": "a"}]\n[{"text": "b"}, {"text": "c"}]', ["a", "b", "c"], 0),
    ('[{"body": "x"}, {"text": "late"}, 3]', ["late"], 2),
    ('{"body": "x"}\n{"text": "late"}\n', ["late"], 1),
    ('{"text": "cut\n{"text": "late"}\n', ["late"], 1),
    ('{"scripts": {"a": 1}}', [], 1),
    ("[1, 2]", [], 1),
    ("{", [], 1),
    ("[]", [], 0),
    ('{"text": "a"}\r{"text": "b"}\r', ["a", "b"], 0),
    ('\ufeff{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"], 0),
    ('{"text": "a"} {"text": "b"}\n{"text": "c"}', ["a", "b", "c"], 0),
    ('{"text": "a"} trash\n{"text": "b"}\n', ["b"], 1),
    ('\x1e{"text": "a"}\n\x1e{"text": "b"}\n', ["a", "b"], 0),
    ('\x1e{"text": "a"}\n\x1e{"text": "cut\n\x1e\n\x1e{"text": "c"}\n', ["a", "c"], 1),
    ('\x1e{\n"text": "a"}\n\x1e{"text": "b"}\n', ["a", "b"], 0),
])  # fmt: skip
def test_json_is_rows_whatever_its_ending_and_its_first_row(tmp_path, name, content, texts, bad):
    """A row without the text is counted, as in a file of lines; nothing is ever one text of raw JSON."""
    compress = COMPRESS.get((tmp_path / name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content.encode()))
    documents = read([tmp_path / name])
    assert texts_of(documents) == texts
    assert len(documents) - len(texts) == bad


@pytest.mark.parametrize("key", ["data", "rows", 'a "b'])
def test_rows_under_a_key_of_an_object_are_refused_with_a_command_that_unpacks_them(tmp_path, key):
    rows = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "x.json").write_text(json.dumps({"version": "1", key: rows}, indent=1))
    with pytest.raises(UserError, match="one object without 'text', with 2 rows under .*jq -c ") as caught:
        read([tmp_path / "x.json"])
    path = re.search(r"jq -c '\.\[(.*)\]\[\]'", str(caught.value))[1]
    assert json.loads(path) == key


def test_json_that_is_to_be_learned_as_json_is_text(tmp_path):
    """verify = "json" says so; rows with the text are rows all the same."""
    (tmp_path / "a.json").write_text('{"name": "x"}')
    (tmp_path / "b.json").write_text('[{"text": "{}"}]')
    fields = Fields("text", json_is_text=True)
    parts = parts_of(find_files([str(tmp_path)], "input"), fields)
    assert texts_of(document for part in parts for document in read_part(part, fields)) == ['{"name": "x"}', "{}"]
    assert Fields.from_recipe(TextRecipe(input=("x",), output="y", verify="json")) == fields


def test_a_file_of_rows_needs_the_memory_of_a_row(tmp_path, monkeypatch):
    """No text of more than two reads is held at once; a file that is no JSON stops at the longest row."""
    monkeypatch.setattr(json_rows, "_READ_CHARACTERS", 1000)
    monkeypatch.setattr(json_rows, "MAX_ROW_CHARACTERS", 5000)
    held = []
    decode = json_rows._decode
    monkeypatch.setattr(json_rows, "_decode", lambda text, at: held.append(len(text)) or decode(text, at))
    row = {"text": "t" * 300}
    (tmp_path / "x.json").write_text(json.dumps([row] * 1000))
    assert texts_of(read([tmp_path / "x.json"])) == [row["text"]] * 1000
    assert max(held) <= 2000
    (tmp_path / "x.json").write_text('[{"text": "' + "t" * 100_000)
    with pytest.raises(UserError, match="damaged JSON at row 0 .no row within 5,000 characters"):
        read([tmp_path / "x.json"])
    assert max(held) <= 20_000


JSON_ROWS = "holds rows of JSON, not a text; give it the ending .json"
OTHER_FORMAT = "not text but another format; glm46 reads Parquet"
NO_TEXTS = [
    '{"text": "a"}\n{"text": "b"}\n',
    '[{"text": "a"}]',
    '\ufeff{\n"text": "a"}',
    '{"body": "a", "id": 1}\n{"body": "b"}\n',
    '[{"body": "a"}]',
    '{"body": "a"}\r\n\r\n{"id": 1}\nrubbish',
    '\x1e{"body": "a"}\n\x1e{"body": "b"}\n',
]
NAMES = ("part-00000", "x.txt", "x.jsonl.1", "x.txt.gz", "x.txt.xz")
TABLES = [
    ("x.csv", "id,text\n1,a\n"),
    ("x.csv", "text\na\n"),
    ("x.tsv.gz", "prompt\tanswer\na\tb\n"),
    ("X.CSV", '\ufeff"a, b",c\n1,2'),
]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [(name, content, JSON_ROWS) for name in NAMES for content in NO_TEXTS]
    + [(name, content, OTHER_FORMAT) for name, content in TABLES],
)
def test_rows_under_the_ending_of_a_text_are_refused(tmp_path, name, content, message):
    compress = COMPRESS.get((tmp_path / name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content.encode()))
    with pytest.raises(UserError, match=f"{name}: {message}"):
        read([tmp_path / name])


def test_texts_that_begin_as_json_does_stay_texts(tmp_path):
    contents = ['{ "a": 1 }', "[1] Knuth", "{% extends %}", '{"text": 3}', "[[link]]", '{"a": 1} and prose']
    for number, content in enumerate([*contents, '{"cells": [{"source": "a"}]}', "[]"]):
        (tmp_path / f"{number}.txt").write_text(content)
    assert len(texts_of(read([tmp_path]))) == 8


@needs_parquet
@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.txt", "x.jsonl.gz"])
def test_a_file_that_has_gone_is_named(tmp_path, name):
    file = tmp_path / name
    if name == "x.parquet":
        write_parquet(file, TEXTS)
    else:
        file.write_bytes(gzip.compress(lines(TEXTS)) if name.endswith("gz") else b"a text")
    found = find_files([str(tmp_path)], "input")
    parts = parts_of(found, Fields("text"))
    file.unlink()
    for use in (lambda: parts_of(found, Fields("text")), lambda: list(read_part(parts[0], Fields("text")))):
        with pytest.raises(UserError, match=f"{name}: cannot be read: No such file or directory; leave it out"):
            use()


UTF = ("utf-16", "utf-16-le", "utf-16-be", "utf-32-le")


def packed(kind):
    """Bytes of a format, as its own library writes them."""
    stream = io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))
    elif kind == "zip":
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("a.txt", "a")
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": ["a"]}), stream)
    elif kind == "lfs":
        stream.write(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    elif kind in UTF:
        stream.write('{"text": "a"}\n'.encode(kind))
    content = stream.getvalue()
    compress = {
        "gzip": gzip.compress,
        "bzip2": bz2.compress,
        "xz": lzma.compress,
        "zstd": zstd,
        "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
        "tar.gz": lambda _: gzip.compress(packed("tar")),
    }.get(kind, bytes)
    return compress(content)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("x.jsonl", "parquet", "not JSON but another format"),
        ("x.txt", "parquet", "not text but another format"),
        ("x.json", "gzip", "not JSON but another format"),
        ("x", "gzip", "not text but another format"),
        ("x.txt", "bzip2", "not text but another format"),
        ("x.txt", "xz", "not text but another format"),
        pytest.param("x.jsonl", "zstd", "not JSON but another format", marks=needs_zstd),
        pytest.param("x.txt", "zstd", "not text but another format", marks=needs_zstd),
        ("x.jsonl", "lzma", "not JSON but another format"),
        pytest.param("x.parquet", "gzip", "damaged Parquet file, or one that", marks=needs_parquet),
        pytest.param("x.parquet", "lfs", "damaged Parquet file, or one that", marks=needs_parquet),
        ("x.parquet.gz", "gzip", "not Parquet but another format"),
        ("x.txt", "lfs", r"not text but another format.*\(git lfs pull\)"),
        ("x.jsonl", "lfs", "not JSON but another format"),
        ("x.tar", "tar", "not text but another format"),
        ("x.tar.gz", "tar.gz", "not text but another format"),
        ("x.tgz", "tar.gz", "not text but another format"),
        ("x.jsonl.gz", "tar.gz", "not JSON but another format"),
        ("x.zip", "zip", "not text but another format"),
        ("x.jsonl.gz", "zip", "damaged archive, or not gzip"),
        ("x.jsonl.bz2", "gzip", "damaged archive, or not bzip2"),
        ("x.jsonl", "utf-16", "not JSON but another format"),
        ("x.jsonl", "utf-16-le", "not JSON but another format"),
        ("x.json", "utf-16-be", "not JSON but another format"),
        ("x.ndjson", "utf-32-le", "not JSON but another format"),
    ],
)
def test_a_file_that_is_not_what_its_ending_says_is_named(tmp_path, name, kind, message):
    (tmp_path / name).write_bytes(packed(kind))
    with pytest.raises(UserError, match=f"{name}: {message}"):
        read([tmp_path / name])
    with pytest.raises(UserError, match=name):  # of conversations, too
        parts = parts_of([tmp_path / name], Fields("messages", format="messages"))
        list(read_part(parts[0], Fields("messages", format="messages")))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("größe".encode("utf-16"), "not UTF-8"),
        ("text".encode("utf-16-le"), "not text but binary, or UTF-16"),
        (b"%PDF-1.7\n\xe2\xe3", "not UTF-8"),
        (b"\x7fELF\0\0", "not text but binary, or UTF-16"),
        (b"SQLite format 3\0" + bytes(80), "not text but binary, or UTF-16"),
        ("größe".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_text_in_another_encoding_is_counted_as_what_it_is(tmp_path, content, reason):
    (tmp_path / "x.txt").write_bytes(content)
    assert [d.args[0] for d in read([tmp_path / "x.txt"])] == [reason]


@needs_zstd
def test_windows_above_128_mib_are_read(tmp_path):
    """As `zstd --long=31` writes them, with which large dumps are published."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(data.compress(lines(TEXTS)) + data.flush())
    assert zstandard.get_frame_parameters((tmp_path / "x.jsonl.zst").read_bytes()).window_size == 2**31
    assert texts_of(read([tmp_path / "x.jsonl.zst"])) == TEXTS


@needs_zstd
def test_a_frame_that_zstd_skips_has_no_dictionary(tmp_path):
    skipped = (0x184D2A55).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    (tmp_path / "x.jsonl.zst").write_bytes(skipped + zstd(lines(TEXTS)))
    assert texts_of(read([tmp_path / "x.jsonl.zst"])) == TEXTS


@needs_zstd
@pytest.mark.parametrize("frame", ["first", "second"])
def test_a_zstd_frame_with_a_dictionary_is_not_called_damaged(tmp_path, frame):
    import zstandard

    dictionary = zstandard.train_dictionary(4096, [json.dumps({"text": f"sentence {i}"}).encode() for i in range(4000)])
    data = zstandard.ZstdCompressor(dict_data=dictionary).compress(lines(TEXTS))
    assert zstandard.ZstdDecompressor(dict_data=dictionary).decompress(data) == lines(TEXTS)
    (tmp_path / "x.jsonl.zst").write_bytes(data if frame == "first" else zstd(lines(TEXTS)) + data)
    with pytest.raises(UserError, match="x.jsonl.zst: was compressed with a dictionary .*zstd -D DICTIONARY -dc"):
        read([tmp_path / "x.jsonl.zst"])


COMPRESS = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
    ".lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
}  # fmt: skip
ENDINGS = [pytest.param(one, marks=needs_zstd if one == ".zst" else ()) for one in COMPRESS]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("foreign", [b"rubbish", b"<!doctype html>", b"x", gzip.compress(b"x", mtime=0)[2:]])
def test_foreign_bytes_after_a_whole_archive_are_refused(tmp_path, ending, foreign):
    """They may be a second stream whose beginning is damaged, which the libraries skip without an error."""
    file = tmp_path / f"x.jsonl{ending}"
    file.write_bytes(COMPRESS[ending](lines(TEXTS)) + foreign)
    with pytest.raises(UserError, match=f"{file.name}: damaged archive, or not "):
        read([file])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("between, behind", [(0, 4), (0, 9000), (512, 3), (8188, 0)])
def test_streams_one_behind_the_other_and_zeros_that_pad_them_are_one_text(tmp_path, ending, between, behind):
    file, compress = tmp_path / f"x.jsonl{ending}", COMPRESS[ending]
    half = len(TEXTS) // 2
    file.write_bytes(compress(lines(TEXTS[:half])) + bytes(between) + compress(lines(TEXTS[half:])) + bytes(behind))
    assert texts_of(read([file])) == TEXTS


@needs_parquet
def test_encrypted_parquet_is_refused_with_the_reason(tmp_path):
    import pyarrow
    import pyarrow.parquet.encryption as encryption

    class Keys(encryption.KmsClient):
        def __init__(self, connection):
            encryption.KmsClient.__init__(self)

        def wrap_key(self, key, name):
            return base64.b64encode(key)

    table, file = pyarrow.table({"text": TEXTS}), tmp_path / "x.parquet"
    for plaintext_footer in (True, False):
        properties = encryption.CryptoFactory(Keys).file_encryption_properties(
            encryption.KmsConnectionConfig(),
            encryption.EncryptionConfiguration("key", column_keys={"k": ["text"]}, plaintext_footer=plaintext_footer),
        )
        with pyarrow.parquet.ParquetWriter(file, table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)
        with pytest.raises(UserError, match="does not read .*crypt.*without encryption"):
            read([file])


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
    (tmp_path / "x.jsonl").write_bytes(b"<html></html>")
    assert [d.args[0] for d in read([tmp_path / "x.jsonl"])] == ["not JSON"]


def test_text_files_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfmarked")
    documents = read([tmp_path])
    assert [d.args[0] for d in documents[:2]] == ["not UTF-8", "empty"]
    assert documents[0].args[1].endswith("a.txt line 1")
    assert documents[2].text == "marked"


@pytest.mark.parametrize(
    "name", ["x.jsonl.gz", "x.txt.gz", pytest.param("x.jsonl.zst", marks=needs_zstd), "x.jsonl.bz2", "x.jsonl.xz"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
def test_a_damaged_archive_stops_with_its_name(tmp_path, name, damage):
    file, rng = tmp_path / name, random.Random(0)
    data = lines([rng.randbytes(400).hex() for _ in range(300)])
    if name.endswith(".zst"):
        file.write_bytes(zstd(data))
    else:
        file.write_bytes({".gz": gzip, ".bz2": bz2, ".xz": lzma}[file.suffix].compress(data))
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
        whole = b"plain text" if damage == "other" else b""
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


@pytest.mark.parametrize("form", ["folder", "folder/**", "folder/*", "lin*"])
def test_folders_and_globs_have_the_same_reach(tmp_path, form):
    """Links to folders and files are followed, loops end, and hidden names are skipped."""
    for name in ("folder/a.txt", "elsewhere/b.txt", "elsewhere/deep/C.TXT", "elsewhere/.hidden/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "folder" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    found = [file.name for file in find_files([str(tmp_path / form)], "input")]
    assert sorted(found) == ["C.TXT", "a.txt", "b.txt"]


@pytest.mark.parametrize("target", ["away", "gone.txt", "other.txt"])
@pytest.mark.parametrize("form", ["folder", "folder/*", "folder/gone.txt"])
def test_a_link_to_nothing_is_an_error(tmp_path, form, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "folder" / "gone.txt").symlink_to(target)
    if target == "other.txt":
        (tmp_path / "folder" / target).symlink_to("gone.txt")
    with pytest.raises(UserError, match="gone.txt: a link to nothing") as caught:
        find_files([str(tmp_path / form)], "input")
    assert all(fault.endswith("a link to nothing; fix or remove it") for fault in caught.value.faults)


def test_characters_of_globs_in_names_are_those_of_the_files(tmp_path):
    for name in ("a[1].txt", "b?.txt", "c*.txt", "[d]/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        assert find_files([str(tmp_path / name)], "input") == [tmp_path / name]
    (tmp_path / "bx.txt").write_text("")
    assert find_files([str(tmp_path / "b?.txt")], "input") == [tmp_path / "b?.txt"]
    assert find_files([str(tmp_path / "[d]")], "input") == [tmp_path / "[d]" / "e.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="closed: cannot be read"):
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


@pytest.mark.slow
def test_text_of_this_machine_is_an_input_too(tmp_path):
    (tmp_path / "own.txt").write_text("mine")
    found = find_files(["builtin:package_docs", str(tmp_path)], "input")
    assert tmp_path.resolve() / "own.txt" in found and len(found) > 10
    assert any(file.name == "METADATA" for file in found)
    with pytest.raises(
        UserError, match="'wikipedia': unknown; the embedded sources are python_stdlib, python_packages"
    ):
        find_files(["builtin:wikipedia"], "input")


@needs_parquet
def test_rows_of_parquet_with_nul_characters_are_counted(tmp_path):
    write_parquet(tmp_path / "x.parquet", ["good", "a\0b"])
    good, bad = read([tmp_path / "x.parquet"])
    assert good.text == "good" and bad.args[0] == "holds NUL characters"


@pytest.mark.parametrize(("fault", "part"), [("holds NUL characters", "\0"), ("not UTF-8", "\ud83d")])
@pytest.mark.parametrize("place", ["content", "reasoning", "name", "key", "value", "tools"])
def test_no_string_of_a_conversation_has_characters_that_no_text_has(fault, part, place):
    strings = {name: "x" + part * (name == place) for name in ("content", "reasoning", "name", "key", "value", "tools")}
    call = {"function": {"name": strings["name"], "arguments": {strings["key"]: strings["value"]}}}
    answer = {
        "role": "assistant", "content": "", "reasoning_content": strings["reasoning"], "tool_calls": [call],
    }  # fmt: skip
    row = {
        "messages": [{"role": "user", "content": strings["content"]}, answer],
        "tools": [{"name": strings["tools"]}],
    }
    document = read_row(row, "x.jsonl line 1", Fields("messages", format="messages"))
    assert isinstance(document, BadDocument) and document.args == (fault, "x.jsonl line 1")


@pytest.mark.parametrize("text", [r"the escape \u0000", "\\" * 3 + "u0000", "\ufffe", "\x01", "\U0001f600"])
def test_other_characters_are_text(text):
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    assert isinstance(read_row(row, "", Fields("messages", format="messages")), Document)
    assert isinstance(read_row({"text": text}, "", Fields("text")), Document)


@needs_parquet
@pytest.mark.parametrize("form", ["saved", "saved/*", "saved/state.json", "."])
def test_a_folder_of_save_to_disk_is_refused_with_the_command_that_makes_it_readable(tmp_path, form):
    """The files are those that datasets 5.2 writes."""
    import pyarrow

    folder = tmp_path / "saved"
    folder.mkdir()
    table = pyarrow.table({"text": ["a"]})
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None, "_format_columns": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}))
    with pytest.raises(UserError, match=r"saved: was written by save_to_disk .*load_from_disk.*to_parquet") as caught:
        find_files([str(tmp_path / form)], "input")
    assert len(caught.value.faults) == 1


def test_a_file_named_state_json_alone_is_rows(tmp_path):
    (tmp_path / "state.json").write_text('{"text": "a"}')
    assert texts_of(read([tmp_path])) == ["a"]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("part_bytes", [100, 10**9])
def test_a_line_above_the_longest_row_is_counted_in_bounded_memory(tmp_path, monkeypatch, ending, part_bytes):
    monkeypatch.setattr(json_rows, "_READ_CHARACTERS", 1000)
    monkeypatch.setattr(json_rows, "MAX_ROW_CHARACTERS", 5000)
    monkeypatch.setattr(readers, "PART_BYTES", part_bytes)
    longest = lines(["t" * 4000])[:-1].ljust(4999) + b"\n"
    above = lines(["t" * 100_000])
    file = tmp_path / f"x.jsonl{ending}"
    file.write_bytes((gzip.compress if ending else bytes)(lines(["a"]) + longest + above + lines(["b"]) + longest[:-1]))
    documents = read([file])
    assert texts_of(documents) == ["a", "t" * 4000, "b", "t" * 4000]
    (bad,) = [document for document in documents if isinstance(document, BadDocument)]
    assert bad.args[0] == json_rows.LONG_LINE and readers.with_line(bad.args[1]).endswith("line 3")


def test_the_memory_for_a_line_does_not_grow_with_it(tmp_path):
    with gzip.open(tmp_path / "x.jsonl.gz", "wb") as stream:
        for _ in range(200):
            stream.write(b"a" * 2**20)
    tracemalloc.start()
    try:
        with readers.opened(tmp_path / "x.jsonl.gz") as stream:
            assert json_rows.read_line(stream) == (None, 200 * 2**20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * json_rows.MAX_ROW_CHARACTERS  # readline doubles its buffer
