"""Files that hold JSON which is read in no other way than as a mistake: each is refused with what makes it readable."""

from contextlib import suppress
from io import BytesIO
from itertools import islice
from json import detect_encoding, dumps
from pathlib import Path

from glm46.config.errors import UserError
from glm46.storage.prepare.archives import is_compressed
from glm46.storage.prepare.json_rows import JsonText
from glm46.storage.prepare.rows import Fields


def refuse_other_encoding(file: Path, head: bytes) -> None:
    """Raise UserError if a file is JSON in UTF-16 or UTF-32, with or without a byte order mark."""
    encoding = detect_encoding(head)
    text = head.decode(encoding, "ignore").lstrip("\ufeff\x1e \t\r\n")
    if not encoding.startswith("utf-8") and text[:1] in ("{", "["):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
        unpacked = ", unpacked," if is_compressed(file) else ""
        raise UserError(
            f"{file}: holds {name}, not JSON in UTF-8; write it{unpacked} as UTF-8 "
            f"(iconv -f {name} -t UTF-8 '{file}' > FILE.jsonl)"
        )


def refuse_object_of_rows(file: Path, value: dict, text_key: str) -> None:
    """Raise UserError if the only value of a file is an object that holds rows under a key of its own."""
    for key, rows in value.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            raise UserError(
                f"{file}: one object without '{text_key}', with {len(rows):,} rows under '{key}'; write the rows one "
                f"per line: jq -c '.[{dumps(key)}][]' '{file}' > FILE.jsonl"
            )


def refuse_rows(file: Path, data: bytes, fields: Fields) -> None:
    """Raise UserError if a text is rows, which another ending would have told: it begins with one that has the text,
    with two objects, or with an array of objects."""
    text, found = JsonText(BytesIO(data)), []
    is_array = text.peek() == "["
    with suppress(ValueError):
        for row in islice(text.rows(), 2):
            found.append(row)
    if not found or not all(isinstance(row, dict) for row in found):
        return
    ending = "".join([".json", file.suffix if is_compressed(file) else ""])
    if isinstance(found[0].get(fields.text), str):
        raise UserError(f"{file}: holds rows of JSON with '{fields.text}', not a text; give it the ending {ending}")
    if fields.json_is_text:
        return
    if is_array or len(found) == 2:
        keys = ", ".join(list(found[0])[:8])
        raise UserError(
            f"{file}: holds rows of JSON without '{fields.text}', not a text; their keys are {keys}: set text_key and "
            f"give it the ending {ending}, or leave it out of the input"
        )
    if any(
        isinstance(rows, list) and rows and isinstance(rows[0], dict) and fields.text in rows[0]
        for rows in found[0].values()
    ):
        refuse_object_of_rows(file, found[0], fields.text)
