"""Prompts of files, what is said about bad rows, and their order."""

import gzip
import io
import json
import lzma
import os
import signal

import pytest

from glm46.config.errors import UserError
from glm46.config.rl_data import PromptsConfig
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.prompts import Prompt, prompt_at, read_prompts, require_reachable_labels
from glm46.tasks.rl.rewards.answer import RewardRule
from glm46.tasks.rl.rewards.function_pool import FunctionPool


def write(folder, *rows):
    file = folder / "prompts.jsonl"
    lines = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    file.write_text(lines, errors="surrogateescape")
    return file


def read(file, tokenizer, needs_label=True, most_tokens=100, **keys):
    config = PromptsConfig(file=str(file), **keys)
    return read_prompts(file, config, tokenizer, most_tokens=most_tokens, needs_label=needs_label)


@pytest.mark.parametrize("keep, said", [(True, "<think>x</think>"), (False, "</think>")])
def test_past_thoughts_stay_where_the_format_keeps_them(keep, said, tmp_path):
    past = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a", "reasoning_content": "x"}]
    file = write(tmp_path, {"prompt": [*past, {"role": "user", "content": "2"}], "label": "b"})
    of_47, of_45 = (load_tokenizer("builtin", flavor) for flavor in ("GLM-4.7-Flash", "GLM-4.6"))
    keys = PromptsConfig(file=str(file), thinking=True, keep_thoughts=keep)
    (prompt,) = read_prompts(file, keys, of_47, most_tokens=99, needs_label=True)
    assert of_47.decode(prompt.tokens) == f"[gMASK]<sop><|user|>1<|assistant|>{said}a<|user|>2<|assistant|><think>"
    if keep:
        with pytest.raises(UserError, match=r"rl.prompts.keep_thoughts = true: the tokenizer 'builtin' has .* GLM-4.5"):
            read_prompts(file, keys, of_45, most_tokens=99, needs_label=True)


def test_a_row_states_the_effort_of_its_prompt(tmp_path):
    rows = [{"prompt": "Hi", "label": "x", "reasoning_effort": effort} for effort in ("high", None, "low")]
    of_52, of_47 = (load_tokenizer("builtin", flavor) for flavor in ("GLM-5.2", "GLM-4.7"))
    prompts = read(write(tmp_path, *rows[:2]), of_52, thinking=True)
    assert [prompt.effort for prompt in prompts] == ["high", ""]
    assert [of_52.decode(prompt.tokens) for prompt in prompts] == [
        f"[gMASK]<sop><|system|>Reasoning Effort: {effort}<|user|>Hi<|assistant|><think>" for effort in ("High", "Max")
    ]
    assert len(read(write(tmp_path, *rows), of_47, thinking=True)) == 3
    with pytest.raises(UserError, match="line 3: reasoning_effort is neither high nor max: 'low'"):
        read(write(tmp_path, *rows), of_52, thinking=True)


DAPO = {
    "data_source": "math_dapo", "prompt": [{"content": "Solve it.\n\n1 + 1 =", "role": "user"}], "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"},
}  # fmt: skip
"""A row of dapo-math-17k."""
AIME = {
    "prompt": [{"role": "user", "content": "Every morning Aya walks."}],
    "label": "204",
    "metadata": {"rm_type": "x"},
}
"""A row of aime-2024 in the form of slime's data set."""


def test_rows_of_data_sets_are_read_as_they_are(tokenizer, tmp_path):
    [prompt] = read(write(tmp_path, DAPO), tokenizer, label_key="reward_model.ground_truth")
    assert (prompt.text, prompt.label) == ("Solve it.\n\n1 + 1 =", "34")
    assert tokenizer.decode(prompt.tokens).endswith("/nothink<|assistant|>\n<think></think>")
    [prompt] = read(write(tmp_path, AIME), tokenizer, thinking=True)
    assert prompt.label == "204"
    assert tokenizer.decode(prompt.tokens) == "[gMASK]<sop><|user|>\nEvery morning Aya walks.<|assistant|>"


