"""Runs that train the prediction layers alone: drafts fit a tuned model again, and it answers as before."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import glm46
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.metadata import read_metadata
from glm46.storage.data.tokenizer import Tokenizer
from tests.builders import small_config, write_tokens
from tests.step_tensors import step_tensors

DEPTHS = 3
STEPS = 60
DOCUMENTS = 60
PROMPT = 4
"""Tokens of a prompt."""
ANSWER = 48
BASE_TEXT = "def function_{number}(value):\n    return value + {number}\n"
TUNED_TEXT = "class Thing_{number}:\n    size = {number} * 2\n\n"


def write_documents(folder: Path, tokenizer: Tokenizer, documents: list[list[int]]) -> Path:
    """A prepared source of these documents; the first ones are held out too."""
    folder.mkdir()
    ended = [np.append(tokens, tokenizer.eos_id).astype(np.uint32) for tokens in documents]
    return write_tokens(folder, tokenizer, {"train": ended, "validation": ended[:6]})


def run(folder: Path, source: Path, start: Path | None = None, *, steps: int = STEPS, **tables) -> Path:
    """Train, and return the Hugging Face folder of the last step."""
    checkpoint = {"last_save_in_hf": True, "interval": steps}
    if start is not None:
        checkpoint |= {"initial_load_path": str(start), "initial_load_in_hf": True}
    training = {"steps": steps, "seq_len": 32, "local_batch_size": 4, "mixed_precision_param": "float32"}
    metrics = {"log_freq": steps, "enable_tensorboard": False}
    tables |= {"training": training, "checkpoint": checkpoint, "metrics": metrics}
    assert train(small_config(source, folder, **tables)) == 0
    return folder / f"huggingface/step-{steps:06d}"


def prompts(tokenizer: Tokenizer, text: str, numbers: range) -> list[list[int]]:
    return [tokenizer.encode(text.format(number=number)).tolist()[:PROMPT] for number in numbers]


def answers(folder: Path, tokenizer: Tokenizer, begins: list[list[int]]) -> tuple[list[list[int]], float]:
    """Greedy answers of a model with drafts, and the tokens that a step adds."""
    rows = [Continuation(begin, ANSWER) for begin in begins]
    model = glm46.load(str(folder)).module
    decoder = decoder_for(model, rows, drafts=DEPTHS)
    vocab_size = tokenizer.vocab_size
    sampling = Sampling(temperature=0.0)
    Generation(decoder, rows, sampling=sampling, stop=frozenset(), vocab_size=vocab_size).run()
    tokens = sum(len(row.tokens) for row in rows)
    return [row.tokens for row in rows], tokens / (tokens - sum(row.accepted for row in rows))


@pytest.mark.slow
def test_drafts_fit_a_tuned_model_again_and_it_answers_as_before(tokenizer, tmp_path):
    def documents(text: str) -> list[list[int]]:
        return [tokenizer.encode(text.format(number=n) * (3 + n % 5)).tolist() for n in range(DOCUMENTS)]

    base_source = write_documents(tmp_path / "base_text", tokenizer, documents(BASE_TEXT))
    base = run(tmp_path / "base", base_source, mtp={"depths": DEPTHS})
    asked = range(DOCUMENTS, DOCUMENTS + 8)
    _, before = answers(base, tokenizer, prompts(tokenizer, BASE_TEXT, asked))
    assert before > 3  # of at most 4: the base drafts well

    tuned_source = write_documents(tmp_path / "tuned_text", tokenizer, documents(TUNED_TEXT))
    tuned = run(tmp_path / "tuned", tuned_source, base, finetune={}, mtp={"loss_weight": 0.0})
    expected, stale = answers(tuned, tokenizer, prompts(tokenizer, TUNED_TEXT, asked))
    assert stale < 0.5 * before

    begins = prompts(tokenizer, TUNED_TEXT, range(DOCUMENTS))
    told, _ = answers(tuned, tokenizer, begins)
    texts = [begin + answer for begin, answer in zip(begins, told, strict=True)]
    source = write_documents(tmp_path / "answers", tokenizer, texts)
    alone = {"train_only": "prediction_layers"}
    mtp = {"depths": DEPTHS, "loss_weight": 1.0}
    fresh = run(tmp_path / "fresh", source, tuned, steps=3 * STEPS, finetune=alone, mtp=mtp)
    told_again, after = answers(fresh, tokenizer, prompts(tokenizer, TUNED_TEXT, asked))
    assert told_again == expected
    assert after >= 0.95 * before

    weights = load_file(next(fresh.glob("*.safetensors")))
    for name, weight in load_file(next(tuned.glob("*.safetensors"))).items():
        is_prediction = name.startswith("model.layers.2.")
        assert torch.equal(weight, weights[name]) != is_prediction or "bias" in name, name


def only_drafts(make_config, start: Path, **tables):
    checkpoint = {"initial_load_path": str(start), "initial_load_model_only": True, "interval": 2, "keep_latest_k": 5}
    usual = {
        "checkpoint": checkpoint | {"async_mode": "disabled"},
        "finetune": {"train_only": "prediction_layers"},
        "mtp": {"depths": 2},
        "moe": {"bias_update_rate": 0.05},
    }
    return make_config(**usual | tables)


@pytest.mark.slow
def test_nothing_else_has_states_or_moves(make_config, source_folder, tmp_path):
    """With BF16 too: frozen weights are kept in the compute type, trained ones in FP32."""
    base = small_config(source_folder, tmp_path / "base", training={"steps": 2}, mtp={"depths": 2})
    assert train(base) == 0
    start = tmp_path / "base/checkpoint/step-000002"
    assert train(only_drafts(make_config, start, training={"mixed_precision_param": "bfloat16"})) == 0
    before = step_tensors(start)
    after = step_tensors(tmp_path / "out/checkpoint/step-000004")
    moved = set()
    for name, tensor in after.items():
        is_trained = name.startswith("mtp.")
        assert tensor.dtype == (torch.float32 if is_trained or "correction_bias" in name else torch.bfloat16), name
        if not torch.equal(before[name].to(tensor.dtype), tensor):
            moved.add(name)
    assert {"mtp.0.eh_proj.weight", "mtp.0.block.mlp.router.e_score_correction_bias"} <= moved
    assert all(name.startswith("mtp.") for name in moved), moved
    names = read_metadata(tmp_path / "out/checkpoint/step-000004")[0].state_dict_metadata
    states = [name for name in names if name.startswith("optimizer.")]
    assert states and all(name.startswith("optimizer.mtp.") for name in states)


@pytest.mark.slow
def test_a_resume_of_drafts_alone_changes_no_bit(make_config, source_folder, tmp_path):
    assert train(small_config(source_folder, tmp_path / "base", training={"steps": 2}, mtp={"depths": 2})) == 0
    start = tmp_path / "base/checkpoint/step-000002"
    assert train(only_drafts(make_config, start)) == 0
    whole = step_tensors(tmp_path / "out/checkpoint/step-000004")
    for kept in (tmp_path / "out/checkpoint").glob("step-000004*"):
        kept.rename(tmp_path / kept.name)
    assert train(only_drafts(make_config, start)) == 0
    again = step_tensors(tmp_path / "out/checkpoint/step-000004")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole if not name.startswith("rng."))
