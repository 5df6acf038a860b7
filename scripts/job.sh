# shellcheck shell=bash
# Sourced by the job scripts of deploy/, in the checkout: the files that the starts of one job leave for later ones, and
# what follows the end of a run.

# use_state NAME COUNT: set `job`, the beginning of the names of these files, for the start after COUNT earlier ones. All
# nodes must see GLM46_JOBS (outputs/jobs): a requeued job may begin on another node.
use_state() {
    job=${GLM46_JOBS:-$PWD/outputs/jobs}/$1
    mkdir -p "${job%/*}" || exit 2
    # Files of another job: a controller that was set up anew counts its jobs from 1 again.
    if [ "$2" -eq 0 ]; then remove_state; fi
    export GLM46_STATE=$job.state
}

# use_slurm_state: `use_state` for this job of Slurm, or for the chain of jobs of one name that Slurm runs one after another.
use_slurm_state() {
    local name=$SLURM_JOB_ID count=${SLURM_RESTART_COUNT:-0}
    is_chain=''
    if [[ ${SLURM_JOB_DEPENDENCY:-} == *singleton* ]]; then is_chain=1 name=${SLURM_JOB_NAME//\//_} count=1; fi
    use_state "${SLURM_CLUSTER_NAME:-slurm}-$name" "$count"
}

# check_hosts COMMAND: run a preflight, once for a job, since later starts wait for storage that may be away. PREFLIGHT=0 skips
# it. Sets `code`, as `attend`.
check_hosts() {
    code=0
    if [ "${PREFLIGHT:-1}" = 0 ] || [ -e "$job.checked" ]; then return 0; fi
    attend "$@"
    case $code in
        0) : >"$job.checked" ;;
        75) ;;
        *)
            echo "error: preflight ended with exit code $code, nothing was trained; end what fails above, submit the job without" \
                "these hosts (Slurm: --exclude), or set PREFLIGHT=0" >&2
            ;;
    esac
    return "$code"
}

remove_state() { rm -f "$job" "$job".*; }

# attend COMMAND: run it, pass SIGUSR1 on, and set `code` when it has ended. `is_ended` is set after SIGTERM, which job
# systems send to this shell and to the run when a job is cancelled, requeued by others, or at its time limit.
attend() {
    local is_signalled='' before=''
    code='' is_ended='' pid=''
    trap 'is_signalled=1; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1
    trap 'is_signalled=1 is_ended=1; [ -z "${PBS_JOBID:-}" ] || [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null' TERM
    "$@" &
    pid=$!
    # `wait` also returns at a trapped signal, with a code of its own, sometimes only when it is called after the trap. It
    # knows the code of a process that has ended, so two calls without a signal give the same code.
    until [ -n "$code" ] && [ "$code" = "$before" ]; do
        before=$code code=0 is_signalled=''
        wait "$pid" || code=$?
        [ -z "$is_signalled" ] || code=''
    done
    trap '' USR1 TERM
    # bash has lost the code: a signal arrived in the moment of the end. If another start does not help, its code says so.
    if [ "$code" -lt 0 ]; then code=75; fi
}

# goes_on STARTS: whether another start helps, after the end of a run with `code`; if not, the files of the job are removed.
# 75: stopped by a signal, and saved, or several saves in a row have failed. Other failures: on other nodes, if some were lost.
goes_on() {
    newest_step=0 lost_hosts=
    # shellcheck disable=SC1090
    [ ! -f "$job.state" ] || . "$job.state"
    if [ "$code" -eq 75 ] || { [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ -n "$lost_hosts" ]; }; then
        echo "$newest_step" >>"$job.steps"
        if [ "$(tail -n 3 "$job.steps" | grep -cx "$newest_step")" -lt 3 ]; then return 0; fi
        echo "error: three $1 without a new checkpoint, no other follows. See the output above" >&2
    fi
    remove_state
    return 1
}

# requeue_or_end: the end of a job script of Slurm after `attend`. A chain goes on with its next job, or is cancelled.
requeue_or_end() {
    local waiting=$SLURM_JOB_ID chain=(--name="$SLURM_JOB_NAME" --user="${SLURM_JOB_USER:-$USER}")
    if [ -n "$is_ended" ]; then
        if [ -z "$is_chain" ]; then
            # Slurm counts a restart as soon as it requeues the job; without one, the job was cancelled or its time is over.
            case $(scontrol show job "$SLURM_JOB_ID") in *" Restarts=${SLURM_RESTART_COUNT:-0} "*) remove_state ;; esac
        fi
        exit "$code"
    fi
    if ! goes_on "starts of this job"; then
        [ -z "$is_chain" ] || scancel "${chain[@]}" --state=PENDING
        exit "$code"
    elif [ -n "$is_chain" ]; then
        waiting=$(squeue --noheader "${chain[@]}" --states=PENDING --format=%A)
    else
        scontrol requeue "$SLURM_JOB_ID" || exit "$code"
    fi
    for waiting in ${lost_hosts:+$waiting}; do exclude "$waiting" "$lost_hosts"; done
    exit "$code"
}

# exclude JOB HOSTS: keep a waiting job from these hosts, beside those that it excludes already. A lost node looks healthy to
# Slurm for a while. Slurm takes the list of a requeued job once it waits.
exclude() {
    local known _
    known=$(scontrol show job "$1" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1,/p')
    for _ in {1..50}; do
        if scontrol update JobId="$1" ExcNodeList="${known#(null),}${2// /,}" 2>/dev/null; then break; fi
        sleep 0.1
    done
}
