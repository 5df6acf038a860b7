"""The rules of the architecture as functions: each takes parsed source and returns its violations, one line each.

Nothing of the package is imported, so the rules hold for code that cannot even be loaded, and cost no torch.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "glm46"

# A package may import packages of a strictly lower layer, and itself. Packages of one layer meet through arguments.
# `compute` to `operate` are groups of packages; the others are packages themselves.
LAYERS = {
    "config": 0, "compat": 0,
    "files": 1,
    "run": 2,
    "compute/distributed": 3, "compute/model": 3,
    "compute/optim": 4, "compute/parallelize": 4,
    "storage/data": 5, "storage/checkpoint": 5, "storage/judge": 5,
    "storage/chats": 6,
    "storage/prepare": 7, "storage/huggingface": 7,
    "engine/inference": 8,
    "engine/reliability": 9,
    "engine/training": 10,
    "engine/observe": 11,
    "engine/evaluation": 12,
    "tasks/pretrain": 13, "tasks/weights": 13, "tasks/rl/rewards": 13,
    "tasks/finetune": 14, "tasks/rl/rollout": 14,
    "tasks/rl": 15, "operate/estimate": 15,
    "operate/launch": 16,
    "operate/ablation": 17, "operate/benchmark": 17, "operate/cluster": 17, "operate/models": 17,
    "commands": 18,
    "cli": 19,
    "__main__": 20,
}  # fmt: skip
GROUPS = ("compute", "storage", "engine", "tasks", "operate")
CORE = (
    "run", "compute", "storage/data", "storage/checkpoint", "engine/training", "engine/reliability", "tasks/pretrain",
)  # fmt: skip
"""The trainer: the packages that a person reads to trust a gradient, a batch, a save and a stop."""
BASE_OF_CORE = ("config", "files", "compat")
"""What the core may import besides itself."""
RL_USERS = {"glm46.commands.rl", "glm46.operate.launch.rl_servers", "glm46.operate.launch.rl_start"}
"""The verbs of reinforcement learning, and the check of its files before a start."""
MOST_VERB_STATEMENTS = 110
"""Limit for a file in `commands`: a verb parses its options and calls a package."""
_UNLISTED = 21  # a package that is not in the table may be imported by nobody

ROOT_CONFIG = "glm46.config.run_config"
ROOT_CONFIG_PACKAGES = {"config", "run", "commands", *(package for package in LAYERS if package.startswith("operate/"))}
# What starts a rank, locks its folders and makes its Plan; what compares a config with that of a checkpoint, by key.
ROOT_CONFIG_MODULES = {
    "glm46.engine.training.build",
    "glm46.engine.training.outputs",
    "glm46.engine.training.origin",
    "glm46.engine.training.saved_config",
    "glm46.tasks.weights.start_folders",
}

ENVIRONMENT_READER = "glm46.compute.distributed.environment"
TORCH_INTERNALS = "glm46.compat"
# The one file that reads a pickle: DCP's metadata, through an unpickler that knows a short list of classes.
PICKLE_READER = "glm46.storage.checkpoint.metadata"
# Calls rewards of the user's: whatever they raise, their sample is dropped and the reason is shown.
CODE_OF_USERS = "glm46.tasks.rl.rewards.function_pool"

_GRAB_BAGS = {"utils", "util", "helpers", "helper", "misc", "common", "stuff", "lib", "manager", "tools", "base"}
_GRAB_BAG_EXCEPTION = "glm46.storage.checkpoint.manager"

_MOST_FILE_STATEMENTS = 230
_MOST_CLASS_STATEMENTS = 150
_MOST_FUNCTION_STATEMENTS = 40
_MOST_PARAMETERS = 8


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Dotted; a package's __init__.py has the package's name."""
    path: Path
    tree: ast.Module
    lines: int

    @property
    def package(self) -> str:
        """The longest part of its place that is a package, else its folder, or its own name beside the folders."""
        parts = self.name.split(".")[1:]
        for end in range(len(parts), 0, -1):
            if (place := "/".join(parts[:end])) in LAYERS:
                return place
        return "/".join(parts if self.is_package else parts[:-1] or parts)

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
            if other.package in ("", module.package):
                continue
            mine, theirs = LAYERS.get(module.package, _UNLISTED), LAYERS.get(other.package, _UNLISTED)
            if theirs >= mine:
                faults.append(f"{module.name} (layer {mine}) imports {name} (layer {theirs})")
    return faults


def imports_of_the_core(modules: dict[str, Module]) -> list[str]:
    """Imports of the core from packages that are neither the core nor its base."""
    return [
        f"{module.name} imports {name}; let a caller hand it to the core"
        for module in modules.values()
        if is_in(module.package, CORE)
        for name in sorted(imports(module, modules))
        if not is_in(modules[name].package, (*CORE, *BASE_OF_CORE))
    ]


def imports_of_reinforcement(modules: dict[str, Module]) -> list[str]:
    """Imports of tasks/rl from outside of it and of its verbs. Its task module is loaded by name."""
    return [
        f"{module.name} imports {name}; reinforcement learning is at the edge"
        for module in modules.values()
        if module.name not in RL_USERS and not is_in(module.package, ("tasks/rl",))
        for name in sorted(imports(module, modules))
        if is_in(modules[name].package, ("tasks/rl",))
    ]


def is_in(package: str, packages: Sequence[str]) -> bool:
    """Return whether a package is one of these, or inside one."""
    return any(package == place or package.startswith(f"{place}/") for place in packages)


def root_config_readers(modules: dict[str, Module]) -> list[str]:
    """Modules that know the root config and are not among those that may; others take a section, or the `Plan`."""
    return [
        f"{module.name} imports {ROOT_CONFIG}; take a section, or the Plan"
        for module in modules.values()
        if module.package not in ROOT_CONFIG_PACKAGES
        and module.name not in ROOT_CONFIG_MODULES
        and ROOT_CONFIG in imports(module, modules)
    ]


