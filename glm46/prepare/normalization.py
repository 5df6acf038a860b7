"""Text in one spelling: ends of lines, and characters that Unicode can write in several ways."""

import re
import unicodedata

# Windows and old Mac files. Other separators (form feeds, U+2028) carry meaning in some text and stay.
_LINE_END = re.compile(r"\r\n?")


def normalized(text: str, form: str) -> str:
    """The text as a recipe wants it.

    Args:
        form: "none" returns it as it is; "newlines" ends every line with one line feed; "nfc" does that and composes
            characters (Unicode Standard Annex 15, form C), which changes no meaning and no width.
    """
    if form == "none":
        return text
    text = _LINE_END.sub("\n", text) if "\r" in text else text
    return unicodedata.normalize("NFC", text) if form == "nfc" else text
