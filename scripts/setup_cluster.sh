#!/usr/bin/env bash
# Check the hosts of a cluster, make their local folders, and write hostfile, launch script and job script.
#
#   scripts/setup_cluster.sh --type slurm --nodes 128 --gpus-per-node 8 --master-addr 10.0.0.1 --master-port 29500 \
#       --nvme-path /local_nvme
#
# In an allocation of Slurm or a job of PBS, or with --hostfile FILE. --help explains all options; docs/infrastructure.md says what
# each of the eight steps of the infrastructure guide has become. Exit codes: 0 done, 2 a mistake or hosts that cannot train:
# nothing was changed.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
. "$root/scripts/environment.sh"
for python in python python3 "$root/.venv/bin/python"; do
    if has_everything "$python" ""; then exec "$python" -m glm46 setup-cluster "$@"; fi
done
echo "error: no Python here has what glm46 needs; ./run_train.sh makes an environment in $root/.venv" >&2
exit 2
