#!/usr/bin/env bash
# Train the run of a TOML file on this machine. On a fresh machine this sets up its environment first.
#
#   ./run_train.sh                                                      a small GLM on text of this machine
#   CONFIG_FILE=train_configs/debug_hsdp.toml NGPU=4 ./run_train.sh --training.steps 100 --optimizer.lr 3e-4
#
# CONFIG_FILE  the TOML file; looked for in the current folder, then in this checkout
# NGPU         processes to start on each node; one per GPU, or two on a CPU, if not set
# HOSTFILE     lines such as `node001 slots=8`: starts all these nodes from here, over ssh
# Any key of the file can be overridden: --section.key VALUE. `python -m glm46 launch --help` prints all of them.
set -euo pipefail
# Until Python handles the signals: 75 asks a job system to start the same command again.
trap 'exit 130' INT
trap 'exit 75' TERM HUP USR1
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
. "$root/scripts/environment.sh"
config=$(find_config)
# The first line comes before Python starts. --help starts nothing: it shows the lines above, and then all options and keys.
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && echo ;; *) printf 'starting     %s\n' "$config${*:+ $*}" || exit 2 ;; esac
# No Python is known yet that could read the file.
extras=
if grep -Eqs '^[[:space:]]*\[\[?[[:space:]]*rl[].[:space:]]' "$config"; then extras=rl; fi
use_environment "$extras"

# The launcher prints this command, with overrides, for a person to copy.
script="$root/run_train.sh"
if [ "$PWD" = "$root" ]; then script=./run_train.sh; fi
printf -v GLM46_START '%s%s%q' "${HOSTFILE:+HOSTFILE=$(printf %q "$HOSTFILE") }${CONFIG_FILE:+CONFIG_FILE=$(printf %q "$CONFIG_FILE") }" "${NGPU:+NGPU=$(printf %q "$NGPU") }" "$script"
export GLM46_START

# Signals wait until Python listens, where env can block them (GNU).
# shellcheck disable=SC2054
blocking=(env --block-signal=INT,TERM,HUP,USR1)
"${blocking[@]}" true 2>/dev/null || blocking=(env)
exec "${blocking[@]}" "$python" -m glm46 launch --config "$config" --nproc "${NGPU:-auto}" ${HOSTFILE:+--hostfile "$HOSTFILE"} "$@"
