"""``python -m glm46 plot``: draw the metrics of runs (`SHOWN`) into one PNG."""

import os
from collections.abc import Sequence
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.options import require_picture, verb_parser
from glm46.engine.observe.history import ROWS_FILE, RunRows, read_history, rows_by_kind
from glm46.files.local_disk import real_path

_X_AXES = {"tokens": "tokens", "steps": "step"}
"""Units of the horizontal axis, and the column of each."""


def plot_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = verb_parser(
        "plot", description="Draws loss, reward, learning rate, speed and other metrics of runs in one PNG."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="job.dump_folder of a run, or its rows file")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="picture; absent: plot.png beside the first run's rows"
    )
    parser.add_argument("--x", choices=list(_X_AXES), default="tokens", help="horizontal axis of runs; default tokens")
    arguments = parser.parse_args(argv)
    files = [path / ROWS_FILE if path.is_dir() else path for path in arguments.runs]
    output = arguments.output or files[0].parent / "plot.png"
    require_picture("plot", "--output", output, [".png"])
    runs = [_read(file, name) for file, name in zip(files, _names(files), strict=True)]
    from glm46.engine.observe.plots import draw  # matplotlib is optional: the extra [plot]

    try:
        draw(runs, output, (arguments.x, _X_AXES[arguments.x]))
    except OSError as error:
        raise UserError(f"plot: --output {output}: {error.strerror or error}; name a folder that exists") from error
    print(output)
    return 0


def _names(files: Sequence[Path]) -> list[str]:
    """Names of the runs: their folders relative to the deepest common folder."""
    folders = [real_path(file.parent if file.name == ROWS_FILE else file) for file in files]
    if len(set(folders)) == 1:
        return [folders[0].name] * len(folders)
    common = Path(os.path.commonpath(folders))
    return [str(folder.relative_to(common)) if folder != common else folder.name for folder in folders]


def _read(file: Path, name: str) -> RunRows:
    try:
        rows = read_history(file)
    except OSError as error:
        raise UserError(f"plot: {file}: {error.strerror}; give the job.dump_folder of a run") from error
    if not rows and file.stat().st_size:
        raise UserError(
            f"plot: {file}: damaged, or another file: no line of it is a row of metrics; give the job.dump_folder of a "
            "run, or its rows file"
        )
    run = RunRows(name, *rows_by_kind(rows))
    if not run.train:
        raise UserError(f"plot: {file}: has no training rows yet; plot it after metrics.log_freq steps")
    return run
