#!/usr/bin/env bash
# Set up what the tests need and run them.
#
#   scripts/run_tests.sh                      what every change needs: all but the tests that are marked thorough
#   scripts/run_tests.sh --all                all tests
#   scripts/run_tests.sh --fast               the first row of each unit and architecture test that is not marked slow
#   scripts/run_tests.sh --coverage           with any of these: print how much of each package ran, and which lines of the
#                                             core did not
#   scripts/run_tests.sh data model           the unit tests of these packages (also: storage/data, or a group: storage)
#   scripts/run_tests.sh -k "tp2 and pp2" -x  any options, files and folders of pytest
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
. "$root/scripts/environment.sh"

# The folder of the unit tests of a package, with or without its group; nothing if there is none.
package_folder() {
    local folder
    for folder in "$root/tests/unit/$1" "$root/tests/unit/"*"/$1"; do
        if [ -n "$1" ] && [ -d "$folder" ]; then
            echo "${folder#"$root"/}"
            return
        fi
    done
}

side_by_side=() alone=() options=() fast='' whole='' coverage='' previous=''
for argument in "$@"; do
    path=${argument%%::*}
    path=${path#"$root"/}
    case $previous in
        -k | -m | -n | -p | -o | -c | -W | -r) options+=("$argument") ;; # the value of an option, never a path
        *) case ${path#./} in
            --fast) fast=1 ;;
            --all) whole=1 ;;
            --coverage) coverage=1 ;;
            tests/ranks* | tests/gpu*) alone+=("$argument") ;;
            tests | tests/) side_by_side+=(tests/unit tests/architecture) alone+=(tests/ranks tests/gpu) ;;
            tests/*) side_by_side+=("$argument") ;;
            -*) options+=("$argument") ;;
            *) folder=$(package_folder "$path")
               if [ -n "$folder" ]; then side_by_side+=("$folder"); else options+=("$argument"); fi ;;
        esac ;;
    esac
    previous=$argument
done
if [ ${#side_by_side[@]} -eq 0 ] && [ ${#alone[@]} -eq 0 ]; then
    side_by_side=(tests/unit tests/architecture)
    [ -n "$fast" ] || alone=(tests/ranks tests/gpu)
fi
[ $# -gt "${coverage:-0}" ] || { whole=1 options+=(-m "not thorough and not long and not slurm"); }
[ -z "$fast" ] || options+=(-m "not slow and not further and not long and not slurm")

processes=auto
if [[ " ${side_by_side[*]-} " == *" tests/unit "* ]] && [ -z "$fast" ]; then processes=$(($(nproc) + 1)); fi

use_environment test
cd "$root"

# The settings, in pyproject.toml, measure the processes that tests start, too.
measured=()
if [ -n "$coverage" ]; then
    measured=(-m coverage run)
    export COVERAGE_FILE="$root/build/coverage/data"
    rm -rf "${COVERAGE_FILE%/*}"
fi

# Runs pytest and keeps the exit code of a failure. Code 5 is that no test was selected: it counts only if both runs
# say so.
status=5
run() {
    local code=0
    "$python" ${measured[@]+"${measured[@]}"} -m pytest --durations=15 "$@" ${options[@]+"${options[@]}"} || code=$?
    case $code in 5) ;; 0) [ "$status" -ne 5 ] || status=0 ;; *) status=$code ;; esac
}

# Tests of one process side by side, a core each; all of them with one process more, because a quarter of their time is
# waiting. Then those that start several ranks: whole files in two lanes, because ranks wait for each other, for time
# limits and for signals. A GPU has one lane.
export TORCHINDUCTOR_COMPILE_THREADS=1 # no pool of processes, each of which imports torch, where no core is idle
if [ ${#side_by_side[@]} -gt 0 ]; then
    OMP_NUM_THREADS=1 run -n "$processes" --maxprocesses=8 "${side_by_side[@]}"
fi
lanes=()
if [[ " ${alone[*]-} " == *" tests/ranks "* ]] && ! command -v nvidia-smi >/dev/null; then
    lanes=(-n 2 --dist loadfile)
fi
# With arguments, an interruption or a wrong option ends it here.
if [ ${#alone[@]} -gt 0 ] && { [ -n "$whole" ] || [ "$status" -le 1 ] || [ "$status" -eq 5 ]; }; then
    run ${lanes[@]+"${lanes[@]}"} "${alone[@]}"
fi
if [ -n "$coverage" ]; then "$python" scripts/print_coverage.py "$COVERAGE_FILE"; fi
exit "$status"
