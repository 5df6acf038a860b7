"""Losses of a short run, stored per torch release: what changes the training of every layout shows here.

    PYTHONPATH=. python tests/unit/engine/training/test_golden_losses.py

prints the line for the installed release. A change that is meant to alter training replaces the line and says why.
A run that an earlier commit saved continues as that commit would have continued it, with the losses of that commit.

What other libraries have to say about themselves does not reach a user of glm46.
"""

import logging
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from glm46.compat import quiet_libraries
from glm46.config.loader import load_config
from glm46.operate.launch.train_rank import train
from glm46.storage.data.tokenizer import load_tokenizer
from tests.builders import metric_rows, small_config, write_source

RELEASE = ".".join(torch.__version__.split(".")[:2])
LOSSES = {
    "2.11": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561628, 7.4542913, 7.2401661, 7.0960170],
    "2.13": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561628, 7.4542913, 7.2401661, 7.0960170],
    "2.14": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561633, 7.4542913, 7.2401661, 7.0960175],
    "2.15": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561628, 7.4542913, 7.2401661, 7.0960170],
}  # fmt: skip
# FP32 kernels of other CPUs sum in another order. Seen between torch's scalar, AVX2 and AVX-512 kernels, with one and
# with two threads: 1e-7 in twelve steps. A learning rate that is 1 % wrong moves the second loss by 3e-4.
TOLERANCE = 1e-5


def measure_losses(folder: Path, source: Path) -> list[float]:
    """Losses of eight steps: Muon, multi-token prediction, both balance terms, documents, FP32."""
    config = small_config(
        source,
        folder,
        training={"steps": 8, "seq_len": 64},
        optimizer={"name": "Muon", "lr": 1e-2},
        moe={"balance": "sign", "bias_update_rate": 0.01, "sequence_aux_loss_weight": 0.01},
    )
    assert train(config) == 0
    rows = metric_rows(folder)
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.skipif(
    RELEASE not in LOSSES, reason=f"no losses are stored for torch {RELEASE}; see the head of this file"
)
def test_losses_are_those_of_this_torch_release(source_folder, tmp_path):
    assert measure_losses(tmp_path / "out", source_folder) == pytest.approx(LOSSES[RELEASE], rel=TOLERANCE)


# Four steps of commit ffdd21b4: dump folder, shards and tokenizer. The same commit then trained two more steps, with
# the losses and gradient norms below.
ARCHIVE = Path(__file__).with_name("run_ffdd21b4.tar.xz")
EARLIER_LOSSES = [5.2146947383880615, 5.050400991288442]
GRADIENT_NORMS = [1.9425134658813477, 1.9073458909988403]
CONFIG = """
[job]
dump_folder = "run"
[model]
flavor = "debug"
tokenizer_path = "bytes.tiktoken"
[model.shape]
vocab_size = 320
num_hidden_layers = 2
hidden_size = 16
intermediate_size = 32
moe_intermediate_size = 16
n_routed_experts = 4
num_experts_per_tok = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
[data]
document_mask = true
[[data.sources]]
name = "lines"
path = "shards"
[training]
steps = 6
seq_len = 32
local_batch_size = 2
global_batch_size = 4
mixed_precision_param = "float32"
[optimizer]
name = "Muon"
lr = 1e-2
[lr_scheduler]
total_tokens = 1024
warmup_tokens = 256
[checkpoint]
interval = 4
keep_latest_k = 0
[metrics]
log_freq = 1
enable_tensorboard = false
"""


@pytest.mark.slow
def test_a_run_of_an_earlier_commit_continues(tmp_path, monkeypatch, capsys):
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.11.4 and later warn without a filter.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG, encoding="utf-8")
    assert train(load_config(Path("run.toml"))) == 0
    assert "resumed after step 4, 512 tokens" in capsys.readouterr().out
    rows = metric_rows("run")
    rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]  # the earlier rows are kept
    assert [row["loss"] for row in rows[4:]] == pytest.approx(EARLIER_LOSSES, rel=TOLERANCE)
    assert [row["grad_norm"] for row in rows[4:]] == pytest.approx(GRADIENT_NORMS, rel=TOLERANCE)


ROOT = Path(__file__).parents[4]

PROGRAM = """
import os, sys
from pathlib import Path

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, and two workers
import torch
from glm46.operate.launch.train_rank import train
from scripts.measure.model_speed import Workload, race
from scripts.measure.speed_with_peers import CONTESTANTS
from tests.builders import small_config

run = small_config(
    Path(sys.argv[1]), Path(sys.argv[2]), training={"steps": 2}, optimizer={"state_dtype": "8bit"},
    metrics={"enable_tensorboard": True}, validation={"enable": True}, data={"num_workers": 2},
)
code = train(run)
work = Workload("debug", 1, 16, torch.device("cpu"), torch.float32, layers=2)
race(work, {name: CONTESTANTS[name] for name in ("ours", "transformers default")}, 1, lambda text: None)
sys.exit(code)
"""


@pytest.mark.slow
def test_a_run_with_eight_bit_states_and_many_workers_and_a_benchmark_write_no_errors(source_folder, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(source_folder), str(tmp_path / "out")]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (end.returncode, end.stderr) == (0, "")


def test_other_messages_of_these_libraries_still_arrive(caplog):
    quiet_libraries()
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).propagate = True  # caplog listens at the root
        logging.getLogger(name).warning("another fault")
    logging.getLogger("torchao").warning("Failed to load /some/_C.abi3.so: could not load this library")
    assert [record.message for record in caplog.records] == ["another fault"] * 2
    with pytest.warns(UserWarning, match="batch size"):
        warnings.warn("This DataLoader has an odd batch size", stacklevel=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        places = Path(scratch) / "source", Path(scratch) / "out"
        places[0].mkdir()
        found = measure_losses(places[1], write_source(places[0], load_tokenizer("builtin")))
    print(f'    "{RELEASE}": [{", ".join(f"{loss:.7f}" for loss in found)}],')
