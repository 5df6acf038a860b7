"""``inspect --chat``: the first conversations of a run or a folder token by token, before a model is built."""

import json
import re
import subprocess
import sys
from html import unescape

import pytest

from glm46.cli import main
from glm46.config.text_recipe import TextRecipe
from glm46.storage.prepare.pipeline import prepare_text
from tests.small_run import call_here

ROWS = {
    "chat": [{"messages": [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Hellö!"}]}] * 2
    + [{"instruction": "Say a.", "input": "", "output": "a"}],
    "preference": [{"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"}],
    "unpaired_preference": [{"prompt": "Hi", "completion": "What?", "label": False}],
}
SHOWN = {
    "chat": ["document", "Hi é/nothink", "[[\nHellö!<|user|>]]"],
    "preference": ["chosen: ", "[[\nHello!<|user|>]]", "rejected: ", "[[\nWhat?<|user|>]]"],
    "unpaired_preference": ["undesirable answer", "[[\nWhat?<|user|>]]"],
}
CONFIG = """
[model]
flavor = "debug"
num_nextn_predict_layers = 0
[data]
document_mask = true
[[data.sources]]
name = "mine"
path = "FOLDER/shards"
packing = "best_fit"
[data.sources.recipe]
input = ["FOLDER/rows.jsonl"]
format = "FORMAT"
max_tokens = 64
held_out = 0.0
[training]
steps = 2
seq_len = 128
[validation]
enable = false
[checkpoint]
initial_load_path = "base"
"""
PREFERENCE = '[finetune.preference]\nloss_type = "kto"\n'


@pytest.fixture
def config(tmp_path):
    """A function that writes rows and the config of a run on them."""

    def written(format, rows=None):
        lines = (json.dumps(row) + "\n" for row in (ROWS[format] if rows is None else rows))
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        text = CONFIG.replace("FOLDER", str(tmp_path)).replace("FORMAT", format)
        (tmp_path / "run.toml").write_text(text + ("[finetune]" if format == "chat" else PREFERENCE))
        return tmp_path / "run.toml"

    return written


def plain(text: str) -> str:
    """The text of tokens without the dots between them."""
    return text.replace("·", "")


@pytest.mark.parametrize("format", ROWS)
def test_the_first_conversations_of_a_run_are_shown_before_it_is_prepared(
    config, capsys, format, tmp_path, monkeypatch
):
    file = config(format)
    assert main(["inspect", "--chat", str(file)]) == 0
    of_files = capsys.readouterr().out
    assert not (tmp_path / "shards").exists()
    assert "·<sop>·<|user|>·\n" in of_files and "mine, " in of_files and "rows.jsonl line 1" in of_files
    for part in [*SHOWN[format], ", chat format of GLM-4.5\n"]:
        assert part in plain(of_files)
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    recipe = {"input": (str(tmp_path / "rows.jsonl"),), "output": str(tmp_path / "shards"), "name": "mine"}
    recipe |= {"format": format, "max_tokens": 64, "held_out": 0.0, "processes": 1}
    prepare_text(TextRecipe(**recipe), report=lambda line: None)
    # The same of the folder, and of the run that reads it.
    for place in (tmp_path / "shards", file):
        assert main(["inspect", "--chat", str(place)]) == 0
        of_folder = capsys.readouterr().out
        assert "·<sop>·<|user|>·\n" in of_folder and "0 of " in of_folder and ", chat format of GLM-4.5\n" in of_folder
        for part in SHOWN[format]:
            assert part in plain(of_folder)


def test_a_page_has_each_token_with_its_id_and_the_targets_marked(config, capsys, tmp_path):
    page = tmp_path / "chats.html"
    assert main(["inspect", "--chat", str(config("chat")), "--html", str(page), "--rows", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r'<span( class="target")? title="([\d ]+)">(.*?)</span>', text, re.DOTALL)
    assert "".join(unescape(found[2]) for found in spans if found[0]).startswith("\nHellö!<|user|>\nHellö!<|user|>\na<")
    assert text.count("<h2>") == 3 and "<|user|>" not in text and "�" not in text
    before = page.read_text()
    assert main(["inspect", "--chat", str(tmp_path / "none.toml"), "--html", str(page)]) == 2
    assert page.read_text() == before


def test_what_is_skipped_is_said(config, capsys):
    rows = [{"text": "a", "id": 3}, *ROWS["chat"]]
    assert main(["inspect", "--chat", str(config("chat", rows)), "--rows", "1"]) == 0
    said = "skipped, columns of no chat format: 1, such as "
    assert re.search(said + r".*rows.jsonl line 1 \(columns text, id\)", capsys.readouterr().out)


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "give a folder, or --chat"), (["x", "--chat", "y"], "give a folder, or --chat"),
    (["x", "--html", "page.html"], "--html: has no effect without --chat"),
    (["--chat", "CONFIG", "--html", "none/page.html"], "--html none/page.html: cannot be written (No such file or "),
    (["--chat", "CONFIG", "--html", "docs"], "--html docs: cannot be written (Is a directory)"),
    (["--chat", "train_configs/debug_chats.jsonl"], "neither a folder of shards nor the TOML file of a run; name "),
    (["--chat", "EMPTY"], "no conversation in its data.sources (skipped, columns of no chat format: 1"),
    (["--chat", "train_configs/debug.toml"], "no conversation in its data.sources; give a run with a source of chats"),
    (["--chat", "none.toml"], "none.toml"),
])  # fmt: skip
def test_bad_use_is_refused(config, capsys, arguments, said):
    files = {"CONFIG": lambda: str(config("chat")), "EMPTY": lambda: str(config("chat", [{"text": "a"}]))}
    given = [files[one]() if one in files else one for one in arguments]
    try:
        code = main(["inspect", *given])
    except SystemExit as error:
        code = error.code
    assert code == 2 and said in capsys.readouterr().err


def test_no_torch_is_loaded(config):
    """A run is looked at on a machine without a GPU, and in no time."""
    code = "import sys; from glm46.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "inspect", "--chat", str(config("chat"))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
