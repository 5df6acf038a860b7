"""Fine-tuning starts from trained weights and shows greedy answers before and after."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.engine.evaluation import network_rows
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.loading import load_for_inference
from glm46.engine.inference.sampling import Sampling
from glm46.operate.launch.train_rank import train
from glm46.storage.chats import chat
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import call_here

MESSAGES = ["function_3", "return"]


@pytest.fixture
def base(make_config, tmp_path) -> str:
    """A step folder to start from."""
    assert train(make_config(job={"dump_folder": str(tmp_path / "base")}, training={"steps": 2})) == 0
    return str(tmp_path / "base/checkpoint/step-000002")


def tuned(make_config, base: str, **tables):
    start = {"initial_load_path": base, "initial_load_model_only": True, **tables.pop("checkpoint", {})}
    samples = {"samples": MESSAGES, "max_new_tokens": 5}
    return make_config(**{"checkpoint": start, "finetune": samples, "model": {"max_position_embeddings": 40}} | tables)


@pytest.mark.slow
def test_the_answers_before_and_after_are_those_of_the_generator(make_config, base, tokenizer, tmp_path, capsys):
    assert train(tuned(make_config, base)) == 0
    said = capsys.readouterr().out
    before, after = said.index("Greedy answers after step 0;"), said.index("Greedy answers after step 4;")
    assert before < said.index("step       1") < after
    prompts = [chat_prompt(tokenizer, [Message("user", message)], thinking=False) for message in MESSAGES]
    for folder, text in ((Path(base), said[before:after]), (tmp_path / "out/checkpoint/step-000004", said[after:])):
        model, _ = load_for_inference(folder, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))
        stop = frozenset(stop_ids(tokenizer))
        settings = {"sampling": Sampling(0.0), "stop": stop, "vocab_size": tokenizer.vocab_size}
        rows = [Continuation(prompt, 5) for prompt in prompts]
        Generation(decoder_for(model, rows), rows, **settings).run()
        for row, message in zip(rows, MESSAGES, strict=True):
            answer = tokenizer.decode(row.text(stop))
            assert f"user: {message}\nassistant: {answer.strip()}" in text


@pytest.mark.slow
def test_answers_end_with_their_stop_marker_and_say_so(make_config, base, tokenizer, capsys, monkeypatch):
    model, _ = load_for_inference(Path(base), tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [chat_prompt(tokenizer, [Message("user", message)], thinking=False) for message in MESSAGES]
    settings = {"sampling": Sampling(0.0), "stop": frozenset(), "vocab_size": tokenizer.vocab_size}
    rows = [Continuation(prompt, 5) for prompt in prompts]
    Generation(decoder_for(model, rows), rows, **settings).run()
    answers = [row.tokens for row in rows]
    marker = answers[0][1]
    monkeypatch.setattr("glm46.tasks.finetune.task.stop_ids", lambda tokenizer: [marker])
    assert train(tuned(make_config, base, training={"steps": 1})) == 0
    said = capsys.readouterr().out
    before = said[: said.index("step       1")]
    assert f"{sum(marker in answer for answer in answers)} of 2 ended with a stop marker" in before
    for message, answer in zip(MESSAGES, answers, strict=True):
        cut = answer[: answer.index(marker) + 1] if marker in answer else answer
        state = "" if marker in answer else "│ not ended after 5 tokens"
        assert f"user: {message}\nassistant: {tokenizer.decode(cut).strip()}{state}\n" in before


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [True, False], ids=["target", "no target"])
def test_answers_end_if_and_only_if_the_marker_behind_them_is_a_target(
    make_config, base, tokenizer, tmp_path, capsys, monkeypatch, is_trained
):
    """A small model learns an answer. The role marker behind them is in its text either way."""
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    if not is_trained:
        encode, ends = chat._encode, sorted(stop_ids(tokenizer))

        def without_markers(*arguments):
            document = encode(*arguments)
            return document._replace(is_target=document.is_target & ~np.isin(document.ids, ends))

        monkeypatch.setattr(chat, "_encode", without_markers)
    words = ("red", "blue", "green")
    messages = ([{"role": "user", "content": word}, {"role": "assistant", "content": "Yes."}] for word in words)
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in messages))
    recipe = {"input": (str(file),), "output": str(tmp_path / "chats"), "format": "messages", "max_tokens": 24}
    prepare_text(TextRecipe(**recipe, name="chats", held_out=0.0, processes=1), report=lambda line: None)
    source = {"name": "chats", "path": str(tmp_path / "chats"), "packing": "best_fit"}
    config = tuned(
        make_config, base, data={"sources": [source]}, training={"steps": 40, "seq_len": 24},
        finetune={"samples": list(words), "max_new_tokens": 8}, optimizer={"lr": 2e-2},
    )  # fmt: skip
    assert train(config) == 0
    after = capsys.readouterr().out.partition("Greedy answers after step 40;")[2]
    assert after.startswith(f" {3 if is_trained else 0} of 3 ended with a stop marker")
    assert all(f"user: {word}\nassistant: Yes." in after for word in words)


@pytest.mark.slow
def test_answers_are_computed_in_batches_no_larger_than_a_micro_batch(make_config, base, monkeypatch, capsys, tmp_path):
    batches, batch = [], network_rows.batch_of_rows
    monkeypatch.setattr(network_rows, "batch_of_rows", lambda rows, n: batches.append((len(rows), n)) or batch(rows, n))
    words = [letter * 2 for letter in "abcdefg"]
    answers = []
    for rows in (1, 8):
        config = tuned(
            make_config, base, finetune={"samples": words, "max_new_tokens": 4},
            training={"steps": 1, "local_batch_size": rows, "global_batch_size": rows},
            job={"dump_folder": str(tmp_path / str(rows))},
        )  # fmt: skip
        batches.clear()
        assert train(config) == 0
        shown = capsys.readouterr().out.partition("Greedy answers after step 0;")[2]
        answers.append(shown.partition("\nfirst step")[0])
        assert all(count * n <= max(rows * config.training.seq_len, n) for count, n in batches)
        assert (max(count for count, _ in batches) == len(words)) == (rows == 8)
    assert answers[0].count("assistant:") == 7 and answers[0] == answers[1]


@pytest.mark.slow
def test_samples_that_do_not_fit_are_refused_before_a_step(make_config, base):
    config = tuned(make_config, base, finetune={"samples": ["word " * 30], "max_new_tokens": 16})
    with pytest.raises(UserError, match=r"finetune.max_new_tokens = 16: .* 40 positions .* lower it"):
        train(config)


def test_faults_name_key_and_remedy(make_config):
    (fault,) = check_config(make_config(finetune={}), world_size=1)
    assert fault.startswith("[finetune]: needs checkpoint.initial_load_path, which is absent or has no effect; name")
    config = tuned(make_config, "base", inference={"prompt": "def"})
    (fault,) = check_config(config, world_size=1)
    assert fault.startswith('inference.prompt = "def": ') and "finetune.samples" in fault
