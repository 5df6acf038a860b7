#!/usr/bin/env python
"""A picture of the last lines that a command shows on a terminal, as they stand when TEXT is shown for the last time.

export NGPU=1
CONFIG_FILE=train_configs/rl_debug_labels.toml ./run_train.sh
CONFIG_FILE=train_configs/rl_debug.toml python scripts/capture_terminal.py \\
    docs/images/rl_terminal.svg "step 113" ./run_train.sh
"""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

_LINES, _COLUMNS = 24, 120
"""Of the terminal."""


def written(command: list[str]) -> str:
    """All that a command writes on a terminal. Exits with its code if that is not 0."""
    process, terminal = pty.fork()
    if not process:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    found = bytearray()
    try:
        while part := os.read(terminal, 2**16):
            found += part
    except OSError:  # so Linux says that the command has ended
        pass
    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        sys.exit(code)
    return found.decode(errors="replace")


def screen(text: str) -> list[str]:
    """The lines that stand after a text. Of the movements it knows those of rich's bar: up, and the line deleted."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh])", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part not in ("\r", "\x1b[?25l", "\x1b[?25h"):
            lines[row] += part
    return lines


def main(output: Path, text: str, command: list[str]) -> None:
    before, _, behind = written(command).rpartition(text)
    lines = screen(before + text + re.split("[\r\n]", behind)[0])
    console = Console(record=True, file=io.StringIO(), width=_COLUMNS)
    console.print(Text.from_ansi("\n".join(lines[-_LINES:])))
    picture = console.export_svg(title=" ".join(command), unique_id="terminal")
    # Without fonts from elsewhere.
    output.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
