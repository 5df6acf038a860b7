"""``rl-servers``: the options of servers fit the run, the model and the hosts; started ones end together."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from glm46.commands.rl_servers import rl_servers_command
from glm46.config.errors import UserError
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.launch import rl_servers
from tests.fake_ssh import write_ssh
from tests.processes import is_alive, wait_until
from tests.unit.tasks.rl.rollout.sglang_contract import read_table

ROOT = Path(__file__).parents[4]
S3 = {
    "--mem-fraction-static": "0.7", "--attn-dp-size": "4", "--ep-size": "32", "--enable-dp-lm-head": None,
    "--moe-dense-tp-size": "1", "--speculative-algorithm": "EAGLE", "--speculative-num-steps": "1",
    "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "2",
}  # fmt: skip
"""The flags of the recipe for GLM-4.5 on 32 GPUs an engine; `--enable-dp-attention --dp-size 4` is `--attn-dp-size 4`
since SGLang 0.5.23."""


@pytest.fixture
def lines(tmp_path, capsys, monkeypatch):
    """The lines that the verb prints for GLM-4.6 with some keys, on hosts of eight GPUs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("GLM46_VLLM_PYTHON", raising=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1?", "label": "2"}\n{"prompt": "a longer question", "label": "3"}\n')

    def run(*words: str, hosts: int = 4) -> list[str]:
        file = tmp_path / "hosts"
        file.write_text("".join(f"engine-{number} slots=8\n" for number in range(hosts)))
        options = [
            "--config",
            "train_configs/glm46_rl_gspo.toml",
            "--model.tokenizer_path",
            "builtin",
            "--rl.validation=",
        ]
        options += ["--rl.prompts.file", str(prompts), "--validation.enable", "false", *words]
        assert rl_servers_command([*options, "--hosts", str(file)] if hosts else options) == 0
        return capsys.readouterr().out.splitlines()

    return run


def options_of(line: str) -> dict[str, str | None]:
    """Flags of a command with their values."""
    found: dict[str, str | None] = {}
    for word in line.split():
        if word.startswith("--"):
            found[word] = None
        elif found:
            found[list(found)[-1]] = word
    return found


def commands(lines: list[str]) -> list[str]:
    return [line for line in lines if "launch_server" in line or "vllm serve" in line]


def test_engine_of_32_gpus_has_the_flags_of_the_source(lines):
    found = commands(
        lines("--gpus-per-engine", "32", "--rollout.kind", "sglang", "--model.shape.num_nextn_predict_layers", "1")
    )
    assert len(found) == 4
    for node, line in enumerate(found):
        options = options_of(line)
        assert options.items() >= S3.items() and options["--tp-size"] == "32" and options["--node-rank"] == str(node)
        assert options["--host"] == f"engine-{node}" and options["--dist-init-addr"] == "engine-0:5000"
        assert options.keys() <= read_table()["options"].keys()


def test_options_follow_the_keys_of_the_run(lines):
    words = ["--gpu", "H200", "--gpus-per-engine", "8", "--rollout.kind", "sglang", "--rl.routing_replay", "true"]
    printed = lines(*words)
    found = [options_of(line) for line in commands(printed)]
    assert len(found) == 4 and all(options["--tp-size"] == "8" for options in found)
    assert all("--enable-return-routed-experts" in options and "--attn-dp-size" not in options for options in found)
    longest = len("a longer question") + len("[gMASK]<sop><|user|>\n<|assistant|>\n<think>")
    assert 30720 < int(found[0]["--context-length"]) < 30720 + longest and found[0]["--dtype"] == "bfloat16"
    urls = json.loads(re.search(r"--rollout.urls '(.*)'", printed[-1])[1])
    assert urls == [f"http://engine-{number}:8000" for number in range(4)]
    assert "--enable-deterministic-inference" in "".join(printed)


def test_adapters_have_the_larger_rank_and_are_allowed(lines):
    words = ["--gpu", "H200", "--adapter.rank", "8", "--adapter.expert_rank", "16", "--rollout.send_adapters", "true"]
    (vllm, *_) = commands(lines(*words))
    assert options_of(vllm)["--max-lora-rank"] == "16" and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in vllm
    (sglang, *_) = commands(lines(*words, "--rollout.kind", "sglang"))
    assert options_of(sglang)["--max-lora-rank"] == "16" and "--enable-lora" in sglang
    assert options_of(sglang).keys() <= read_table()["options"].keys()


def test_options_of_vllm_are_those_of_its_script(lines):
    script = (ROOT / "deploy/vllm/serve_cpu.sh").read_text()
    (line, *_) = commands(lines("--gpu", "H200"))
    for word in (
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--worker-extension-cls glm_ext.Extension",
    ):
        assert word in line and word in script
    assert "VLLM_SERVER_DEV_MODE=1" in line and "VLLM_SERVER_DEV_MODE=1" in script
    assert f"PYTHONPATH={ROOT}/deploy/vllm" in line and (ROOT / "deploy/vllm/glm_ext.py").is_file()


def test_vllm_over_hosts_has_a_replica_on_each_and_one_that_listens(lines):
    found = [options_of(line) for line in commands(lines("--gpus-per-engine", "32", "--rollout.weights", "broadcast"))]
    assert ["--headless" in options for options in found] == [False, True, True, True]
    assert [options.get("--data-parallel-start-rank") for options in found] == [None, "1", "2", "3"]
    assert all(options["--data-parallel-size"] == "4" and options["--tensor-parallel-size"] == "8" for options in found)
    assert all(options["--data-parallel-address"] == "engine-0" for options in found)


def test_servers_share_a_host_by_their_gpus_and_have_ports_of_their_own(lines):
    found = commands(lines("--gpus-per-engine", "4", "--gpu", "B300", "--rollout.kind", "sglang", hosts=1))
    assert [line.split()[0] for line in found] == ["CUDA_VISIBLE_DEVICES=0,1,2,3", "CUDA_VISIBLE_DEVICES=4,5,6,7"]
    assert [options_of(line)["--port"] for line in found] == ["8000", "8001"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus-per-engine", "4"], ["--gpus-per-engine 4", "GiB", "fp8-block"]),
        (["--gpus-per-engine", "24"], ["--gpus-per-engine 24", "n_routed_experts = 160"]),
        (["--gpus-per-engine", "80"], ["--hosts", "80"]),
        (["--rollout.weights_dtype", "fp8-block"], ["--folder", "convert to-hf --dtype fp8-block"]),
        (["--gpu", "H9"], ["--gpu"]),
        (["--rollout.kind", "local", "--rollout.urls="], ["rollout.kind", "has no servers"]),
    ],
)  # fmt: skip
def test_what_the_run_would_refuse_is_refused_with_its_remedy(lines, words, said):
    with pytest.raises(UserError) as raised:
        lines(*words)
    assert all(part in str(raised.value) for part in said)


