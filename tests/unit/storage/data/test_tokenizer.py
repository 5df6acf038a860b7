"""The tokenizer against Hugging Face ``tokenizers``, and the files that it must refuse."""

import base64
import functools
import importlib.util
import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.errors import UserError
from glm46.storage.data.tokenizer import BUILTIN_PATH, END_OF_TEXT, GLM_SPECIAL_TOKENS, load_tokenizer, read_rank_file
from glm46.storage.data.tokenizer_hf import GLM_PATTERN, byte_characters


def hugging_face_json(ranks: dict[bytes, int], special: dict[str, int]) -> dict:
    """What converting a rank file gives: every split of every token listed as a merge, in the order of the ids."""
    characters = byte_characters()
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for name, i in special.items()
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": GLM_PATTERN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {text[token]: rank for token, rank in ranks.items()},
            "merges": [[text[a], text[b]] for a, b in merges],
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def builtin():
    return load_tokenizer("builtin")


@pytest.fixture(scope="module")
def content(builtin):
    return hugging_face_json(read_rank_file(BUILTIN_PATH), builtin.special)


@pytest.fixture(scope="module")
def reference(content):
    # Without added tokens: they match inside raw text there, and ours never does that.
    return tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))


def differing(ours, reference, texts: list[str]) -> list[str]:
    expected = reference.encode_batch_fast(texts)
    return [t for t, e in zip(texts, expected, strict=True) if ours.encode(t).tolist() != e.ids]


def fuzz(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = (
        list(" \t\n\r  \n'") + list("aZ9'.,(_#é中😀\u00a0\u2028\u0301ſK\x1c\x85") + ["'ll", "  ", "\r\n", "def ", "123"]
    )
    return ["".join(rng.choices(alphabet, k=rng.randint(0, 40))) for _ in range(count)]


def test_builtin_has_the_size_that_the_debug_presets_name(builtin):
    assert builtin.vocab_size == 8192
    assert len(builtin.special) == len(GLM_SPECIAL_TOKENS) == 36
    assert [name for name, _ in sorted(builtin.special.items(), key=lambda item: item[1])] == list(GLM_SPECIAL_TOKENS)
    assert builtin.eos_id == builtin.special[END_OF_TEXT] == 8192 - 36


@pytest.mark.slow
def test_library_sources_encode_as_hugging_face_does_and_decode_to_themselves(builtin, reference):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    texts = [file.read_text(encoding="utf-8") for file in files]
    assert differing(builtin, reference, texts) == []
    assert [t for t in texts if builtin.decode(builtin.encode(t)) != t] == []


@pytest.mark.slow
def test_hundred_thousand_fuzz_strings_encode_as_hugging_face_does(builtin, reference):
    assert differing(builtin, reference, fuzz(100_000, seed=1)) == []


@pytest.mark.slow
def test_every_code_point_encodes_as_hugging_face_does(builtin, reference):
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    # Sixteen to a string with a letter, a space and a digit around: the classes of neighbours matter, not only its own.
    texts = ["a" + " 1".join(points[i : i + 16]) + "'s" for i in range(0, len(points), 16)]
    assert differing(builtin, reference, texts) == []


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    " " * 1_000_000, " " * 1_000_000 + "x", "x.\n\n" + " " * 300_000 + "\n" + " " * 300_000 + "y",
    "(" + "\r\n" * 200_000 + "1", "\x1c" + "\n" * 100_000 + "\t" * 100_000 + "'s", "é" + "\u3000" * 50_000 + ".",
    "a" * 200_000 + " b",
])  # fmt: skip
def test_endless_runs_encode_as_hugging_face_does(builtin, reference, text):
    assert builtin.encode(text).tolist() == reference.encode(text).ids


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["a", "9", "(", "\x1c", "'s", "中", ".\n"]),
                          st.sampled_from([" ", "\n", "\t", "\r\n", "\n ", " \n", "\u00a0"]),
                          st.sampled_from([1, 2, 12_000])), max_size=5))  # fmt: skip
def test_cuts_at_long_runs_change_no_token(parts):
    # One regex pass over the whole text is possible up to about a hundred thousand characters of one run.
    tokenizer = _builtin_once()
    text = "".join(word + space * times for word, space, times in parts)
    assert tokenizer.encode(text).tolist() == tokenizer._encoding.encode_ordinary(text)


@functools.cache
def _builtin_once():
    return load_tokenizer("builtin")


