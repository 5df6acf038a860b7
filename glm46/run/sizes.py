"""Sizes that both the program and the estimate use."""

OFFLOAD_SLOTS = 3
"""Offloaded items of optimizer states on the device at a time; with a state file, also in host memory."""


def loss_chunk_tokens(*, is_trained: bool, device: str = "gpu") -> int:
    """Return the tokens per chunk of logits in the output head. On a GPU each chunk of a trained head reads and writes
    the FP32 gradient of its weight once, which takes a third of the time of the products of 1,024 tokens. ``device``:
    "cpu", or any other device type."""
    return 4096 if is_trained and device != "cpu" else 1024


PROBE_BYTES = {"cpu": 2**20, "gpu": 2**26}
"""Bytes that `comm.bandwidth_interval` sends; allocated for the whole run."""
