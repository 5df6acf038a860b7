"""The Python API: a local model, and the calls of the package."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import glm46
from glm46.cli import main
from glm46.config.errors import UserError
from glm46.storage.data.batches import IGNORE
from tests.builders import model_folder, random_model, tiny_shape

ROOT = Path(__file__).parents[4]
CHAT = {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi, what is it?"}]}
ROWS = ["def f(x):\n    return x\n", "import os\n", CHAT]


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of random weights."""
    return model_folder(tmp_path_factory.mktemp("model") / "hf", random_model(tiny_shape(), seed=1))


@pytest.fixture
def model(tiny_model_folder):
    return glm46.load(tiny_model_folder, device="cpu")


def test_tokens_logits_and_counts_are_those_of_transformers(model, tiny_model_folder):
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    ids = model.encode(ROWS[0])
    assert model.decode(ids) == ROWS[0]
    with torch.no_grad():
        torch.testing.assert_close(model.logits(ids), theirs(torch.tensor([ids])).logits[0], rtol=1e-5, atol=1e-5)
    assert model.shape.hidden_size == theirs.config.hidden_size
    stored = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    mtp = sum(x.numel() for x in [*model.module.mtp.parameters(), *model.module.mtp.buffers()])
    counted = sum(x.numel() for name, x in stored.items() if not name.endswith("inv_freq"))
    assert model.shape.total_parameters == counted + mtp
    assert f"{model.shape.total_parameters:,} parameters" in repr(model)


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}, {"chat": True, "system": "Be short.", "thinking": True},
])  # fmt: skip
def test_text_is_that_of_the_verb(options, model, tiny_model_folder, capsys):
    words = [word for key, value in options.items()
             for word in (f"--{key.replace('_', '-')}", *([] if value is True else [str(value)]))]  # fmt: skip
    assert (
        main(["generate", "--model", str(tiny_model_folder), "--prompt", "Hello!", "--max-new-tokens", "9", *words])
        == 0
    )
    text = model.generate("Hello!", max_new_tokens=9, **options)
    assert text and text.strip() in capsys.readouterr().out
    assert model.generate(["Hello!", "x"], max_new_tokens=9, **options)[0] == text


def test_targets_of_a_batch_are_all_of_a_text_and_the_answer_of_a_chat(model):
    batch = model.batch(ROWS)
    labels = [model.decode(row[row != IGNORE].tolist()) for row in batch["labels"]]
    assert ROWS[0][len(model.decode(model.encode(ROWS[0])[:1])) :] in labels[0]
    assert "Hi, what is it?" in labels[2] and "Hello!" not in labels[2]