def train_own(pre_tokenizer, *, special_first: bool) -> tokenizers.Tokenizer:
    """A vocabulary as a user of `tokenizers` trains it."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:10]
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizer, tokenizers.decoders.ByteLevel()
    special = [END_OF_TEXT, "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special if special_first else [], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator((file.read_text(encoding="utf-8") for file in files), trainer)
    if not special_first:
        own.add_special_tokens(special)
    return own


def _glm_split():
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(GLM_PATTERN), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([split, byte_level])


_OWN = {
    "gpt2, special tokens first": lambda: train_own(
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), special_first=True
    ),
    "gpt2, special tokens last": lambda: train_own(
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), special_first=False
    ),
    "a space before the text": lambda: train_own(tokenizers.pre_tokenizers.ByteLevel(), special_first=True),
    "glm, special tokens first": lambda: train_own(_glm_split(), special_first=True),
}


@pytest.fixture(scope="module", params=_OWN.values(), ids=_OWN)
def own(request, tmp_path_factory):
    """A trained tokenizer as we load it, and as `tokenizers` does, without matching added tokens inside text."""
    file = tmp_path_factory.mktemp("own") / "own.json"
    trained = request.param()
    trained.save(str(file))
    content = json.loads(file.read_text())
    return load_tokenizer(str(file)), tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []})), trained


@pytest.mark.slow
def test_own_vocabularies_encode_as_hugging_face_does_and_decode(own):
    ours, reference, trained = own
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[10:14]
    texts = [file.read_text(encoding="utf-8") for file in files] + fuzz(3_000, seed=3) + ["", " ", "x", "\x1cx"]
    assert differing(ours, reference, texts) == []
    assert [t for t in texts if ours.decode(ours.encode(t)) != trained.decode(reference.encode(t).ids)] == []
    assert ours.eos_id == trained.token_to_id(END_OF_TEXT) and ours.vocab_size == trained.get_vocab_size()
    lengths = ours.token_bytes()
    assert lengths[ours.encode(" naïve 中文")].sum() == len(" naïve 中文".encode()) and lengths[ours.eos_id] == 0


@pytest.mark.parametrize("own", [_OWN["gpt2, special tokens first"]], indirect=True)
def test_the_pattern_of_gpt2_cuts_as_hugging_face_does_at_every_code_point(own):
    ours, reference, _ = own
    # The planes behind these have ideographs and private characters only, a few of them here too.
    points = [chr(i) for i in range(0x20400) if not 0xD800 <= i < 0xE000]
    texts = ["a" + " 1".join(points[i : i + 16]) + "'s" for i in range(0, len(points), 16)]
    assert differing(ours, reference, texts) == []


@pytest.mark.parametrize("text", [
    " " * 300_000, " " * 300_000 + "x", "x.\n\n" + " " * 100_000 + "\n" + " " * 100_000 + "y",
    "(" + "\r\n" * 60_000 + "1", "a" + "\t" * 90_000 + "'s", "é" + "\u3000" * 50_000 + ".",
])  # fmt: skip
def test_own_vocabularies_encode_endless_runs_as_hugging_face_does(own, text):
    ours, reference, _ = own
    assert ours.encode(text).tolist() == reference.encode(text).ids


def test_fingerprints_tell_own_vocabularies_apart(own, tmp_path):
    ours, _, trained = own
    trained.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).fingerprint == ours.fingerprint
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = {token: i + 7 for token, i in content["model"]["vocab"].items()}
    added = [token | {"id": token["id"] + 7} for token in content["added_tokens"]]
    shifted = content | {"added_tokens": added, "model": content["model"] | {"vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(shifted))
    assert load_tokenizer(str(tmp_path)).fingerprint != ours.fingerprint


def test_the_script_trains_a_vocabulary_that_loads(tmp_path):
    script = Path(__file__).resolve().parents[4] / "scripts" / "train_tokenizer.py"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_bytes(Path(json.__file__).read_bytes())
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, check=False)
    done = run([sys.executable, script, "--ranks", "400", "--output", "own.tiktoken", "text"])
    assert done.returncode == 0, done.stderr
    ours = load_tokenizer(str(tmp_path / "own.tiktoken"))
    assert len(ours.ranks) == 400 and ours.vocab_size == 436
    text = (tmp_path / "text" / "a.py").read_text()
    assert ours.decode(ours.encode(text)) == text and len(ours.encode(text)) < 0.6 * len(text)
    # Without the package the help is still there, and the mistake is one line.
    (tmp_path / "tokenizers.py").write_text("raise ImportError('no tokenizers')")
    bare = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    assert "--ranks" in run([sys.executable, script, "--help"], env=bare).stdout
    done = run([sys.executable, script, "--ranks", "400", "--output", "x.tiktoken", "text"], env=bare)
    assert done.returncode == 2 and "glm46[hf]" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x.tiktoken").exists()


def test_special_names_in_text_stay_text(builtin):
    ids = builtin.encode("<think>" + END_OF_TEXT)
    assert ids.max() < builtin.eos_id
    assert builtin.decode(ids) == "<think>" + END_OF_TEXT


def test_token_bytes_sum_to_the_text(builtin):
    text = "Größe: 10 µm\n" * 50
    lengths = builtin.token_bytes()
    assert lengths[builtin.encode(text)].sum() == len(text.encode())
    assert lengths.shape == (8192,) and lengths[list(builtin.special.values())].sum() == 0


def test_ids_without_a_token_decode_to_the_replacement_character(builtin):
    assert builtin.decode([9_999, -1]) == "\ufffd\ufffd"
    assert builtin.decode(np.array([builtin.eos_id])) == END_OF_TEXT


def test_tokenizer_json_is_the_same_tokenizer_as_its_rank_file(builtin, content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.fingerprint == builtin.fingerprint
    assert loaded.special == builtin.special


def test_special_tokens_listed_in_the_vocabulary_too_change_nothing(builtin, content, tmp_path):
    content = json.loads(json.dumps(content))
    content["model"]["vocab"] |= builtin.special
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).fingerprint == builtin.fingerprint


def _other_order(c):
    c["model"]["merges"][:2] = c["model"]["merges"][1::-1]


def _unlisted(c):
    c["model"]["merges"] = [m for m in c["model"]["merges"] if "".join(m) != "".join(c["model"]["merges"][5])]


@pytest.mark.parametrize("change, reason", [
    (lambda c: c["model"].update(type="Unigram"), "Unigram.*byte-level BPE"),
    (lambda c: c.update(model={"type": "WordPiece", "vocab": {"a": 0}}), "WordPiece.*byte-level BPE"),
    (lambda c: c.update(pre_tokenizer=None), "pre-tokenizer is absent"),
    (lambda c: c.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer is Whitespace"),
    (lambda c: c["model"]["vocab"].pop("!"), "1 bytes have no token.*initial_alphabet"),
    (lambda c: c["added_tokens"].append({"id": 8192, "content": "   "}), "white space"),
    (lambda c: c["added_tokens"].append({"id": 2**40, "content": "far"}), "an id is not in"),
    (lambda c: c.update(normalizer={"type": "NFC"}), "normalises"),
    (lambda c: c["model"].update(byte_fallback=True), "byte_fallback"),
    (lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"), "its Split has the pattern"),
    (lambda c: c["pre_tokenizer"]["pretokenizers"].insert(0, {}), "tokenizer.json"),
    (lambda c: c["model"]["vocab"].update({"zzzz": 9_000}), "not built by a listed merge"),
    (lambda c: c["added_tokens"][1].update(id=5), "share an id"),
    (lambda c: c["added_tokens"].pop(0), END_OF_TEXT),
    (_other_order, "merge order"),
    (_unlisted, "not built by a listed merge"),
])  # fmt: skip
def test_a_tokenizer_json_that_is_not_exact_is_refused(content, tmp_path, change, reason):
    content = json.loads(json.dumps(content))
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=reason):
        load_tokenizer(str(tmp_path))


def _line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % rank


@pytest.mark.parametrize("lines, reason", [
    (lambda full: b"", "no token for byte 0"),
    (lambda full: full + b"%%% 8156\n", "line 8157"),
    (lambda full: full + b"YWJj\n", "line 8157"),
    (lambda full: full + _line(b"qqqq", 9_000), "ranks are not"),
    (lambda full: b"".join(full.splitlines(keepends=True)[1:]), "ranks are not"),
])  # fmt: skip
def test_a_broken_rank_file_is_refused(tmp_path, lines, reason):
    file = tmp_path / "broken.tiktoken"
    file.write_bytes(lines(BUILTIN_PATH.read_bytes()))
    with pytest.raises(UserError, match=reason):
        load_tokenizer(str(file))


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match="nowhere/tokenizer.json"):
        load_tokenizer("nowhere/tokenizer.json")


# Real vocabularies of 100k tokens and more, where a package that ships one is installed.
_SHIPPED = [("dashscope", "resources/qwen.tiktoken"), ("tiktoken_ext", "data/cl100k_base.tiktoken")]


@pytest.mark.parametrize("package, file", _SHIPPED)
def test_real_vocabularies_encode_as_hugging_face_does(package, file, tmp_path):
    spec = importlib.util.find_spec(package)
    paths = [Path(folder) / file for folder in (spec.submodule_search_locations or [])] if spec else []
    paths = [path for path in paths if path.is_file()]
    if not paths:
        pytest.skip(f"{package} with {file} is not installed")
    ours = load_tokenizer(str(paths[0]))
    content = hugging_face_json(read_rank_file(paths[0]), ours.special)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).fingerprint == ours.fingerprint
    reference = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    assert differing(ours, reference, [f.read_text(encoding="utf-8") for f in files] + fuzz(20_000, seed=2)) == []
