"""Innermost frames of a thread, for the hang report."""

import dis
from types import FrameType

_FRAMES_SHOWN = 3
_WAITS_FOR_DEVICE = " waits for the device"
_DEVICE_WAITS = {"cpu", "item", "tolist", "synchronize"}
"""Methods without arguments that block in C, without a frame of torch, until the GPU has computed their result."""


def innermost_frames(frame: FrameType | None) -> list[str]:
    """Return the innermost frames of a thread as ``file:line function``, innermost first; the first one has a mark if
    it waits for the device."""
    frames: list[str] = []
    while frame is not None and len(frames) < _FRAMES_SHOWN:
        code = frame.f_code
        mark = _WAITS_FOR_DEVICE if not frames and _calls(frame) in _DEVICE_WAITS else ""
        frames.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}{mark}")
        frame = frame.f_back
    return frames


def _calls(frame: FrameType) -> str | None:
    """Return the method without arguments that a frame is calling. Read from the bytecode, because the source file may
    be on a disk that hangs."""
    executed = [
        instruction for instruction in dis.get_instructions(frame.f_code) if instruction.offset <= frame.f_lasti
    ]
    while executed and executed[-1].opname in ("CALL", "PRECALL", "CALL_METHOD", "CALL_FUNCTION"):
        executed.pop()
    return executed[-1].argval if executed and executed[-1].opname in ("LOAD_METHOD", "LOAD_ATTR") else None


def is_waiting(frame: str) -> bool:
    """True if a frame of `innermost_frames` waits for the device or for other ranks."""
    return frame.endswith(_WAITS_FOR_DEVICE) or any(place in frame for place in ("torch/", "distributed/agreement.py"))