@pytest.mark.slow
@pytest.mark.parametrize("mtp_weight", [0.0, 0.3])
def test_step_of_training_is_that_of_transformers_and_learns(mtp_weight, model, tiny_model_folder):
    """The loss over the targets of all rows, its gradients, clipped, and a step of SGD."""
    batch, theirs = model.batch(ROWS), AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    is_real = (batch["document_ids"] >= 0).long()
    logits = theirs(batch["input_ids"], attention_mask=is_real).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    if not mtp_weight:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    before = model.train_step(batch, optimizer, mtp_weight=mtp_weight)
    ids = model.encode(ROWS[0])
    if mtp_weight:
        assert before > loss.item() + 0.3 and model.module.mtp["0"].eh_proj.weight.grad.abs().sum() > 0
    else:
        assert before == pytest.approx(loss.item(), rel=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model.logits(ids), theirs(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    losses = [model.train_step(batch, optimizer, mtp_weight=mtp_weight) for _ in range(40)]
    assert losses[-1] < losses[0] / 3


def test_example_of_the_page_runs(model, tiny_model_folder, capsys):
    """docs/api.md, with the folder of this test."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"(?s)```python\n(.*?)```", page) if "load(" in code]
    example, count = re.subn(r'load\("[^"]+"', f"load({str(tiny_model_folder)!r}", example)
    assert count == 1
    exec(compile(example, "docs/api.md", "exec"), {})
    assert "parameters" in capsys.readouterr().out


def test_import_loads_no_torch():
    code = "import sys, json, glm46; print(json.dumps(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules))))"
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) == []


IDS = [5, 6, 7]


@pytest.mark.parametrize("ids", [
    IDS, tuple(IDS), range(5, 8), np.array(IDS), np.array(IDS, np.uint32), torch.tensor(IDS),
    torch.tensor(IDS, dtype=torch.int32), [torch.tensor(5), torch.tensor(6), torch.tensor(7)],
], ids=["list", "tuple", "range", "array", "uint32", "tensor", "int32", "list of tensors"])  # fmt: skip
def test_one_row_of_ids(ids, model):
    inputs = torch.tensor([IDS])
    with torch.no_grad():
        expected = model.module(inputs)[0, :, : model.tokenizer.vocab_size]
    torch.testing.assert_close(model.logits(ids), expected)
    assert model.decode(ids) == model.tokenizer.decode(IDS)


@pytest.mark.parametrize("ids", [
    [IDS, IDS[::-1]], np.array([IDS, IDS[::-1]]), torch.tensor([IDS, IDS[::-1]]),
    [torch.tensor(IDS), np.array(IDS[::-1])],
], ids=["lists", "array", "tensor", "mixed"])  # fmt: skip
def test_rows_of_ids(ids, model):
    logits = model.logits(ids)
    torch.testing.assert_close(logits[0], model.logits(IDS))
    torch.testing.assert_close(logits[1], model.logits(IDS[::-1]))
    assert model.decode(ids) == [model.decode(IDS), model.decode(IDS[::-1])]


@pytest.mark.parametrize("row", ["import os", CHAT], ids=["text", "conversation"])
def test_one_document_is_one_row(row, model):
    one = model.batch(row)
    several = model.batch([row])
    assert one["input_ids"].shape[0] == 1
    assert torch.equal(one["input_ids"], several["input_ids"])
    assert torch.equal(one["labels"], several["labels"])


def test_no_ids_are_no_text(model):
    assert model.decode([]) == ""


def test_longest_rows_are_taken(model):
    positions = model.shape.max_position_embeddings
    assert model.logits([5] * positions).shape[0] == positions
    longest = model.decode([model.encode("a")[0]] * positions)
    while len(model.encode(longest)) > positions:
        longest = longest[:-1]
    labels = model.batch(longest)["labels"]
    assert (labels != IGNORE).sum() == len(model.encode(longest))


def test_dtype_and_device_of_torch(tiny_model_folder):
    model = glm46.load(tiny_model_folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert next(model.module.parameters()).dtype == torch.bfloat16


REFUSED_CALLS = {
    "logits: too long": (lambda m: m.logits([1] * 5000), r"ids: a row has 5,000 tokens.* positions .*shorter"),
    "logits: empty": (lambda m: m.logits([]), r"ids = \[\]: must not be empty; give"),
    "logits: empty row": (lambda m: m.logits([[]]), r"ids = \[\[\]\]: must not be empty; give"),
    "logits: above": (lambda m: m.logits([999_999]), r"ids: 999999 is not a token id: .* from 0 to [\d,]+; take"),
    "logits: negative": (lambda m: m.logits([-1]), r"ids: -1 is not a token id: .* from 0 to"),
    "logits: huge": (lambda m: m.logits([2**70]), r"ids = .*must be integers"),
    "logits: text": (lambda m: m.logits("hello"), r"ids = 'hello': must be token ids, not a text; give encode\(text\)"),
    "logits: texts": (lambda m: m.logits(["hello"]), r"ids = \['hello'\]: must be integers; give a list"),
    "logits: floats": (lambda m: m.logits([1.0]), r"ids = \[1.0\]: must be integers"),
    "logits: float tensor": (lambda m: m.logits(torch.ones(3)), r"ids = tensor.*: must be integers"),
    "logits: bools": (lambda m: m.logits([True]), r"ids = \[True\]: must be integers"),
    "logits: ragged": (lambda m: m.logits([[1, 2], [3]]), r"ids = .*: must be integers; give .* equal length"),
    "logits: None": (lambda m: m.logits(None), r"ids = None: must be integers"),
    "logits: number": (lambda m: m.logits(5), r"ids = 5: must have 1 or 2 dimensions, not 0"),
    "logits: 3-D": (lambda m: m.logits(torch.ones(1, 1, 1).long()), r"ids = .*1 or 2 dimensions, not 3"),
    "decode: above": (lambda m: m.decode([99_999]), r"ids: 99999 is not a token id"),
    "decode: text": (lambda m: m.decode("hello"), r"ids = 'hello': must be token ids"),
    "encode: list": (lambda m: m.encode(["a"]), r"text = \['a'\]: must be a text; call encode once"),
    "generate: none": (lambda m: m.generate([]), r"prompts = \[\]: must not be empty; give"),
    "generate: empty": (lambda m: m.generate(["a", ""]), r"prompts\[1\] = '': must not be empty; give"),
    "generate: blank chat": (lambda m: m.generate(" ", chat=True), r"prompts = ' ': must not be empty"),
    "generate: message": (
        lambda m: m.generate(CHAT["messages"], chat=True),
        r"prompts\[0\] = \{'role'.*: must be a text; .*chat=True",
    ),
    "generate: ids": (lambda m: m.generate([1, 2]), r"prompts\[0\] = 1: must be a text; for ids give decode\(ids\)"),
    "generate: tensor": (lambda m: m.generate(torch.tensor(IDS)), r"prompts = tensor.*must be a text or a list"),
    "generate: max_tokens": (
        lambda m: m.generate("a", max_tokens=2),
        r"max_tokens: generate\(\) has no such .*; use max_new_tokens",
    ),
    "generate: max_length": (lambda m: m.generate("a", max_length=2), r"max_length: .*use max_new_tokens"),
    "generate: unlike": (lambda m: m.generate("a", zzz=2), r"zzz: .*take one of prompts, chat, .*min_p"),
    "generate: temperature": (lambda m: m.generate("a", temperature=-1), r"temperature = -1: must be .*not negative"),
    "generate: temperature type": (
        lambda m: m.generate("a", temperature="hot"),
        r"temperature = 'hot': must be",
    ),
    "generate: top_k": (lambda m: m.generate("a", temperature=1.0, top_k=0), r"top_k = 0: must be at least 1"),
    "generate: top_k type": (lambda m: m.generate("a", temperature=1.0, top_k=1.5), r"top_k = 1.5: must be an integer"),
    "generate: top_p": (lambda m: m.generate("a", temperature=1.0, top_p=2.0), r"top_p = 2.0: must be above 0"),
    "generate: filter": (lambda m: m.generate("a", top_k=3), r"top_k, top_p and min_p choose .*temperature above 0"),
    "generate: no tokens": (lambda m: m.generate("a", max_new_tokens=0), r"max_new_tokens = 0: must be at least 1"),
    "generate: many tokens": (lambda m: m.generate("a", max_new_tokens=10**6), r"max_new_tokens = 1000000 .*positions"),
    "generate: half tokens": (
        lambda m: m.generate("a", max_new_tokens=2.5),
        r"max_new_tokens = 2.5: must be",
    ),
    "generate: seed": (lambda m: m.generate("a", seed=2**64), r"seed = \d+: must fit in 64 bits"),
    "generate: system": (lambda m: m.generate("a", system="b"), r"system and thinking belong to a chat; add chat=True"),
    "generate: surrogate": (lambda m: m.generate("\ud800"), r"prompts = .*UTF-8"),
    "batch: empty": (lambda m: m.batch([]), r"rows: expected at least one"),
    "batch: ids": (lambda m: m.batch([[1, 2]]), r"rows\[0\] = \[1, 2\]: must be a text or a conversation"),
    "batch: number": (lambda m: m.batch(5), r"rows = 5: must be texts and conversations; give a list"),
    "batch: bytes": (lambda m: m.batch(b"import os"), r"rows = b'import os': must be texts"),
    "batch: no messages": (lambda m: m.batch(["a", {"messages": []}]), r"rows\[1\]: .*messages"),
    "batch: long": (lambda m: m.batch("a b " * 9000), r"rows: the longest has [\d,]+ tokens, .*positions .*shorter"),
    "loss: text": (lambda m: m.loss("a"), r"batch = 'a': must be a batch; give the result of batch\(rows\)"),
    "train_step: optimizer": (lambda m: m.train_step(m.batch("a"), None), r"optimizer = None: must be a torch.optim"),
}


@pytest.mark.parametrize(("call", "pattern"), REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_refused_call_gets_one_sentence_about_python(call, pattern, model):
    with pytest.raises(UserError) as raised:
        call(model)
    (fault,) = raised.value.faults
    assert re.match(pattern, fault), fault
    assert "--" not in fault
    assert "\n" not in fault


REFUSED_LOADS = {
    "nowhere": (lambda folder: glm46.load(folder / "none"), "none"),
    "None": (lambda folder: glm46.load(None), "folder = None: must be"),
    "dtype": (
        lambda folder: glm46.load(folder, dtype="float16"),
        "dtype = 'float16': expected 'float32' or",
    ),
    "no GPU": (
        lambda folder: glm46.load(folder, device="cuda:7"),
        r"device = 'cuda:7': this machine has 0 GPUs; use cpu",
    ),
    "unknown device": (lambda folder: glm46.load(folder, device="tpu"), r"device = 'tpu': unknown device; use cpu"),
    "number": (lambda folder: glm46.load(folder, device=0), r"device = 0: must be a name such as 'cpu'"),
    "torch_dtype": (lambda folder: glm46.load(folder, torch_dtype="float32"), r"torch_dtype: load\(\) .*; use dtype"),
    "device_map": (lambda folder: glm46.load(folder, device_map="auto"), r"device_map: load\(\) .*; use device"),
}


@pytest.mark.parametrize(("call", "pattern"), REFUSED_LOADS.values(), ids=REFUSED_LOADS)
def test_refused_load_gets_one_sentence_about_python(call, pattern, tiny_model_folder):
    with pytest.raises(UserError) as raised:
        call(tiny_model_folder)
    (fault,) = raised.value.faults
    assert re.search(pattern, fault), fault
    assert "--" not in fault


def test_verb_speaks_of_its_options(tiny_model_folder, capsys):
    words = ["generate", "--model", str(tiny_model_folder), "--prompt", "a", "--temperature", "-1", "--device", "cpu"]
    assert main(words) == 2
    assert "--temperature -1.0: must be" in capsys.readouterr().err
