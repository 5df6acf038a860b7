#!/usr/bin/env bash
# Measure this machine's GPU and write one JSON and one Markdown file for docs/performance.md, and at most three more.
# Four commands of at most ten minutes each add to one report:
#
#   scripts/gpu_report.sh 1                versions, tests/gpu file by file, one-rank NCCL, FP8; nothing counts before it
#   scripts/gpu_report.sh 2                profile of an eager step, peers, kernels beside their bounds, decoding
#   scripts/gpu_report.sh 3                compiled training in BF16, and in FP8
#   scripts/gpu_report.sh 4                a launched run that is killed and goes on, LoRA, rates for `plan`, TorchTitan
#   scripts/gpu_report.sh --wheels DIR 1   packages that this Python lacks come from a folder, without a network
#   scripts/gpu_report.sh --parts bf16,fp8 these only, with all the time of a command
#   scripts/gpu_report.sh --dry-run        every part on a CPU with a tiny model: three minutes on two quiet cores
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
for python in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python python3; do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" "$root/scripts/gpu_report.py" "$@"; fi
done
echo "error: no Python on PATH; activate an environment that has torch" >&2
exit 2
