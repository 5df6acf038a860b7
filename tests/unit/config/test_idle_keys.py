"""A key that a person states has an effect, or is refused; a default that nobody stated never is."""

from pathlib import Path

import pytest

from glm46.commands.prepare import read_recipe
from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config

# Keys, what each needs and the run that lacks it.
IDLE = {
    "optimizer.momentum = 0.95": ("optimizer.name", 'optimizer.name = "AdamW"'),
    "optimizer.adamw_lr = 1e-3": ("optimizer.name", 'optimizer.name = "AdamW"'),
    "moe.bias_ema_decay = 0.9": ("moe.balance", ""),
    "moe.bias_clamp = 2.0": ("moe.balance", 'moe.balance = "none"'),
    "moe.bias_update_rate = 0.1": ('"sign" or "proportional"', 'moe.balance = "none"'),
    "mtp.loss_weight = 0.1": (
        "model.shape.num_nextn_predict_layers above 0", "model.shape.num_nextn_predict_layers = 0"
    ),
    'parallelism.pipeline_parallel_schedule = "1F1B"': ("parallelism.pipeline_parallel_degree above 1", ""),
    'parallelism.expert_exchange = "all_to_all"': ("parallelism.expert_parallel_degree above 1", ""),
    "parallelism.expert_exchange_chunks = 1": ("parallelism.expert_parallel_degree above 1", ""),
    "parallelism.pipeline_parallel_stages_per_rank = 1": ("parallelism.pipeline_parallel_degree above 1", ""),
    "activation_checkpoint.cpu_checkpointing = true": ('activation_checkpoint.mode = "selective" or "full"', ""),
    "activation_checkpoint.every_n_layers = 2": ('activation_checkpoint.mode = "selective" or "full"', ""),
    'activation_checkpoint.recompute = ["experts"]': ('activation_checkpoint.mode = "selective"', ""),
    "checkpoint.interval = 5": ("checkpoint.enable = true", "checkpoint.enable = false"),
    'checkpoint.load_path = "x"': ("checkpoint.enable = true", "checkpoint.enable = false"),
    "checkpoint.load_step = 3": ("checkpoint.enable = true", "checkpoint.enable = false"),
    'checkpoint.node_local_folder = "local"': ("checkpoint.enable = true", "checkpoint.enable = false"),
    "checkpoint.keep_best_k = 2": ("validation.enable = true", ""),
    "checkpoint.keep_every = 2": ("checkpoint.keep_latest_k above 0", "checkpoint.keep_latest_k = 0"),
    "checkpoint.initial_load_model_only = true": ("checkpoint.initial_load_path", ""),
    "checkpoint.initial_load_in_hf = true": ("checkpoint.initial_load_path", ""),
    'checkpoint.initial_load_exclude = ["model.mtp.*"]': (
        "checkpoint.initial_load_in_hf = false",
        'checkpoint.initial_load_path = "hf"\ncheckpoint.initial_load_in_hf = true',
    ),
    "training.parameter_offload = true": ('optimizer.state_offload = "cpu" or "nvme"', ""),
    "training.max_rollbacks = 1": ("checkpoint.enable = true", "checkpoint.enable = false"),
    "validation.freq = 5": ("validation.enable = true", ""),
    "validation.steps = 2": ("validation.enable = true", "validation.enable = false"),
    "model.shape.rope_scaling.beta_fast = 16.0": ('model.shape.rope_scaling.rope_type = "yarn"', "LINEAR"),
    "model.shape.rope_scaling.original_max_position_embeddings = 128": (
        'model.shape.rope_scaling.rope_type = "yarn"', "LINEAR"
    ),
}  # fmt: skip
LINEAR = 'model.shape.rope_scaling.rope_type = "linear"\nmodel.shape.rope_scaling.factor = 2.0'
SOUND = (
    'model.flavor = "debug"\ntraining.steps = 2\ntraining.seq_len = 16\n[[data.sources]]\nname = "a"\npath = "data/a"\n'
)


