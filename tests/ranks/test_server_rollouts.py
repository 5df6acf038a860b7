"""All ranks get what servers generate, however long it takes, and the same errors."""

import hashlib

from tests.ranks.server_rollouts import DEADLINE, REQUESTS, TIMEOUT
from tests.unit.tasks.rl.rollout.stub_server import generate, logprob


def test_ranks_get_completions_and_errors_of_the_first_rank(server):
    assert DEADLINE > TIMEOUT  # a rank waits longer than its process group would
    first, second = server.rows("server_rollouts.main")
    assert "one changed tensor of each kind" in first["unchanged"] and second["unchanged"] == ""
    assert not any("version -1" in line for line in first["lines"]) and "generates with version 0" in first["lines"][0]
    assert first["temperatures"] == [0.67, 0.7, 0.73, 1.0]  # 1 of the probe
    assert "KL divergence" in first["mismatch"] and "rollout.urls" in first["mismatch"] and second["mismatch"] == ""
    assert "entropy" in first["sampler"] and "rollout.urls" in first["sampler"] and second["sampler"] == ""
    for name, version in (("version 1", 1), ("version 2", 2), ("broadcast", 2)):
        assert first[name] == second[name]
        for request, completion in zip(REQUESTS, first[name], strict=True):
            tokens, logprobs, _, versions, *_ = completion
            assert tokens == generate(*request) and set(versions) == {version}
            assert logprobs == [logprob(version, token) for token in tokens]
    assert first["folders"] == ["version-00000002"] and first["left"] == 0
    files = {"model.safetensors": {"bytes": 9, "sha256": hashlib.sha256(b"weights 2").hexdigest()}}
    assert first["manifest"] == {"version": 2, "files": files}
    assert first["slow"] == second["slow"] and first["slow"][0][2] == "abort"
    assert "rollout.urls" in first["error"] and second["error"] == ""
    # Started again with other options, it generates nothing more.
    assert "KL divergence" in first["came back"] and second["came back"] == ""
    assert any("is excluded" in line and "KL divergence" in line for line in first["lines"])
    assert second["lines"] == [] and any("is excluded" in line for line in first["lines"])
    # The server was started again between update and rollout: all ranks sent the weights in the middle of the rollout.
    assert first["stopped"] is None and second["stopped"] is None and not first["generates on"]
    assert "generates with version 2" in first["lines"][-2] and "a KL divergence of 0" in first["lines"][-1]
    assert first["received"] == [[f"tensor {number}", [[2 * (30.0 + number)] * 3] * 2] for number in range(3)]
