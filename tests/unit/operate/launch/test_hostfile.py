"""Hostfiles as DeepSpeed and Open MPI write them; a line of another form is refused with its number."""

from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.operate.launch.hostfile import Host, read_hostfile, refuse_hosts


def test_lines_of_every_form_are_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(
        b"# the first rack\r\n\r\nnode001 slots=8\r\nroot@node002   slots=8  # spare\n\n  gpu_3.site-a.org\n"
        b"10.0.0.7 slots=16\n[2001:DB8::1] slots=2\nme@2001:db8:0::2\n"
    )
    hosts = read_hostfile(file)
    assert hosts == [
        Host(3, "node001", slots=8),
        Host(4, "node002", "root", 8),
        Host(6, "gpu_3.site-a.org"),
        Host(7, "10.0.0.7", slots=16),
        Host(8, "2001:db8::1", slots=2),
        Host(9, "2001:db8::2", "me"),
    ]
    assert [host.login for host in hosts[1::4]] == ["root@node002", "me@2001:db8::2"]


@pytest.mark.parametrize(("line", "words"), [
    ("-oProxyCommand=evil", "'-oProxyCommand=evil' is not a host name"), ("-l@node", "'-l' is not a user name"),
    ("node$(id)", "is not a host name"), ("node:8", "'node:8' is not a host name"), ("1:2:3", "in '1:2:3'"),
    ("@", "'' is not a host name"), ("node slots=0", "'slots=0': expected slots=N, with N of at least 1"),
    ("node slots=", "'slots=': expected"), ("node slots=-1", "expected"), ("node slots = 8", "'slots': expected"),
    ("node max_slots=8", "'max_slots=8': expected"), ("node 8", "'8': expected"),
])  # fmt: skip
def test_other_lines_are_refused_with_number_and_form(line, words, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"good slots=8\n{line}\nbad!\n")
    with pytest.raises(UserError) as caught:
        read_hostfile(file)
    second, third = caught.value.faults
    assert f"{file}, line 2: " in second and words in second and second.endswith("write NAME slots=N, or NAME alone")
    assert "line 3: 'bad!'" in third


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("\n# none\n", "names no host; write one")])
def test_a_hostfile_without_hosts_is_refused(content, words, tmp_path):
    file = tmp_path / "hosts"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=words):
        read_hostfile(file)


@pytest.mark.parametrize(("content", "faults"), [
    (b"\x7fELF\x02\x01\x01\0\0\n\0\n" * 50, 1),
    (b"\xff\xfe\n" * 50, 1),
    (b"no!\n" * 50, 4),
    (b"x!" * 5000, 1),
])  # fmt: skip
def test_a_file_of_another_kind_has_few_and_short_faults(content, faults, tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_hostfile(file)
    assert len(caught.value.faults) == faults and all(len(fault) < 300 for fault in caught.value.faults)
    assert "state a file of hosts" in caught.value.faults[-1] or faults == 1


TWO = [Host(1, "a", slots=8), Host(2, "b", slots=8)]


@pytest.mark.parametrize(("named", "processes", "variables", "words"), [
    ([*TWO, Host(9, "A", "root", 8)], None, {}, "a stands on lines 1, 9; write each host once"),
    ([*TWO, Host(3, "c")], None, {}, "have the values none, 8; all nodes run the same number"),
    ([*TWO, Host(3, "c", slots=4)], None, {}, "have the values 4, 8"), (TWO, 4, {}, "have the values 4, 8"),
    ([Host(1, "localhost"), Host(2, "b")], None, {}, "the first host, localhost, is another machine for each node"),
    (TWO, None, {"MASTER_ADDR": "127.0.0.1"}, "the first host, 127.0.0.1, is another machine"),
    (TWO, None, {"NNODES": "2"}, "is run once; unset NNODES"),
    (TWO, None, {"SLURM_NODEID": "1"}, "start it outside srun"),
])  # fmt: skip
def test_hostfiles_that_cannot_be_are_refused(named, processes, variables, words):
    with pytest.raises(UserError) as caught:
        refuse_hosts(named, processes, variables, Path("hosts"))
    (fault,) = caught.value.faults
    assert fault.startswith("--hostfile hosts: ") and words in fault


def test_hostfiles_that_can_be_are_accepted():
    refuse_hosts(TWO, None, {"SLURM_NODEID": "0"}, Path("hosts"))
    refuse_hosts(TWO, 8, {}, Path("hosts"))
    refuse_hosts([Host(1, "a"), Host(2, "b")], 4, {}, Path("hosts"))
    refuse_hosts([Host(1, "localhost"), Host(2, "127.0.0.2")], None, {}, Path("hosts"))
    assert refuse_hosts([Host(1, "localhost"), Host(2, "b")], None, {"MASTER_ADDR": "a"}, Path("hosts")) is None
