"""Tasks of lm-eval: the numbers of its own `hf` backend, resumed calls, refused tasks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.engine.evaluation import results
from glm46.engine.evaluation.answers import EvaluationPrompt, has_ended, text_of
from glm46.engine.inference.sampling import Sampling
from glm46.operate.launch.train_rank import train
from tests.builders import small_config

pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
from glm46.engine.evaluation.standard import find_tasks

NAMES = ["next_line", "documentation", "rest_of_line"]
FOLDER = Path(__file__).parents[3] / "lm_eval_tasks"
OUR_TASKS = ["--task-folder", str(FOLDER), "--tasks", ",".join(NAMES)]


@pytest.fixture(scope="module")
def exported(source_folder, tmp_path_factory) -> str:
    """A Hugging Face folder; its texts need several windows."""
    folder = tmp_path_factory.mktemp("run")
    model = {"max_position_embeddings": 512}
    config = small_config(source_folder, folder, model=model, checkpoint={"last_save_in_hf": True})
    assert train(config) == 0
    return str(max((folder / "huggingface").glob("step-*")))


def evaluate(exported: str, output: Path, *argv: str) -> dict:
    assert main(["evaluate", "--model", exported, "--output", str(output), *argv]) == 0
    return json.loads((output / "evaluation.json").read_text())


def of_hf(exported: str) -> tuple[dict, dict]:
    """What lm-eval's own backend says: results by task, and answers by task and document."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=exported, device="cpu", dtype="float32", batch_size=8)
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found = simple_evaluate(model=model, tasks=NAMES, task_manager=manager)
    answers = {
        (task, one["doc_id"], number): answer
        for task, of_task in found["samples"].items()
        for one in of_task
        for number, answer in enumerate(one["resps"])
    }
    return found["results"], answers


@pytest.mark.slow
def test_numbers_are_those_of_the_hf_backend(exported, tmp_path, monkeypatch, capsys):
    from glm46.engine.evaluation import lm_eval_model

    answered = {}
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        real = getattr(lm_eval_model.LmEvalModel, name)

        def record(self, requests, real=real):
            found = real(self, requests)
            for request, answer in zip(requests, found, strict=True):
                answered[request.task_name, request.doc_id, request.idx] = answer
            return found

        monkeypatch.setattr(lm_eval_model.LmEvalModel, name, record)
    found = evaluate(exported, tmp_path, *OUR_TASKS)["results"]["standard"]
    wanted, answers = of_hf(exported)
    assert answered.keys() == answers.keys() and len(answers) == 12 * (4 + 1 + 1)
    for key, (theirs,) in answers.items():
        if isinstance(theirs, str):
            assert answered[key] == theirs, key
        else:
            ours, theirs = (pair if isinstance(pair, tuple) else (pair,) for pair in (answered[key], theirs))
            assert ours == pytest.approx(theirs, rel=1e-5), key  # FP32 sums in another order
    for one in found["figures"]:
        assert one["value"] == pytest.approx(wanted[one["task"]][f"{one['metric']},{one['filter']}"], rel=1e-5)
    assert {one["task"] for one in found["figures"]} == set(NAMES)
    assert "next_line" in capsys.readouterr().out


@pytest.fixture(scope="module")
def marking(exported, tokenizer, tmp_path_factory) -> str:
    """The model with another head, so that it writes many special tokens, and with a tokenizer.json that marks one more
    of them as no text."""
    folder = tmp_path_factory.mktemp("marking") / "model"
    shutil.copytree(exported, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, usual, of_special in (("model.embed_tokens.weight", 1.0, 1.0), ("lm_head.weight", 0.2, 0.4)):
        scale = torch.full((len(weights[name]), 1), usual)
        scale[list(tokenizer.special.values())] = of_special
        random = scale * torch.randn(weights[name].shape, generator=generator)
        weights[name] = random.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] |= token["content"] == "</tool_call>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def recorded(monkeypatch) -> list:
    """Contexts, and what was written after them, by any backend of lm-eval."""
    from lm_eval.models.huggingface import HFLM

    from glm46.engine.evaluation.lm_eval_model import LmEvalModel

    found = []
    for backend in (HFLM, LmEvalModel):
        real = backend.generate_until

        def record(self, requests, *rest, real=real, **more):
            texts = real(self, requests, *rest, **more)
            found.append(sorted((one.args[0], text) for one, text in zip(requests, texts, strict=True)))
            return texts

        monkeypatch.setattr(backend, "generate_until", record)
    return found


