#!/usr/bin/env bash
# Start Prometheus, Alertmanager, node exporter, dcgm-exporter and Grafana for the runs of this machine, or stop them.
#
#   scripts/setup_monitoring.sh --prometheus-port 9090 --grafana-port 3000 --start
#   scripts/setup_monitoring.sh --status
#   scripts/setup_monitoring.sh --stop
#
# --start     start what is not running; again, it starts only what is missing and loads changed rules; edited files are kept
# --stop      end what this script has started, and nothing else
# --status    say what runs
# --dry-run   with --start or --stop: print the commands, change nothing
# --prometheus-port, --alertmanager-port, --grafana-port, --node-exporter-port, --dcgm-exporter-port N
# --bind ADDRESS   address that all of them listen on; 127.0.0.1, reach it by `ssh -L`
# --webhook URL    where Alertmanager sends alerts
# --folder DIR     configuration, data and logs; outputs/monitoring
#
# Ports, address and webhook of the last --start are kept in the folder, until the options state others.
#
# A program that is missing is said, with the command that installs it; the others start. Exit codes: 0 done, 1 a program
# did not start, 2 wrong use or a port in use: nothing was changed.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

refuse() {
    echo "error: $*" >&2
    exit 2
}

action='' dry='' bind=127.0.0.1 webhook='' folder=outputs/monitoring
declare -A port=([prometheus]=9090 [alertmanager]=9093 [grafana]=3000 [node-exporter]=9100 [dcgm-exporter]=9401)
declare -A seen=()
words=("$@")
for ((i = 0; i + 1 < $#; i++)); do
    if [ "${words[i]}" = --folder ]; then folder=${words[i + 1]}; fi
done
# Before the options, which state others. Another call would otherwise write the defaults into files that programs read.
while read -r name value; do
    case $name in
        bind) bind=$value ;;
        webhook) webhook=$value ;;
        *) if [ -n "${port[${name:-none}]-}" ]; then port[$name]=$value; fi ;;
    esac
done < <(cat "$folder/options" 2>/dev/null)
while [ $# -gt 0 ]; do
    option=$1
    [ -z "${seen[$option]-}" ] || refuse "$option: given twice; state it once"
    seen[$option]=1
    case $option in
        --start | --stop | --status)
            [ -z "$action" ] || refuse "$option with --$action: state one of --start, --stop and --status"
            action=${option#--}
            ;;
        --dry-run) dry=1 ;;
        --help | -h) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --*-port | --bind | --webhook | --folder)
            [[ $# -gt 1 && $2 != --* ]] || refuse "$option: needs a value"
            value=$2 name=${option#--}
            case $option in
                --bind) bind=$value ;;
                --webhook) webhook=$value ;;
                --folder) folder=$value ;;
                *)
                    name=${name%-port}
                    [ -n "${port[$name]-}" ] || refuse "$option: unknown; see --help"
                    [[ $value =~ ^[1-9][0-9]{0,4}$ && $value -le 65535 ]] ||
                        refuse "$option $value: must be between 1 and 65535; state such a port"
                    port[$name]=$value
                    ;;
            esac
            shift
            ;;
        *) refuse "$option: unknown; see --help" ;;
    esac
    shift
done
[ -n "$action" ] || refuse "nothing to do: state --start, --stop or --status"
[[ $bind =~ ^[0-9]{1,3}(\.[0-9]{1,3}){3}$ ]] || refuse "--bind $bind: must be an IPv4 address such as 127.0.0.1"
[[ $action != start || $bind == 0.0.0.0 || $bind =~ ^127(\.(1?[0-9]?[0-9]|2[0-4][0-9]|25[0-5])){3}$ ]] ||
    grep -q -- "|-- ${bind//./\\.}\$" /proc/net/fib_trie ||
    refuse "--bind $bind: no address of this machine; state 127.0.0.1, 0.0.0.0 or one that \`hostname -I\` prints"
