"""What a launcher remembers of checkpoints, and its wait for storage that has gone."""

import shutil

import pytest

from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.reliability.verdict import write_verdict
from glm46.operate.launch.restarts import SavedSteps, StorageLost, hung_hosts, known_step


@pytest.fixture
def saved(make_config, monkeypatch):
    """Of a run that has saved the steps 7 and 9."""
    monkeypatch.setattr("glm46.operate.launch.restarts._WAIT_SECONDS", 0.01)
    config = make_config()
    for step in (7, 9):
        (config.checkpoint_folder / f"step-{step:06d}").mkdir(parents=True)
    return SavedSteps(config)


def test_a_new_run_and_a_run_that_resumes_wait_for_nothing(saved, make_config):
    said: list[str] = []
    saved.wait_for_storage(0, said.append)  # its text may still have to be prepared
    SavedSteps(make_config(job={"dump_folder": "nothing"})).wait_for_storage(0, said.append)
    assert said == []


def test_a_start_waits_until_a_lost_folder_is_back(saved, make_config):
    """An unmounted folder is empty: training from it would begin at step 0."""
    folder, away = make_config().checkpoint_folder, make_config().checkpoint_folder.with_name("away")
    assert saved.newest() == 9
    folder.rename(away)
    folder.mkdir()
    assert saved.newest() == 9

    said: list[str] = []

    def mount(line: str) -> None:
        said.append(line)
        folder.rmdir()
        away.rename(folder)

    saved.wait_for_storage(300, mount)
    assert not away.exists() and len(said) == 1
    assert str(folder) in said[0] and "step 9" in said[0]
    # A rollback has removed a step: the newest that is there counts.
    shutil.rmtree(folder / "step-000009")
    assert saved.newest() == 7


@pytest.mark.parametrize("lost", ["checkpoints", "text"])
def test_a_start_ends_with_the_code_for_job_systems_if_storage_stays_away(saved, make_config, tmp_path, lost):
    config = make_config()
    if lost == "text":
        absent = str(tmp_path / "absent")
        config = make_config(data={"sources": [{"name": "test", "path": absent}]})
    else:
        absent = str(config.checkpoint_folder)
        shutil.rmtree(absent)
    with pytest.raises(StorageLost) as refused:
        SavedSteps(config, earlier_step=9).wait_for_storage(0.05, lambda _: None)
    assert refused.value.exit_code == EXIT_STOPPED
    assert absent in refused.value.faults[0] and "mount it" in refused.value.faults[0]


def test_the_next_start_of_a_job_knows_the_newest_checkpoint(saved, make_config, tmp_path, monkeypatch):
    assert known_step() == 0
    monkeypatch.setenv("GLM46_STATE", str(tmp_path / "state"))
    assert known_step() == 0  # the first start
    saved.newest()
    shutil.rmtree(make_config().checkpoint_folder)
    write_verdict(tmp_path, [3, 4, 5], {3: "n4.site", 4: "n4.site"}, 12)
    (tmp_path / "hang").mkdir()
    (tmp_path / "verdict.json").rename(tmp_path / "hang" / "verdict.json")
    saved.write_job_state(hung_hosts(tmp_path))
    assert known_step() == 9
    assert (tmp_path / "state").read_text() == "newest_step=9\nlost_hosts=n4\n"
    assert hung_hosts(tmp_path / "nowhere") == []
    (tmp_path / "state").write_text("newest_step=12\nlost_hosts='a b'\n")  # of a hostfile
    assert known_step() == 12