def write(folder, *lines: str):
    """A sound file with lines of dotted keys before it."""
    path = folder / "run.toml"
    path.write_text("\n".join([*lines, SOUND]))
    return path


@pytest.mark.parametrize("line", IDLE)
def test_key_stated_in_vain_is_refused_with_what_it_needs(line, tmp_path):
    need, switch = IDLE[line]
    path = write(tmp_path, line, switch.replace("LINEAR", LINEAR))
    key, _, value = line.partition(" = ")
    with pytest.raises(UserError) as caught:
        load_config(path)
    (fault,) = caught.value.faults
    assert f"{key} = {value.replace('1e-3', '0.001')}: has no effect without " in fault
    assert need in fault and f"or remove {key}" in fault
    assert load_config(write(tmp_path, switch.replace("LINEAR", LINEAR)))  # the default of the key is never refused


def test_a_stated_off_is_not_in_vain(tmp_path):
    lines = ["checkpoint.enable = false", "training.max_rollbacks = 0", "checkpoint.keep_best_k = 0"]
    assert load_config(write(tmp_path, *lines, "checkpoint.initial_load_model_only = false"))
    assert load_config(write(tmp_path, 'parallelism.expert_exchange = "auto"'))


def test_an_exchange_without_expert_parallelism_is_one_fault(tmp_path):
    with pytest.raises(UserError) as refused:
        load_config(write(tmp_path, 'parallelism.expert_exchange = "deepep"', "model.shape.hidden_size = 264"))
    (said,) = [each for each in refused.value.faults if "expert_exchange" in each]
    assert "has no effect without parallelism.expert_parallel_degree above 1" in said


DEEPEP = [
    ("training.mixed_precision_param", '"float32"', "DeepEP sends BF16; set training.mixed_precision_param"),
    (
        "parallelism.expert_exchange_chunks",
        "2",
        "DeepEP sends all tokens at once; remove parallelism.expert_exchange_c",
    ),
    (
        "activation_checkpoint",
        '{ mode = "selective", cpu_checkpointing = true }',
        'add "exchange" to activation_checkp',
    ),
    ("model.shape.hidden_size", "264", "a multiple of 32 bytes, and model.shape.hidden_size is 264; take 272"),
    ("model.shape.num_experts_per_tok", "33", "at most 32 experts; lower model.shape.num_experts_per_tok"),
]


@pytest.mark.parametrize(("key", "value", "reason"), DEEPEP)
def test_what_deepep_does_not_send_is_refused(key, value, reason, tmp_path):
    lines = "parallelism.expert_parallel_degree = 2", 'parallelism.expert_exchange = "deepep"'
    lines += ('training.mixed_precision_param = "bfloat16"',)
    assert load_config(write(tmp_path, *lines))
    with pytest.raises(UserError) as refused:
        load_config(write(tmp_path, *(line for line in lines if key not in line), f"{key} = {value}"))
    (said,) = [each for each in refused.value.faults if "DeepEP" in each]
    assert 'parallelism.expert_exchange = "deepep": ' in said and reason in said
    assert said.endswith('set parallelism.expert_exchange = "two_level"')


def test_samples_do_not_go_by_deepep():
    path = Path(__file__).parents[3] / "train_configs" / "glm46_rl_grpo.toml"
    stated = ["--parallelism.expert_parallel_degree", "2", "--parallelism.expert_exchange"]
    assert load_config(path, [*stated, "two_level"])
    with pytest.raises(
        UserError, match='most tokens of a micro-batch, and those of samples vary; set .* = "two_level"'
    ):
        load_config(path, [*stated, "deepep"])