_PREFIX = 'gen_prefix: " It is "\n'
_TASK = """task: ends
custom_dataset: !function local_data.rest_of_line
test_split: test
fewshot_split: test
output_type: generate_until
description: "Be {{target | length}} short."
doc_to_text: "{{context[-60:]}}"
doc_to_target: "{{target}}x"
generation_kwargs: {until: %s, max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "until", "more", "theirs"), [
    ([], [], "", {}),
    ([], ["_"], "", {}),  # inside of a token that is no text
    ([], ["\n", "|"], "", {"system_instruction": "Be brief."}),
    (["--apply-chat-template"], ["\n\n"], "", {}),
    (["--apply-chat-template", "--fewshot", "2"], ["image"], "", {"num_fewshot": 2}),
    (["--apply-chat-template", "--fewshot", "2"], [], "",
     {"num_fewshot": 2, "system_instruction": "Say é <think> /nothink."}),
    (["--apply-chat-template", "--fewshot", "1"], [], _PREFIX, {"num_fewshot": 1}),
    (["--apply-chat-template", "--thinking", "--fewshot", "1"], [], "", {"num_fewshot": 1}),
    (["--apply-chat-template", "--thinking"], [], _PREFIX, {}),
])  # fmt: skip
def test_chats_and_texts_are_those_of_the_hf_backend(marking, recorded, tmp_path, options, until, more, theirs):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name in ("local_data.py", "rest_of_line.jsonl"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "ends.yaml").write_text(_TASK % json.dumps(until) + more)
    thinking, is_chat = "--thinking" in options, "--apply-chat-template" in options
    system = theirs.get("system_instruction")
    argv = [*options, *(["--system-instruction", system] if system else [])]
    evaluate(marking, tmp_path / "output", "--tasks", str(tmp_path / "ends.yaml"), "--limit", "3", *argv)
    model = HFLM(
        pretrained=marking, device="cpu", dtype="float32", batch_size=1,  # rows of a batch end together in it
        enable_thinking=thinking, think_end_token="</think>" if thinking else None,
    )  # fmt: skip
    simple_evaluate(
        model=model, tasks=["ends"], task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        limit=3, apply_chat_template=is_chat, **theirs,
    )  # fmt: skip
    ours, wanted = recorded
    assert [context for context, _ in ours] == [context for context, _ in wanted]
    if thinking and not more:
        # A thought that has not ended is no answer, where lm-eval takes it for one.
        closed = [(our, text) for (_, our), (_, text) in zip(ours, wanted, strict=True) if our]
        assert all(our == text for our, text in closed)
    else:
        assert ours == wanted and any(text for _, text in ours)


@pytest.mark.parametrize(("tokens", "thinks", "until", "text"), [
    ("<think>a.\n\nb</think>\nc.\n\nd", True, ["\n\n"], "c."),
    ("<think>a.\n\nb", True, ["\n\n"], ""),
    ("<think>a</think>\nb</think> c", True, [], "c"),
    ("\nc.\n\nd", True, ["\n\n"], "c."),
    ("a.\n\nb</think>c", False, ["\n\n"], "a."),
    ("a<|user|>b", False, [], "ab"),
])  # fmt: skip
def test_stop_strings_and_thoughts(tokenizer, tokens, thinks, until, text):
    from lm_eval.models.utils import postprocess_generated_text

    ids = tokenizer.encode_with_special(tokens).tolist()
    prompt = EvaluationPrompt((1,), 9, tuple(until), Sampling(0.0), 0, thinks)
    assert text_of(tokenizer, ids, prompt) == text
    assert has_ended(tokenizer, ids, prompt) is (until != [] and (not thinks or tokens != "<think>a.\n\nb"))
    if text and "<|" not in tokens:
        assert postprocess_generated_text(tokens, until, "</think>" if thinks else None) == text


@pytest.mark.slow
def test_a_second_call_computes_only_what_is_missing(exported, tmp_path, monkeypatch):
    first = evaluate(exported, tmp_path, *OUR_TASKS, "--limit", "3")
    added = []
    real = results.Results.add
    monkeypatch.setattr(results.Results, "add", lambda self, key, row: (added.append(key), real(self, key, row)))
    assert evaluate(exported, tmp_path, *OUR_TASKS, "--limit", "3") == first and not added
    evaluate(exported, tmp_path, *OUR_TASKS[:2], "--tasks", "next_line,rest_of_line", "--limit", "4")
    assert sorted(key.partition("/")[0] for key in added) == ["score"] * 4 + ["text"]


def write_task(folder: Path, name: str, **keys: str) -> Path:
    lines = (FOLDER / "next_line.yaml").read_text().replace("task: next_line", f"task: {name}")
    (folder / "local_data.py").write_text((FOLDER / "local_data.py").read_text())
    (folder / "next_line.jsonl").write_text((FOLDER / "next_line.jsonl").read_text())
    file = folder / f"{name}.yaml"
    file.write_text(lines + "".join(f"{key}: {value}\n" for key, value in keys.items()))
    return file


@pytest.mark.slow
def test_own_task_files_and_folders(exported, tmp_path):
    file = write_task(tmp_path, "mine")
    for tasks in (["--tasks", str(file)], ["--tasks", "mine", "--task-folder", str(tmp_path)]):
        found = evaluate(exported, tmp_path / "output", *tasks, "--limit", "2")["results"]["standard"]
        assert {one["task"] for one in found["figures"]} == {"mine"}


_METRICS = "metric_list: [{metric: %s, aggregation: mean, higher_is_better: true}]"
_FILTERS = _METRICS % "acc" + "\nfilter_list: [{name: f, filter: [%s]}]"


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), [
    (("metric_list", "metric_list: [{metric: mine}]"), ("no aggregation", "aggregation: mean")),
    (("metric_list", "metric_list: [{metric: acc, aggregation: meen}]"), ("metric acc", "unknown aggregation")),
    (("metric_list", _METRICS % "mine"), ("metric mine", "unknown")),
    (("metric_list", "metric_list: [{aggregation: mean}]"), ("metric: acc",)),
    (("metric_list", "metric_list: []"), ("metric_list is empty",)),
    (("metric_list", _FILTERS % "{function: regexx}"), ("Unknown filter 'regexx'",)),
    (("metric_list", _FILTERS % "{function: regex, nope: 1}"), ("'nope'",)),
    (("metric_list", _FILTERS % "{function: regex, regex_pattern: '('}"), ("unterminated",)),
    (("metric_list", "  bad: [\n"), ("ScannerError", "line")),
    (("metric_list", "no_such_key: 1"), ("no_such_key",)),
    (("metric_list", "repeats: many"), ("str",)),
    (("doc_to_text", 'doc_to_text: "{{context"'), ("TemplateSyntaxError",)),
    (("doc_to_text", 'doc_to_text: "{{nothing}}"'), ("'nothing' is undefined",)),
    (("doc_to_text", ""), ("a key that its output_type needs",)),
    (("output_type", "output_type: multi"), ("multi",)),
    (("output_type", ""), ("TypeError",)),
    (("test_split", "test_split: dev"), ("dev",)),
    (("task", ""), ("has no key task",)),
])  # fmt: skip
@pytest.mark.usefixtures("small_task_index")
def test_a_task_file_that_cannot_be_used_is_one_line_before_work(tmp_path, capsys, change, said):
    file, (key, line) = write_task(tmp_path, "mine"), change
    lines = file.read_text().split("\n")
    at = next(number for number, text in enumerate(lines) if text.startswith(f"{key}:"))
    rest = [] if key == "metric_list" else lines[at + 1 :]
    file.write_text("\n".join([*lines[:at], line, *rest]))
    with pytest.raises(UserError) as refused:
        find_tasks([str(file)], [], fewshot=None, limit=2)
    (fault,) = refused.value.faults
    assert "mine" in fault and ("cannot be loaded" in fault or ";" in fault) and "\n" not in fault
    assert all(part in fault for part in said), fault


@pytest.mark.parametrize(("kwargs", "said"), [
    ({"until": 3}, "until"), ({"until": [3]}, "until"), ({"max_gen_toks": "many"}, "many"), ({"beams": 2}, "beams"),
])  # fmt: skip
def test_bad_generation_kwargs(tokenizer, kwargs, said):
    from lm_eval.api.instance import Instance

    from glm46.engine.evaluation.lm_eval_model import LmEvalModel

    request = Instance("generate_until", {}, ("a", kwargs), 0, metadata=("mine", 0, 1))
    with pytest.raises(UserError, match=f"--tasks mine: generation_kwargs.*{said}"):
        LmEvalModel(None, tokenizer, 512).generate_until([request])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*OUR_TASKS[:2], "--tasks", "nextline"], ("nextline", "did you mean next_line?")),
        (["--tasks", "/nowhere/task.yaml"], ("/nowhere/task.yaml: no such file",)),
        (["--tasks", "mine", "--task-folder", "/nowhere"], ("--task-folder /nowhere: no such folder",)),
        (["--tasks", "broken.yaml"], ("broken.yaml", "cannot be loaded")),
        (["--tasks", "long.yaml"], ("long", "2000 tokens", "512 positions", "lower")),
        (["--tasks", "loss", "--data", "x", "--fewshot", "2"], ("--fewshot", "tasks of lm-eval")),
        (["--tasks", "loss", "--data", "x", "--apply-chat-template"], ("--apply-chat-template", "tasks of lm-eval")),
        (["--tasks", "gsm8k", "--thinking"], ("--thinking", "add", "--apply-chat-template")),
        (
            [*OUR_TASKS[:2], "--tasks", "next_line", "--apply-chat-template", "--thinking"],
            ("next_line", "leave --thinking out"),
        ),
    ],
)
@pytest.mark.usefixtures("small_task_index")
def test_bad_tasks(exported, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.jsonl}\n")
    write_task(tmp_path, "long")
    Path("next_line.jsonl").write_text(
        json.dumps({"context": "a " * 2000, "choices": list("abcd"), "answer": 0}) + "\n"
    )
    assert main(["evaluate", "--model", exported, *options]) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in said), err


_DATA = "dataset_path: json\ndataset_kwargs: {data_files: a.jsonl}\ntest_split: train\n"


@pytest.mark.parametrize(("content", "said"), [
    ("- 1\n", "got list"), ("", "got NoneType"), ("hello\n", "got str"), ("task: [a\n", "ParserError"),
    ("\0", "ReaderError"),
    ("task: a\n---\ntask: b\n", "another document"), ("[" * 3000, "nesting depth"),
    ("group: g\ntask: [arc_easy]\n", "holds a group of tasks; give its folder with --task-folder"),
    ("task: [arc_easy]\n", "holds a group of tasks"), ("foo: 1\n", "has no key task"),
    (f"task: 5\n{_DATA}", "has no key task"), ("task: a\n", "has no dataset_path"),
    ("task: a\ndataset_path: 5\n", "has no dataset_path"),
    (f"task: a\n{_DATA}stop: 3\n", "key stop: unknown to lm-eval"),
    ("include: broken.yaml\ntask: a\n", "Include cycle"), ("include: nowhere.yaml\ntask: a\n", "nowhere.yaml"),
    (f"task: a\n{_DATA}metric_list: 5\n", "metric_list: is no list"),
    (f"task: a\n{_DATA}metric_list: [acc]\n", "metric_list"),
    (f"task: a\n{_DATA}output_type: sing\n", "invalid output_type 'sing'"),
    (f"task: a\n{_DATA}doc_to_text: !function nowhere.f\n", "Cannot import module 'nowhere'"),
    (f"task: a\n{_DATA}doc_to_text: !function ends.f\n", "SystemExit: 3"),
    ("task: !!python/object/apply:os.mkdir [made]\n", "could not determine a constructor"),
    (f"task: a\n{_DATA}output_type: generate_until\ndoc_to_text: x\ndoc_to_target: y\n", "DatasetGenerationError"),
])  # fmt: skip
def test_a_file_that_is_no_task_is_refused_in_one_line(tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text(content)
    Path("ends.py").write_text("raise SystemExit(3)\n")
    Path("a.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError) as raised:
        find_tasks(["broken.yaml"], [], fewshot=None, limit=None)
    (fault,) = raised.value.faults
    assert said in fault and fault.startswith("--tasks broken.yaml: ") and "\n" not in fault
    assert "PathLike" not in fault and not Path("made").exists()


def test_the_task_file_of_the_page_is_read(tmp_path, monkeypatch):
    page = Path(__file__).parents[4].joinpath("docs", "evaluation.md").read_text()
    content = page.split("```yaml\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("my_task.yaml").write_text(content)
    example = re.search(r"# (\{.*\}) on each line", content)[1]
    Path("questions.jsonl").write_text(f"{example}\n" * 3)
    tasks = find_tasks(["my_task.yaml"], [], fewshot=None, limit=None)
    assert list(tasks.loaded["tasks"]) == ["mine"]
