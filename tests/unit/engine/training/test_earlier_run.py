"""A run that an earlier commit saved continues as that commit would have continued it.

``run_ffdd21b4.tar.xz`` holds four steps of commit ffdd21b4: dump folder, shards and tokenizer. The same commit then
trained two more steps, with the losses and gradient norms below.
"""

import json
import tarfile
from pathlib import Path

import pytest

from glm46.config.loader import load_config
from glm46.operate.launch.train_rank import train

ARCHIVE = Path(__file__).with_name("run_ffdd21b4.tar.xz")
LOSSES = [5.2146947383880615, 5.050400991288442]
GRADIENT_NORMS = [1.9425134658813477, 1.9073458909988403]
# FP32 kernels of other CPUs and torch releases sum in another order; see TOLERANCE of test_golden_losses.py.
TOLERANCE = 1e-5
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
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG, encoding="utf-8")
    assert train(load_config(Path("run.toml"))) == 0
    assert "resumed after step 4, 512 tokens" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]  # the earlier rows are kept
    assert [row["loss"] for row in rows[4:]] == pytest.approx(LOSSES, rel=TOLERANCE)
    assert [row["grad_norm"] for row in rows[4:]] == pytest.approx(GRADIENT_NORMS, rel=TOLERANCE)
