"""Sizes that the program uses and the estimate counts with."""

OFFLOAD_SLOTS = 3
"""Offloaded items of optimizer states that are on the device at once, and with a file in host memory."""

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once in the output head."""

PROBE_BYTES = {"cpu": 2**20, "gpu": 2**26}
"""What `comm.bandwidth_interval` sends; kept for the whole run."""
