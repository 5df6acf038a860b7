"""Warnings of loading, which come before log.txt is open, are in it, and on standard error once."""

import logging

from glm46.engine.observe.kept_warnings import KeptWarnings


def test_warnings_are_printed_once_and_written_when_there_is_a_log(capsys):
    kept, log, written = KeptWarnings(), logging.getLogger("glm46.storage.huggingface.import_weights"), []
    with kept.listening():
        log.warning("a plain %s folder", "DCP")
        log.info("not this")
        with kept.written(written.append):
            log.warning("while training")
            assert written == ["a plain DCP folder", "while training"]
        log.warning("between two logs")
        with kept.written(written.append):
            assert written[2:] == ["between two logs"]
    log.warning("after the run")
    assert written[3:] == [] and capsys.readouterr().err.splitlines()[:3] == [
        "a plain DCP folder", "while training", "between two logs"
    ]  # fmt: skip
