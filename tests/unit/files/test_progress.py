"""Lines of progress where no terminal is: what is done, the rate, and the time left."""

import pytest

from glm46.files import progress


@pytest.mark.parametrize("show, done, line", [
    (progress.bytes_progress, 3_000_000, "reading: 3 of 12 MB, 0.1 MB/s, 90 s left"),
    (progress.tokens_progress, 3_000_000, "reading: 3,000,000 of 12,000,000 tokens, 100,000 tokens/s, 90 s left"),
])  # fmt: skip
def test_a_line_each_fifteen_seconds_has_rate_and_time_left(show, done, line, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    lines, now = [], 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with show("reading", 12_000_000, lines.append) as advance:
        now = 110.0
        advance(1_000_000)
        assert lines == []
        now = 130.0
        advance(done - 1_000_000)
        now = 131.0
        advance(1)
    assert lines == [line]
