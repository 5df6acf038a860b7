"""Every kind of mistake in a TOML file, and the message it earns: where it was written, key, value, rule, remedy."""

import ast
import errno
import itertools
import os
import re
import time
from pathlib import Path

import pytest

from glm46.commands.prepare import read_recipe
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.config.rules_pipeline import _wanted

SOUND = """
[model]
flavor = "debug"
[model.shape]
[training]
steps = 10
seq_len = 128
[[data.sources]]
name = "a"
path = "data/a"
"""

# By mistake: the text before [training], or old and new text in the sound file; of each fault the key with its value,
# and then the rule or the remedy.
BAD = {
    "unknown key": (("seq_len = 128", "seqlen = 128"), ("training.seqlen", "did you mean 'seq_len'?")),
    "chats that are cut, that see each other, and are longer than a row": (
        ('path = "data/a"', 'path = "data/a"\nrecipe = { input = ["a"], format = "messages", max_tokens = 200 }'),
        ('data.sources[0].packing = "concatenate"', 'set packing = "best_fit"'),
        ("data.document_mask = false", "set it to true"),
        ("data.sources[0].recipe.max_tokens = 200", "lower it to 128, or raise seq_len")),
    "chats of any length": (
        ('path = "data/a"', 'path = "data/a"\npacking = "best_fit"\nrecipe = { input = ["a"], format = "alpaca" }'),
        ("data.document_mask = false", "set it to true"),
        ("data.sources[0].recipe.max_tokens", "set it to at most 128, by the shortest rows")),
    "keys of text for chats": (('path = "data/a"', 'path = "data/a"\nrecipe = { input = ["a"], history = "last" }'),
        ('data.sources[0].recipe.history = "last"',
         'without data.sources[0].recipe.format = "chat" or "messages" or "sharegpt" or "prompt_completion" or '
         '"alpaca"; set that')),
    "unknown key of another section": (("steps = 10", "steps = 10\nlog_freq = 5"),
        ("training.log_freq", "did you mean 'metrics.log_freq'?")),
    "unknown key of a table in a section": (("steps = 10", "steps = 10\nloss_type = 'ipo'"),
        ("training.loss_type", "did you mean 'finetune.preference.loss_type'?")),
    "unknown key near one of its section": ('[adapter]\nname = "lora"\nranks = 8',
        ("adapter.ranks", "did you mean 'rank'?")),
    "unknown key that ends as one of its section": ("[finetune.preference]\ngamma = 1.0",
        ("finetune.preference.gamma", "did you mean 'simpo_gamma'?")),
    "key that repeats its section": ("[checkpoint]\nenable_checkpoint = true",
        ("checkpoint.enable_checkpoint", "did you mean 'enable'?")),
    "choice that is near to none": ('[activation_checkpoint]\nmode = "selective"\nrecompute = ["moe_act"]',
        ('activation_checkpoint.recompute[0] = "moe_act"', "or 'exchange' (Results that selective does not keep")),
    "integer beyond 64 bits": (("steps = 10", "steps = 99999999999999999999999"),
        ("training.steps = 99999999999999999999999", "does not fit into 64 bits; give a smaller number")),
    "schedule beyond 64 bits": (
        ("seq_len = 128", "seq_len = 128\nglobal_batch_size = [[0, 4], [9223372036854775808, 8]]"),
        ("training.global_batch_size = [[0, 4], [9223372036854775808, 8]]", "does not fit into 64 bits")),
    "value for array": ('[activation_checkpoint]\nmode = "selective"\nrecompute = "experts"',
        ('activation_checkpoint.recompute = "experts"', 'must be an array; write ["experts"]')),
    "choice that another trainer names so": ('[finetune.preference]\nloss_type = "dpo"',
        ('finetune.preference.loss_type = "dpo"', "'kto' or 'reward' (sigmoid: DPO (arXiv 2305.18290))")),
    "choice in an array": ('[parallelism]\nexpert_exchange = ["auto"]',
        ('parallelism.expert_exchange = ["auto"]', "or 'deepep' (The way of tokens to their experts)")),
    "unknown key like no other": (("steps = 10", "steps = 10\nzzz = 5"),
        ("training.zzz", "valid keys are local_batch_size, global_batch_size")),
    "run without a profiled step": ("[profiling]\nenable_profiling = true",
        ("profiling.profile_freq = 100", "lower it to at most 10")),
    "unknown section": (("[training]", "[trainning]"), ("trainning", "did you mean 'training'?")),
    "unknown key in an array of tables": (('path = "data/a"', 'path = "data/a"\nweigth = 2.0'),
        ("data.sources[0].weigth", "did you mean 'weight'?")),
    "string for integer": (("seq_len = 128", 'seq_len = "128"'),
        ('training.seq_len = "128"', "write 128 without quotes")),
    "boolean for integer": (("seq_len = 128", "seq_len = true"),
        ("training.seq_len = true", "must be a valid integer")),
    "whole float for integer": (("steps = 10", "steps = 1e6"), ("training.steps = 1000000.0", "write 1_000_000")),
    "broken float for integer": (("steps = 10", "steps = 10.5"), ("training.steps = 10.5", "must be a valid integer")),
    "array for integer": (("seq_len = 128", "seq_len = [128]"),
        ("training.seq_len = [128]", "must be a valid integer")),
    "date for integer": (("seq_len = 128", "seq_len = 2026-01-01"),
        ("training.seq_len = 2026-01-01", "must be a valid integer")),
    "boolean for float": ("[optimizer]\nlr = true", ("optimizer.lr = true", "must be a valid number")),
    "string for float": ('[optimizer]\nlr = "3e-4"', ('optimizer.lr = "3e-4"', "write 0.0003 without quotes")),
    "string for boolean": ('[compile]\nenable = "True"',
        ('compile.enable = "True"', "must be a valid boolean", "write true without quotes")),
    "integer for string": (('path = "data/a"', "path = 3"), ("data.sources[0].path = 3", 'write "3" with quotes')),
    "value for table": (("[model.shape]", "job = 3\n[model.shape]"),
        ("model.job", "valid keys are flavor, shape")),
    "table for array of tables": (("[[data.sources]]", "[data.sources]"),
        ('data.sources = {name = "a", path = "data/a"}',
         "write a table [[data.sources]] for each entry, or on the command line --data.sources '[{name = ...}]'")),
    "below the range": (("seq_len = 128", "seq_len = 1"),
        ("training.seq_len = 1", "must be greater than or equal to 2")),
    "at an open bound": ("[optimizer]\nbeta1 = 1.0", ("optimizer.beta1 = 1.0", "must be less than 1")),
    "infinite": ("[moe]\nbias_clamp = inf", ("moe.bias_clamp = inf", "must be a finite number")),
    "not a number": ("[optimizer]\nlr = nan", ("optimizer.lr = nan", "must be a finite number")),
    "choice in the wrong case": ('[optimizer]\nname = "muon"', ('optimizer.name = "muon"', "did you mean 'Muon'?")),
    "choice of the wrong type": ("[optimizer]\nstate_dtype = 8",
        ("optimizer.state_dtype = 8", "must be 'float32', 'bfloat16' or '8bit'")),
    "pattern": (('name = "a"', 'name = "a b"'),
        ('data.sources[0].name = "a b"', "must match pattern '^[A-Za-z0-9_.-]+$'")),
    "missing in an array of tables": (('path = "data/a"', ""), ("data.sources[0].path", "required, but absent")),
    "missing flavor": (('flavor = "debug"', ""), ("model.flavor", "one of GLM-4.6, GLM-4.7, GLM-4.5")),
    "missing model": (('[model]\nflavor = "debug"\n[model.shape]', ""),
        ("model.flavor", "one of GLM-4.6, GLM-4.7, GLM-4.5")),
    "unknown flavor": (('flavor = "debug"', 'flavor = "glm-4.5-air2"'),
        ('model.flavor = "glm-4.5-air2"', "did you mean 'GLM-4.5-Air'? Presets: GLM-4.6, GLM-4.7, GLM-4.5")),
    **{f"flavor of another model of the family, {name}": (('flavor = "debug"', f'flavor = "{name}"'),
        (f'model.flavor = "{name}"', f"another model, {what}", "; Presets: GLM-4.6, GLM-4.7"))
       for name, what in (("GLM-4.5V", "GLM-4.5V or 4.6V, of images and text: missing here are the vision tower"),
                          ("glm-4.6v-flash", "GLM-4.6V-Flash, of images and text, without experts"),
                          ("GLM-5", "GLM-5: missing here are latent attention of chosen keys and the indexer"),
                          ("GLM-5.2-FP8", "GLM-5: missing here are latent attention of chosen keys"),
                          ("GLM-5.3-Flash", "GLM-5.3-Flash: missing here are linear attention"))},
    "schedule of the wrong type": ('[mtp]\nloss_weight = "high"',
        ('mtp.loss_weight = "high"', "finite number, or points [[tokens, value], ...]")),
    "schedule that is not a number": ("[mtp]\nloss_weight = nan",
        ("mtp.loss_weight = nan", "finite number, or points [[tokens, value], ...]")),
    "schedule as one point": ("[mtp]\nloss_weight = [0, 0.3]",
        ("mtp.loss_weight = [0, 0.3]", "points [[tokens, value], ...]")),
    "schedule with a long point": ("[mtp]\nloss_weight = [[0, 0.3, 1]]",
        ("mtp.loss_weight = [[0, 0.3, 1]]", "points [[tokens, value], ...]")),
    "schedule with float tokens": ("[mtp]\nloss_weight = [[0, 0.3], [15e12, 0.1]]",
        ("mtp.loss_weight = [[0, 0.3], [15000000000000.0, 0.1]]", "integer tokens >= 0")),
    "schedule that goes back": ("[mtp]\nloss_weight = [[5, 0.3], [1, 0.1]]",
        ("mtp.loss_weight = [[5, 0.3], [1, 0.1]]", "integer tokens >= 0 in ascending order")),
    "negative rate": ("[moe]\nbias_update_rate = [[0, 0.1], [5, -0.1]]",
        ("moe.bias_update_rate = [[0, 0.1], [5, -0.1]]", "value -0.1: must be at least 0")),
    "negative weights": ("[moe]\nz_loss_weight = -0.1\nsequence_aux_loss_weight = [[0, 0.1], [5, -0.1]]",
        ("moe.sequence_aux_loss_weight = [[0, 0.1], [5, -0.1]]", "value -0.1: must be at least 0"),
        ("moe.z_loss_weight = -0.1", "must be at least 0")),
    "temperature of zero": ("[moe]\nrouter_temperature = 0",
        ("moe.router_temperature = 0.0", "must be greater than 0")),
    "no budget": (("steps = 10", ""), ("training.tokens, training.steps", "absent", "set one of them")),
    "two budgets": (("steps = 10", "steps = 10\ntokens = 99"),
        ("training.tokens = 99, training.steps = 10", "both given", "remove one of them")),
    "no source": (('[[data.sources]]\nname = "a"\npath = "data/a"', ""),
        ("data.sources", "add a [[data.sources]] table with name and path")),
    "the same name twice": (('path = "data/a"', 'path = "data/a"\n[[data.sources]]\nname = "a"\npath = "data/b"'),
        ('data.sources[1].name = "a"', "give each its own")),
    "the same path twice": (('path = "data/a"', 'path = "data/a"\n[[data.sources]]\nname = "b"\npath = "data/a"'),
        ('data.sources[1].path = "data/a"', "raise the weight of one instead")),
    "batch that does not divide": (("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = 10"),
        ("training.global_batch_size = 10", "take 8 or 12")),
    "ramp below a micro-batch": (
        ("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = [[0, 2], [99, 8]]"),
        ("training.global_batch_size = [[0, 2.0], [99, 8.0]]", "start the ramp higher or lower local_batch_size")),
    "warm-up without end": (
        ("steps = 10\nseq_len = 128", "tokens = 1000\nseq_len = 128\n[lr_scheduler]\nwarmup_tokens = 1000"),
        ("lr_scheduler.warmup_tokens = 1000",
         "warm up for fewer tokens, or raise training.tokens or lr_scheduler.total_tokens")),
    "decay inside the warm-up": (
        ("steps = 10\nseq_len = 128",
         "tokens = 1000\nseq_len = 128\n[lr_scheduler]\nwarmup_tokens = 500\ndecay_ratio = 0.9"),
        ("lr_scheduler.decay_ratio = 0.9", "lower decay_ratio or warmup_tokens")),
    "run beyond its schedule": (
        ("steps = 10\nseq_len = 128",
         "tokens = 1000\nseq_len = 128\n[lr_scheduler]\nstart_tokens = 500\ntotal_tokens = 1400"),
        ("lr_scheduler.total_tokens = 1400", "raise total_tokens to at least that")),
    "checkpoints outside": ('[checkpoint]\nfolder = "../elsewhere"',
        ('checkpoint.folder = "../elsewhere"', "an absolute path, or one inside job.dump_folder")),
    "folders that another key's folder would move": ('[metrics]\nsave_tb_folder = "."',
        ('metrics.save_tb_folder = "."', "must not hold job.dump_folder = ", "name another folder")),
    "events among the checkpoints": ('[metrics]\nsave_tb_folder = "checkpoint"',
        ('metrics.save_tb_folder = "checkpoint"', "must not hold checkpoint.folder = ", "name another folder")),
    "window that an export cannot have": ("sliding_window = 64\n[checkpoint]\nlast_save_in_hf = true",
        ("checkpoint.last_save_in_hf = true", "no model.shape.sliding_window = 64", "set only one of the two")),
    "two checkpoints to start from": ('[checkpoint]\nload_path = "a"\ninitial_load_path = "b"',
        ('checkpoint.load_path = "a", checkpoint.initial_load_path = "b"', "both given; ", "remove one of them")),
    "blocks of 8-bit states cut between ranks": (
        'moe_intermediate_size = 96\n[optimizer]\nstate_dtype = "8bit"\n[parallelism]\ntensor_parallel_degree = 2',
        ('optimizer.state_dtype = "8bit"', "parallelism.tensor_parallel_degree = 2 ",
         "96 columns (model.shape.n_shared_experts * moe_intermediate_size)", "multiples of 64 on each rank",
         "take 1 for the degree, or another state_dtype")),
    "no shard": ("[parallelism]\ndata_parallel_shard_degree = 0",
        ("parallelism.data_parallel_shard_degree = 0", "must be at least 1, or -1 for all")),
    "latent attention over ranks that do not divide its heads": (
        ('flavor = "debug"', 'flavor = "GLM-4.7-Flash"\n[parallelism]\ntensor_parallel_degree = 8'),
        ("parallelism.tensor_parallel_degree = 8", "must divide model.shape.num_attention_heads = 20; take 4")),
    "part of latent attention": ("kv_lora_rank = 64",
        ("model.shape.q_lora_rank", "is absent, and other keys of latent attention are there", "flavor GLM-4.7-Flash")),
    "latent attention with heads of two widths": (
        ('flavor = "debug"\n[model.shape]',
         'flavor = "debug-flash"\n[model.shape]\nv_head_dim = 32\nqk_rope_head_dim = 32'),
        ("model.shape.head_dim = 64", "take 80"), ("model.shape.v_head_dim = 32", "take 80")),
    "latent attention that rotates half a pair": (
        ('flavor = "debug"\n[model.shape]',
         'flavor = "debug-flash"\n[model.shape]\nqk_nope_head_dim = 49\nqk_rope_head_dim = 15'),
        ("model.shape.qk_rope_head_dim = 15", "is rotated in pairs; make it even")),
    "latent attention with what grouped queries have": (
        ('flavor = "debug"\n[model.shape]',
         'flavor = "debug-flash"\n[model.shape]\nuse_qk_norm = true\nattention_bias = true\n'
         "num_key_value_heads = 2\npartial_rotary_factor = 0.5"),
        ("model.shape.num_key_value_heads = 2", "take 4"), ("model.shape.use_qk_norm = true", "take false"),
        ("model.shape.attention_bias = true", "not possible with latent attention"),
        ("model.shape.partial_rotary_factor = 0.5", "take 1.0")),
    "uneven heads": ("num_attention_heads = 7", ("model.shape.num_attention_heads = 7", "take 6 or 8")),
    "odd rotation": ("head_dim = 30",
        ("model.shape.partial_rotary_factor = 0.5", "rotates 15 of model.shape.head_dim = 30 dimensions",
         "must be an even number of at least 2; take 0.5333333333333333")),
    "YaRN without the original length": ('rope_scaling = { rope_type = "yarn", factor = 2.0 }',
        ("model.shape.rope_scaling.original_max_position_embeddings", 'required for rope_type = "yarn", but absent',
         "set the length of the previous training")),
    "key of the shape that is near to one": ("hiden_size = 64",
        ("model.shape.hiden_size", "did you mean 'hidden_size'?")),
    "key of the shape out of its range": ("hidden_size = 0",
        ("model.shape.hidden_size = 0", "must be greater than or equal to 1")),
    "key of the shape in another section": (("steps = 10", "steps = 10\nrope_theta = 1e4"),
        ("training.rope_theta", "did you mean 'model.shape.rope_theta'?")),
    "shape that is no table": (('[model.shape]', 'shape = "GLM-4.6"'), ('model.shape = "GLM-4.6"', "must be a table")),
    "more dense layers than layers": ("first_k_dense_replace = 5",
        ("model.shape.first_k_dense_replace = 5", "lower it")),
    "keys that earlier versions had": ("n_group = 1\nnorm_topk_prob = true",
        ("model.shape.n_group", "unknown key; it has one value in all of GLM's models; remove it"),
        ("model.shape.norm_topk_prob", "unknown key; it has one value in all of GLM's models; remove it")),
    "Megatron's groups of recomputed layers": (
        ("[training]", '[activation_checkpoint]\nrecompute_method = "uniform"\nrecompute_num_layers = 2\n[training]'),
        ("activation_checkpoint.recompute_method", 'unknown key; Megatron\'s "uniform"', 'write mode = "full"'),
        ("activation_checkpoint.recompute_num_layers", "every_n_layers = n", "for more memory")),
    "more experts used than there are": ("n_routed_experts = 2", ("model.shape.num_experts_per_tok = 4", "lower it")),
    "expert rows that grouped matmul refuses": ("moe_intermediate_size = 100",
        ("model.shape.moe_intermediate_size = 100", "take 104")),
    "FP8 kernels in float32": (
        ("[training]", '[float8]\nrecipe_name = "rowwise"\n[training]\nmixed_precision_param = "float32"'),
        ('training.mixed_precision_param = "float32"', 'set it to "bfloat16", or float8.emulate = true')),
    "FP8 filter that matches nothing": ('[float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["output"]',
        ('float8.filter_fqns = "output"',
         "take a part of such a name (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, eh_proj), "
         "or remove it")),
    "FP8 filter that matches everything": ('[float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["proj"]',
        ('float8.filter_fqns = ["proj"]', "exclude fewer, or remove float8.recipe_name")),
    "widths that FP8 cannot divide": (
        ('[model.shape]',
         '[model.shape]\nmoe_intermediate_size = 104\n[float8]\nrecipe_name = "rowwise_with_gw_hp"\n'
         'experts_recipe_name = "rowwise"'),
        ('float8.recipe_name = "rowwise_with_gw_hp"', 'set float8.filter_fqns = ["gate_proj", "up_proj", "down_proj"]'),
        ('float8.experts_recipe_name = "rowwise"', "remove experts_recipe_name")),
    "widths that blocks of MXFP8 cannot divide": (
        ('[model.shape]',
         '[model.shape]\nmoe_intermediate_size = 112\n[float8]\nrecipe_name = "rowwise_with_gw_hp"\n'
         'experts_recipe_name = "mxfp8"'),
        ('float8.experts_recipe_name = "mxfp8"', "remove experts_recipe_name")),
    "tokens that FP8 cannot divide": (("seq_len = 128", 'seq_len = 130\n[float8]\nrecipe_name = "tensorwise"'),
        ("training.seq_len = 130",
         'take 144 or change training.local_batch_size, or set float8.recipe_name = "rowwise_with_gw_hp"')),
    "FP8 gather of scales per row": ('[float8]\nrecipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true',
        ("float8.enable_fsdp_float8_all_gather = true", 'without float8.recipe_name = "tensorwise"; set that')),
    "states on a disk without a folder": ('[optimizer]\nstate_offload = "nvme"',
        ('optimizer.state_offload = "nvme"', "set optimizer.state_offload_folder")),
    "sequence beyond the positions": (("seq_len = 128", "seq_len = 4096"),
        ("training.seq_len = 4096", "shorten it, or raise max_position_embeddings (and rope_theta with it)")),
    "axis that splits unevenly": ("[parallelism]\nexpert_parallel_degree = 3",
        ("parallelism.expert_parallel_degree = 3", "take 2 or 4")),
    "ranks that share no key heads evenly": (
        ('[model.shape]',
         '[model.shape]\nnum_attention_heads = 12\nnum_key_value_heads = 6\n[parallelism]\n'
         'tensor_parallel_degree = 4'),
        ("parallelism.tensor_parallel_degree = 4 with model.shape.num_key_value_heads = 6", "take 2")),
    "parts of a key head that are uneven": (
        ('[model.shape]',
         '[model.shape]\nnum_attention_heads = 16\nhead_dim = 36\n[parallelism]\ntensor_parallel_degree = 16'),
        ("parallelism.tensor_parallel_degree = 16 with model.shape.head_dim = 36", "take 8")),
    "more stages than layers": ("[parallelism]\npipeline_parallel_degree = 8",
        ("parallelism.pipeline_parallel_degree = 8", "lower it")),
    "more stages than layers because of two on each rank": (
        '[parallelism]\npipeline_parallel_degree = 3\npipeline_parallel_schedule = "DualPipeV"',
        ("parallelism.pipeline_parallel_degree = 3 with 2 stages each", "lower it")),
    "stages that the schedule does not have": (
        "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_stages_per_rank = 2",
        ("parallelism.pipeline_parallel_stages_per_rank = 2", "schedule 1F1B needs 1",
         "remove the key, or use Interleaved1F1B or InterleavedZeroBubble")),
    "split backward of freed weights": (
         '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n'
         'fsdp_reshard_after_forward = "always"',
        ('parallelism.fsdp_reshard_after_forward = "always"', "schedule ZBVZeroBubble splits backward",
         'use "default" or "never"')),
}  # fmt: skip


