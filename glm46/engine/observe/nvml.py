"""NVIDIA's management library, if it is installed."""

from types import ModuleType

try:
    import pynvml  # nvidia-ml-py is optional: the extra [gpu]
except ImportError:
    pynvml = None


def load_nvml() -> ModuleType | None:
    """Return the module ``pynvml``, ready for queries; None without it, or if the driver refuses, as in some
    containers."""
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # no driver: a machine without a GPU
    library: ModuleType = pynvml
    return library
