"""INT4 folder calibrated by GPTQ (arXiv 2210.17323) with llm-compressor, in the format of `convert --dtype int4`.

    python -m venv calibration && calibration/bin/pip install llmcompressor
    calibration/bin/python scripts/calibrate_int4.py --model models/mine --text 'text/**/*.py' --output models/mine-gptq

llm-compressor pins releases of torch and transformers, so it has an environment of its own; nothing of glm46 is needed
there. It reads the folder through transformers, so the prediction layers are left out, and holds the model in memory.
Routed and shared experts, attention and dense layers are quantised in groups of 128; embedding, head, router and norms
are not. Every expert sees every token of the calibration text, so none is calibrated on too little: time grows with
tokens x experts. llm-compressor shows a bar for each layer.
"""

import argparse
import glob
import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Calibrate as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder in BF16 or FP32")
    parser.add_argument("--text", required=True, help="glob of text files, such as those of the training; not held out")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32, help="default: 32; more for a larger model, if time allows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample; default: 256")
    arguments = parser.parse_args()
    if arguments.output.exists():
        sys.exit(f"error: --output {arguments.output}: exists; give another folder, or remove it")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    samples = []
    for file in sorted(glob.glob(arguments.text, recursive=True)):
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        ids = tokenizer(text[: 20 * arguments.length])["input_ids"][: arguments.length]
        if len(ids) == arguments.length:
            samples.append({"input_ids": ids})
    if len(samples) < arguments.samples:
        sys.exit(
            f"error: --text {arguments.text}: {len(samples)} files of at least {arguments.length} tokens, but "
            f"--samples {arguments.samples}; give more text, or lower --samples or --length"
        )
    step = len(samples) // arguments.samples
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(samples[::step][: arguments.samples]),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", actorder="static", ignore=["lm_head", "re:.*mlp.gate$"]),
        max_seq_length=arguments.length,
        num_calibration_samples=arguments.samples,
        output_dir=str(arguments.output),
    )


if __name__ == "__main__":
    main()
