"""NVIDIA's management library, if it is installed."""

from types import ModuleType


def load_nvml() -> ModuleType | None:
    """Return the module ``pynvml``, ready for queries; None without it, or if the driver refuses, as in some
    containers."""
    try:
        import pynvml  # nvidia-ml-py is optional: the extra [gpu]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # no driver: a machine without a GPU
    return pynvml