[[ -z $webhook || $webhook =~ ^https?://[^[:space:]\"]+$ ]] || refuse "--webhook $webhook: must begin with http:// or https://"
for one in "${!port[@]}"; do
    for other in "${!port[@]}"; do
        [[ $one == "$other" || ${port[$one]} != "${port[$other]}" ]] ||
            refuse "--$one-port and --$other-port are both ${port[$one]}; state different ports"
    done
done
# All programs are asked at this address.
reach=$bind
[ "$bind" != 0.0.0.0 ] || reach=127.0.0.1

run() {
    if [ -n "$dry" ]; then printf '%q ' "$@" && echo; else "$@"; fi
}

# Whether the process of a pid file still is the one that was started: numbers of processes are used again.
runs() {
    local pid
    pid=$(cat "$folder/run/$1.pid" 2>/dev/null) && [ "$(readlink -f "/proc/$pid/exe" 2>/dev/null)" = "$(cat "$folder/run/$1.exe" 2>/dev/null)" ]
}

answers() { (exec 3<>"/dev/tcp/$reach/$1") 2>/dev/null; }

ready() {
    local path=/metrics
    case $1 in prometheus | alertmanager) path=/-/ready ;; grafana) path=/api/health ;; esac
    exec 3<>"/dev/tcp/$reach/${port[$1]}" || return 1
    printf 'GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "$path" >&3
    local status
    IFS= read -r -t 2 status <&3 || status=
    exec 3<&- 3>&-
    [[ $status == *" 200 "* ]]
}

keep_pid() {
    echo "$2" >"$folder/run/$1.pid"
    readlink -f "/proc/$2/exe" >"$folder/run/$1.exe"
}

failed=0
# start NAME ARGUMENTS...: unless it runs; waits until it is ready.
start() {
    local name=$1 program=${program_of[$1]}
    shift
    if [ -n "$dry" ]; then
        run "$program" "$@"
        return
    fi
    if runs "$name"; then
        echo "$name: runs already"
        return
    fi
    (cd "$folder" && exec setsid "$program" "$@" >"log/$name.log" 2>&1 </dev/null) &
    local pid=$! tick
    # One that answers but is not ready reads its data again, as Prometheus does, for minutes with those of weeks.
    for tick in $(seq 3000); do
        if (ready "$name") 2>/dev/null; then
            keep_pid "$name" "$pid"
            echo "$name: http://$reach:${port[$name]}"
            return
        fi
        kill -0 "$pid" 2>/dev/null || break
        ((tick < 100)) || answers "${port[$name]}" || break
        ((tick != 100)) || echo "$name: reads its data, at most 5 minutes are waited; $folder/log/$name.log"
        sleep 0.1
    done
    if kill -0 "$pid" 2>/dev/null && answers "${port[$name]}"; then
        keep_pid "$name" "$pid"
        echo "$name: not ready yet and left to go on; $folder/log/$name.log" >&2
        failed=1
        return
    fi
    kill "$pid" 2>/dev/null || true
    echo "$name: did not start; $folder/log/$name.log ends with: $(tail -n 1 "$folder/log/$name.log")" >&2
    failed=1
}

