"""``glm46.load`` beside `transformers` and the verb ``generate``: the same logits, text, loss and step of training."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import glm46
from glm46.cli import main
from glm46.config.presets import PRESETS
from glm46.storage.data.batches import IGNORE
from tests.builders import TINY

ROOT = Path(__file__).parents[4]
SHAPE = PRESETS["debug"].model_copy(update={key: value for key, value in TINY.items() if key != "flavor"})
CHAT = {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi, what is it?"}]}
ROWS = ["def f(x):\n    return x\n", "import os\n", CHAT]


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