def mistaken(name: str) -> str:
    """The sound file with a mistake."""
    change = BAD[name][0]
    old, new = ("[training]", f"{change}\n[training]") if isinstance(change, str) else change
    assert SOUND.count(old) == 1
    return SOUND.replace(old, new)


def faults_of(text: str, folder: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    """Messages about a file of this text, without the file's folder."""
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, world_size=world_size)
    return [fault.replace(str(path), "run.toml") for fault in caught.value.faults]


def test_the_sound_file_is_sound(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    assert load_config(path).training.seq_len == 128


@pytest.mark.parametrize("name", BAD)
def test_mistake_earns_its_message(name, tmp_path):
    faults, expected = faults_of(mistaken(name), tmp_path), BAD[name][1:]
    assert len(faults) == len(expected), faults
    for fault, (key_and_value, *words) in zip(faults, expected, strict=True):
        assert fault.startswith(f"run.toml: {key_and_value}: ") and all(word in fault for word in words), fault


_REMEDY = re.compile(r"(?:set|take|use|add) ([a-z_0-9]+(?:\.[a-z_0-9]+)+) = (\"[^\"]*\"|\[[^\]]*\]|[\w.+-]+)")
"""A remedy that states a key with its value."""
_OWN_VALUE = re.compile(r"run.toml: ([\w.]+) = .*; take ([\d_.]+|\"[^\"]*\")(?: or .*)?$")


@pytest.mark.parametrize("name", BAD)
def test_a_stated_remedy_is_one(name, tmp_path):
    """The value that a message states ends its fault and brings no other one."""
    faults = faults_of(mistaken(name), tmp_path)
    for fault in faults:
        for key, value in (*_REMEDY.findall(fault), *_OWN_VALUE.findall(fault)):
            try:
                load_config(tmp_path / "run.toml", (f"--{key}={value}",))
            except UserError as error:
                left = [each.partition(": ")[2] for each in error.faults]
                others = [each.partition(": ")[2] for each in faults if each is not fault]
                assert set(left) <= set(others), (fault, key, value, left)


def test_every_rule_about_parts_says_which_values_work():
    """The message of each rule that values must divide, or be multiples, ends with values, a key or a remedy."""
    folder = Path(__file__).parents[3] / "glm46" / "config"
    calls = [
        ast.unparse(node)
        for file in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fault"
    ]
    rules = [call for call in calls if re.search("must divide|multiples? of|not divide|equal parts|even number", call)]
    assert len(rules) >= 11
    assert [rule for rule in rules if not re.search("; (take|start|set|remove)|{near}|{remedy}|fitting", rule)] == []


def test_all_faults_come_at_once(tmp_path):
    """Types, ranges, unknown keys and rules across sections in one go; a rule that reads a faulty key keeps quiet."""
    text = """
        [model]
        flavor = "debug"
        [model.shape]
        num_attention_heads = 7
        [training]
        seq_len = "long"
        global_batch_size = 7
        local_batch_size = 2
        tokens = 5
        steps = 5
        [optimizer]
        lr = -1.0
        beta3 = 0.1
    """
    assert faults_of(text, tmp_path) == [
        'run.toml: training.seq_len = "long": must be a valid integer (Tokens per sequence)',
        "run.toml: optimizer.lr = -1.0: must be greater than 0 (Peak learning rate)",
        "run.toml: optimizer.beta3: unknown key; did you mean 'beta2'?",
        "run.toml: training.tokens = 5, training.steps = 5: both given; remove one of them",
        "run.toml: data.sources: no source to train on; add a [[data.sources]] table with name and path",
        "run.toml: model.shape.num_attention_heads = 7: must be a multiple of model.shape.num_key_value_heads = 2; "
        "take 6 or 8",
        "run.toml: training.global_batch_size = 7: must be a multiple of 2 (training.local_batch_size = 2 times 1 "
        "data-parallel rank); take 6 or 8",
    ]


@pytest.mark.parametrize(
    ("parallelism", "world_size", "expected"),
    [
        ("data_parallel_shard_degree = 2", 4, "multiply to 2 processes, and 4 is more; start 2 processes (NGPU=2)"),
        ("data_parallel_shard_degree = 4", 2, "multiply to 4 processes, and 2 is fewer; start 4 processes (NGPU=4)"),
        ("data_parallel_replicate_degree = 2", 3, "multiply to 2, which does not divide 3 processes"),
        ("expert_parallel_degree = 4", 2, "must divide shard * context * tensor degrees = 2"),
    ],
)  # fmt: skip
def test_processes_fit_the_layout(parallelism, world_size, expected, tmp_path):
    text = SOUND + f"[parallelism]\n{parallelism}\n"
    (fault,) = faults_of(text, tmp_path, world_size=world_size)
    assert expected in fault


def test_gather_in_fp8_needs_even_shards(tmp_path):
    text = SOUND.replace("[training]", "n_routed_experts = 12\n[training]")  # which 3 ranks divide
    text += '[float8]\nrecipe_name = "tensorwise"\nenable_fsdp_float8_all_gather = true\n'
    (fault,) = faults_of(text, tmp_path, world_size=3)
    assert "float8.enable_fsdp_float8_all_gather = true: layers.0.self_attn.q_proj has" in fault
    assert "rows, which 3 ranks" in fault and "set it to false" in fault
    # Of GLM-4.7-Flash the latents of keys have 576 rows, no multiple of 128.
    (fault,) = faults_of(text.replace('"debug"\n', '"GLM-4.7-Flash"\n').replace("n_routed_experts = 12", ""), tmp_path,
                         world_size=128)  # fmt: skip
    assert "layers.0.self_attn.kv_a_proj_with_mqa has 576 rows, which 128 ranks" in fault


def test_batch_is_checked_against_the_processes(tmp_path):
    text = SOUND.replace("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = 12")
    text = text.replace("[training]", "n_routed_experts = 12\n[training]")  # which 3 ranks divide
    (tmp_path / "sound.toml").write_text(text)
    assert load_config(tmp_path / "sound.toml", world_size=3).training.global_batch_size == 12
    (fault,) = faults_of(text, tmp_path, world_size=2)
    assert "must be a multiple of 8 (training.local_batch_size = 4 times 2 data-parallel ranks); take 8 or 16" in fault
    (fault,) = faults_of(text, tmp_path, world_size=4)
    assert fault.endswith("; take 16")


def test_broken_toml_names_line_and_column(tmp_path):
    (fault,) = faults_of("[model]\nflavor 'debug'\n", tmp_path)
    assert fault.startswith("run.toml:2:8: not valid TOML: Expected '=' after a key")
    assert fault.endswith("; the line reads: flavor 'debug'")


@pytest.mark.parametrize(("content", "words"), [
    (b"[model]\n\xff", "byte 8 is not UTF-8 text; save the TOML file as UTF-8"),
    ("a = 'é'".encode("latin-1"), "byte 5 is not UTF-8 text; save"), ("a = 1".encode("utf-16"), "byte 0 is not"),
    (bytes(range(256)), "not UTF-8 text; save"), (b"a = 1\0", ":1:6: not valid TOML: .*; the line reads"),
    ("folder", "cannot be read: Is a directory; name the TOML file of a run"),
    ("run.toml", "cannot be read: Too many levels of symbolic links; name the TOML file of a run"),
    ("other", "cannot be read: Too many levels of symbolic links; name the TOML file of a run"),
])  # fmt: skip
@pytest.mark.parametrize("verb", ["train", "recipe"])
def test_a_file_that_cannot_be_read_is_one_line(content, words, verb, tmp_path):
    """Other content, a folder, and links that lead to themselves or to each other."""
    path = tmp_path / "run.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to(content)
        (tmp_path / "other").symlink_to(path)
    with pytest.raises(UserError, match=words) as caught:
        load_config(path) if verb == "train" else read_recipe(path, {})
    assert len(caught.value.faults) == 1 and caught.value.faults[0].startswith(str(path))


def test_a_file_without_permission_is_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root reads every file
    with pytest.raises(UserError, match="cannot be read: Permission denied; name the TOML file of a run"):
        load_config(path)


def test_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "debug.toml").write_text(SOUND)
    with pytest.raises(UserError, match=r"cannot be read: No such file or directory; did you mean .*debug\.toml\?"):
        load_config(tmp_path / "debgu.toml")
    with pytest.raises(UserError, match="there is no folder"):
        load_config(tmp_path / "nowhere" / "debug.toml")
    with pytest.raises(UserError, match="Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "wanted"),
    [
        ("1F1B", 2, 1, "at least 2"), ("1F1B", 2, 2, None), ("GPipe", 2, 1, None),
        ("DualPipeV", 2, 3, "at least 4"), ("DualPipeV", 2, 4, None), ("ZBVZeroBubble", 2, 1, None),
        ("Interleaved1F1B", 2, 3, None), ("Interleaved1F1B", 2, 5, "a number that divides into 2 equal rounds"),
        ("Interleaved1F1B", 2, 6, None),
        ("InterleavedZeroBubble", 2, 7, "a number that divides into 3 equal rounds"),
    ],
)  # fmt: skip
def test_micro_batches_fit_the_schedule(schedule, ranks, micro_batches, wanted, tmp_path):
    """The bounds are those at which the schedules of torch raise."""
    text = SOUND.replace(
        "[training]",
        f'[parallelism]\npipeline_parallel_degree = {ranks}\npipeline_parallel_schedule = "{schedule}"\n[training]',
    ).replace("steps = 10", f"steps = 10\nlocal_batch_size = 2\nglobal_batch_size = {2 * micro_batches}")
    if wanted is None:
        (tmp_path / "sound.toml").write_text(text)
        assert load_config(tmp_path / "sound.toml", world_size=ranks).parallelism.stages >= ranks
        return
    (fault,) = faults_of(text, tmp_path, world_size=ranks)
    begin, _, fitting = fault.partition("; take ")
    assert begin == (
        f"run.toml: training.global_batch_size = {2 * micro_batches}: a step of "
        f"{counted(micro_batches, 'micro-batch')} of 2 sequences; schedule {schedule} over {ranks} ranks needs {wanted}"
    )
    load_config(tmp_path / "run.toml", (f"--training.global_batch_size={fitting}",), world_size=ranks)


