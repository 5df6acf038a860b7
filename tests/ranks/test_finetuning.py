"""Fine-tuning computes the same on every kind of layout, and adapters continue from a checkpoint on any mesh.

One rank trains the base. Full fine-tuning on chats with masked targets runs on every kind of layout. Adapters are
trained on one mesh and saved; they continue on the same mesh and on another, over the base that each start reads again.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from glm46.config.text_recipe import TextRecipe
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import metric_rows, small_config
from tests.harness import Ranks, call, in_halves
from tests.ranks.forked_launch import train_and_exit
from tests.step_tensors import step_tensors

LAYOUTS = {
    "one rank": (1, {}), "tensor": (2, {"tensor_parallel_degree": 2}), "context": (2, {"context_parallel_degree": 2}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}), "experts": (2, {"expert_parallel_degree": 2}),
}  # fmt: skip
RESUMED = {"lora": ("experts", "pipeline"), "dora": ("tensor", "experts")}
"""The mesh that saves, and another one."""
STEPS, SAVED = 4, 2
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word}, gladly."}]}
    for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "blue")
]


def prepare_chats(folder: Path) -> Path:
    """A prepared source of short chats, some of them held out."""
    file = folder.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    recipe = {"input": (str(file),), "output": str(folder), "format": "messages", "max_tokens": 64, "held_out": 0.2}
    prepare_text(TextRecipe(**recipe, name="chats", deduplicate="exact", processes=1), report=lambda line: None)
    return folder


def run_all(text: Path, base: Path) -> list[dict]:
    """A row for each run."""
    chats = {"name": "chats", "path": str(prepare_chats(base / "chats")), "packing": "best_fit"}

    def run(label: str, layout: str, **tables) -> dict:
        ranks, degrees = LAYOUTS[layout]
        config = small_config(
            text, base / label, **{
                "parallelism": degrees, "validation": {"enable": True, "freq": 1},
                "training": {"steps": STEPS, "global_batch_size": 8, "local_batch_size": 2, "seq_len": 64},
                "checkpoint": {"interval": SAVED, "async_mode": "disabled"},
                "model": {"num_key_value_heads": 2, "num_nextn_predict_layers": 0},
                "moe": {"balance": "none", "sequence_aux_loss_weight": 0.0},
            } | tables,
        )  # fmt: skip
        started = Ranks(ranks, train_and_exit, config)
        started.results()
        names = ("step", "loss", "grad_norm", "validation_loss")
        rows = [{name: row[name] for name in names if name in row} for row in metric_rows(base / label)]
        answers = [line for line in started.text(0).splitlines() if line.startswith(("Greedy", "assistant:"))]
        return {"name": label, "rows": rows, "answers": answers}

    run("base", "one rank", moe={"bias_update_rate": 0.05})
    step = base / "base" / "checkpoint" / f"step-{STEPS:06d}"
    start = {"initial_load_path": str(step), "interval": SAVED, "async_mode": "disabled"}
    samples = {"samples": ["Say three.", "Say one."], "max_new_tokens": 4}
    tuned = {"finetune": samples, "data": {"sources": [chats]}}
    full = tuned | {"checkpoint": start | {"initial_load_model_only": True}}

    def resume(kind: str) -> list[dict]:
        saving, other = RESUMED[kind]
        adapter = {"name": kind, "rank": 8, "expert_rank": 4}
        tables = tuned | {"checkpoint": start, "adapter": adapter}
        whole, rows = run(kind, saving, **tables), []
        saved = base / kind / "checkpoint"
        for label, layout in ((f"{kind} resumed", saving), (f"{kind} moved", other)):
            shutil.copytree(base / kind, base / label)
            shutil.rmtree(base / label / "checkpoint" / f"step-{STEPS:06d}")
            row = run(label, layout, **tables)
            ours, theirs = (
                step_tensors(folder / f"step-{STEPS:06d}") for folder in (saved, base / label / "checkpoint")
            )
            assert ours.keys() == theirs.keys()
            differences = {
                name: ((ours[name] - theirs[name]).norm() / ours[name].norm()).item()
                for name in ours
                if not torch.equal(ours[name], theirs[name])
            }
            rows.append(row | {"differences": differences, "whole": whole})
        return rows

    def rows_of(name: str) -> list[dict]:
        return resume(name) if name in RESUMED else [run(name, name, **full)]

    return sum(in_halves([*RESUMED, *LAYOUTS], rows_of), [])


BOUND = 1e-4  # FP32 sums in another order, over four steps of AdamW


def same(row: dict, expected: dict) -> bool:
    return row == pytest.approx(expected, rel=BOUND, abs=BOUND)


def test_chats_train_the_same_on_any_layout_and_adapters_resume_over_their_base(source_folder, tmp_path):
    rows = {row["name"]: row for row in call(run_all, source_folder, tmp_path)}
    one = rows["one rank"]
    assert one["answers"][0].startswith("Greedy answers after step 0") and len(one["answers"]) == 6
    assert one["rows"][-1]["validation_loss"] < one["rows"][0]["validation_loss"]
    for layout in ("tensor", "context", "pipeline", "experts"):
        assert rows[layout]["answers"] == one["answers"], layout
        assert all(map(same, rows[layout]["rows"], one["rows"])) and len(rows[layout]["rows"]) == len(one["rows"])
    for kind in ("lora", "dora"):
        again, moved = rows[f"{kind} resumed"], rows[f"{kind} moved"]
        whole = again["whole"]
        # Step 0 is the base, as it was before full fine-tuning.
        assert whole["rows"][0]["validation_loss"] == pytest.approx(one["rows"][0]["validation_loss"], rel=1e-6)
        assert whole["rows"][-1]["validation_loss"] < whole["rows"][0]["validation_loss"]
        assert again["rows"] == whole["rows"] and again["differences"] == {}
        assert all(map(same, moved["rows"], whole["rows"])) and len(moved["rows"]) == len(whole["rows"])
        assert max(moved["differences"].values(), default=0.0) < 1e-5
