"""The package keeps its rules, and each rule finds a violation that is planted for it.

The engine and the devices know no task: what differs is a trait of `Task` or an argument.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import config_reads, rules

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> dict[str, rules.Module]:
    return rules.read_package(ROOT)


ENFORCED = (
    rules.layer_violations, rules.root_config_readers, rules.unlisted_packages, rules.cycles, rules.filled_packages,
    rules.eager_api, rules.environment_readers, rules.private_torch, rules.raising_at_links, rules.unsafe_calls,
    rules.grab_bags, rules.broad_excepts, rules.behind_the_start, rules.undocumented, rules.indirect_docstrings,
    rules.homonyms, rules.long_verbs, rules.imports_of_the_core, rules.imports_of_reinforcement,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", ENFORCED, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule, modules):
    assert rule(modules) == []


@pytest.mark.slow
@pytest.mark.parametrize("habit", rules.MOST_OF_EACH, ids=lambda habit: habit.__name__)
def test_habits_that_make_code_hard_to_read_only_get_fewer(habit, modules):
    places = habit(modules)
    allowed = rules.MOST_OF_EACH[habit]
    assert len(places) <= allowed, "\n".join([f"{habit.__doc__} At most {allowed} are allowed:", *places])


PLANTED = {
    "layer_violations": ("compute/model/rope.py", "def f():\n    from ...engine.training import trainer\n"),
    "root_config_readers": ("compute/model/rope.py", "from glm46.config.run_config import RunConfig\n"),
    "unlisted_packages": ("novelty/thing.py", ""),
    "cycles": ("compute/model/rope.py", "import glm46.compute.model.block\n"),
    "filled_packages": ("compute/model/__init__.py", "x = 1\n"),
    "eager_api": ("__init__.py", "from glm46.compute.model import rope\n"),
    "environment_readers": ("compute/model/rope.py", "import os\nos.environ['A'] = '1'\n"),
    "private_torch": ("compute/model/rope.py", "import torch.nn.functional as F\nF._scaled_mm(1)\n"),
    "raising_at_links": ("compute/model/rope.py", "from pathlib import Path\nPath('x').resolve()\n"),
    "unsafe_calls": ("compute/model/rope.py", "import torch\ntorch.load('x')\n"),
    "grab_bags": ("compute/model/rope_utils.py", ""),
    "broad_excepts": ("compute/model/rope.py", "try:\n    pass\nexcept (ValueError, Exception):\n    pass\n"),
    "behind_the_start": ("compute/model/rope.py", 'if __name__ == "__main__":\n    turn()\ndef turn():\n    pass\n'),
    "undocumented": ("compute/model/rope.py", '"""Rope."""\ndef rotate(x):\n    return x\n'),
    "indirect_docstrings": ("compute/model/rope.py", '"""What turns pairs."""\n'),
    "homonyms": ("compute/model/rope.py", '"""Rope."""\nclass Loop:\n    """Loop."""\n'),
    "long_verbs": ("commands/rope.py", '"""Rope."""\n' + "pass\n" * rules.MOST_VERB_STATEMENTS),
    "imports_of_the_core": ("compute/model/rope.py", "import glm46.storage.chats.chat\n"),
    "imports_of_reinforcement": ("compute/model/rope.py", "import glm46.tasks.rl.story\n"),
    "oversized": ("compute/model/rope.py", "def f(a, b, c, d, e, f, g, h, *, i):\n    pass\n"),
    "plain_any": ("compute/model/rope.py", "def f(a: Any, b: list[Any]) -> int: ...\n"),
    "packed_assignments": ("compute/model/rope.py", "a, b = 1, 2\na, b = b, a\na, b = f()\n"),
    "skipped_formats": ("compute/model/rope.py", "x = 1  # fmt: skip\n"),
    "pronoun_names": ("compute/model/rope.py", "def f(x, of_x):\n    size = x\n"),
    "imports_in_functions": ("compute/model/rope.py", "import os\ndef f():\n    import torch\n"),
}
EXPECTED = {
    "layer_violations": "glm46.compute.model.rope (layer 3) imports glm46.engine.training.trainer (layer 10)",
    "root_config_readers": "glm46.compute.model.rope imports glm46.config.run_config; take a section, or the Plan",
    "unlisted_packages": "novelty",
    "cycles": "glm46.compute.model.block -> glm46.compute.model.rope -> glm46.compute.model.block",
    "filled_packages": "glm46.compute.model",
    "eager_api": "glm46 imports glm46.compute.model; name it in _HOMES, so that it is loaded when it is used",
    "environment_readers": (
        "glm46.compute.model.rope uses os.environ; add a function to glm46.compute.distributed.environment"
    ),
    "private_torch": "glm46.compute.model.rope uses torch.nn.functional._scaled_mm; add a function to glm46.compat",
    "raising_at_links": "glm46.compute.model.rope:2 calls resolve; take files/local_disk.py: real_path",
    "unsafe_calls": "glm46.compute.model.rope:2 calls torch.load without weights_only=True",
    "grab_bags": "glm46.compute.model.rope_utils",
    "broad_excepts": "glm46.compute.model.rope:3",
    "behind_the_start": "glm46.compute.model.rope",
    "undocumented": "glm46.compute.model.rope.rotate",
    "indirect_docstrings": "glm46.compute.model.rope:1: begins with 'What'; say what it does or holds",
    "homonyms": "Loop: glm46.compute.model.rope and glm46.engine.training.trainer; rename one",
    "long_verbs": "glm46.commands.rope: 111 statements, at most 110; move what it does",
    "imports_of_the_core": (
        "glm46.compute.model.rope imports glm46.storage.chats.chat; let a caller hand it to the core"
    ),
    "imports_of_reinforcement": (
        "glm46.compute.model.rope imports glm46.tasks.rl.story; reinforcement learning is at the edge"
    ),
    "oversized": "glm46.compute.model.rope.f: 9 parameters",
    "plain_any": "glm46.compute.model.rope:1",
    "packed_assignments": "glm46.compute.model.rope:1",
    "skipped_formats": "glm46.compute.model.rope:1",
    "pronoun_names": "glm46.compute.model.rope:1 of_x",
    "imports_in_functions": "glm46.compute.model.rope:3",
}


@pytest.mark.parametrize("name", PLANTED)
def test_rule_finds_a_planted_violation(name, tmp_path):
    sound = {
        "__init__.py": "",
        "config/run_config.py": '"""Config."""\n',
        "compute/model/__init__.py": "",
        "compute/model/block.py": '"""Block."""\nimport glm46.compute.model.rope\n',
        "compute/model/rope.py": '"""Rope."""\n',
        "storage/chats/chat.py": '"""Chat."""\n',
        "tasks/rl/story.py": '"""Story."""\n',
        "engine/training/trainer.py": (
            '"""Loop."""\nfrom glm46.compute.model import block\nclass Loop:\n    """Loop."""\n'
        ),
    }
    file, text = PLANTED[name]
    for where, content in (sound | {file: text}).items():
        path = tmp_path / "glm46" / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert getattr(rules, name)(rules.read_package(tmp_path)) == [EXPECTED[name]]


@pytest.mark.slow
def test_every_key_of_the_configuration_is_read_from_its_section(modules):
    assert config_reads.unread_config_fields({name: module.tree for name, module in modules.items()}) == []


SECTIONS = """
class Section: ...
class Source(Section):
    name: str