def test_every_step_of_a_ramp_fits_the_schedule(tmp_path):
    text = SOUND.replace(
        "[training]",
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n[training]',
    ).replace("steps = 10", "steps = 10\nlocal_batch_size = 1\nglobal_batch_size = [[0, 4], [99, 8]]")
    (fault,) = faults_of(text, tmp_path, world_size=2)
    assert "a step of 5 micro-batches of 1 sequence; schedule Interleaved1F1B over 2 ranks needs" in fault
    assert "needs a number that divides into 2 equal rounds; change the ramp" in fault
    # A jump takes only the values on its two sides.
    (tmp_path / "run.toml").write_text(text.replace("[[0, 4], [99, 8]]", "[[0, 4], [99, 4], [99, 8]]"))
    load_config(tmp_path / "run.toml", world_size=2)


def test_a_wrong_number_of_micro_batches_comes_soon_or_never():
    """So that a ramp to any number, as a slip of the hand makes it, is judged at once."""
    for schedule, ranks in itertools.product(PIPELINE_SCHEDULES, (2, 3, 4, 7)):
        wrong = [count for count in range(1, 200) if _wanted(schedule, ranks, count)]
        for first in range(1, 100):
            soon = {count for count in wrong if first <= count <= first + 2 * ranks}
            assert bool(soon) == any(count >= first for count in wrong), (schedule, ranks, first)


