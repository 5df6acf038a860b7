"""What [finetune.distillation] refuses: each message has the key, its value and what to write instead."""

import pytest

from glm46.config.errors import UserError
from tests.unit.config.test_preference import LORA, START, changed, load

TEACHER = 'load_path = "teacher"'
OF_TEACHER = (
    'format = "preference"', 'format = "messages"', "[finetune.preference]\nbeta = 0.1",
    f"[finetune.distillation]\n{TEACHER}",
)  # fmt: skip
# Old and new text; what the message says.
BAD = {
    "beta": ((TEACHER, TEACHER + "\nbeta = 1.5"), ["finetune.distillation.beta = 1.5", "less than or equal to 1"]),
    "temperature": ((TEACHER, TEACHER + "\ntemperature = 0.0"), ["distillation.temperature = 0", "greater than 0"]),
    "weight": ((TEACHER, TEACHER + "\nsft_weight = -1.0"), ["distillation.sft_weight = -1"]),
    "no tokens": ((TEACHER, TEACHER + "\ntop_k = 0"), ["distillation.top_k = 0"]),
    "more tokens than there are": (
        (TEACHER, TEACHER + "\ntop_k = 8193"), ["distillation.top_k = 8193", "8,192 tokens; lower it"],
    ),
    "no teacher": ((TEACHER, ""), ["[finetune.distillation]: load_path is absent", "its teacher", "name a teacher"]),
    "no teacher of new adapters": (
        (TEACHER, "", "[training]", LORA + "[training]"), ["learns nothing", "set sft_weight above 0"],
    ),
    "shape of no folder": (
        (TEACHER, 'sft_weight = 1.0\nflavor = "GLM-4.6"'), ["distillation.flavor", "no effect without", "load_path"],
    ),
    "unknown shape": ((TEACHER, TEACHER + '\nflavor = "GLM-9"'), ["flavor = \"GLM-9\": no such preset", "GLM-4.6"]),
    "other tokens": (
        (TEACHER, TEACHER + '\nflavor = "GLM-4.6"'),
        ['flavor = "GLM-4.6": has 151,552 tokens, and the student 8,192', "student's tokenizer"],
    ),
    "a shape that the layout splits": (
        ('flavor = "debug"', 'flavor = "debug"\nvocab_size = 154880', "[training]",
         "[parallelism]\ntensor_parallel_degree = 3\n[training]", "seq_len = 16", "seq_len = 18", TEACHER,
         TEACHER + '\nflavor = "GLM-4.7-Flash"'),
        ["for the teacher"],
    ),
    "stored values of a teacher that is loaded": (
        (TEACHER, TEACHER + '\nstored_path = "values"'),
        ["distillation.stored_path", "has no effect with", 'load_path = "teacher"', "is loaded; remove"],
    ),
    "shape of stored values": (
        (TEACHER, 'stored_path = "values"\nflavor = "GLM-4.6"'),
        ["distillation.flavor", "no effect without", "load_path"],
    ),
    "a key that earlier versions had": (
        (TEACHER, TEACHER + "\nload_in_hf = false"),
        ["finetune.distillation.load_in_hf: unknown key; the folder itself tells its format; remove it"],
    ),
    "values on the hub": ((TEACHER, 'stored_path = "hf://a/b"'), ["stored_path", "is a URL; give a path"]),
    "pairs too": ((TEACHER, TEACHER + "\n[finetune.preference]\nbeta = 0.1", '"messages"', '"preference"'),
                  ["[finetune.preference], [finetune.distillation]: both given; remove one"]),
    "MTP": (("num_nextn_predict_layers = 0", ""), ["model.num_nextn_predict_layers = 1: must be 0", "distillation"]),
    "no start of a continued run": (
        (START, 'load_path = "other/checkpoint/step-000002"', TEACHER, "sft_weight = 1.0"),
        ["checkpoint.initial_load_path: absent", "the frozen network of [finetune.distillation]", "name the weights"],
    ),
    "part of the start": (
        (START, START + '\ninitial_load_exclude = ["lm_head*"]', TEACHER, "sft_weight = 1.0"),
        ["initial_load_exclude", "[finetune.distillation]", "remove checkpoint.initial"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_teacher_is_refused_in_one_message(name, tmp_path):
    change, said = BAD[name]
    with pytest.raises(UserError) as caught:
        load(changed(*OF_TEACHER, *change), tmp_path)
    fault = caught.value.faults[0]
    assert all(part in fault for part in said), caught.value.faults
    assert name == "a shape that the layout splits" or len(caught.value.faults) == 1, caught.value.faults


@pytest.mark.parametrize(("change", "has_teacher", "keeps_start"), [
    ((), True, False), ((TEACHER, "sft_weight = 1.0"), True, True), ((TEACHER, 'stored_path = "values"'), False, False),
    ((TEACHER, 'stored_path = "values"', "[training]", LORA + "[training]"), False, True),
    (("[training]", LORA + "[training]"), True, True),
    ((TEACHER, "sft_weight = 1.0", "[training]", LORA + "[training]"), False, True),
    ((TEACHER, "", "[training]", LORA + "initial_load_path = 'peft'\n[training]"), False, True),
])  # fmt: skip
def test_a_sound_one_says_who_teaches(change, has_teacher, keeps_start, tmp_path):
    config = load(changed(*OF_TEACHER, *change), tmp_path)
    assert (config.teacher is not None) == has_teacher and config.keeps_its_start == keeps_start
    if config.teacher is not None:
        start = config.teacher.checkpoint.initial_load_path
        assert start == (config.distillation.load_path or config.checkpoint.initial_load_path)
        assert config.teacher.adapter is None and config.teacher.finetune is None
