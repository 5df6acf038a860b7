"""Names of SGLang's API, read from its wheel without importing it: the requests, replies and options that we use.

python -m tests.unit.tasks.rl.rollout.sglang_contract WHEEL: writes `TABLE`, which tests without the wheel compare with.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_name("sglang_contract.json")
WHEEL_VARIABLE = "GLM46_SGLANG_WHEEL"
WHEEL_SHA256 = "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
"""Of the release in `TABLE`: tests run code of it."""
REPLIES = {
    "io_struct": {
        "update": "UpdateWeightsFromDistributedReqOutput", "disk": "UpdateWeightFromDiskReqOutput",
        "checksum": "CheckWeightsReqOutput", "adapter": "LoRAUpdateOutput",
    },
    "meta": (
        "output_token_logprobs", "input_token_logprobs", "finish_reason", "weight_versions", "routed_experts",
    ),
    "keys": ("success", "message", "ranks", "per_engine_checksum", "version"),
}  # fmt: skip
"""What the client reads: fields of these classes, keys of a reply's ``meta_info``, and of other replies."""
PATHS = (
    "/server_info", "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache",
    "/update_weights_from_disk", "/update_weight_version", "/init_weights_update_group", "/begin_weight_update",
    "/update_weights_from_distributed", "/end_weight_update", "/destroy_weights_update_group", "/weights_checker",
    "/load_lora_adapter", "/unload_lora_adapter", "/v1/models",
)  # fmt: skip
OPTIONS = (
    "--model-path", "--host", "--port", "--tp-size", "--dp-size", "--pp-size", "--nnodes", "--node-rank",
    "--dist-init-addr", "--attn-dp-size", "--ep-size", "--moe-dense-tp-size", "--enable-dp-lm-head", "--dtype",
    "--device", "--context-length", "--mem-fraction-static", "--enable-return-routed-experts", "--enable-lora",
    "--max-lora-rank", "--lora-target-modules", "--enable-deterministic-inference", "--speculative-algorithm",
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    "--enable-draft-weights-cpu-backup",
)  # fmt: skip
"""Flags that the client and `rl-servers` know of."""


def fields_of(tree: ast.Module, name: str) -> dict[str, bool]:
    """Fields of a class by name; true for those that a request must have."""
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    inherited = {"rid": False, "http_worker_ipc": False} if "BaseReq" in map(ast.unparse, found.bases) else {}
    own = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return inherited | {node.target.id: node.value is None for node in own}


def _routes(tree: ast.Module) -> dict[str, str | None]:
    """The class of each path's body."""
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        types = " ".join(ast.unparse(one.annotation) for one in node.args.args if one.annotation is not None)
        kind = re.search(r"\b\w*Req(?:Input)?\b", types)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("app."):
                for path in decorator.args:
                    if isinstance(path, ast.Constant):
                        found[path.value] = kind[0] if kind else None
    return found


def _options(files: list[ast.Module]) -> dict[str, str]:
    """Fields of the server's arguments by the flags that set them."""
    found = {}
    for tree in files:
        for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for node in (node for node in owner.body if isinstance(node, ast.AnnAssign)):
                text, name = ast.unparse(node.annotation), node.target.id
                flag = re.search(r"\bname='(--[a-z0-9-]+)'", text) or re.search(r"\bcli_name='(--[a-z0-9-]+)'", text)
                found[flag[1] if flag else "--" + name.replace("_", "-")] = name
                for alias in re.findall(r"'(--[a-z0-9-]+)'", text):
                    found[alias] = name
                if "no_cli=True" in text:
                    found.pop("--" + name.replace("_", "-"), None)
    return found


def read_wheel(path: Path) -> dict:
    """The table of a wheel."""
    with zipfile.ZipFile(path) as wheel:

        def parse(name: str) -> ast.Module:
            return ast.parse(wheel.read(f"sglang/{name}"))

        structures, routes = parse("srt/managers/io_struct.py"), _routes(parse("srt/entrypoints/http_server.py"))
        assert all(known in routes for known in PATHS), [known for known in PATHS if known not in routes]
        constants = set()
        for name in (
            "srt/managers/tokenizer_manager.py",
            "srt/utils/weight_versions.py",
            "srt/entrypoints/http_server.py",
        ):
            constants |= {node.value for node in ast.walk(parse(name)) if isinstance(node, ast.Constant)}
        fields = [name for name in wheel.namelist() if re.match(r"sglang/srt/arg_groups/fields/\w+\.py$", name)]
        options = _options([ast.parse(wheel.read(name)) for name in fields])
        return {
            "version": re.search(r"sglang-([\d.]+)-", path.name)[1],
            "requests": {
                known: None if routes[known] is None else fields_of(structures, routes[known]) for known in PATHS
            },
            "sampling": list(fields_of(parse("srt/sampling/sampling_params.py"), "SamplingParams")),
            "replies": {key: list(fields_of(structures, name)) for key, name in REPLIES["io_struct"].items()},
            **{kind: [key for key in REPLIES[kind] if key in constants] for kind in ("meta", "keys")},
            "options": {flag: options.get(flag) for flag in OPTIONS},
        }


def read_table() -> dict:
    """The table of the release that the client was written for."""
    return json.loads(TABLE.read_text())


if __name__ == "__main__":
    TABLE.write_text(json.dumps(read_wheel(Path(sys.argv[1])), indent=1) + "\n")
