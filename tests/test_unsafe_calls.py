"""Nothing in the sources turns bytes from elsewhere into code or objects: no pickle, no eval, no shell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("common", "scheduler_svc", "executor_svc", "kernels", "deploy", "benchmarks")
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "unsafe_load",
    "full_load",
    "unsafe_load_all",
    "full_load_all",
    "mktemp",
    "popen",
}
WORDS = MODULES | BUILTINS | METHODS | {"system", "run_path", "load", "load_all", "shell", "allow_pickle"}
SUSPECT = re.compile(rf"\b(?:{'|'.join(sorted(WORDS))}|trust_remote_code)\b")
"""What every finding has in it; a source without needs no closer look."""
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}


def findings(source: str) -> Iterator[str]:
    """What a source does that it must not, with the line."""
    if not SUSPECT.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            yield from (f"{node.lineno}: {fault}" for fault in _call(node))


def _call(node: ast.Call) -> Iterator[str]:
    name = _dotted(node.func)
    last = name.split(".")[-1]
    given = {keyword.arg: keyword.value for keyword in node.keywords}

    def is_constant(argument: str, value: object) -> bool:
        found = given.get(argument)
        return isinstance(found, ast.Constant) and found.value is value

    if name in BUILTINS or (last in METHODS and "." in name) or name in ("os.system", "runpy.run_path"):
        yield f"{name}()"
    if name == "torch.load" and not is_constant("weights_only", True):
        yield "torch.load() without weights_only=True"
    if name in ("yaml.load", "yaml.load_all"):
        loader = ast.unparse(given.get("Loader") or (node.args[1:] or [ast.Constant(None)])[0]).split(".")[-1]
        if loader not in SAFE_LOADERS:
            yield f"{name}() without a safe loader"
    for argument in ("shell", "allow_pickle", "trust_remote_code"):
        if argument in given and not is_constant(argument, False):
            yield f"{argument}= in {name}()"


def _dotted(function: ast.expr) -> str:
    """A function's name; what is called on another expression begins with a dot."""
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{_dotted(value)}.{name}"
    return ""


def test_the_sources_do_none_of_it() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 150
    assert not [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in findings(path.read_text())]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from _pickle import loads",
        "import marshal, os",
        "def f():\n    import shelve",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text, yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "socket.recv_pyobj()",
        "os.system(text)",
        "os.popen(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=choice)",
        "np.load(path, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        "tempfile.mktemp()",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert len(list(findings(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.CSafeLoader)",
        "model.eval()",
        "re.compile(text)",
        "subprocess.run(words, shell=False)",
        "np.load(path)",
        "from scheduler_svc.keys import read_keys",
    ],
)
def test_what_is_safe_is_let_be(source: str) -> None:
    assert not list(findings(source))
