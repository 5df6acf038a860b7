"""The lengths of prepared documents as one number of a plan, compared with what each token attends to."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from glm46.cli import main
from glm46.config.presets import resolve_shape
from glm46.operate.estimate.document_lengths import prepared_document_tokens
from glm46.run.flops import attention_flops, pair_flops
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.packing import open_tokens
from tests.small_run import write_source

SEQ_LEN = 256


def keys_of_tokens(ends: np.ndarray, seq_len: int, *, packed: bool) -> float:
    """Mean number of keys over all tokens: back to the start of the document, or to the last cut.

    Documents that are not packed are cut at the starts of rows, tried at each offset of the first row.
    """
    begin = np.concatenate([[0], ends[:-1]])
    way = np.arange(ends[-1]) - np.repeat(begin, np.diff(ends, prepend=0))
    if packed:
        return float((way % seq_len + 0.5).mean())
    places = np.arange(len(way))
    cut = [np.minimum(way, (places + offset) % seq_len) + 0.5 for offset in range(0, seq_len, 16)]
    return float(np.mean(cut))


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("factor", [1, 8, 40])
def test_a_plan_attends_to_as_many_keys_as_the_prepared_documents(packing, factor, make_config, tokenizer, tmp_path):
    folder = write_source(tmp_path, tokenizer, factor=factor)
    source = {"name": "test", "path": str(folder), "packing": packing}
    config = make_config(data={"sources": [source]}, training={"seq_len": SEQ_LEN})
    document, shape = prepared_document_tokens(config), resolve_shape(config.model)
    planned = attention_flops(shape, SEQ_LEN, document) / pair_flops(shape)
    ends = open_tokens(load_manifest(folder), "train").doc_ends()
    # Lengths are rounded to whole tokens, and rows begin at 16 of 256 offsets here.
    assert planned == pytest.approx(keys_of_tokens(ends, SEQ_LEN, packed=packing == "best_fit"), rel=0.03)


def test_the_command_reads_prepared_sources(make_config, tmp_path, capsys):
    config = make_config(training={"seq_len": SEQ_LEN})
    file = tmp_path / "plan.json"
    table = config.model_dump(mode="json", exclude_unset=True)
    toml = tmp_path / "run.toml"
    toml.write_text(tomli_w.dumps(table))
    command = ["plan", "--config", str(toml), "--gpu", "H100"]
    flops = {}
    for option in ([], ["--document-tokens", "prepared"], ["--document-tokens", str(prepared_document_tokens(config))]):
        assert main([*command, *option, "--json", str(file)]) == 0
        flops[" ".join(option)] = json.loads(file.read_text())["flops"]
    whole, prepared, stated = flops.values()
    assert prepared == stated < whole
    capsys.readouterr()
    missing = Path(config.data.sources[0].path)
    assert main([*command, "--document-tokens", "prepared", "--data.sources[0].path=nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err and missing.is_dir()
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--document-tokens", "many"])
