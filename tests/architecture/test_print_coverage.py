"""The text of coverage: lines and branches of the core that did not run, then a table."""

from scripts import print_coverage


def test_what_did_not_run_is_named_and_the_rows_are_sums(monkeypatch, capsys):
    summary = {"num_statements": 10, "covered_lines": 6, "num_branches": 4, "covered_branches": 1}
    files = {
        "glm46/run/plan.py": {
            "summary": summary,
            "missing_lines": [3, 4, 5, 9],
            "missing_branches": [[12, -3], [14, 16], [9, 20], [21, 4]],  # the last two are clear from lines 9 and 4
        },
        "glm46/operate/launch/ranks.py": {"summary": summary, "missing_lines": [1], "missing_branches": []},
    }
    monkeypatch.setattr(print_coverage, "read_report", lambda data: files)
    print_coverage.main("data")
    lines = capsys.readouterr().out.splitlines()
    core = [line for line in lines if line.startswith("  glm46/")]
    assert core == ["  glm46/run/plan.py: lines 3-5, 9; branches 12 to exit, 14 to 16"]
    rows = [" ".join(line.split()) for line in lines if line.endswith("branches")]
    assert rows == [
        "operate/launch 60.0 % of 10 lines 25.0 % of 4 branches",
        "run 60.0 % of 10 lines 25.0 % of 4 branches",
        "core 60.0 % of 10 lines 25.0 % of 4 branches",
        "all 60.0 % of 20 lines 25.0 % of 8 branches",
    ]
