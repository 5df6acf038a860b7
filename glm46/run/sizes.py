"""Sizes that the program uses and the estimate counts with."""

OFFLOAD_SLOTS = 3
"""Offloaded items of optimizer states that are on the device at once, and with a file in host memory."""


def loss_chunk_tokens(*, is_trained: bool, device: str = "gpu") -> int:
    """Tokens whose logits exist at once in the output head. On a GPU each chunk of a head that trains reads and writes
    the FP32 gradient of its weight once, which takes a third of the time of the products of 1,024 tokens. ``device``:
    "cpu", or any name of another one."""
    return 4096 if is_trained and device != "cpu" else 1024


PROBE_BYTES = {"cpu": 2**20, "gpu": 2**26}
"""What `comm.bandwidth_interval` sends; kept for the whole run."""