def test_command_line_switches_off_what_the_file_sets_up(tmp_path):
    """`--optimizer.name AdamW` tries another rule with the same file; the keys of the first one are not in the way."""
    path = write(tmp_path, "optimizer.momentum = 0.9", "validation.enable = true", "validation.freq = 5")
    config = load_config(path, ["--optimizer.name", "AdamW", "--validation.enable", "false"])
    assert config.optimizer.momentum == 0.95 and config.validation.freq == 100
    (tmp_path / "dumped.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.toml") == config
    with pytest.raises(UserError, match=r"^command line: optimizer.momentum = 0.8: has no effect"):
        load_config(path, ["--optimizer.name", "AdamW", "--optimizer.momentum", "0.8"])
    with pytest.raises(UserError, match=r"run.toml and command line: optimizer.momentum"):
        load_config(write(tmp_path, 'optimizer.name = "AdamW"'), ["--optimizer.momentum", "0.8"])


def test_recipe_is_held_to_the_same_rule(tmp_path):
    with pytest.raises(UserError, match=r'^command line: answer_key = "b": has no effect without verify = "maths"'):
        read_recipe(None, {"input": ["a.txt"], "output": "out", "answer_key": "b"})
    line = 'recipe = { input = ["a.txt"], answer_key = "result" }'
    path = write(tmp_path)
    path.write_text(path.read_text() + line)
    with pytest.raises(UserError, match=r'recipe.answer_key = "result": has no effect without .*verify = "maths"'):
        load_config(path)


def test_the_text_key_of_chats_belongs_to_evaluation_text(tmp_path):
    chats = {"input": ["a.jsonl"], "output": "out", "format": "messages", "max_tokens": 8, "text_key": "question"}
    with pytest.raises(UserError, match=r'text_key = "question": has no effect without format = "text" or decontam'):
        read_recipe(None, chats)
    assert read_recipe(None, chats | {"decontaminate": ["exam.jsonl"]}).text_key == "question"


# Lines of a run, and the message about one of them.
SELECTIVE, FULL = (f'activation_checkpoint.mode = "{mode}"' for mode in ("selective", "full"))
ROW, NTH = "training.local_batch_size = 1", "activation_checkpoint.every_n_layers = 9"
DENSE = "model.shape.first_k_dense_replace = 4", "model.shape.num_nextn_predict_layers = 0"
UNFIT = [
    ((ROW, "parallelism.expert_parallel_degree = 2", "parallelism.expert_exchange_chunks = 2",
      "parallelism.context_parallel_degree = 8", "parallelism.tensor_parallel_degree = 2"),
     r"expert_exchange_chunks = 2: a rank has 1 token per micro-batch; take 1"),
    ((ROW, FULL, NTH), f"{NTH}: the model has 5 layers, of which it would recompute one; take at most 5"),
    ((ROW, FULL, NTH, "parallelism.pipeline_parallel_degree = 2", "training.global_batch_size = 8"),
     f"{NTH}: a pipeline stage has 3 layers, of which it would recompute one; take at most 3"),
    ((SELECTIVE, "activation_checkpoint.recompute = ['experts', 'experts']"),
     r'recompute = \["experts", "experts"\]: "experts" is there twice; remove one'),
    ((SELECTIVE, "activation_checkpoint.recompute = ['exchange']"),
     r'no rows come from .* with parallelism.expert_parallel_degree = 1; remove "exchange"'),
    ((SELECTIVE, "activation_checkpoint.recompute = ['mlp']"),
     r"activation_checkpoint.recompute\[0\].*core_attn.*experts.*exchange"),
    ((*DENSE, "parallelism.expert_parallel_degree = 2"), "expert_parallel_degree = 2: no layer has experts .* take 1"),
    ((*DENSE, SELECTIVE, "activation_checkpoint.recompute = ['experts']"),
     'recompute = .* no layer has experts with model.shape.first_k_dense_replace = 4; remove "experts"'),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), UNFIT)
def test_a_key_that_does_not_fit_the_others_is_refused(lines, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_config(write(tmp_path, *lines))
