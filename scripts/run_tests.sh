#!/usr/bin/env bash
# Set up what the tests need and run them all. Arguments go to pytest, for example: scripts/run_tests.sh -k loader -x
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
. "$root/scripts/environment.sh"
use_environment test

cd "$root"
exec "$python" -m pytest --durations=15 "$@"
