"""What ended the ranks: the host that the others wait for, and errors as results."""

import pytest

from glm46.config.errors import UserError
from glm46.operate.cluster.rank_files import DONE, WAITS, failed_ranks, read_rows, read_stages, write_error, write_rows
from glm46.operate.cluster.rank_files import write_stage as write
from glm46.operate.cluster.results import FAIL, Result


def found(stages: dict[int, str], cause: str = "a rank hung") -> dict[int, str]:
    """The value of each host's result, with two ranks on each."""
    rows = failed_ranks(stages, cause, 2)
    assert all(result.verdict == FAIL and result.remedy for [result] in rows.values())
    return {host: result.value for host, [result] in rows.items()}


def test_the_host_of_the_rank_that_others_wait_for_has_the_result():
    stages = {0: f"all-reduce{WAITS}", 1: DONE, 2: f"products{WAITS}", 3: "products"}
    assert found(stages) == {1: "a rank hung; rank 3 in products"}
    assert found({0: "meeting", 1: "meeting", 2: "pairs"}) == {
        0: "a rank hung; rank 0, 1 in meeting",
        1: "a rank hung; rank 2 in pairs",
    }
    assert found({}) == {-1: "a rank hung; before they began"}
    assert found({0: f"products{WAITS}", 1: f"products{WAITS}"}) == {0: f"a rank hung; rank 0, 1 in products{WAITS}"}


def test_the_error_that_ended_a_rank_is_its_result_and_ranks_that_lost_it_have_none(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, "small steps")
    write(tmp_path, 2, f"products{WAITS}")

    def ended(rank: int, raised: Exception) -> str | None:
        try:
            raise raised
        except type(raised) as error:
            return write_error(tmp_path, rank, error)

    assert ended(0, RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:7001")) is None
    assert ended(2, RuntimeError("ncclUnhandledCudaError")) is None
    line = ended(3, NotImplementedError("FSDP does not support uneven shards:\n torch.Size([16, 256])"))
    assert line.startswith("small steps: NotImplementedError: FSDP does not support uneven shards: torch.Size")
    assert "test_rank_files.py, line" in line and "\n" not in line
    assert found(read_stages(tmp_path)) == {1: f"rank 3 in {line}"}  # rank 1 was ended where it was


def test_an_error_of_all_ranks_is_of_no_host():
    stages = dict.fromkeys(range(2), "small steps: ValueError: wrong (small_steps.py, line 9)")
    [result] = failed_ranks(stages, "rank 0 ended", 2)[0]
    assert "all ranks fail alike" in result.remedy
    [result] = failed_ranks(stages | {1: f"small steps{WAITS}"}, "rank 0 ended", 2)[0]
    assert "look at this host" in result.remedy


def test_messages_of_a_user_error_are_shown_as_they_are(tmp_path):
    write(tmp_path, 0, "meeting")
    assert write_error(tmp_path, 0, UserError("key = 1: wrong; set 2")) == "meeting: key = 1: wrong; set 2"


def test_rows_are_whole_or_as_before(tmp_path, monkeypatch):
    assert read_rows(tmp_path) == {}
    rows = {-1: [], 0: [Result("products", FAIL, "1", "2", "look")]}
    write_rows(tmp_path, rows)
    assert read_rows(tmp_path) == rows
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: pytest.fail("killed here"))
    with pytest.raises(BaseException, match="killed here"):
        write_rows(tmp_path, {0: []})
    assert read_rows(tmp_path) == rows