class Extra(Section):
    plain: int
    inherited: int
    passed: int
    kept: int
    by_word: int
    forgotten: int
    checked: int
class Derived(Extra):
    own: int
class Run(Section):
    extra: Extra
    derived: Derived | None
    sources: tuple[Source, ...]
"""
READER = """
from glm46.config.extra import Run

class Plan:
    config: Run

class Other:
    forgotten: int

class Holder:
    def __init__(self, plan: Plan, others: list[Other]):
        self._extra, self._others = plan.config.extra, others

    def show(self):
        return self._extra.kept, [one.forgotten for one in self._others]

def read(plan: Plan, key: str, names=("by_word",)):
    config, other = plan.config, 1
    derived = config.derived or None
    print(config.extra.plain, derived.inherited, derived.own, use(plan.config.extra), getattr(config.extra, key))
    return sorted(source.name for _, source in enumerate(config.sources))

def use(section: Extra):
    def inner():
        return section.passed
    return inner()

def unknown(x):
    return x.forgotten, x.checked, x.extra, x.derived, x.sources
"""


def test_a_key_counts_as_read_only_where_its_section_is_read():
    """Attributes of the same name on other objects, and rules that check a key, do not count."""
    trees = {
        "glm46.config.extra": SECTIONS,
        "glm46.config.rules_extra": "def rule(config: Run):\n    return config.extra.checked\n",
        "glm46.engine.training.reader": READER,
    }
    unread = config_reads.unread_config_fields({name: ast.parse(text) for name, text in trees.items()})
    assert unread == ["glm46.config.extra.Extra.checked", "glm46.config.extra.Extra.forgotten"]


def tracked_texts() -> dict[str, str]:
    """Every text file that belongs to the project, by its path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout: which files belong to the project cannot be told")
    texts = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".tiktoken":
            texts[name] = path.read_text(encoding="utf-8", errors="replace")  # a picture, too
    return texts