# Write a file of the folder from standard input, unless somebody has edited it.
install_file() {
    local file=$folder/$1 shipped=$folder/.shipped/${1//\//_}
    cat >"$shipped.new"
    if [ -e "$file" ] && ! cmp -s "$file" "$shipped"; then
        echo "$file: edited by hand and kept; remove it to get the shipped one" >&2
    else
        cp "$shipped.new" "$file"
    fi
    mv "$shipped.new" "$shipped"
}

write_files() {
    local deploy=$root/deploy/monitoring name
    mkdir -p "$folder"/{.shipped,run,log,runs,nodes,gpus,textfile,data/{prometheus,alertmanager,grafana},dashboards} \
        "$folder"/provisioning/{datasources,dashboards}
    sed -e "s/127.0.0.1:9093/$reach:${port[alertmanager]}/; s/127.0.0.1:9100/$reach:${port[node-exporter]}/" \
        "$deploy/prometheus.yml" | install_file prometheus.yml
    install_file alerts.yml <"$deploy/alerts.yml"
    install_file dcgm-counters.csv <"$deploy/dcgm-counters.csv"
    {
        cat "$deploy/alertmanager.yml"
        [ -z "$webhook" ] || printf '    webhook_configs: [{url: "%s"}]\n' "$webhook"
    } | install_file alertmanager.yml
    for name in "$deploy"/dashboards/*.json; do install_file "dashboards/$(basename "$name")" <"$name"; done
    sed "s#http://127.0.0.1:9090#http://$reach:${port[prometheus]}#" "$deploy/grafana/datasource.yml" |
        install_file provisioning/datasources/datasource.yml
    sed "s#/var/lib/grafana/dashboards#$folder/dashboards#" "$deploy/grafana/dashboards.yml" |
        install_file provisioning/dashboards/dashboards.yml
}

# Who listens on the port of a program, and the remedy. Debian's packages start their programs as services of systemd.
who_listens() {
    local -A service_of=([prometheus]=prometheus [alertmanager]=prometheus-alertmanager
        [node-exporter]=prometheus-node-exporter [grafana]=grafana-server)
    local one active=()
    for one in prometheus alertmanager node-exporter grafana; do
        if systemctl is-active --quiet "${service_of[$one]}" 2>/dev/null; then active+=("${service_of[$one]}"); fi
    done
    if [[ " ${active[*]-} " == *" ${service_of[$1]-none} "* ]]; then
        echo "the service ${service_of[$1]} of this system listens on it; end it with" \
            "\`systemctl disable --now ${active[*]}\` (as root), then call this again"
    else
        echo "another program listens on it at $reach; state a free one"
    fi
}

# Programs by name; Debian calls two of them by longer names.
declare -A program_of=()
find_programs() {
    local name candidate
    local -A candidates=([prometheus]=prometheus [alertmanager]="prometheus-alertmanager alertmanager"
        [node-exporter]="prometheus-node-exporter node_exporter" [grafana]="grafana-server grafana")
    if command -v nvidia-smi >/dev/null; then candidates[dcgm-exporter]=dcgm-exporter; fi
    for name in "${!candidates[@]}"; do
        for candidate in ${candidates[$name]}; do
            [ -n "${program_of[$name]-}" ] || program_of[$name]=$(command -v "$candidate" || true)
        done
    done
    # Without a program of its own, Grafana's image, if an engine has it: nothing is downloaded.
    for candidate in docker podman; do
        if [ -z "${program_of[grafana]}" ] && command -v $candidate >/dev/null &&
            timeout 10 $candidate image inspect grafana/grafana >/dev/null 2>&1; then
            program_of[grafana]=$(command -v $candidate)
        fi
    done
    [ -n "${program_of[prometheus]-}" ] ||
        refuse "prometheus: not found; apt-get install prometheus prometheus-alertmanager prometheus-node-exporter"
    for name in "${!program_of[@]}"; do
        if [ -n "${program_of[$name]}" ] && ! runs "$name" && answers "${port[$name]}"; then
            refuse "--$name-port ${port[$name]}: $(who_listens "$name")"
        fi
    done
}

# Refuse files that somebody has edited, and that Prometheus or Alertmanager would not read.
check_edited() {
    local tool name said
    for tool in "promtool check config prometheus.yml" "amtool check-config alertmanager.yml"; do
        name=${tool##* }
        [ -e "$folder/$name" ] || continue
        if ! command -v "${tool%% *}" >/dev/null; then
            echo "${tool%% *}: not found, so $folder/$name is not checked; Debian's packages have it" >&2
            continue
        fi
        said=$(cd "$folder" && $tool 2>&1) ||
            refuse "$folder/$name or the rules that it names: ${tool% *}: $(echo "$said" | grep -v -e '^ *$' -e 'failed to validate' | tail -n 1); correct or remove the file"
    done
    for name in "$folder"/dashboards/*.json; do
        [ -e "$name" ] || return 0
        if ! command -v python3 >/dev/null; then
            echo "python3: not found, so $folder/dashboards is not checked: apt-get install python3" >&2
            return 0
        fi
        said=$(python3 -m json.tool "$name" 2>&1 >/dev/null) ||
            refuse "$name: is not JSON: $(echo "$said" | tail -n 1); correct or remove the file"
    done
}

# Name the queries of edited dashboards for which a Prometheus that runs has no data.
name_empty_queries() {
    command -v python3 >/dev/null || return 0
    python3 "$root/scripts/make_dashboards.py" --check "http://$reach:${port[prometheus]}" "$folder/dashboards" || true
}

start_all() {
    start prometheus --config.file=prometheus.yml --storage.tsdb.path=data/prometheus \
        --web.listen-address="$bind:${port[prometheus]}"
    if [ -n "${program_of[alertmanager]}" ]; then
        start alertmanager --config.file=alertmanager.yml --storage.path=data/alertmanager \
            --web.listen-address="$bind:${port[alertmanager]}" --cluster.listen-address=
    else
        echo "alertmanager: not found, so nobody is told: apt-get install prometheus-alertmanager" >&2
    fi
    if [ -n "${program_of[node-exporter]}" ]; then
        start node-exporter --web.listen-address="$bind:${port[node-exporter]}" --collector.textfile.directory=textfile
    else
        echo "node-exporter: not found; figures of nodes are missing: apt-get install prometheus-node-exporter" >&2
    fi
    if [ -z "${program_of[dcgm-exporter]+known}" ]; then
        echo "dcgm-exporter: not needed, this machine has no NVIDIA GPU"
    elif [ -n "${program_of[dcgm-exporter]}" ]; then
        [ -n "$dry" ] || printf '[{"targets": ["%s:%s"]}]\n' "$reach" "${port[dcgm-exporter]}" >"$folder/gpus/here.json"
        start dcgm-exporter --address "$bind:${port[dcgm-exporter]}" --collectors dcgm-counters.csv
    else
        echo "dcgm-exporter: not found; figures of GPUs are missing: run NVIDIA's container of it with" \
            "$folder/dcgm-counters.csv, and write its address into $folder/gpus/here.json" >&2
    fi
    if [ -n "${program_of[grafana]}" ]; then
        start_grafana
    else
        echo "grafana: no program and no image grafana/grafana of docker or podman found (Debian has no package);" \
            "a Grafana of your own reads $folder/provisioning" >&2
    fi
}

start_grafana() {
    local password=$folder/grafana-password arguments variables
    # Not admin/admin.
    if [ -z "$dry" ] && [ ! -s "$password" ]; then
        (umask 077 && head -c 18 /dev/urandom | base64 >"$password")
    fi
    variables=(GF_SECURITY_ADMIN_PASSWORD__FILE="$password" GF_PATHS_PROVISIONING="$folder/provisioning"
        GF_SERVER_HTTP_ADDR="$bind" GF_SERVER_HTTP_PORT="${port[grafana]}" GF_PATHS_DATA="$folder/data/grafana"
        GF_ANALYTICS_REPORTING_ENABLED=false GF_ANALYTICS_CHECK_FOR_UPDATES=false)
    export "${variables[@]}"
    case ${program_of[grafana]##*/} in
        docker | podman)
            # As this user, who may read the password; in the network of the host, because Prometheus is on loopback.
            arguments=(run --rm --network host --user "$(id -u):0" --volume "$folder:$folder"
                "${variables[@]/#/--env=}" grafana/grafana)
            ;;
        grafana) arguments=(server --homepath "${GRAFANA_HOME:-/usr/share/grafana}") ;;
        *) arguments=(--homepath "${GRAFANA_HOME:-/usr/share/grafana}") ;;
    esac
    start grafana "${arguments[@]}"
    echo "grafana: user admin, password in $password"
}