def test_experts_that_no_shard_divides_are_refused_with_the_valid_choices(tmp_path):
    """An expert of the debug preset has 256 and 256 rows. What was stated is blamed, and nothing else."""
    text = SOUND.replace("[training]", "n_routed_experts = 24\n[training]")
    (tmp_path / "sound.toml").write_text(text)
    assert load_config(tmp_path / "sound.toml", world_size=12)  # two experts each
    (fault,) = faults_of(text, tmp_path, world_size=18)
    assert fault == (
        "run.toml: 18 processes: 24 experts of a layer sharded over 18 ranks, which divide neither their number nor an "
        "expert's 256 and 256 rows; start 16 or 24 processes, or take another number of ranks"
    )
    stated = text + "[parallelism]\nexpert_parallel_degree = 1\n"
    (fault,) = faults_of(stated, tmp_path, world_size=48)
    assert fault.startswith("run.toml: parallelism.expert_parallel_degree = 1: 24 experts of a layer sharded over 48")
    assert fault.endswith("set parallelism.expert_parallel_degree = 3 or 6 or 12 or 24")
    (fault,) = faults_of(text + "[parallelism]\ndata_parallel_shard_degree = 18\n", tmp_path, world_size=18)
    assert fault.startswith("run.toml: parallelism.data_parallel_shard_degree = 18: 24 experts of a layer sharded")
    (fault,) = faults_of(text + "[parallelism]\ndata_parallel_replicate_degree = 2\n", tmp_path, world_size=36)
    assert fault.startswith("run.toml: 36 processes:") and "; start 32 or 48 processes" in fault
    # No number of ranks that three divides: nothing to name.
    *_, fault = faults_of(SOUND + "[parallelism]\ntensor_parallel_degree = 3\n", tmp_path, world_size=3)
    assert fault.startswith("run.toml: 3 processes: 16 experts of a layer sharded over 3 ranks")
    assert fault.endswith("256 and 256 rows; take another number of ranks")


