#!/usr/bin/env bash
# Serve a Hugging Face folder with vLLM on a CPU, for reinforcement learning with `rollout.kind = "vllm"`.
#   GLM46_VLLM_PYTHON=... deploy/vllm/serve_cpu.sh FOLDER PORT [more options of vLLM]
# A GPU needs no other command than vLLM's, with the options marked (*).
set -euo pipefail
folder=${1:?"usage: $0 FOLDER PORT [options]"}
port=${2:?"usage: $0 FOLDER PORT [options]"}
here=$(cd "$(dirname "$0")" && pwd)
export VLLM_SERVER_DEV_MODE=1                # (*) the calls that change weights
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1    # (*) and adapters, with --enable-lora
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"   # (*) where glm_ext.py is
export VLLM_ENABLE_V1_MULTIPROCESSING=0      # one process less: a third less work at the start
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VLLM_CPU_OMP_THREADS_BIND=nobind  # threads that spin on shared cores cost 30 x
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
# processed_logprobs (*): of the distribution at the temperature, not of the raw logits.
# Without --kv-cache-memory-bytes vLLM asks for 92 % of the memory.
exec "${GLM46_VLLM_PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$folder" --host 127.0.0.1 --port "$port" \
    --enable-scale-out --logprobs-mode processed_logprobs --worker-extension-cls glm_ext.Extension \
    --dtype float32 --enforce-eager --block-size 32 --kv-cache-memory-bytes 67108864 --distributed-executor-backend uni \
    "${@:3}"