def unlisted_packages(modules: dict[str, Module]) -> list[str]:
    """Packages that the table of layers does not know."""
    return sorted({module.package for module in modules.values()} - {"", *GROUPS, *LAYERS})


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
    """``__init__.py`` files of packages that hold anything."""
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


def raising_at_links(modules: dict[str, Module]) -> list[str]:
    """Calls of `Path.resolve`, which raises RuntimeError at a loop of links before Python 3.13."""
    return [
        f"{module.name}:{node.lineno} calls resolve; take files/local_disk.py: real_path"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and not node.args and getattr(node.func, "attr", "") == "resolve"
    ]


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


def behind_the_start(modules: dict[str, Module]) -> list[str]:
    """Definitions below the block that starts a module as a program: its functions run before they exist."""
    return [
        module.name
        for module in modules.values()
        if any(isinstance(node, ast.If) and "'__main__'" in ast.dump(node.test) for node in module.tree.body[:-1])
    ]


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


def indirect_docstrings(modules: dict[str, Module]) -> list[str]:
    """Docstrings that begin with a question word in place of what the thing does or holds."""
    return [
        f"{module.name}:{getattr(node, 'lineno', 1)}: begins with '{word[0]}'; say what it does or holds"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        and (word := re.match(r"(What|Which|Whether|Who|How|Where|When|Why|So many)\b", ast.get_docstring(node) or ""))
    ]


def homonyms(modules: dict[str, Module]) -> list[str]:
    """Names that two public classes bear."""
    homes: dict[str, list[str]] = {}
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module.name)
    return [f"{name}: {' and '.join(places)}; rename one" for name, places in homes.items() if len(places) > 1]


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


def long_verbs(modules: dict[str, Module]) -> list[str]:
    """Files of verbs that hold more than a verb."""
    return [
        f"{module.name}: {_statements(module.tree)} statements, at most {MOST_VERB_STATEMENTS}; move what it does"
        for module in modules.values()
        if module.package == "commands" and _statements(module.tree) > MOST_VERB_STATEMENTS
    ]


def oversized(modules: dict[str, Module]) -> list[str]:
    """Files, classes, functions and signatures beyond the sizes that good ones have: a smoke alarm, not a fault.

    Statements are counted, not lines: a limit on lines asks for dense lines.
    """
    large = []
    for module in modules.values():
        if (size := _statements(module.tree)) > _MOST_FILE_STATEMENTS:
            large.append(f"{module.name}: {size} statements")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            name = f"{module.name}.{node.name}"
            size = _statements(node)
            if isinstance(node, ast.ClassDef):
                if size > _MOST_CLASS_STATEMENTS:
                    large.append(f"{name}: {size} statements")
                continue
            if size > _MOST_FUNCTION_STATEMENTS:
                large.append(f"{name}: {size} statements")
            signature = node.args
            parameters = len(signature.posonlyargs) + len(signature.args) + len(signature.kwonlyargs)
            parameters += (signature.vararg is not None) + (signature.kwarg is not None)
            if parameters > _MOST_PARAMETERS:
                large.append(f"{name}: {parameters} parameters")
    return large


def _statements(node: ast.AST) -> int:
    """Statements within a node, at any depth."""
    return sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - isinstance(node, ast.stmt)


def packed_assignments(modules: dict[str, Module]) -> list[str]:
    """Assignments of several values to several names in one line, which hide that they are several thoughts. A swap is
    allowed, and so is unpacking of one value."""
    packed = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
                continue
            if isinstance(node.targets[0], ast.Tuple):
                targets = {ast.unparse(target) for target in node.targets[0].elts}
                if targets != {ast.unparse(value) for value in node.value.elts}:
                    packed.append(f"{module.name}:{node.lineno}")
    return packed


def skipped_formats(modules: dict[str, Module]) -> list[str]:
    """Lines that the formatter must not touch."""
    lines = []
    for module in modules.values():
        for number, line in enumerate(module.path.read_text(encoding="utf-8").splitlines(), 1):
            if "fmt: skip" in line or "fmt: off" in line:
                lines.append(f"{module.name}:{number}")
    return lines


_PRONOUN = re.compile(
    r"_?of(_\w+)?|one|each|some|own|found|there|here|every|both|left|known|stated|given|wanted|meant|said"
)


def pronoun_names(modules: dict[str, Module]) -> list[str]:
    """Variables and parameters whose name does not say what they hold; a noun does, such as ``layer_squares``."""
    names = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else ""
            if _PRONOUN.fullmatch(name):
                names.append(f"{module.name}:{node.lineno} {name}")
    return names


def imports_in_functions(modules: dict[str, Module]) -> list[str]:
    """Imports that a reader does not see at the top of the file."""
    places = set()
    for module in modules.values():
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
                places |= {f"{module.name}:{node.lineno}" for node in inner}
    return sorted(places)


def plain_any(modules: dict[str, Module]) -> list[str]:
    """Arguments and results whose type is `Any` alone, about which a reader and mypy learn nothing."""
    places = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            annotation = node.returns if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
            if isinstance(node, ast.arg):
                annotation = node.annotation
            if isinstance(annotation, ast.Name) and annotation.id == "Any":
                places.append(f"{module.name}:{node.lineno}")
    return places


MOST_OF_EACH: dict[Callable[[dict[str, Module]], list[str]], int] = {
    oversized: 27,
    packed_assignments: 5,
    skipped_formats: 0,
    pronoun_names: 2,
    imports_in_functions: 41,
    plain_any: 42,
}
"""Habits that make code hard to read, with the number of places that still have them. A number may only fall."""