def test_hosts_of_urls_do_for_servers_of_one_host_and_others_need_a_file(lines):
    with pytest.raises(UserError, match=r"--hosts: missing, and a host has room for 0 servers of 32 GPUs"):
        lines(hosts=0)
    printed = lines("--gpu", "H200", "--gpus-per-engine", "8", hosts=0)
    assert [options_of(line)["--host"] for line in commands(printed)] == ["rollout-0", "rollout-1"]
    assert "--rollout.urls" not in "".join(printed)  # they are those of the file
    urls = json.dumps(["http://b:7", "http://a:8", "http://b:9"])
    printed = lines("--gpu", "B300", "--gpus-per-engine", "4", "--rollout.urls", urls, hosts=0)
    found = [(options_of(line)["--host"], options_of(line)["--port"]) for line in commands(printed)]
    assert found == [("b", "7"), ("b", "9"), ("a", "8")] and "--rollout.urls" not in "".join(printed)
    assert [line.split("CUDA_VISIBLE_DEVICES=")[1][:7] for line in commands(printed)] == [
        "0,1,2,3",
        "4,5,6,7",
        "0,1,2,3",
    ]


def lines_here(capsys, *words: str) -> list[str]:
    """Those for the debug recipe with two servers on this machine."""
    urls = ["--rollout.kind", "vllm", "--rollout.urls", '["http://127.0.0.1:8000", "http://localhost:8005"]']
    assert rl_servers_command(["--config", "train_configs/rl_debug.toml", *urls, "--folder", "a b", *words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("words", [(), ("--model.shape.hidden_size", "2048", "--rollout.max_new_tokens", "100000")])
def test_a_machine_without_gpus_has_commands_for_its_cpu(capsys, monkeypatch, words):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rl_servers, "detect_machine", lambda _: Machine(2, 2**40, 2**40))
    monkeypatch.delenv("GLM46_VLLM_PYTHON", raising=False)
    with pytest.raises(UserError, match=r"GLM46_VLLM_PYTHON: not set.*install_cpu.sh.*--gpu"):
        lines_here(capsys)
    monkeypatch.setenv("GLM46_VLLM_PYTHON", "/envs/vllm/bin/python")
    long = ["--training.seq_len", "131072", "--model.shape.max_position_embeddings", "131072"] if words else []
    printed = lines_here(capsys, *words, *long)
    found = [shlex.split(line) for line in printed if "serve_cpu" in line]
    start = ["GLM46_VLLM_PYTHON=/envs/vllm/bin/python", str(ROOT / "deploy/vllm/serve_cpu.sh"), "a b"]
    assert [line[:4] for line in found] == [[*start, "8000"], [*start, "8005"]]
    assert "CPU of this machine" in printed[0] and not any("--gpu-memory" in word for line in found for word in line)
    options = [options_of(shlex.join(line[4:])) for line in found]
    assert [(one["--host"], one["--port"], one["--dtype"]) for one in options] == [
        ("127.0.0.1", "8000", "float32"), ("localhost", "8005", "float32"),
    ]  # fmt: skip
    context, token = int(options[0]["--max-model-len"]), 2 * 2 * 2 * 32 * 4  # 2 layers, keys and values, 2 heads, FP32
    assert int(options[0]["--kv-cache-memory-bytes"]) == max(64 * 2**20, 4 * context * token)
    assert bool(words) == (4 * context * token > 64 * 2**20)


def test_a_machine_with_gpus_and_a_named_gpu_have_other_commands(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GLM46_VLLM_PYTHON", "/envs/vllm/bin/python")
    monkeypatch.setattr(rl_servers, "detect_machine", lambda _: Machine(2, 2**40, 2**40))
    named = lines_here(capsys, "--gpu", "H100")
    monkeypatch.setattr(rl_servers, "detect_machine", lambda _: Machine(2, 2**40, 2**40, (Gpu("H100", 2**36),)))
    assert lines_here(capsys) == named
    assert sum(" /envs/vllm/bin/python -m vllm.entrypoints.cli.main serve " in line for line in named) == 2


def test_a_model_that_the_memory_does_not_hold_is_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GLM46_VLLM_PYTHON", "/envs/vllm/bin/python")
    monkeypatch.setattr(rl_servers, "detect_machine", lambda _: Machine(2, 2 * 2**20, 2**20))
    with pytest.raises(UserError, match=r"a CPU would hold .*--gpu"):
        lines_here(capsys)


SERVER = """#!{python}
import os, sys, time
print(*sys.argv[1:3], "of", os.environ.get("FAKE_SSH_HOST"), "is", os.getpid(), flush=True)
if os.environ.get("FAKE_SSH_HOST") == {ends!r}:
    sys.exit(7)
time.sleep(1000)
"""


def test_started_servers_end_when_one_ends(lines, tmp_path, monkeypatch, capsys):
    programs = write_ssh(tmp_path / "bin")
    (programs / "vllm").write_text(SERVER.format(python=sys.executable, ends="engine-1"))
    (programs / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    urls = json.dumps([f"http://engine-{number}:8000" for number in range(2)])
    with pytest.raises(AssertionError):  # the fixture wants 0
        lines("--gpu", "H200", "--gpus-per-engine", "8", "--rollout.urls", urls, "--run", hosts=2)
    printed = capsys.readouterr().out
    assert "engine-1: ended with code 7" in printed
    pids = [*map(int, re.findall(r"serve assets/GLM-4.6 of \S+ is (\d+)", printed))]
    wait_until(lambda: not any(map(is_alive, pids)), "a server was left behind")


def test_servers_at_other_addresses_than_the_run_asks_are_not_started(lines):
    with pytest.raises(UserError, match=r"rollout.urls: .*engine-0"):
        lines("--gpu", "H200", "--run")


def test_a_run_without_rl_is_named_before_a_folder_is_asked_for():
    with pytest.raises(UserError) as raised:
        rl_servers_command(["--config", str(ROOT / "train_configs/debug.toml")])
    (fault,) = raised.value.faults
    assert "has no [rl]" in fault and "--folder" not in fault
