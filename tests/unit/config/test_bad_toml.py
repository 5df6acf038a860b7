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
[training]
steps = 10
seq_len = 128
[[data.sources]]
name = "a"
path = "data/a"
"""

CHATS = 'recipe = { input = ["a"], format = "messages", max_tokens = 200 }'
TASKS = "[validation]\nenable = true\ntasks = [{}]\n[training]"

# What is put in place of (old, new) in the sound file, or behind it, and the whole message after the file's name.
BAD = {
    "unknown key": (
        ("seq_len = 128", "seqlen = 128"),
        ["training.seqlen: unknown key; did you mean 'seq_len'?"],
    ),
    "validation tasks of one kind": (
        ("[training]", TASKS.format('{ kind = "needle", lengths = [64] }, { kind = "needle", lengths = [96] }')),
        ['validation.tasks[1].kind = "needle": the same as validation.tasks[0].kind; put the lengths into one task'],
    ),
    "standard task that is there twice": (
        ("[training]", TASKS.format('{ kind = "standard", names = ["a", "b"] }, { kind = "standard", names = ["b"] }')),
        ['validation.tasks[1].names = "b": the same as validation.tasks[0].names; name each task once'],
    ),
    "validation tasks that measure nothing": (
        ("[training]", TASKS.format('{ kind = "standard" }, { kind = "needle" }')),
        [
            'validation.tasks[0].names: required with kind = "standard"; add it, for example names = '
            '["glm46_next_line"]',
            'validation.tasks[1].lengths: required with kind = "needle"; add it, for example lengths = [4096]',
        ],
    ),
    "lengths of a standard task": (
        ("[training]", TASKS.format('{ kind = "standard", names = ["a"], lengths = [64] }')),
        [
            "validation.tasks[0].lengths = [64]: has no effect without validation.tasks[0].kind = \"position\" or "
            '"needle"; set that, or remove validation.tasks[0].lengths',
        ],
    ),
    "validation task between two validations": (
        ("[training]", TASKS.format('{ kind = "needle", lengths = [64], freq = 150 }')),
        ["validation.tasks[0].freq = 150: must be a multiple of validation.freq = 100; take 200"],
    ),
    "validation task beyond the positions": (
        ("[training]", TASKS.format('{ kind = "position", lengths = [256, 4096] }')),
        [
            "validation.tasks[0].lengths = [256, 4096]: longer than model.max_position_embeddings = 2048; take lengths "
            "up to that, or raise it",
        ],
    ),
    "depths of a task without a needle": (
        ("[training]", TASKS.format('{ kind = "position", lengths = [64], depths = [0.5] }')),
        [
            'validation.tasks[0].depths = [0.5]: has no effect without validation.tasks[0].kind = "needle"; set that, '
            "or remove validation.tasks[0].depths",
        ],
    ),
    "chats that are cut, that see each other, and are longer than a row": (
        ('path = "data/a"', f'path = "data/a"\n{CHATS}'),
        [
            'data.sources[0].packing = "concatenate": cuts chats between rows; set packing = "best_fit"',
            "data.document_mask = false: the chats of data.sources[0] in a row would read each other; set it to true",
            "data.sources[0].recipe.max_tokens = 200: longer than the shortest rows that read it, 128 tokens, and a "
            "document of chats must fit into a row; lower it to 128, or raise seq_len",
        ],
    ),
    "chats of any length": (
        ('path = "data/a"', 'path = "data/a"\npacking = "best_fit"\nrecipe = { input = ["a"], format = "alpaca" }'),
        [
            "data.document_mask = false: the chats of data.sources[0] in a row would read each other; set it to true",
            "data.sources[0].recipe.max_tokens: absent, and chats need it; set it to at most 128, the shortest rows",
        ],
    ),
    "keys of text for chats": (
        ('path = "data/a"', 'path = "data/a"\nrecipe = { input = ["a"], history = "last" }'),
        [
            'data.sources[0].recipe.history = "last": has no effect without data.sources[0].recipe.format = "messages" '
            'or "sharegpt" or "prompt_completion" or "alpaca"; set that, or remove data.sources[0].recipe.history',
        ],
    ),
    "unknown validation task": (
        ("[training]", TASKS.format('{ kind = "needles", lengths = [64] }')),
        ["validation.tasks[0].kind = \"needles\": must be 'position', 'needle' or 'standard'; did you mean 'needle'?"],
    ),
    "unknown key of another section": (
        ("steps = 10", "steps = 10\nlog_freq = 5"),
        ["training.log_freq: unknown key; did you mean 'metrics.log_freq'?"],
    ),
    "unknown key like no other": (
        ("steps = 10", "steps = 10\nzzz = 5"),
        [
            "training.zzz: unknown key; valid keys are local_batch_size, global_batch_size, seq_len, tokens, steps, "
            "max_norm, max_skipped_steps, spike_sigmas, spike_window, max_rollbacks, dtype, mixed_precision_param, "
            "mixed_precision_reduce, parameter_offload, gc_freq"
        ],
    ),
    "profile and warm-up longer than the steps between profiles": (
        ("[training]", "[profiling]\nenable_profiling = true\nprofile_freq = 3\n[training]"),
        [
            "profiling.profile_freq = 3: must be at least profiling.profiler_warmup + profiling.profiler_active = 4; "
            "raise it, or lower one of them",
        ],
    ),
    "run without a profiled step": (
        ("[training]", "[profiling]\nenable_profiling = true\n[training]"),
        [
            "profiling.profile_freq = 100: no step would be profiled, because the run ends at training.steps = 10; "
            "lower it to at most 10",
        ],
    ),
    "profiled rank named twice": (
        ("[training]", "[profiling]\nranks = [1, 1]\n[training]"),
        ["profiling.ranks = [1, 1]: names a rank twice; name each once"],
    ),
    "no profiled rank": (
        ("[training]", "[profiling]\nranks = []\n[training]"),
        [("profiling.ranks = []: ", "at least 1")],
    ),
    "unknown section": (
        ("[training]", "[trainning]"),
        [
            "trainning: unknown key; did you mean 'training'?",
        ],
    ),
    "unknown key in an array of tables": (
        ('path = "data/a"', 'path = "data/a"\nweigth = 2.0'),
        ["data.sources[0].weigth: unknown key; did you mean 'weight'?"],
    ),
    "string for integer": (
        ("seq_len = 128", 'seq_len = "128"'),
        ['training.seq_len = "128": must be a valid integer; write 128 without quotes'],
    ),
    "boolean for integer": (
        ("seq_len = 128", "seq_len = true"),
        ["training.seq_len = true: must be a valid integer (Tokens per sequence)"],
    ),
    "whole float for integer": (
        ("steps = 10", "steps = 1e6"),
        ["training.steps = 1000000.0: must be a valid integer; write 1_000_000"],
    ),
    "broken float for integer": (
        ("steps = 10", "steps = 10.5"),
        ["training.steps = 10.5: must be a valid integer (Training budget of this run in optimizer steps)"],
    ),
    "array for integer": (
        ("seq_len = 128", "seq_len = [128]"),
        ["training.seq_len = [128]: must be a valid integer (Tokens per sequence)"],
    ),
    "date for integer": (
        ("seq_len = 128", "seq_len = 2026-01-01"),
        ["training.seq_len = 2026-01-01: must be a valid integer (Tokens per sequence)"],
    ),
    "boolean for float": (
        ("[training]", "[optimizer]\nlr = true\n[training]"),
        ["optimizer.lr = true: must be a valid number (Peak learning rate)"],
    ),
    "string for float": (
        ("[training]", '[optimizer]\nlr = "3e-4"\n[training]'),
        ['optimizer.lr = "3e-4": must be a valid number; write 0.0003 without quotes'],
    ),
    "string for boolean": (
        ("[training]", '[compile]\nenable = "True"\n[training]'),
        [('compile.enable = "True": must be a valid boolean', "write true without quotes")],
    ),
    "integer for string": (
        ('path = "data/a"', "path = 3"),
        ['data.sources[0].path = 3: must be a valid string; write "3" with quotes'],
    ),
    "value for table": (
        ("[training]", "job = 3\n[training]"),  # behind the header [model], so it is a key of that
        [
            "model.job: unknown key; valid keys are flavor, tokenizer_path, vocab_size, hidden_size, "
            "num_hidden_layers, first_k_dense_replace, intermediate_size, moe_intermediate_size, n_routed_experts, "
            "num_experts_per_tok, n_shared_experts, n_group, topk_group, norm_topk_prob, routed_scaling_factor, "
            "num_attention_heads, num_key_value_heads, head_dim, use_qk_norm, attention_bias, partial_rotary_factor, "
            "rope_theta, rope_scaling, sliding_window, rms_norm_eps, initializer_range, max_position_embeddings, "
            "num_nextn_predict_layers"
        ],
    ),
    "table for array of tables": (
        ("[[data.sources]]", "[data.sources]"),
        [
            'data.sources = {name = "a", path = "data/a"}: must be an array; write a table [[data.sources]] for each '
            "entry, or on the command line --data.sources '[{name = ...}]'"
        ],
    ),
    "below the range": (
        ("seq_len = 128", "seq_len = 1"),
        ["training.seq_len = 1: must be greater than or equal to 2 (Tokens per sequence)"],
    ),
    "at an open bound": (
        ("[training]", "[optimizer]\nbeta1 = 1.0\n[training]"),
        ["optimizer.beta1 = 1.0: must be less than 1 (AdamW: decay of the first moment)"],
    ),
    "infinite": (
        ("[training]", "[moe]\nbias_clamp = inf\n[training]"),
        ["moe.bias_clamp = inf: must be a finite number (proportional: largest absolute value of the bias)"],
    ),
    "not a number": (
        ("[training]", "[optimizer]\nlr = nan\n[training]"),
        [
            "optimizer.lr = nan: must be a finite number (Peak learning rate)",
        ],
    ),
    "choice in the wrong case": (
        ("[training]", '[optimizer]\nname = "muon"\n[training]'),
        ["optimizer.name = \"muon\": must be 'Muon' or 'AdamW'; did you mean 'Muon'?"],
    ),
    "choice of the wrong type": (
        ("[training]", "[optimizer]\nstate_dtype = 8\n[training]"),
        ["optimizer.state_dtype = 8: must be 'float32', 'bfloat16' or '8bit' (Type of the optimizer states)"],
    ),
    "pattern": (
        ('name = "a"', 'name = "a b"'),
        [
            "data.sources[0].name = \"a b\": must match pattern '^[A-Za-z0-9_.-]+$' (Name of the source in logs and "
            "metrics)",
        ],
    ),
    "missing in an array of tables": (
        ('path = "data/a"', ""),
        [
            "data.sources[0].path: required, but absent (Folder with manifest.json and the shards that "
            "'python -m glm46 prepare' wrote)"
        ],
    ),
    "missing flavor": (
        ('flavor = "debug"', ""),
        ["model.flavor: required, but absent; one of GLM-4.6, GLM-4.5, GLM-4.5-Air, 100B, 15B, 100M, debug"],
    ),
    "missing model": (
        ('[model]\nflavor = "debug"', ""),
        ["model.flavor: required, but absent; one of GLM-4.6, GLM-4.5, GLM-4.5-Air, 100B, 15B, 100M, debug"],
    ),
    "unknown flavor": (
        ('flavor = "debug"', 'flavor = "glm-4.5-air2"'),
        [
            'model.flavor = "glm-4.5-air2": no such preset; did you mean \'GLM-4.5-Air\'? Presets: GLM-4.6, GLM-4.5, '
            "GLM-4.5-Air, 100B, 15B, 100M, debug"
        ],
    ),
    "schedule of the wrong type": (
        ("[training]", '[mtp]\nloss_weight = "high"\n[training]'),
        [('mtp.loss_weight = "high": ', "finite number, or points [[tokens, value], ...]")],
    ),
    "schedule that is not a number": (
        ("[training]", "[mtp]\nloss_weight = nan\n[training]"),
        [("mtp.loss_weight = nan: ", "finite number, or points [[tokens, value], ...]")],
    ),
    "schedule as one point": (
        ("[training]", "[mtp]\nloss_weight = [0, 0.3]\n[training]"),
        [("mtp.loss_weight = [0, 0.3]: ", "points [[tokens, value], ...]")],
    ),
    "schedule with a long point": (
        ("[training]", "[mtp]\nloss_weight = [[0, 0.3, 1]]\n[training]"),
        [("mtp.loss_weight = [[0, 0.3, 1]]: ", "points [[tokens, value], ...]")],
    ),
    "schedule with float tokens": (
        ("[training]", "[mtp]\nloss_weight = [[0, 0.3], [15e12, 0.1]]\n[training]"),
        [("mtp.loss_weight = [[0, 0.3], [15000000000000.0, 0.1]]: ", "integer tokens >= 0")],
    ),
    "schedule that goes back": (
        ("[training]", "[mtp]\nloss_weight = [[5, 0.3], [1, 0.1]]\n[training]"),
        [("mtp.loss_weight = [[5, 0.3], [1, 0.1]]: ", "integer tokens >= 0 in ascending order")],
    ),
    "negative rate": (
        ("[training]", "[moe]\nbias_update_rate = [[0, 0.1], [5, -0.1]]\n[training]"),
        ["moe.bias_update_rate = [[0, 0.1], [5, -0.1]]: value -0.1: must be at least 0"],
    ),
    "negative weights": (
        ("[training]", "[moe]\nz_loss_weight = -0.1\nsequence_aux_loss_weight = [[0, 0.1], [5, -0.1]]\n[training]"),
        [
            "moe.sequence_aux_loss_weight = [[0, 0.1], [5, -0.1]]: value -0.1: must be at least 0",
            "moe.z_loss_weight = -0.1: must be at least 0",
        ],
    ),
    "temperature of zero": (
        ("[training]", "[moe]\nrouter_temperature = 0\n[training]"),
        ["moe.router_temperature = 0.0: must be greater than 0"],
    ),
    "no budget": (
        ("steps = 10", ""),
        [("training.tokens, training.steps: ", "absent", "set one of them")],
    ),
    "two budgets": (
        ("steps = 10", "steps = 10\ntokens = 99"),
        [("training.tokens = 99, training.steps = 10: ", "both given", "remove one of them")],
    ),
    "no source": (
        ('[[data.sources]]\nname = "a"\npath = "data/a"', ""),
        ["data.sources: no source to train on; add a [[data.sources]] table with name and path"],
    ),
    "the same name twice": (
        ('path = "data/a"', 'path = "data/a"\n[[data.sources]]\nname = "a"\npath = "data/b"'),
        ['data.sources[1].name = "a": the same as data.sources[0].name; give each its own'],
    ),
    "the same path twice": (
        ('path = "data/a"', 'path = "data/a"\n[[data.sources]]\nname = "b"\npath = "data/a"'),
        ['data.sources[1].path = "data/a": the same as data.sources[0].path; raise the weight of one instead'],
    ),
    "batch that does not divide": (
        ("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = 10"),
        [
            "training.global_batch_size = 10: must be a multiple of 4 (training.local_batch_size = 4 times 1 "
            "data-parallel rank); take 8 or 12"
        ],
    ),
    "ramp below a micro-batch": (
        ("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = [[0, 2], [99, 8]]"),
        [
            "training.global_batch_size = [[0, 2.0], [99, 8.0]]: 2 sequences are less than one micro-batch, 4 "
            "(training.local_batch_size = 4 times 1 data-parallel rank); start the ramp higher or lower "
            "local_batch_size"
        ],
    ),
    "warm-up without end": (
        ("steps = 10\nseq_len = 128", "tokens = 1000\nseq_len = 128\n[lr_scheduler]\nwarmup_tokens = 1000"),
        [
            "lr_scheduler.warmup_tokens = 1000: the schedule ends at 1000 tokens, before its peak; warm up for fewer "
            "tokens, or raise training.tokens or lr_scheduler.total_tokens"
        ],
    ),
    "decay inside the warm-up": (
        (
            "steps = 10\nseq_len = 128",
            "tokens = 1000\nseq_len = 128\n[lr_scheduler]\nwarmup_tokens = 500\ndecay_ratio = 0.9",
        ),
        [
            "lr_scheduler.decay_ratio = 0.9: the decay would begin at 100 tokens, inside the warm-up of 500; lower "
            "decay_ratio or warmup_tokens"
        ],
    ),
    "run beyond its schedule": (
        (
            "steps = 10\nseq_len = 128",
            "tokens = 1000\nseq_len = 128\n[lr_scheduler]\nstart_tokens = 500\ntotal_tokens = 1400",
        ),
        [
            "lr_scheduler.total_tokens = 1400: the schedule ends before this run, which reaches 1500 tokens "
            "(lr_scheduler.start_tokens + training.tokens); raise total_tokens to at least that"
        ],
    ),
    "checkpoints outside": (
        ("[training]", '[checkpoint]\nfolder = "../elsewhere"\n[training]'),
        [('checkpoint.folder = "../elsewhere": ', "an absolute path, or one inside job.dump_folder")],
    ),
    "folders that another key's folder would move": (
        ("[training]", '[metrics]\nsave_tb_folder = "."\n[training]'),
        [('metrics.save_tb_folder = ".": ', "must not hold job.dump_folder = ", "name another folder")],
    ),
    "events among the checkpoints": (
        ("[training]", '[metrics]\nsave_tb_folder = "checkpoint"\n[training]'),
        [('metrics.save_tb_folder = "checkpoint": must not hold checkpoint.folder = ', "name another folder")],
    ),
    "two checkpoints to start from": (
        ("[training]", '[checkpoint]\nload_path = "a"\ninitial_load_path = "b"\n[training]'),
        [('checkpoint.load_path = "a", checkpoint.initial_load_path = "b": both given; ', "remove one of them")],
    ),
    "blocks of 8-bit states cut between ranks": (
        (
            "[training]",
            'moe_intermediate_size = 96\n[optimizer]\nstate_dtype = "8bit"\n[parallelism]\ntensor_parallel_degree = 2\n'
            "[training]",
        ),
        [
            (
                'optimizer.state_dtype = "8bit": parallelism.tensor_parallel_degree = 2 ',
                "96 columns (model.n_shared_experts * moe_intermediate_size)",
                "multiples of 64 on each rank",
                "take 1 for the degree, or another state_dtype",
            )
        ],
    ),
    "no shard": (
        ("[training]", "[parallelism]\ndata_parallel_shard_degree = 0\n[training]"),
        ["parallelism.data_parallel_shard_degree = 0: must be at least 1, or -1 for all"],
    ),
    "uneven heads": (
        ('flavor = "debug"', 'flavor = "debug"\nnum_attention_heads = 7'),
        ["model.num_attention_heads = 7: must be a multiple of model.num_key_value_heads = 2; take 6 or 8"],
    ),
    "odd rotation": (
        ('flavor = "debug"', 'flavor = "debug"\nhead_dim = 30'),
        [
            (
                "model.partial_rotary_factor = 0.5: rotates 15 of model.head_dim = 30 dimensions",
                "must be an even number of at least 2; take 0.5333333333333333",
            )
        ],
    ),
    "YaRN without the original length": (
        ('flavor = "debug"', 'flavor = "debug"\nrope_scaling = { rope_type = "yarn", factor = 2.0 }'),
        [
            (
                'model.rope_scaling.original_max_position_embeddings: required for rope_type = "yarn", but absent',
                "set the length of the previous training",
            )
        ],
    ),
    "more dense layers than layers": (
        ('flavor = "debug"', 'flavor = "debug"\nfirst_k_dense_replace = 5'),
        ["model.first_k_dense_replace = 5: there are only model.num_hidden_layers = 4; lower it"],
    ),
    "uneven groups of experts": (
        ('flavor = "debug"', 'flavor = "debug"\nn_group = 3'),
        ["model.n_group = 3: must divide model.n_routed_experts = 16; take 2 or 4"],
    ),
    "groups of one expert": (
        ('flavor = "debug"', 'flavor = "debug"\nn_group = 16\ntopk_group = 8'),
        ["model.n_group = 16: leaves one expert per group, and a group is scored by its best two; lower it"],
    ),
    "more groups used than there are": (
        ('flavor = "debug"', 'flavor = "debug"\ntopk_group = 2'),
        ["model.topk_group = 2: there are only model.n_group = 1 groups; lower it"],
    ),
    "more experts used than reachable": (
        ('flavor = "debug"', 'flavor = "debug"\nn_group = 8\ntopk_group = 1'),
        [
            "model.num_experts_per_tok = 4: a token can reach only 2 of model.n_routed_experts = 16; lower it",
        ],
    ),
    "expert rows that grouped matmul refuses": (
        ('flavor = "debug"', 'flavor = "debug"\nmoe_intermediate_size = 100'),
        [
            "model.moe_intermediate_size = 100: must be a multiple of 8 for experts in bfloat16, whose rows begin at "
            "multiples of 16 bytes; take 104"
        ],
    ),
    "FP8 kernels in float32": (
        ("[training]", '[float8]\nrecipe_name = "rowwise"\n[training]\nmixed_precision_param = "float32"'),
        [
            'training.mixed_precision_param = "float32": the results of FP8 products are bfloat16 on a GPU; set it to '
            '"bfloat16", or float8.emulate = true'
        ],
    ),
    "FP8 filter that matches nothing": (
        ("[training]", '[float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["output"]\n[training]'),
        [
            'float8.filter_fqns = "output": no linear layer has this in its name, such as '
            "mtp.0.block.mlp.shared_experts.down_proj; take a part of such a name (q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj, down_proj, eh_proj), or remove it"
        ],
    ),
    "FP8 filter that matches everything": (
        ("[training]", '[float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["proj"]\n[training]'),
        [
            'float8.filter_fqns = ["proj"]: excludes all 36 linear layers; exclude fewer, or remove float8.recipe_name'
        ],
    ),
    "FP8 size filter that excludes everything": (
        ("[training]", '[float8]\nrecipe_name = "rowwise"\nfilter_min_features = 100000\n[training]'),
        [
            "float8.filter_min_features = 100000: excludes all 36 linear layers; exclude fewer, or remove "
            "float8.recipe_name"
        ],
    ),
    "widths that FP8 cannot divide": (
        (
            'flavor = "debug"',
            'flavor = "debug"\nmoe_intermediate_size = 104\n[float8]\nrecipe_name = "rowwise_with_gw_hp"\n'
            'experts_recipe_name = "rowwise"',
        ),
        [
            'float8.recipe_name = "rowwise_with_gw_hp": layers.1.mlp.shared_experts.gate_proj has 256 inputs and 104 '
            "outputs on a rank, and FP8 products need multiples of 16; set float8.filter_fqns = "
            '["gate_proj", "up_proj", "down_proj"]',
            'float8.experts_recipe_name = "rowwise": experts map model.hidden_size = 256 to '
            "model.moe_intermediate_size = 104, and its products need multiples of 16; remove experts_recipe_name",
        ],
    ),
    "widths that blocks of MXFP8 cannot divide": (
        (
            'flavor = "debug"',
            'flavor = "debug"\nmoe_intermediate_size = 112\n[float8]\nrecipe_name = "rowwise_with_gw_hp"\n'
            'experts_recipe_name = "mxfp8"',
        ),
        [
            'float8.experts_recipe_name = "mxfp8": experts map model.hidden_size = 256 to '
            "model.moe_intermediate_size = 112, and its products need multiples of 32; remove experts_recipe_name",
        ],
    ),
    "tokens that FP8 cannot divide": (
        ("seq_len = 128", 'seq_len = 130\n[float8]\nrecipe_name = "tensorwise"'),
        [
            "training.seq_len = 130: 130 tokens of a micro-batch on a rank, and weight gradients of "
            'float8.recipe_name = "tensorwise" need a multiple of 16; take 144 or change training.local_batch_size, '
            'or set float8.recipe_name = "rowwise_with_gw_hp"'
        ],
    ),
    "FP8 gather of scales per row": (
        (
            "[training]",
            '[float8]\nrecipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true\n[training]',
        ),
        [
            "float8.enable_fsdp_float8_all_gather = true: has no effect without float8.recipe_name = \"tensorwise\"; "
            "set that, or remove float8.enable_fsdp_float8_all_gather"
        ],
    ),
    "states on a disk without a folder": (
        ("[training]", '[optimizer]\nstate_offload = "nvme"\n[training]'),
        [
            'optimizer.state_offload = "nvme": needs a folder on a local disk; set optimizer.state_offload_folder',
        ],
    ),
    "sequence beyond the positions": (
        ("seq_len = 128", "seq_len = 4096"),
        [
            "training.seq_len = 4096: longer than model.max_position_embeddings = 2048; shorten it, or raise "
            "max_position_embeddings (and rope_theta with it)"
        ],
    ),
    "axis that splits unevenly": (
        ("[training]", "[parallelism]\nexpert_parallel_degree = 3\n[training]"),
        ["parallelism.expert_parallel_degree = 3: must divide model.n_routed_experts = 16; take 2 or 4"],
    ),
    "ranks that share no key heads evenly": (
        (
            'flavor = "debug"',
            'flavor = "debug"\nnum_attention_heads = 12\nnum_key_value_heads = 6\n'
            "[parallelism]\ntensor_parallel_degree = 4",
        ),
        [
            "parallelism.tensor_parallel_degree = 4 with model.num_key_value_heads = 6: must divide it or be a "
            "multiple of it; take 2"
        ],
    ),
    "parts of a key head that are uneven": (
        (
            'flavor = "debug"',
            'flavor = "debug"\nnum_attention_heads = 16\nhead_dim = 36\n[parallelism]\ntensor_parallel_degree = 16',
        ),
        [
            "parallelism.tensor_parallel_degree = 16 with model.head_dim = 36: must leave equal parts of 2 key heads; "
            "take 8"
        ],
    ),
    "more stages than layers": (
        ("[training]", "[parallelism]\npipeline_parallel_degree = 8\n[training]"),
        ["parallelism.pipeline_parallel_degree = 8: there are only model.num_hidden_layers = 4 layers; lower it"],
    ),
    "more stages than layers because of two on each rank": (
        (
            "[training]",
            '[parallelism]\npipeline_parallel_degree = 3\npipeline_parallel_schedule = "DualPipeV"\n[training]',
        ),
        [
            "parallelism.pipeline_parallel_degree = 3 with 2 stages each: there are only model.num_hidden_layers = 4 "
            "layers; lower it"
        ],
    ),
    "stages that the schedule does not have": (
        (
            "[training]",
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_stages_per_rank = 2\n[training]",
        ),
        [
            (
                "parallelism.pipeline_parallel_stages_per_rank = 2: schedule 1F1B needs 1",
                "remove the key, or use Interleaved1F1B or InterleavedZeroBubble",
            )
        ],
    ),
    "split backward of freed weights": (
        (
            "[training]",
            '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n'
            'fsdp_reshard_after_forward = "always"\n[training]',
        ),
        [
            (
                'parallelism.fsdp_reshard_after_forward = "always": schedule ZBVZeroBubble splits backward',
                'use "default" or "never"',
            )
        ],
    ),
}  # fmt: skip


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
    (old, new), expected = BAD[name]
    assert SOUND.count(old) == 1
    faults = faults_of(SOUND.replace(old, new), tmp_path)
    assert len(faults) == len(expected)
    for fault, message in zip(faults, expected, strict=True):
        if isinstance(message, str):
            assert fault == f"run.toml: {message}"
        else:  # key and value in front, then the rest of what the message must hold: the rule and the remedy
            key_and_value, *others = message
            assert fault.startswith(f"run.toml: {key_and_value}") and all(part in fault for part in others), fault


_REMEDY = re.compile(r"(?:set|take|use|add) ([a-z_0-9]+(?:\.[a-z_0-9]+)+) = (\"[^\"]*\"|\[[^\]]*\]|[\w.+-]+)")
"""A remedy that states a key with its value."""
_OWN_VALUE = re.compile(r"run.toml: ([\w.]+) = .*; take ([\d_.]+|\"[^\"]*\")(?: or .*)?$")


@pytest.mark.parametrize("name", BAD)
def test_a_stated_remedy_is_one(name, tmp_path):
    """The value that a message states ends its fault and brings no other one."""
    text = SOUND.replace(*BAD[name][0])
    faults = faults_of(text, tmp_path)
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
        "run.toml: model.num_attention_heads = 7: must be a multiple of model.num_key_value_heads = 2; take 6 or 8",
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


def test_batch_is_checked_against_the_processes(tmp_path):
    text = SOUND.replace("steps = 10", "steps = 10\nlocal_batch_size = 4\nglobal_batch_size = 12")
    text = text.replace("[training]", "n_routed_experts = 12\n[training]")  # which 3 ranks divide
    (tmp_path / "sound.toml").write_text(text)
    assert load_config(tmp_path / "sound.toml", world_size=3).training.global_batch_size == 12
    (fault,) = faults_of(text, tmp_path, world_size=2)
    assert "must be a multiple of 8 (training.local_batch_size = 4 times 2 data-parallel ranks); take 8 or 16" in fault
    (fault,) = faults_of(text, tmp_path, world_size=4)
    assert fault.endswith("; take 16")


def test_profiled_ranks_are_checked_against_the_processes(tmp_path):
    text = SOUND.replace("[training]", "[profiling]\nranks = [0, 4]\n[training]")
    assert faults_of(text, tmp_path, world_size=4) == [
        "run.toml: profiling.ranks = [0, 4]: the run has 4 processes, so its last rank is 3; name ranks up to that"
    ]


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
        ("Interleaved1F1B", 2, 3, None), ("Interleaved1F1B", 2, 5, "a multiple of 2"), ("Interleaved1F1B", 2, 6, None),
        ("InterleavedZeroBubble", 2, 7, "a multiple of 2"),
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
    assert (
        "a step of 5 micro-batches of 1 sequence; schedule Interleaved1F1B over 2 ranks needs a multiple of 2" in fault
    )
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--model.num_hidden_layers=1000000000", "must be less than or equal to 1024"),
        ("--model.num_nextn_predict_layers=1000000000", "must be less than or equal to 1024"),
        ("--model.n_routed_experts=1000000000000", "must be less than or equal to 65536"),
        ("--parallelism.data_parallel_shard_degree=1000000000000", "16 experts of a layer sharded over 1000000000000"),
        ("--parallelism.expert_parallel_degree=1000000000", "must divide model.n_routed_experts = 16"),
        ("--validation.steps=0", "validation.steps = 0: must be at least 1, or -1 for all"),
        ("--job.dump_folder=s3://bucket/x", 'job.dump_folder = "s3://bucket/x": is a URL'),
        ("--checkpoint.initial_load_path=s3://bucket/x", 'checkpoint.initial_load_path = "s3://bucket/x": is a URL'),
        ("--model.tokenizer_path=https://a.b/c", 'model.tokenizer_path = "https://a.b/c": is a URL'),
    ],
)
def test_a_slip_of_the_hand_is_answered_at_once(override, said, tmp_path):
    """Nothing that rules and planner compute grows with a number that a person may write."""
    began = time.process_time()
    text = SOUND.replace("[[data", "[validation]\nenable = true\n[[data")
    faults = faults_of(text, tmp_path, override)
    assert said in faults[0] and time.process_time() - began < 2


@pytest.mark.parametrize(("number", "noun", "text"), [(1, "step", "1 step"), (0, "step", "0 steps"),
                                                      (2, "process", "2 processes"), (1, "process", "1 process"),
                                                      (4096, "rank", "4,096 ranks")])  # fmt: skip
def test_a_number_agrees_with_its_noun(number, noun, text):
    assert counted(number, noun) == text
