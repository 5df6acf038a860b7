#!/usr/bin/env bash
# Set up what the tests need and run them all. Arguments go to pytest, for example: scripts/run_tests.sh -k loader -x
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
. "$root/scripts/environment.sh"
use_environment test

cd "$root"
if [ $# -gt 0 ]; then exec "$python" -m pytest --durations=15 "$@"; fi

# Tests of one process side by side, a core each; then those that start several ranks, which want all cores themselves.
status=0
OMP_NUM_THREADS=1 "$python" -m pytest --durations=15 -n auto --maxprocesses=8 tests/unit tests/architecture || status=$?
"$python" -m pytest --durations=15 tests/ranks tests/gpu || status=$?
exit "$status"
