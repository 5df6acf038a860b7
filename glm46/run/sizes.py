"""Sizes that the program uses and the estimate counts with."""

OFFLOAD_SLOTS = 3
"""Offloaded items of optimizer states that are on the device at once, and with a file in host memory."""

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once in the output head."""
TRAINED_LOSS_CHUNK_TOKENS = 4096
"""The same on a GPU for a head that trains: each chunk reads and writes the FP32 gradient of its weight once, which
takes a third of the time of the products of 1,024 tokens."""

PROBE_BYTES = {"cpu": 2**20, "gpu": 2**26}
"""What `comm.bandwidth_interval` sends; kept for the whole run."""