def test_parquet_and_texts_are_read(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "prompts.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([DAPO, DAPO]), file)
    assert [p.label for p in read(file, tokenizer, label_key="reward_model.ground_truth")] == ["34", "34"]
    [prompt] = read(write(tmp_path, {"question": "Why?"}), tokenizer, needs_label=False, prompt_key="question")
    assert (prompt.text, prompt.label) == ("Why?", None)


@pytest.mark.parametrize("name", ["p.json", "p.jsonl.gz", "p.txt", "P.JSONL", "p.json.xz", "p"])
@pytest.mark.parametrize("form", [
    "\n".join, "\r".join, lambda rows: f"[{','.join(rows)}]", lambda rows: "\n\x1e".join(["", *rows]),
    lambda rows: "\ufeff" + "\r\n".join(rows),
])  # fmt: skip
def test_prompts_are_read_by_the_reader_of_chats(name, form, tokenizer, tmp_path):
    data = form([json.dumps(row) for row in (DAPO, AIME | {"prompt": "Why?"})]).encode()
    file = tmp_path / name
    file.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)(data))
    assert [one.text for one in read(file, tokenizer, needs_label=False)] == ["Solve it.\n\n1 + 1 =", "Why?"]


@pytest.mark.parametrize(("name", "change", "said"), [
    ("p.parquet", lambda data: data[: len(data) // 2], "damaged Parquet file"),
    ("p.parquet", lambda data: b"PAR1" + bytes(64) + data[68:], "damaged Parquet file"),
    ("p.parquet", lambda _: b'{"prompt": "a"}', "damaged Parquet file"),
    ("P.PARQUET", lambda _: b"", "damaged Parquet file"),
    ("p.jsonl", bytes, "not JSON but another format"),
    ("p.jsonl", lambda _: '{"prompt": "a"}'.encode("utf-16-le"), "not JSON but another format"),
    ("p.jsonl.gz", lambda data: gzip.compress(data)[:-9], "not JSON but another format|cut off"),
    ("p.json", lambda _: b'[{"prompt": "a", "label": "1"}, {"prompt"', "damaged JSON at row 1"),
    ("p.json", lambda _: b'[{"prompt": ' + b"[" * 100_000, "nested too deeply"),
])  # fmt: skip
def test_a_file_that_holds_no_prompts_is_one_line(name, change, said, tokenizer, tmp_path):
    parquet, stream = pytest.importorskip("pyarrow.parquet"), io.BytesIO()
    rows = [AIME | {"prompt": f"{number} + 1 = {number * 7919 % 10007}"} for number in range(2000)]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), stream)
    (tmp_path / name).write_bytes(change(stream.getvalue()))
    with pytest.raises(UserError, match=f"{name}: .*{said}") as error:
        read(tmp_path / name, tokenizer)
    assert len(error.value.faults) == 1


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "a"}, "label"), ("{broken", "JSON"), ("[1]", "JSON"),
    pytest.param('{"prompt": ' + "[" * 100_000, "not JSON", id="deep"), ('{"prompt": "\udcff", "label": "1"}', "UTF-8"),
    ({"label": "1"}, "prompt"), ({"prompt": [], "label": "1"}, "prompt"),
    ({"promt": "a", "label": "1"}, "among its keys: promt, label"), ({"prompt": 1234, "label": "1"}, "is 1234"),
    ({"prompt": [{"role": "user"}], "label": "1"}, "content"),
    ({"prompt": [{"role": "assistant", "content": "a"}], "label": "1"}, "user"),
    ({"prompt": "word " * 100, "label": "1"}, "100"),
])  # fmt: skip
def test_a_bad_row_is_named_with_its_line(row, said, tokenizer, tmp_path):
    file = write(tmp_path, {"prompt": "a", "label": "1"}, row)
    with pytest.raises(UserError) as error:
        read(file, tokenizer)
    [fault] = error.value.faults
    assert f"{file} line 2" in fault
    assert said in fault


def test_a_file_that_is_missing_or_empty_is_refused(tokenizer, tmp_path):
    for file in (tmp_path / "none.jsonl", write(tmp_path)):
        with pytest.raises(UserError, match=r"rl\.prompts\.file"):
            read(file, tokenizer)


def test_each_pass_hands_out_every_prompt_once_in_an_order_of_its_own():
    passes = [[prompt_at(number, 50, 3) for number in range(start, start + 50)] for start in (0, 50)]
    assert [sorted(one) for one in passes] == [list(range(50))] * 2
    assert passes[0] != passes[1]
    assert passes[0] != [prompt_at(number, 50, 4) for number in range(50)]


