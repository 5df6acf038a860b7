"""Untrusted text, made safe for a terminal."""

_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """Replace control characters by U+FFFD, except line ends and tabs; the length stays the same. Text from models,
    data, programs and files may contain escape sequences, which a terminal would execute."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _REPLACEMENT for char in text)
