"""Wheels of other projects, whose source is compared with what we call; nothing of them is installed."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

DOWNLOAD_SECONDS = 60
"""39 MB took 1 s from an index beside the machine."""


def download(requirement: str, sha256: str, folder: Path) -> Path:
    """Get a wheel by pip, whose cache keeps it, whatever Python asks; the test is skipped if pip cannot."""
    of = ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11"]
    of += ["--platform", "manylinux_2_34_x86_64", "--dest", str(folder), requirement]
    quick = ["--quiet", "--disable-pip-version-check", "--retries", "0", "--timeout", "10"]
    words = [sys.executable, "-m", "pip", "download", "--no-deps", *quick, *of]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip has not got {requirement} after {DOWNLOAD_SECONDS} s")
    if found.returncode:
        pytest.skip(f"pip cannot get {requirement}: {found.stderr.strip()[-300:]}")
    (path,) = folder.iterdir()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256, f"{requirement} is another file"
    return path