@pytest.mark.parametrize(
    ("reward", "label", "is_reachable"),
    [
        ("exact", "012389", True), ("exact", ["a", "b"], True), ("exact", "", False), ("choice", "C", True),
        ("choice", "Paris", False), ("math", "34", True), ("math", "\\frac{1}{2}", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("thinking", [False, True])
def test_a_label_that_no_answer_reaches_is_refused(reward, label, is_reachable, thinking):
    prompts = [Prompt([1], "?", "A" if reward == "choice" else "7"), Prompt([1], "?", label)]
    scorer = FunctionPool([RewardRule(reward), RewardRule("format")])
    try:
        if is_reachable:
            require_reachable_labels(prompts, scorer, thinking=thinking)
            return
        with pytest.raises(UserError) as error:
            require_reachable_labels(prompts, scorer, thinking=thinking)
    finally:
        scorer.close()
    (fault,) = error.value.faults
    assert all(part in fault for part in (reward, repr(label), "1 of 2", "rl.prompts.label_key"))


@pytest.mark.parametrize(
    ("reward", "label", "said"),
    [
        ("exact", "", "is empty"), ("exact", {"a": 1}, "not a text"), ("exact", ["a", ""], "is empty"),
        ("choice", "CD", "no letter"), ("choice", 5, "no letter"), ("math", "\\frac{1}{", "braces"),
        ("math", True, "not a text"), ("math", "x+*/2)", "read"), ("math", ["1", "..."], "states nothing"),
        ("exact", True, "not a text"), ("exact", float("nan"), "not a text"), ("exact", ["a", None], "not a text"),
        ("choice", True, "no letter"), ("math", float("nan"), "not a text"), ("code", True, "list of tests"),
        ("code", ["assert f(1) or True"], "passes whatever"), ("code", ["assert f(1)"], "passes all tests"),
        ("code", ["pass"], "each program passes"), ("code", "print(1)", "list of tests"),
        ("code", {"inputs": ["1"], "outputs": [""]}, "output is empty"),
    ],
)  # fmt: skip
def test_a_label_that_a_reward_cannot_judge_is_refused_with_its_line(reward, label, said, tokenizer, tmp_path):
    if reward == "math":
        pytest.importorskip("math_verify")
    good = {"exact": "a", "choice": "A", "math": "1", "code": ["assert f(1) == 1"]}[reward]
    file = write(tmp_path, {"prompt": "a", "label": good}, {"prompt": "b", "label": label})
    scorer = FunctionPool([RewardRule(reward)])
    try:
        with pytest.raises(UserError) as error:
            require_reachable_labels(read(file, tokenizer), scorer, thinking=True)
    finally:
        scorer.close()
    (fault,) = error.value.faults
    assert all(part in fault for part in (f"{file} line 2", f"rl.rewards: {reward}", repr(label), said, "1 of 2"))


@pytest.mark.slow
def test_labels_are_compared_in_a_process_that_is_killed_if_it_hangs():
    scorer = FunctionPool([RewardRule("math", seconds=0.2)])
    _, process = scorer._idle[0]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=r"math does not give the label '7'.*no value within 0\.2 s.*1 of 1"):
            require_reachable_labels([Prompt([1], "?", "7")], scorer, thinking=False)
    finally:
        scorer.close()


def test_prompts_that_are_too_long_are_one_message(tmp_path, tokenizer):
    file = write(tmp_path, *({"prompt": "x" * length, "label": "1"} for length in (3, 200, 4, 300)))
    with pytest.raises(UserError) as error:
        read(file, tokenizer, most_tokens=40)
    (fault,) = error.value.faults
    longest = len(read(file, tokenizer, most_tokens=1000)[3].tokens)
    assert f"{file} line 2" in str(fault) and "2 of 4" in str(fault) and f"{longest:,}" in str(fault)
    assert "rollout.max_new_tokens" in str(fault) and "training.seq_len leaves 40" in str(fault)


def test_columns_that_are_stored_as_json_text_are_read(tokenizer, tmp_path):
    stored = {key: json.dumps(value) for key, value in DAPO.items()}
    keys = {"label_key": "reward_model.ground_truth"}
    [expected] = read(write(tmp_path, DAPO), tokenizer, **keys)
    [prompt] = read(write(tmp_path, stored), tokenizer, **keys)
    assert (prompt.tokens, prompt.label) == (expected.tokens, expected.label)


@pytest.mark.parametrize(("text", "fault"), [
    ("a\0b", "holds NUL characters"), ("half \ud83d", "not UTF-8"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["text", "messages"])
def test_characters_that_no_text_has_are_faults(text, fault, form, tokenizer, tmp_path):
    prompt = text if form == "text" else [{"role": "user", "content": text}]
    with pytest.raises(UserError, match=rf"prompts.jsonl line 1: 'prompt' \(rl.prompts.prompt_key\): {fault}"):
        read(write(tmp_path, {"prompt": prompt, "label": "b"}), tokenizer)
    [kept] = read(write(tmp_path, {"prompt": r"the escape \u0000", "label": "b"}), tokenizer)
    assert kept.text == r"the escape \u0000"