@pytest.mark.parametrize(("override", "said"), [
    ("--model.shape.num_hidden_layers=1000000000", "must be less than or equal to 1024"),
    ("--model.shape.num_nextn_predict_layers=1000000000", "must be less than or equal to 1024"),
    ("--model.shape.n_routed_experts=1000000000000", "must be less than or equal to 65536"),
    ("--parallelism.data_parallel_shard_degree=1000000000000", "16 experts of a layer sharded over 1000000000000"),
    ("--parallelism.expert_parallel_degree=1000000000", "must divide model.shape.n_routed_experts = 16"),
    ("--validation.steps=0", "validation.steps = 0: must be at least 1, or -1 for all"),
    ("--job.dump_folder=s3://bucket/x", 'job.dump_folder = "s3://bucket/x": is a URL'),
    ("--checkpoint.initial_load_path=s3://bucket/x", 'checkpoint.initial_load_path = "s3://bucket/x": is a URL'),
    ("--model.tokenizer_path=https://a.b/c", 'model.tokenizer_path = "https://a.b/c": is a URL'),
])  # fmt: skip
def test_a_slip_of_the_hand_is_answered_at_once(override, said, tmp_path):
    """Nothing that rules and planner compute grows with a number that a person may write."""
    began = time.process_time()
    text = SOUND.replace("[[data", "[validation]\nenable = true\n[[data")
    faults = faults_of(text, tmp_path, override)
    assert said in faults[0] and time.process_time() - began < 60


@pytest.mark.parametrize(("number", "noun", "text"), [(1, "step", "1 step"), (0, "step", "0 steps"),
                                                      (2, "process", "2 processes"), (1, "process", "1 process"),
                                                      (4096, "rank", "4,096 ranks")])  # fmt: skip
def test_a_number_agrees_with_its_noun(number, noun, text):
    assert counted(number, noun) == text
