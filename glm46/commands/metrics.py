"""``python -m glm46 metrics``: serve the metrics of a run for Prometheus, in a process of its own."""

import signal
from collections.abc import Sequence
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.config.options import verb_parser
from glm46.operate.launch.config_options import parse_with_overrides
from glm46.operate.launch.exporting import exporting

_PORT = "9400"
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def metrics_command(argv: Sequence[str]) -> int:
    """Serve the metrics of a run until a signal; returns the exit code.

    Raises:
        UserError: the folder holds no run, or see `Endpoint`.
    """
    parser = verb_parser(
        "metrics",
        description="Serves the metrics of a run for Prometheus until Ctrl-C, beside a run that torchrun has started, "
        "or after its end. A run of the launcher serves its own with [metrics] prometheus_port.",
        epilog=f"Keys of [metrics] can be stated as --metrics.prometheus_port VALUE; the port is {_PORT} otherwise.",
    )
    parser.add_argument("folder", type=Path, help="job.dump_folder of the run")
    arguments, overrides = parse_with_overrides(parser, argv)
    file = arguments.folder / "config.toml"
    if not file.is_file():
        raise UserError(f"{arguments.folder}: not the folder of a run, it has no config.toml; state job.dump_folder")
    config = load_config(file, overrides)
    if config.metrics.prometheus_port is None:
        config = load_config(file, (*overrides, "--metrics.prometheus_port", _PORT))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # or a thread of the endpoint receives them
    try:
        with exporting(config, is_beside=True) as exporter:
            exporter.announce()
            signal.sigwait(_ENDS)
            return exporter.ends(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
