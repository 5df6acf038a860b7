"""docs/nccl.md names the variables that preflight warns of, with its verdicts; links of the guides exist."""

import ast
import re
from pathlib import Path

from glm46.config.run_config import RunConfig
from glm46.operate.cluster.network import NCCL_VARIABLES

DOCS = Path(__file__).parents[4] / "docs"


def test_the_page_of_nccl_has_the_verdicts_of_the_program():
    part = (DOCS / "nccl.md").read_text().partition("## What preflight calls a fault")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`NCCL_.*?) \| (FAIL|WARN)", part)
    stated = {name: verdict for names, verdict in rows for name in re.findall(r"`(\w+)`", names)}
    assert stated == {name: verdict for name, (verdict, _) in NCCL_VARIABLES.items()}


DEEPSPEED_KEYS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer lr betas eps
weight_decay scheduler warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps fp16 bf16 zero_optimization stage
contiguous_gradients overlap_comm reduce_scatter reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size
stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
stage3_gather_16bit_weights_on_model_save offload_optimizer device nvme_path pin_memory buffer_count fast_init
offload_param gradient_clipping activation_checkpointing partition_activations cpu_checkpointing
contiguous_memory_optimization synchronize_checkpoint_boundary aio block_size queue_depth thread_count single_submit
overlap_events steps_per_print tensorboard enabled output_path job_name flops_profiler"""
"""Of the infrastructure guide's JSON."""
GUIDE_SECTIONS = (
    "Overview",
    "Cluster setup",
    "Job scheduling",
    "Distributed training",
    "Monitoring",
    "Checkpoints",
    "Performance",
    "Troubleshooting",
    "Do's and don'ts",
    "Checklist",
    "Next steps",
    "Resources",
)


def test_the_infrastructure_page_answers_each_section_and_each_key_of_deepspeed_with_keys_that_exist():
    text = (DOCS / "infrastructure.md").read_text()
    headings = re.findall(r"(?m)^## (.+)$", text)
    assert [name for name in GUIDE_SECTIONS if not any(heading.startswith(name) for heading in headings)] == []
    rows = re.findall(r"(?m)^\| (.+) \| (.+) \|$", text.partition("| DeepSpeed |")[2].partition("\n\n")[0])
    named = {key for left, _ in rows for key in re.findall(r"`(\w+)`", left)}
    assert named == set(DEEPSPEED_KEYS.split())
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    for section, key in re.findall(r"`(\w+)\.(\w+)(?: = [^`]*)?`", "".join(right for _, right in rows)):
        assert key in sections[section].model_fields, f"{section}.{key}"


def templates() -> list[re.Pattern]:
    """What the program prints, as patterns: its strings with at least 18 letters of their own."""
    found = []
    for file in (DOCS.parent / "glm46").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            fixed = [text for text in texts if isinstance(text, str)]
            if sum(map(len, fixed)) >= 18 and len("".join(fixed).split()) >= 3 and "\n" not in "".join(fixed):
                pieces = [re.escape(text) if isinstance(text, str) else ".+" for text in texts]
                found.append(re.compile(re.sub("%[sd]", ".+", "".join(pieces))))
    return found


def test_each_procedure_of_troubleshooting_quotes_what_the_program_prints():
    """A message that is changed has to be changed in the guide, too."""
    sections = (DOCS / "troubleshooting.md").read_text().split("\n## ")[1:]
    patterns = templates()
    strange, without = [], []
    drifted = "step 60: the checkpoint was not saved. rank 0, saving step 60: No space left; raise something, or look"
    assert not any(pattern.search(drifted) for pattern in patterns)
    for section in sections:
        quotes = re.findall(r"(?m)^    +(.+)$", section)
        strange += [quote for quote in quotes if not any(pattern.search(f"  {quote} ") for pattern in patterns)]
        if not quotes:
            without.append(section.partition("\n")[0])
    assert strange == []
    assert without == ["Twenty faults in one run"]


def test_pages_scripts_and_headings_that_the_guides_name_exist():
    missing = []
    for page in ("infrastructure", "nccl", "preflight", "troubleshooting"):
        text = (DOCS / f"{page}.md").read_text()
        for path, heading in re.findall(r"`((?:docs|scripts|tests|deploy)/[\w/.-]+)(?:#([\w-]+))?`", text):
            file = DOCS.parent / path
            titles = re.findall(r"(?m)^#+ (.+)$", file.read_text()) if file.suffix == ".md" and file.is_file() else []
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            if not file.exists() or (heading and heading not in anchors):
                missing.append(f"{page}.md: {path}#{heading}")
    assert missing == []
