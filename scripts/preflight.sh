#!/usr/bin/env bash
# Check this node, or the hosts of a hostfile, for the run of run_train.sh: CONFIG_FILE, NGPU and arguments are the same. The job
# scripts start it on every node before they train. Exit codes: 0 nothing fails, 1 something does, 2 a mistake in config or options.
set -euo pipefail
trap 'exit 130' INT
trap 'exit 75' TERM HUP USR1
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
. "$root/scripts/environment.sh"
use_environment ""
words=()
while [ $# -gt 0 ]; do
    case $1 in
        --max-restarts) shift ;;
        --max-restarts=*) ;;
        *) words+=("$1") ;;
    esac
    shift
done
exec "$python" -m glm46 preflight --config "$(find_config)" --nproc "${NGPU:-auto}" "${words[@]}"
