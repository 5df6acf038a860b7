#!/usr/bin/env python
"""Write the dashboards of deploy/monitoring/dashboards for Grafana: python scripts/make_dashboards.py [FOLDER].

With --check URL FOLDER: name the queries of the edited dashboards of a folder for which a Prometheus has no data.
"""

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from glm46.engine.observe.metrics import SHOWN, Metric, Shown, exported_name, find_metric  # noqa: E402

FOLDER = ROOT / "deploy" / "monitoring" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
RUN = '{run=~"$run"}'
_COLUMNS = 24
"""Width of Grafana's grid."""


class Panel(NamedTuple):
    """One chart."""

    title: str
    unit: str
    """Grafana's name of the unit; ``short`` for a number."""
    queries: dict[str, str]
    """Queries by the text of their legend."""
    meaning: str = ""
    kind: str = "timeseries"
    """``timeseries``, or ``stat`` for the newest value."""


class Dashboard(NamedTuple):
    """One page."""

    title: str
    variable: str
    """Label by which the page is filtered."""
    of: str
    """Metric whose values of this label can be chosen."""
    panels: tuple[Panel, ...]


def _stat(title: str, unit: str, query: str, meaning: str = "") -> Panel:
    return Panel(title, unit, {title: query}, meaning, "stat")


def _of_gpus(title: str, unit: str, metric: str, meaning: str = "") -> Panel:
    """A chart of each GPU; labels in the title go to the legend."""
    title, _, label = title.partition(" {{")
    legend = "{{Hostname}} {{gpu}}" + (f" {{{{{label}" if label else "")
    return Panel(title, unit, {legend: f'{metric}{{Hostname=~"$Hostname"}}'}, meaning)


def _of_runs(title: str, unit: str, metric: str, meaning: str = "") -> Panel:
    """A chart of what the ranks of runs measure, for which no dcgm-exporter is needed."""
    return Panel(title, unit, {"{{run}} {{ranks}}": metric}, f"Over the ranks of a run. {meaning}".strip())


def _of_shown(shown: Shown) -> Panel:
    """The chart of a metric that the console and `plot` show too."""
    columns = dict.fromkeys(name for name in (shown.column, shown.validation) if name)
    queries = {_legend(find_metric(name)): exported_name(name) + RUN for name in columns}
    unit = {"ratio": "percentunit"}.get(find_metric(shown.column).unit, "short")
    return Panel(shown.title, unit, queries, find_metric(shown.column).meaning)


def _legend(metric: Metric) -> str:
    if metric.group == "validation":
        return f"validation {{{{{metric.per.partition('@')[0]}}}}}"
    return metric.name + (" {{network}}" if metric.group in ("loss", "policy", "optimizer", "experts") else "")


