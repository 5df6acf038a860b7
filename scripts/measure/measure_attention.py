"""Memory and time of attention of GLM-4.6, forward and backward, on a CPU; prints one JSON object per case.

    python scripts/measure/measure_attention.py --lengths 8192 16384 --document 2048 --ranks 1 2

A layer of GLM-4.6 with one of its 8 key heads and the 12 query heads of it, in FP32, on one thread. Peaks are those of
the resident memory beyond that before the layer. Under context parallelism the process computes the first rank's part,
with copies of its own keys in place of those of the other ranks.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"  # a variable of glibc
if __name__ == "__main__" and _THRESHOLD not in os.environ:
    # Freed blocks shall return to the system at once, so that resident memory is that of living tensors. Before the
    # imports, which take seconds.
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {_THRESHOLD: "65536"})

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.compute.distributed.sequence import SequenceShard  # noqa: E402
from glm46.compute.model.attention import Attention, attend  # noqa: E402
from glm46.compute.model.attention_layout import attention_layout  # noqa: E402
from glm46.compute.model.rope import rotary_tables  # noqa: E402
from glm46.config.presets import PRESETS  # noqa: E402

_HIDDEN = 256


def measure(length: int, document: int, ranks: int, window: int | None) -> dict:
    """One case in this process: peak in bytes, and seconds.

    Args:
        length: tokens of the row.
        document: tokens of each document; the last one may have fewer.
        ranks: context-parallel degree.
        window: most keys that a query sees; None for all of its document.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = PRESETS["GLM-4.6"]
    heads = shape.num_attention_heads // shape.num_key_value_heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "hidden_size": _HIDDEN}
    shape = shape.model_copy(update=sizes)
    layer = Attention(shape)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.arange(length).div(document, rounding_mode="floor").unsqueeze(0)
    places = None if ranks == 1 else SequenceShard(None, ranks, 0).places(ids, (1, length), window)
    layout = attention_layout(ids, (1, length), window, places)
    tokens = torch.arange(length).unsqueeze(0) if places is None else places[:, 0]
    rope = rotary_tables(tokens % document, shape, torch.float32)
    if layout is not None and layout.exchange is not None:
        keys = layout.exchange.keys

        def gathering(q, k, v, layout):
            count = length if window is None else sum(layout.exchange.receive)
            gathered = (x.flatten(0, 1).repeat(ranks, 1, 1)[:count][keys].unsqueeze(0) for x in (k, v))
            return attend(q, *gathered, layout)

        layer.core = gathering
    x = torch.randn(1, length // ranks, _HIDDEN, requires_grad=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began = _memory("VmRSS"), time.perf_counter()
    layer(x, rope, layout).square().mean().backward()
    seconds, peak = time.perf_counter() - began, _memory("VmHWM") - before
    return {
        "length": length, "document": document, "ranks": ranks, "window": window, "peak": peak, "seconds": seconds,
    }  # fmt: skip


def _memory(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--window", type=int)
    arguments = parser.parse_args()
    measure(256, 256, 1, None)  # starts torch's threads and kernels
    for ranks in arguments.ranks:
        for length in arguments.lengths:
            print(json.dumps(measure(length, arguments.document, ranks, arguments.window)), flush=True)


if __name__ == "__main__":
    main()
