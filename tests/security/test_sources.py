"""What no source that we ship may do, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("proto", "kernels", "clients/python", "service")
# Whose data runs code when it is read.
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "runpy.run_path",
    "runpy.run_module",
}
# By file. Ray's own script of a worker, in a fork, by the command that Ray gave.
ALLOWED = {"worker_start.py": "calls runpy.run_path"}
LOADERS = {"from_pretrained", "snapshot_download", "hf_hub_download"}


def findings(source: str) -> list[str]:
    """Each with its line."""
    tree = ast.parse(source)
    return [f"{line}: {what}" for line, what in _found(tree)]


def _found(tree: ast.Module) -> Iterator[tuple[int, str]]:
    constants = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants.update(ast.unparse(target) for target in targets)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            parts = {part for name in (*names, module) for part in name.split(".")}
            if parts & PICKLES:
                yield node.lineno, "imports what reads pickles"
        elif isinstance(node, ast.Call):
            for what in _found_in_call(node, constants):
                yield node.lineno, what


def _found_in_call(call: ast.Call, constants: set[str]) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {one.arg: ast.unparse(one.value) for one in call.keywords}
    if name in CALLS:
        yield f"calls {name}"
    if keywords.get("trust_remote_code", "False") != "False":
        yield "runs code of a model's folder"
    if keywords.get("allow_pickle", "False") != "False":
        yield "reads pickles"
    if keywords.get("shell", "False") != "False":
        yield "starts a shell"
    last = name.rpartition(".")[2]
    if last in LOADERS and keywords.get("local_files_only") != "True":
        yield f"{last} may go to the network"
    if last == "import_module":
        module = call.args[0]
        is_fixed = isinstance(module, ast.Constant) or ast.unparse(module) in constants
        if not is_fixed:
            yield "imports by a name that is not a constant"


def _sources(part: str) -> list[Path]:
    files = (ROOT / part / "src").rglob("*.py")
    return [file for file in files if not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


@pytest.mark.parametrize("part", PARTS)
def test_no_source_runs_what_it_reads(part: str) -> None:
    sources = _sources(part)
    assert len(sources) > 2
    found = {
        f"{path}:{line}"
        for path in sources
        for line in findings(path.read_text(encoding="utf-8"))
        if not line.endswith(ALLOWED.get(path.name, "\0"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from ray import cloudpickle",
        "import ray.cloudpickle as codec",
        "def f(data):\n    import marshal",
        "eval(text)",
        "exec(body, {})",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=True)",
        "AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=flag)",
        "AutoModel.from_pretrained(name)",
        "subprocess.run(line, shell=True)",
        "importlib.import_module(request.module)",
        "NAME = path\nimportlib.import_module(NAME)",
    ],
)
def test_what_is_looked_for_is_found(source: str) -> None:
    assert len(findings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "NAME = 'a.b'\nimportlib.import_module(NAME)",
        "NAME: Final = 'a.b'\nimportlib.import_module(NAME)",
        "model.eval()",
        "json.loads(text)",
        "AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)",
    ],
)
def test_what_is_allowed_is_not_found(source: str) -> None:
    assert findings(source) == []