def find_lines(pattern: str) -> list[str]:
    """``file:line: text`` for each match in the project."""
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_no_path_of_a_machine_is_in_the_project():
    # Split, so that this file does not find itself.
    folders = "|".join(("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/[a-z]", "/op" + "t/", "\\.\\./sha" + "red"))
    assert find_lines(f"(^|[\\s\"'`(=])({folders})") == []


def test_no_link_is_in_the_project():
    """Git stores where a link points to: a folder of one machine, once data/ itself, which broke the first command."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout: which files belong to the project cannot be told")
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def test_no_registry_is_named():
    hosts = "|".join(("py" + "pi\\.org", "python" + "hosted", "download\\.py" + "torch", "npm" + "js\\.(com|org)", "deb\\.deb" + "ian"))  # fmt: skip  # noqa: E501
    assert find_lines(hosts) == []


def test_nothing_is_left_to_be_done():
    found = find_lines("\\b(TO" + "DO|FIX" + "ME|XX" + "X)\\b")
    assert [line for line in found if ".png:" not in line] == []  # bytes of a picture are no words


def test_scripts_stop_at_the_first_error():
    scripts = [ROOT / "run_train.sh", *(ROOT / "scripts").glob("run_*.sh")]
    assert len(scripts) >= 2
    assert [script.name for script in scripts if "set -euo pipefail" not in script.read_text()] == []


def test_folders_of_tests_are_packages():
    """The rhyme: a package's proof lies in the folder of its name."""
    folder = ROOT / "tests" / "unit"
    packages = {file.parent.relative_to(folder).as_posix() for file in folder.rglob("test_*.py")}
    assert packages - rules.LAYERS.keys() == set()


def test_these_tests_load_nothing_of_the_package():
    """The rules must hold for code that cannot be loaded, on a machine without torch."""
    files = [*(ROOT / "tests").glob("conftest.py"), *(ROOT / "tests" / "architecture").glob("*.py")]
    assert len(files) >= 2
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    imported = {node.module or "" for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    allowed = sys.stdlib_module_names | {"pytest"}
    assert {name for name in imported if name.split(".")[0] not in allowed} <= {
        "scripts",
        "tests.architecture",
        "tests.conftest",
    }


@pytest.mark.slow
def test_tests_assert_something():
    """A test without an assertion proves only that code runs."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and not any(_asserts(inner) for inner in ast.walk(node)):
                silent.append(f"{path.relative_to(ROOT)}::{node.name}")
    assert silent == []


def _asserts(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    is_known = name in ("raises", "wait_until") or any(word in name for word in ("assert", "check", "run_"))
    return isinstance(node, ast.Assert) or is_known


PACKAGE = Path(__file__).parents[2] / "glm46"
OF_TASKS = {"rl", "rollout", "finetune", "preference"}


@pytest.mark.parametrize("package", ["engine/training", "engine/reliability", "engine/observe", "compute"])
def test_a_package_below_the_tasks_asks_for_none(package):
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in OF_TASKS and ast.unparse(node.value).endswith("config")
    ]
    assert found == []


def test_the_sections_of_tasks_are_those_of_the_config():
    tree = ast.parse((PACKAGE / "config" / "run_config.py").read_text(encoding="utf-8"))
    nodes = [node for owner in tree.body if isinstance(owner, ast.ClassDef) and owner.name == "RunConfig"
             for node in owner.body]  # fmt: skip
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert fields | {node.name for node in nodes if isinstance(node, ast.FunctionDef)} >= OF_TASKS
