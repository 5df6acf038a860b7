"""`python -m glm46 plot` with rows of this release and older ones; the drawn PNG is read back."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from glm46.cli import main
from glm46.engine.observe.console import short_number
from scripts import plot_curriculum
from scripts.plot_curriculum import read_phases

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.image import imread  # noqa: E402

CONFIGS = Path(__file__).parents[3] / "train_configs"
PHASE_1, PHASE_3 = (str(CONFIGS / f"debug_phase{number}.toml") for number in (1, 3))
EDGES = ["15T", "22T", "22.25T", "22.5T", "22.75T", "23T"]
# matplotlib's first two colours of lines.
BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)


def write_run(folder, *, is_old=False, loss=3.0):
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, 21):
        row = {
            "kind": "train", "step": step, "tokens": 1000 * step, "loss": loss + 1 / step, "loss_mean": loss + 1 / step,
        }  # fmt: skip
        row |= {"lr": 1e-3, "tokens_per_second": 50.0, "expert_balance_cv": 0.5}
        if is_old:
            del row["kind"], row["loss_mean"]
        validation = {"step": step, "tokens": 1000 * step, "validation_loss": loss}
        rows += [row, validation if is_old else {"kind": "validation", **validation}]
    rows[4]["loss"] = None  # not finite
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ink(file, colour) -> np.ndarray:
    """Pixels of a colour in each quarter of the picture: loss, learning rate, speed, balance."""
    picture = (imread(file)[..., :3] * 255).round().astype(int)
    # The row of the legend is left out.
    hits = (np.abs(picture - colour).max(-1) <= 2)[60:]
    middle, centre = hits.shape[0] // 2, hits.shape[1] // 2
    return np.array([part.sum() for rows in (hits[:middle], hits[middle:]) for part in (rows[:, :centre], rows[:, centre:])])  # fmt: skip  # noqa: E501


def test_a_full_disk_leaves_no_part_of_a_picture(tmp_path, small_disk, capsys):
    disk, _ = small_disk
    run = write_run(tmp_path / "run")
    with suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while file.write(b"x" * 4096) == 4096:
            pass
    assert main(["plot", str(run), "--output", str(disk / "plot.png")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.slow
def test_each_run_is_drawn_in_each_panel(tmp_path, capsys):
    new, old = write_run(tmp_path / "new"), write_run(tmp_path / "old", is_old=True, loss=4.0)
    # Another speed, or one line would cover the other.
    text = (old / "metrics.jsonl").read_text()
    (old / "metrics.jsonl").write_text(text.replace("50.0", "30.0").replace("0.001,", "0.002,").replace("0.5}", "0.3}"))
    assert main(["plot", str(new), str(old / "metrics.jsonl")]) == 0
    file = new / "plot.png"
    assert capsys.readouterr().out.strip() == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in new.iterdir() if path.suffix == ".tmp"] == []
    # A line across half of the picture has hundreds of pixels.
    assert (ink(file, BLUE) > 300).all() and (ink(file, ORANGE) > 300).all()


@pytest.mark.slow
def test_points_of_validation_are_drawn_over_steps_too(tmp_path):
    run = write_run(tmp_path / "run")
    assert main(["plot", str(run), "--x", "steps"]) == 0
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(row for row in rows if "validation" not in row))
    assert main(["plot", str(run), "--x", "steps", "--output", str(tmp_path / "without.png")]) == 0
    # Twenty points of some 50 pixels each, on an axis that they make a little longer.
    points = ink(run / "plot.png", BLUE) - ink(tmp_path / "without.png", BLUE)
    assert points[0] > 500 > abs(points[1:]).max()
    assert ink(run / "plot.png", ORANGE).sum() == 0


def test_a_model_without_experts_has_no_balance_panel(tmp_path):
    run = write_run(tmp_path / "dense")
    text = (run / "metrics.jsonl").read_text().replace(', "expert_balance_cv": 0.5', "")
    (run / "metrics.jsonl").write_text(text)
    assert main(["plot", str(run)]) == 0
    assert ink(run / "plot.png", BLUE)[3] == 0 < ink(run / "plot.png", BLUE)[2]


POLICY = {"loss": 0.0, "entropy": 0.5, "completion_tokens": 8.0, "mismatch_kl": 1e-9}
RUNS = {
    "rl": (
        POLICY | {"reward": 0.25, "reference_kl": 1e-3},
        {"validation_reward/sums": 0.5, "validation_pass/sums@1": 0.5, "validation_pass/sums@4": 0.75},
        {"Reward", "Pass@k", "Loss", "Entropy", "Length of completions", "KL from the reference",
         "KL of rollout and trainer"},
        {"sums", "sums@1", "sums@4"},
    ),
    "rollouts alone": ({"reward": 0.25}, {}, {"Reward"}, set()),
    "preferences": (
        {"loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 0.1}, {"validation_rewards/accuracies": 0.5},
        {"Loss", "Accuracy of preferences", "Margin of preferences"}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("train", "validation", "titles", "sets"), RUNS.values(), ids=RUNS)
def test_a_run_is_drawn_with_what_it_optimises(tmp_path, monkeypatch, train, validation, titles, sets):
    rows = [{"kind": "train", "step": step, "tokens": step, **train} for step in range(1, 4)]
    rows += [{"kind": "validation", "step": 3, "tokens": 3, **validation}] if validation else []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = []
    monkeypatch.setattr(
        "glm46.engine.observe.plots.Figure", lambda **options: figures.append(Figure(**options)) or figures[0]
    )
    assert main(["plot", str(tmp_path)]) == 0
    assert {axes.get_title("left") for axes in figures[0].axes} == titles
    assert {text.get_text() for axes in figures[0].axes for text in axes.texts} == sets
    assert all(any(len(line.get_xdata()) for line in axes.lines) for axes in figures[0].axes)


@pytest.mark.slow
def test_a_curriculum_is_drawn_from_its_files(tmp_path, capsys):
    """All words are in the SVG as text: lengths, windows and shares of the files, each mixture once."""
    files = sorted(str(path) for path in CONFIGS.glob("glm46_phase?.toml"))
    output = tmp_path / "curriculum.svg"
    assert plot_curriculum.main([*reversed(files), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", output.read_text())
    for length in ("2,048", "4,096", "32,768", "65,536", "131,072", "196,608"):
        assert length in words
    assert words.count("RoPE linear × 48") == words.count("window 65,536") == words.count("books 15%") - 1 == 1
    assert {"agent trajectories 20%", "learning rate", "router temperature, at most 1.5", "4.194M"} <= set(words)
    assert [word for word in words if word in EDGES] == EDGES
    once = output.read_bytes()
    assert plot_curriculum.main([*files, "--output", str(output)]) == 0
    assert output.read_bytes() == once


def test_the_pictures_of_the_document_are_those_of_the_files():
    """Their words; lines depend on the release of matplotlib."""
    for name, length in (("glm46", "196,608"), ("glm45_paper", "131,072")):
        picture = (CONFIGS.parent / "docs" / "images" / f"curriculum_{name}.svg").read_text()
        words = set(re.findall(r"<text[^>]*>([^<]*)</text>", picture))
        assert length in words
        for stage in read_phases(sorted(CONFIGS.glob(f"{name}_phase?.toml"))):
            assert {f"{source.replace('_', ' ')} {share:.0%}" for source, share in stage.mixture().items()} <= words


@pytest.mark.parametrize("arguments, words", [
    (["nowhere"], ("nowhere", "job.dump_folder")), (["empty"], ("empty", "metrics.jsonl", "job.dump_folder")),
    (["begun"], ("begun", "no training rows", "metrics.log_freq")),
    (["damaged"], ("damaged/metrics.jsonl: damaged", "no line of it is a row", "job.dump_folder")),
    (["run", "--output", "picture.jpg"], ("--output", "picture.jpg", ".png")),
    (["run", "--output", "nowhere/picture.png"], ("--output", "nowhere/picture.png", "folder")),
    ([PHASE_1, "--output", "picture.jpg"], ("--output", "picture.jpg", ".png or .svg")),
    ([PHASE_1, PHASE_3], ("debug_phase3.toml", "lr_scheduler.start_tokens = 245760", "163840", "all phases")),
])  # fmt: skip
def test_mistakes_are_named_with_their_remedy(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/metrics.jsonl").write_text("{bad\n" * 3)
    (tmp_path / "begun/metrics.jsonl").write_text('{"kind": "validation", "step": 0, "validation_loss": 9.0}\n')
    draw = plot_curriculum.main if arguments[0] == PHASE_1 else lambda words: main(["plot", *words])
    assert draw(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words)
    assert list(tmp_path.rglob("*.png*")) == []


def test_without_matplotlib_one_message_names_the_command_that_installs_it(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr("glm46.config.options.find_spec", lambda name: None)
    assert main(["plot", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install matplotlib" in said and "[plot]" in said


def test_help_needs_no_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as end:
        main(["plot", "--help"])
    assert end.value.code == 0 and "RUN" in capsys.readouterr().out


def test_axis_numbers_are_short():
    known = {0: "0", 0.25: "0.25", 3e-4: "3.0e-04", 950: "950", 2000: "2K", 1.5e6: "1.5M", 2e10: "20B", 2.2e13: "22T"}
    assert {value: short_number(value) for value in known} == known


def test_the_legend_names_the_bold_line_and_the_thin_one(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("glm46.engine.observe.plots.save_picture", lambda figure, output: figures.append(figure))
    assert main(["plot", str(write_run(tmp_path / "run"))]) == 0
    legend = figures[0].legends[0]
    widths = {
        text.get_text(): line.get_linewidth() for text, line in zip(legend.texts, legend.get_lines(), strict=True)
    }
    assert widths["mean loss since the previous row"] > widths["loss of one step"]
