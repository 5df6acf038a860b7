"""The rules of the house as functions: each takes a parsed tree of source and returns its violations, one line each.

Nothing of the package is imported, so the rules hold for code that cannot even be loaded, and cost no torch.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "glm46"

# A room may import rooms of a strictly lower layer, and itself. Rooms of one layer meet through arguments.
LAYERS = {
    "config": 0, "compat": 0,
    "files": 1, "planner": 1,
    "distributed": 2,
    "model": 3, "data": 3, "optim": 3, "observe": 3,
    "prepare": 4, "parallelize": 4, "checkpoint": 4, "reliability": 4,
    "huggingface": 5, "rewards": 5,
    "inference": 6, "serving": 6,
    "training": 7, "evaluation": 7,
    "pretrain": 8, "rollout": 8, "ablation": 8,
    "finetune": 9, "rl": 9, "benchmark": 9, "preflight": 9,
    "commands": 10,
    "cli": 11,
    "__main__": 12,
}  # fmt: skip
# Most lines of a room, comments and blank lines included; "" is the package's own __init__.py. A person chose these
# numbers, and they fall when code goes. `RAISED` holds what was added to them, with its reason.
LINE_BUDGETS = {
    "": 25, "__main__": 26, "ablation": 440, "benchmark": 940, "checkpoint": 2350, "cli": 105,
    "commands": 7110, "compat": 402, "config": 4840, "data": 2860,
    "distributed": 1240, "evaluation": 1450, "files": 645, "finetune": 375, "huggingface": 2845, "inference": 1685,
    "model": 2650, "observe": 2220, "optim": 1790, "parallelize": 1350,
    "planner": 5100, "preflight": 1800, "prepare": 2040, "pretrain": 835, "reliability": 1055,
    "rewards": 526, "rl": 3175, "rollout": 2735, "serving": 550,
    "training": 2610,
}  # fmt: skip
RAISED: tuple[tuple[str, int, str], ...] = (
    ("checkpoint", 120, "kinds of folders, told apart in one place; folders of torch.distributed.checkpoint"),
    ("cli", 5, "memory segments that grow; ranks of job systems"),
    ("commands", 540, "refusals before work; each verb parses its options before torch is imported"),
    ("compat", 10, "timeouts of process groups"),
    ("config", 45, "keys whose values are obeyed or refused"),
    ("data", 190, "one parser of messages; nulls of Arrow"),
    ("distributed", 80, "groups that are made once, with a timeout"),
    ("evaluation", 105, "chat templates in tasks of lm-eval; faults of task files"),
    ("files", 125, "files of other formats are named; locks that are only looked at"),
    ("huggingface", 340, "weights of other programs, and FP8 and INT4 straight from a folder"),
    ("inference", 50, "attention in few shapes; needs that are known before weights are read"),
    ("model", 35, "the router temperature as part of the function"),
    ("observe", 135, "one formatter of rows for terminal, pipe and log"),
    ("planner", 210, "the function of a network; what limits a plan; memory of generation"),
    ("prepare", 820, "JSON is rows; archives; the judge of mathematical results"),
    ("reliability", 215, "hang reports that read the recorder of NCCL; a lock that is only looked at"),
    ("rewards", 525, "verdicts by what a program answers; labels that are checked; sessions of workers"),
    ("rl", 40, "labels, resumes and rows"),
    ("training", 110, "dump folders that are deleted; disks that are too small"),
)
"""Room, lines, and what they are for."""
MOST_LINES = 59_200
"""Of the whole package. It may only fall; 48,000 is the goal of the present work on its size."""
MOST_OVERSIZED = 45
"""Files, classes and functions that are larger than good ones. It may only fall too."""
_UNLISTED = 13  # a room that is not in the table may be imported by nobody

ROOT_CONFIG = "glm46.config.run_config"
ROOT_CONFIG_ROOMS = {"config", "planner", "commands"}
# What starts a rank and makes its Plan; and what compares a config with that of a checkpoint, key by key.
ROOT_CONFIG_MODULES = {
    "glm46.engine.training.build",
    "glm46.tasks.pretrain.task",
    "glm46.tasks.finetune.task",
    "glm46.tasks.rl.task",
    "glm46.engine.training.origin",
}

ENVIRONMENT_READER = "glm46.compute.distributed.environment"
TORCH_INTERNALS = "glm46.compat"
# The one file that reads a pickle: DCP's metadata, through an unpickler that knows a short list of classes.
PICKLE_READER = "glm46.storage.checkpoint.metadata"
# Calls rewards of the user's: whatever they raise, their sample is dropped and the reason is shown.
CODE_OF_USERS = "glm46.tasks.rl.rewards.scorer"

_GRAB_BAGS = {"utils", "util", "helpers", "helper", "misc", "common", "stuff", "lib", "manager", "tools", "base"}
_GRAB_BAG_EXCEPTION = "glm46.storage.checkpoint.manager"

_MOST_FILE_LINES, _MOST_CLASS_LINES, _MOST_FUNCTION_LINES, _MOST_PARAMETERS = 300, 200, 60, 8


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Dotted; a package's __init__.py has the package's name."""
    path: Path
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def read_package(root: Path) -> dict[str, Module]:
    """Every module under ``root/glm46``, by dotted name. Syntax beyond Python 3.10 is an error."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path), feature_version=(3, 10))
        modules[name] = Module(name, path, tree, text.count("\n"))
    return modules


def imports(module: Module, modules: dict[str, Module]) -> set[str]:
    """Modules of the package that a module imports, inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.name.split(".")
                kept = parents[: len(parents) - node.level + module.is_package]
                base = ".".join([*kept, *filter(None, [node.module])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
    return {name for name in found if name in modules and name != module.name}


def layer_violations(modules: dict[str, Module]) -> list[str]:
    """Imports that do not go strictly down."""
    faults = []
    for module in modules.values():
        for name in sorted(imports(module, modules)):
            other = modules[name]
            if other.room in ("", module.room):
                continue
            mine, theirs = LAYERS.get(module.room, _UNLISTED), LAYERS.get(other.room, _UNLISTED)
            if theirs >= mine:
                faults.append(f"{module.name} (layer {mine}) imports {name} (layer {theirs})")
    return faults


def root_config_readers(modules: dict[str, Module]) -> list[str]:
    """Modules that know the root config and are not among those that may; others take a section, or the `Plan`."""
    return [
        f"{module.name} imports {ROOT_CONFIG}; take a section, or the Plan"
        for module in modules.values()
        if module.room not in ROOT_CONFIG_ROOMS
        and module.name not in ROOT_CONFIG_MODULES
        and ROOT_CONFIG in imports(module, modules)
    ]


def unlisted_rooms(modules: dict[str, Module]) -> list[str]:
    """Rooms that the table of layers does not know."""
    return sorted({module.room for module in modules.values()} - {"", *LAYERS})


def cycles(modules: dict[str, Module]) -> list[str]:
    """Import cycles, each with its whole path."""
    edges = {name: sorted(imports(module, modules)) for name, module in modules.items()}
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for other in edges[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return found


def filled_packages(modules: dict[str, Module]) -> list[str]:
    """``__init__.py`` files of rooms that hold anything."""
    return [
        module.name
        for module in modules.values()
        if module.is_package and module.name != PACKAGE and module.path.stat().st_size
    ]


def eager_api(modules: dict[str, Module]) -> list[str]:
    """Imports that ``import glm46`` would run, beside those that it finds the names of the Python API with."""
    body = modules[PACKAGE].tree.body
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in body if isinstance(node, ast.ImportFrom)}
    return [
        f"{PACKAGE} imports {name}; name it in _HOMES, so that it is loaded when it is used"
        for name in sorted(names - {"importlib", "typing"})
    ]


def environment_readers(modules: dict[str, Module]) -> list[str]:
    """Modules beside the one that may which read or write the environment."""
    faults = []
    for module in modules.values():
        names = {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
        names |= {a.name for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        touched = names & {"environ", "environb", "getenv", "putenv", "unsetenv"}
        if touched and module.name != ENVIRONMENT_READER:
            faults.append(f"{module.name} uses os.{sorted(touched)[0]}; add a function to {ENVIRONMENT_READER}")
    return faults


def private_torch(modules: dict[str, Module]) -> list[str]:
    """Uses of private parts of torch and its sisters outside the one file that may."""
    faults = []
    for module in modules.values():
        if module.name == TORCH_INTERNALS:
            continue
        aliases = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                aliases |= {a.asname or a.name.split(".")[0]: a.name for a in node.names if _is_torch(a.name)}
            elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
                aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        used = set(aliases.values()) | {
            f"{aliases[chain[0]]}.{'.'.join(chain[1:])}"
            for chain in map(_attribute_chain, ast.walk(module.tree))
            if len(chain) > 1 and chain[0] in aliases
        }
        faults += [f"{module.name} uses {name}; add a function to {TORCH_INTERNALS}" for name in sorted(used)
                   if any(re.match(r"_(?!_)", part) for part in name.split("."))]  # fmt: skip
    return faults


def _is_torch(name: str) -> bool:
    return name.split(".")[0] in ("torch", "torchao", "torchdata")


def _attribute_chain(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; empty when it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) and parts else []


def unsafe_calls(modules: dict[str, Module]) -> list[str]:
    """Pickles of unknown origin and shells: both run what somebody else wrote."""
    faults = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            where = f"{module.name}:{getattr(node, 'lineno', 0)}"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if "pickle" in names and module.name != PICKLE_READER:
                faults.append(f"{where} imports pickle")
            if not isinstance(node, ast.Call):
                continue
            stated = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            if stated.get("shell") is True:
                faults.append(f"{where} starts a shell")
            if _attribute_chain(node.func) == ["torch", "load"] and stated.get("weights_only") is not True:
                faults.append(f"{where} calls torch.load without weights_only=True")
    return faults


def grab_bags(modules: dict[str, Module]) -> list[str]:
    """Names that say nothing, so that anything fits into them."""
    return [
        name
        for name in modules
        if name != _GRAB_BAG_EXCEPTION
        and any(word in _GRAB_BAGS for part in name.split(".") for word in part.split("_"))
    ]


def broad_excepts(modules: dict[str, Module]) -> list[str]:
    """Handlers that would swallow our own bugs. One that raises again is none."""
    faults = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
            is_broad = node.type is None or names & {"Exception", "BaseException"}
            if (
                is_broad
                and module.name != CODE_OF_USERS
                and not any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
            ):
                faults.append(f"{module.name}:{node.lineno}")
    return faults


def undocumented(modules: dict[str, Module]) -> list[str]:
    """Modules, public classes and public functions without a docstring."""
    faults = []
    for module in modules.values():
        if not module.is_package and not ast.get_docstring(module.tree):
            faults.append(module.name)
        for owner, node in _public_definitions(module.tree):
            if not ast.get_docstring(node):
                faults.append(f"{module.name}.{owner}{node.name}")
    return faults


# What a framework calls, and what a name and a type say in full.
_NEEDS_NO_DOCSTRING = {"forward", "backward", "setup_context", "state_dict", "load_state_dict"}


def _public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield "", node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    is_public = isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_")
                    if is_public and inner.name not in _NEEDS_NO_DOCSTRING and not _is_plain_property(inner):
                        yield f"{node.name}.", inner


def _is_plain_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)


def room_lines(modules: dict[str, Module]) -> dict[str, int]:
    """Lines of each room."""
    lines: dict[str, int] = {}
    for module in modules.values():
        lines[module.room] = lines.get(module.room, 0) + module.lines
    return lines


def over_budget(modules: dict[str, Module]) -> list[str]:
    """Rooms with more lines than their budget, and the package."""
    counts = room_lines(modules)
    rooms = [
        (f"{PACKAGE}/{room}", lines, LINE_BUDGETS.get(room, 0) + sum(more for name, more, _ in RAISED if name == room))
        for room, lines in sorted(counts.items())
    ]
    return [
        f"{name}: {lines} lines, budget {most}; shorten it, or add a line to RAISED that says what the lines are for"
        for name, lines, most in [*rooms, (PACKAGE, sum(counts.values()), MOST_LINES)]
        if lines > most
    ]


def oversized(modules: dict[str, Module]) -> list[str]:
    """Files, classes, functions and signatures beyond the sizes that good rooms have: a smoke alarm, not a fault."""
    found = []
    for module in modules.values():
        if module.lines > _MOST_FILE_LINES:
            found.append(f"{module.name}: {module.lines} lines")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.ClassDef):
                if lines > _MOST_CLASS_LINES:
                    found.append(f"{module.name}.{node.name}: {lines} lines")
                continue
            names = node.args
            parameters = len(names.posonlyargs) + len(names.args) + len(names.kwonlyargs)
            parameters += (names.vararg is not None) + (names.kwarg is not None)
            if lines > _MOST_FUNCTION_LINES:
                found.append(f"{module.name}.{node.name}: {lines} lines")
            if parameters > _MOST_PARAMETERS:
                found.append(f"{module.name}.{node.name}: {parameters} parameters")
    return found