SHOWN_PANELS = tuple(_of_shown(shown) for shown in SHOWN if shown.title)
DASHBOARDS = {
    "training": Dashboard("Training", "run", "training_step", (
        _stat("Phase", "short", f"training_phase{RUN} == 1", "The phase of the first rank is the label of the series."),
        _stat("Since the last step", "s", f"time() - training_last_step_timestamp_seconds{RUN}", "Or change of phase."),
        _stat("Left", "s", f"(training_tokens_budget{RUN} - training_tokens{RUN}) / training_tokens_per_second{RUN}"),
        _stat("Step", "short", f"training_step{RUN}"),
        _stat("Starts in a day", "short", f"changes(training_start_timestamp_seconds{RUN}[1d])", "After the first."),
        _stat("Skipped steps", "short", f"training_skipped_steps_total{RUN}", "Of this process."),
        *SHOWN_PANELS,
        Panel("Tokens counted", "short", {
            "counted": f"rate(training_tokens_total{RUN}[$__rate_interval])",
        }, "With validation and saves, which rows leave out."),
        Panel("Time of a step", "s", {
            "step": f"training_step_seconds{RUN}",
            "waiting for text": f"training_data_seconds{RUN}",
        }),
        Panel("Multi-token prediction", "percentunit", {
            "accepted {{depth}}": f"training_mtp_acceptance_ratio{RUN}",
        }, "Positions where a prediction layer has the main model's token."),
        Panel("Skipped steps in ten minutes", "short", {
            "all": f"increase(training_skipped_steps_total{RUN}[10m])",
            "not finite": f"increase(training_not_finite_steps_total{RUN}[10m])",
        }),
    )),
    "experts": Dashboard("Experts", "run", "expert_balance_cv", (
        Panel("Deviation of tokens per expert", "short", {
            "mean of layers": f"expert_balance_cv{RUN}",
            "worst layer": f"expert_balance_cv_max{RUN}",
        }, "Standard deviation over the mean; 0 is perfect balance."),
        Panel("Load of an expert over an even share", "short", {
            "busiest": f"expert_load_max_ratio{RUN}",
            "idlest": f"expert_load_min_ratio{RUN}",
        }),
        Panel("Experts without tokens", "short", {"dead": f"dead_experts{RUN}"}, "Over all layers."),
        Panel("Assignments dropped by the capacity", "percentunit", {"dropped": f"expert_overflow_ratio{RUN}"}),
        Panel("Largest selection bias", "short", {"bias": f"expert_bias_max{RUN}"}),
        Panel("Balance loss", "short", {"before its weight": f"training_balance_loss{RUN}"}),
    )),
    "checkpoints": Dashboard("Checkpoints", "run", "training_last_checkpoint_step", (
        _stat("Age of the newest", "s", f"time() - training_last_checkpoint_timestamp_seconds{RUN}"),
        _stat("Steps since the newest", "short", f"training_step{RUN} - training_last_checkpoint_step{RUN}"),
        _stat("Failed saves", "short", f"training_failed_saves_total{RUN}", "Of this process."),
        _stat("Size", "bytes", f"training_checkpoint_bytes{RUN}"),
        Panel("Time of a save", "s", {
            "until published": f"training_checkpoint_save_seconds{RUN}",
            "training waited": f"training_checkpoint_seconds{RUN}",
        }),
        Panel("Starts of the process", "short", {
            "in the last hour": f"changes(training_start_timestamp_seconds{RUN}[1h])",
        }),
        Panel("Free disk", "bytes", {
            "{{instance}} {{mountpoint}}": 'node_filesystem_avail_bytes{fstype!~"tmpfs|ramfs|squashfs"}',
        }),
    )),
    "hardware": Dashboard("GPUs", "Hostname", "DCGM_FI_DEV_GPU_TEMP", (
        _of_runs("Memory reserved by ranks", "percentunit", "training_memory_peak_ratio", "Peak since the last row."),
        _of_runs("Temperature by ranks", "celsius", "training_gpu_temperature_celsius"),
        _of_runs("Power by ranks", "watt", "training_gpu_power_watts"),
        _of_runs("Time with a kernel by ranks", "percentunit", "training_gpu_utilization_ratio", "100 % if hung."),
        Panel("Rank with the least or most", "short", {"{{run}} {{figure}}": "training_extreme_rank"}),
        _of_gpus("Temperature", "celsius", "nvidia_gpu_temperature"),
        _of_gpus("Temperature of the memory", "celsius", "DCGM_FI_DEV_MEMORY_TEMP"),
        _of_gpus("Power", "watt", "nvidia_gpu_power_usage", "Far below its usual in a hang."),
        _of_gpus("Memory in use", "bytes", "nvidia_gpu_memory_used_bytes"),
        _of_gpus("Time with a kernel", "percent", "nvidia_gpu_duty_cycle", "100 % in a hang too."),
        _of_gpus("Tensor cores active", "percentunit", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
        _of_gpus("Clock", "short", "DCGM_FI_DEV_SM_CLOCK", "MHz."),
        _of_gpus("Lowered clocks {{clock_event}}", "short", "DCGM_EXP_CLOCK_EVENTS_COUNT"),
        _of_gpus("Xid {{xid}}", "short", "DCGM_EXP_XID_ERRORS_COUNT", "In five minutes."),
        _of_gpus("Remapped rows", "short", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
    )),
    "cluster": Dashboard("Nodes", "instance", "node_load1", (
        Panel("Runs that answer", "short", {"{{run}}": 'up{job="glm46"}'}, "1 answers, 0 has crashed."),
        Panel("Alerts", "short", {"{{alertname}} {{run}}": 'count by (alertname, run) (ALERTS) or vector(0)'}),
        Panel("Processors in use", "percentunit", {
            "{{instance}}": '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle", instance=~"$instance"}'
            "[$__rate_interval]))",
        }),
        Panel("Available memory", "bytes", {
            "{{instance}}": 'node_memory_MemAvailable_bytes{instance=~"$instance"}',
        }),
        Panel("Disks busy", "percentunit", {
            "{{instance}} {{device}}": 'rate(node_disk_io_time_seconds_total{instance=~"$instance"}[$__rate_interval])',
        }),
        Panel("Network", "Bps", {
            "received {{instance}} {{device}}": 'rate(node_network_receive_bytes_total{device!="lo", '
            'instance=~"$instance"}[$__rate_interval])',
        }),
        Panel("Bus bandwidth of collectives", "Bps", {
            "{{run}} {{group}} {{collective}} {{message_size}}": "avg by (run, group, collective, message_size) "
            '(nccl_busbw_gbps{instance=~"$instance"} or nccl_busbw_gbps{run!=""}) * 1e9',
        }, "By the probe of a run ([comm] bandwidth_interval), or NCCL's Inspector plugin."),
        Panel("Bandwidth of an all-reduce", "Bps", {
            "{{run}} {{group}}": "nccl_bandwidth_gbps * 1e9",
        }, "Bytes per second, by the probe of a run; bus bandwidth is this times 2 (n - 1)/n of n ranks."),
        Panel("Time of an all-reduce", "s", {
            "{{run}} {{group}} {{message_size}}": "avg by (run, group, message_size) "
            '(nccl_allreduce_time_ms{instance=~"$instance"} or nccl_allreduce_time_ms{run!=""}) / 1000',
        }, "By the probe of a run, or NCCL's Inspector plugin."),
        Panel("Clock offset", "s", {"{{instance}}": 'node_timex_offset_seconds{instance=~"$instance"}'}),
    )),
}  # fmt: skip


def dashboard_json(name: str) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    page = DASHBOARDS[name]
    panels, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(page.panels, 1):
        width, tall = (4, 4) if panel.kind == "stat" else (8, 8)
        if x + width > _COLUMNS or (panels and tall != height):
            x, y = 0, y + height
        panels.append(_panel(panel, number, {"x": x, "y": y, "w": width, "h": tall}))
        x, height = x + width, tall
    alerts = {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing"}',
        "titleFormat": "{{alertname}}",
    }
    query = f"label_values({page.of}, {page.variable})"
    return {
        "uid": f"glm46-{name}",
        "title": f"glm46: {page.title}",
        "tags": ["glm46"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [alerts]},
        "templating": {
            "list": [
                {
                    "name": page.variable,
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": query, "refId": page.variable},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    options = {
        "timeseries": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "stat": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "name" if panel.title == "Phase" else "auto",
        },
    }
    # The name of a phase is its label.
    legends = {"{{run}}: {{phase}}" if panel.title == "Phase" else key: query for key, query in panel.queries.items()}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": options[panel.kind],
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for index, (legend, query) in enumerate(legends.items())
        ],
    }


def answers(url: str, query: str) -> list[dict[str, Any]]:
    """What a Prometheus answers to a query now, with all values of the variables.

    Raises:
        OSError: the server does not answer; urllib.error.HTTPError if it refuses the query.
    """
    query = re.sub(r"\$\{?\w+\}?", ".*", query.replace("$__rate_interval", "1m"))
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=5) as answer:
        return json.load(answer)["data"]["result"]


def check(url: str, folder: Path) -> int:
    """Print one line for each edited dashboard with queries that have no data; returns 1 if there is one."""
    code = 0
    shipped = [dashboard_json(name) for name in DASHBOARDS]
    for file in sorted(folder.glob("*.json")):
        page, empty = json.loads(file.read_text(encoding="utf-8")), []
        panels = [one for panel in page.get("panels", []) for one in (panel, *panel.get("panels", []))]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", []) if "expr" in target]
        for query in [] if page in shipped else queries:
            try:
                empty += [] if answers(url, query) else [query]
            except urllib.error.HTTPError as error:
                empty.append(f"{query} ({json.load(error)['error']})")
        if empty:
            print(
                f"{file}: no data now for {'; '.join(empty)}: is the name right, and does a run export it?",
                file=sys.stderr,
            )
            code = 1
    return code


def main(folder: Path) -> None:
    """Write all dashboards into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (folder / f"{name}.json").write_text(json.dumps(dashboard_json(name), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        sys.exit(check(sys.argv[2], Path(sys.argv[3])))
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
