"""Fine-tuning on chats with masked targets, full and by adapters; print one JSON object per run.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/finetuning.py

One rank trains the base. Full fine-tuning runs on every kind of layout. Adapters are trained on one mesh, saved, and go
on from there on the same mesh and on another, over the base that each start reads again.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from glm46.config.text_recipe import TextRecipe
from glm46.operate.launch.train_rank import train
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare.pipeline import prepare_text
from tests.ranks.forked_ranks import in_halves, run_whole
from tests.small_run import small_config, write_source
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


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "text").mkdir()
        text = write_source(base / "text", load_tokenizer("builtin"))
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

            def work(rank: int) -> int:
                torch.set_num_threads(1)
                return train(config)

            log = base / f"log-{label}-"
            said = run_whole(ranks, log, work)[0]
            found = map(json.loads, (base / label / "metrics.jsonl").read_text().splitlines())
            names = ("step", "loss", "grad_norm", "validation_loss")
            rows = [{name: row[name] for name in names if name in row} for row in found]
            answers = [line for line in said.splitlines() if line.startswith(("Greedy", "assistant:"))]
            return {"name": label, "rows": rows, "answers": answers}

        run("base", "one rank", moe={"bias_update_rate": 0.05})
        step = base / "base" / "checkpoint" / f"step-{STEPS:06d}"
        start = {"initial_load_path": str(step), "interval": SAVED, "async_mode": "disabled"}
        samples = {"samples": ["Say three.", "Say one."], "max_new_tokens": 4}
        tuned = {"finetune": samples, "data": {"sources": [chats]}}
        full = tuned | {"checkpoint": start | {"initial_load_model_only": True}}

        def resume(kind: str) -> None:
            saving, other = RESUMED[kind]
            adapter = {"name": kind, "rank": 8, "expert_rank": 4}
            tables = tuned | {"checkpoint": start, "adapter": adapter}
            whole = run(kind, saving, **tables)
            saved = base / kind / "checkpoint"
            for label, layout in ((f"{kind} resumed", saving), (f"{kind} moved", other)):
                shutil.copytree(base / kind, base / label)
                shutil.rmtree(base / label / "checkpoint" / f"step-{STEPS:06d}")
                row = run(label, layout, **tables)
                ours, theirs = (
                    step_tensors(folder / f"step-{STEPS:06d}") for folder in (saved, base / label / "checkpoint")
                )
                assert ours.keys() == theirs.keys()
                row["differences"] = {
                    name: ((ours[name] - theirs[name]).norm() / ours[name].norm()).item()
                    for name in ours
                    if not torch.equal(ours[name], theirs[name])
                }
                print(json.dumps(row | {"whole": whole}), flush=True)

        def run_full(layout: str) -> None:
            print(json.dumps(run(layout, layout, **full)), flush=True)

        in_halves([*RESUMED, *LAYOUTS], lambda name: resume(name) if name in RESUMED else run_full(name))


if __name__ == "__main__":
    main()