programs=(grafana dcgm-exporter node-exporter alertmanager prometheus)
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
case $action in
    start)
        find_programs
        check_edited
        if [ -z "$dry" ]; then
            { mkdir -p "$folder" && [ -w "$folder" ]; } 2>/dev/null ||
                refuse "--folder $folder: cannot be written; state another folder"
            write_files
            {
                printf 'bind %s\nwebhook %s\n' "$bind" "$webhook"
                for one in "${!port[@]}"; do echo "$one ${port[$one]}"; done
            } >"$folder/options"
        fi
        if [ -z "$dry" ] && runs prometheus; then name_empty_queries; fi
        start_all
        # Those that run read changed files.
        for one in prometheus alertmanager; do
            if [ -z "$dry" ] && runs "$one"; then kill -HUP "$(cat "$folder/run/$one.pid")"; fi
        done
        [ -n "$dry" ] || echo "a run is found with --metrics.prometheus_port 9400; list others in $folder/runs"
        ;;
    stop)
        for one in "${programs[@]}"; do
            runs "$one" || continue
            pid=$(cat "$folder/run/$one.pid")
            run kill "$pid"
            [ -n "$dry" ] && continue
            for _ in $(seq 100); do
                kill -0 "$pid" 2>/dev/null || break
                sleep 0.1
            done
            kill -KILL "$pid" 2>/dev/null || true
            rm -f "$folder/run/$one".{pid,exe}
            echo "$one: stopped"
        done
        ;;
    status)
        for one in "${programs[@]}"; do
            if runs "$one"; then echo "$one: runs on port ${port[$one]}"; else echo "$one: does not run"; fi
        done
        if runs prometheus; then name_empty_queries; fi
        ;;
esac
exit "$failed"
