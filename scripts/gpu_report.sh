#!/usr/bin/env bash
# Measure this machine's GPU within ten minutes and write one JSON and one Markdown file for docs/performance.md, and at most
# three more: tests/gpu, the benchmark against installed peers, the profile of a step, BF16 against FP8.
#
#   scripts/gpu_report.sh                  with the packages of the active Python: its torch (2.11 to 2.15) is used
#   scripts/gpu_report.sh --wheels DIR     packages that it lacks come from a folder of wheels, without a network
#   scripts/gpu_report.sh --parts tests,fp8   these only, with all the time for them; a report grows over several calls
#   scripts/gpu_report.sh --dry-run        the same on a CPU with a tiny model, in under a minute
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
for python in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python python3; do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" "$root/scripts/gpu_report.py" "$@"; fi
done
echo "error: no Python on PATH; activate an environment that has torch" >&2
exit 2
