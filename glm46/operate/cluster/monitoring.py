"""Checks that a Prometheus watches: it is ready, has the rules, and knows an Alertmanager."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

from glm46.operate.cluster.results import FAIL, SKIP, Result, Subject, limited

_SECONDS = 5.0
_RULE = "TrainingDown"


def prometheus(subject: Subject) -> Iterator[Result]:
    """State of the Prometheus that ``--prometheus`` names, asked by the first host."""
    if subject.node != 0:
        return
    if subject.prometheus is None:
        yield Result("monitoring", SKIP, "only with --prometheus http://127.0.0.1:9090, or where yours is")
        return
    url = subject.prometheus.rstrip("/")
    remedy = "bash scripts/setup_monitoring.sh --start; --status says what runs"
    try:
        _get(f"{url}/-/ready")
        rules = json.loads(_get(f"{url}/api/v1/rules"))["data"]["groups"]
        managers = json.loads(_get(f"{url}/api/v1/alertmanagers"))["data"]["activeAlertmanagers"]
    except (OSError, ValueError, KeyError) as error:
        yield Result("monitoring", FAIL, f"{url}: {error}", "ready", remedy)
        return
    has_rules = any(rule["name"] == _RULE for group in rules for rule in group["rules"])
    value = f"{url}: {len(rules)} groups of rules, {len(managers)} Alertmanagers"
    yield limited("monitoring", has_rules and bool(managers), value, f"rule {_RULE}, an Alertmanager", remedy)


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        raise OSError(f"HTTP {error.code}") from error


MONITORING_CHECKS = {"monitoring": prometheus}
