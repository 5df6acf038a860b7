# shellcheck shell=bash
# Sourced by run_train.sh and scripts of this folder: find or make a Python environment that has all that glm46 needs.
# Expects `root`, the folder of this checkout; use_environment sets `python`, the interpreter to use.

# shellcheck disable=SC2154
# This checkout's code is used whatever environment runs it, from any working directory.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# attended COMMAND: run it in a process group of its own, so that a signal ends it at once: bash handles a signal only after
# a command in the foreground has ended.
trap 'if [ -n "${child:-}" ]; then kill -KILL -- "-$child" 2>/dev/null || true; fi' EXIT
attended() {
    local code=0
    set -m
    "$@" &
    child=$!
    set +m
    wait "$child" || code=$?
    child=
    return "$code"
}

# has_everything INTERPRETER EXTRAS: succeeds if it has every package of pyproject.toml in a version that fits.
has_everything() {
    command -v "$1" >/dev/null 2>&1 && attended "$1" -m glm46.operate.launch.environment "$2" 2>/dev/null
}

# find_base_python: print the newest Python that glm46 supports and that can make environments.
find_base_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.13 with the modules venv and ensurepip on PATH. Install one (on Debian and Ubuntu:" \
        "apt-get install python3 python3-venv), or activate an environment that has one." >&2
    return 2
}

# find_config: print the file of the run, from the current folder or else this checkout.
find_config() {
    local config=${CONFIG_FILE:-train_configs/debug.toml}
    if [ ! -f "$config" ] && [ -f "$root/$config" ]; then config="$root/$config"; fi
    echo "$config"
}

# install EXTRAS: glm46 and what it needs into .venv. A terminal sees pip's own progress, a log one line per package.
install() {
    local wanted="$root${1:+[$1]}"
    if [ -t 1 ]; then
        "$python" -m pip install --disable-pip-version-check --editable "$wanted"
    else
        "$python" -m pip install --disable-pip-version-check --progress-bar off --editable "$wanted" |
            while IFS= read -r line; do
                case $line in Collecting* | Processing* | Installing* | Successfully*) printf '  %.100s\n' "$line" ;; esac
            done
    fi
}

# use_environment EXTRAS: the active environment if it has everything, else .venv, made or completed as needed.
use_environment() {
    local extras=$1 base
    for python in python python3 "$root/.venv/bin/python"; do
        if has_everything "$python" "$extras"; then return; fi
    done
    python="$root/.venv/bin/python"
    # All nodes of a job start at once, with one checkout: one of them installs. The shell holds the lock, by its descriptor.
    mkdir -p "$root/.venv"
    exec {lock}>>"$root/.venv/.lock"
    if command -v flock >/dev/null && ! flock --nonblock "$lock"; then
        echo "Waiting until another process has installed glm46 into $root/.venv"
        attended flock "$lock"
    fi
    if has_everything "$python" "$extras"; then
        exec {lock}>&-
        return
    fi
    if [ ! -x "$python" ]; then
        base=$(find_base_python) || exit 2
        echo "Making an environment in $root/.venv with $("$base" --version)"
        attended "$base" -m venv "$root/.venv"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || attended "$python" -m ensurepip >/dev/null
    echo "Installing glm46 and what it needs into $root/.venv; PyTorch is large, this takes minutes the first time"
    # The gpu extra reads temperature and power, which needs a driver.
    if [ -e /proc/driver/nvidia/version ]; then extras="${extras:+$extras,}gpu"; fi
    attended install "$extras"
    exec {lock}>&-
}
