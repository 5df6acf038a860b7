"""Time log-likelihoods of lm-eval's tasks: this package's engine against lm-eval's own backend `hf`, interleaved.

    python scripts/measure/measure_lm_eval.py --model models/mine --tasks my.yaml               # three rounds
    python scripts/measure/measure_lm_eval.py --model models/mine --tasks my.yaml --batch-size 8 --rounds 1

Both have the folder in memory in FP32, and get the same requests, which are made before the clock starts. Prints
seconds and their ratio for each round, and for each task the median ratio and how many answers differ: those to texts
that spell a special token, which is text here and the token in `hf`.
"""

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.engine.evaluation.answers import Answers
from glm46.engine.evaluation.lm_eval_model import LmEvalModel
from glm46.engine.evaluation.results import Results
from glm46.engine.evaluation.standard import find_tasks
from glm46.engine.inference.loading import Loaded, load_for_inference
from glm46.engine.inference.model_mesh import ModelMesh


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", required=True, help="names or files, with commas")
    parser.add_argument("--batch-size", default="8", help="of lm-eval's backend; its own auto is refused on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.WARNING)
    theirs = HFLM(pretrained=str(arguments.model), device="cpu", dtype="float32", batch_size=arguments.batch_size)
    model, tokenizer = load_for_inference(
        arguments.model, tokenizer=None, dtype=torch.float32, device=torch.device("cpu")
    )
    names = arguments.tasks.split(",")
    for name, task in find_tasks(names, [], fewshot=None, limit=None).loaded["tasks"].items():
        task.build_all_requests(limit=None, rank=0, world_size=1)
        kind = task.instances[0].request_type
        ratios, other_answers = [], 0
        for number in range(arguments.rounds):
            seconds, answers = [], []
            # Without results of a round before, and with the other one first in every second round.
            ours = LmEvalModel(
                Answers(Loaded(model, tokenizer, ModelMesh()), Results(None, {})),
                tokenizer,
                model.shape.max_position_embeddings,
            )
            for one in (ours, theirs) if number % 2 == 0 else (theirs, ours):
                start = time.perf_counter()
                found = getattr(one, kind)(task.instances)
                seconds.append(time.perf_counter() - start)
                answers.append(torch.tensor([x[0] if isinstance(x, tuple) else x for x in found]))
            mine, other = seconds if number % 2 == 0 else reversed(seconds)
            ratios.append(other / mine)
            # FP32 sums in another order differ by 1e-5 of the answer.
            other_answers = int((~torch.isclose(*answers, rtol=1e-4)).sum())
            print(f"{name} round {number + 1}: {mine:.2f} s, hf {other:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
        print(
            f"{name}: median ratio {statistics.median(ratios):.2f} over {len(task.instances)} requests ({kind}), "
            f"{other_answers} other answers",
            flush=True,
        )


if __name__ == "__main__":
    main()
