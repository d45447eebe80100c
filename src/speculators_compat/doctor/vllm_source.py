"""What the installed vLLM knows, read from its source text with :mod:`ast`: nothing is imported."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class ModelClass:
    """A model class that vLLM's registry names.

    Attributes:
        module: where it is, for example ``vllm.model_executor.models.kimi_k25``.
        native: whether it, or a class it derives from, lists ``SupportsEagle3``; ``None`` where its source
            was not found.
    """

    module: str
    name: str
    native: bool | None


class VllmSource:
    """Reads the files of one vLLM.

    Args:
        folder: the package's folder (that of ``vllm/__init__.py``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    @cached_property
    def _registry(self) -> dict[str, dict[str, tuple[str, ...]]]:
        tables: dict[str, dict[str, tuple[str, ...]]] = {}
        tree = self._tree("vllm.model_executor.models.registry")
        for node in tree.body if tree is not None else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id.endswith("_MODELS") and isinstance(value, ast.Dict):
                table = tables.setdefault(target.id, {})
                for key, item in zip(value.keys, value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        parts = item.elts if isinstance(item, ast.Tuple) else [item]
                        words = [p.value for p in parts if isinstance(p, ast.Constant)]
                        if len(words) == len(parts):
                            table[key.value] = tuple(str(word) for word in words)
        return tables

    @cached_property
    def architectures(self) -> dict[str, tuple[str, str]]:
        """Every architecture in the registry with its module and class; empty if the registry has
        another form.
        """
        left_out = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS", "_SPECULATIVE_DECODING_MODELS")
        return {
            name: (entry[0], entry[1])
            for table, entries in self._registry.items()
            if table not in left_out
            for name, entry in entries.items()
            if len(entry) == 2
        }

    @cached_property
    def dropped(self) -> dict[str, str]:
        """Architectures that vLLM no longer has, with the last version that had them."""
        return {n: e[0] for n, e in self._registry.get("_PREVIOUSLY_SUPPORTED_MODELS", {}).items()}

    def model_class(self, architecture: str) -> ModelClass | None:
        """The class for an architecture; ``None`` if the registry does not have it."""
        entry = self.architectures.get(architecture)
        if entry is None:
            return None
        module, name = entry
        module = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        return ModelClass(module, name, self._lists(module, name, "SupportsEagle3", set()))

    @cached_property
    def quantization_methods(self) -> frozenset[str]:
        """Names of quantization methods; empty if their list has another form."""
        tree = self._tree("vllm.model_executor.layers.quantization")
        for node in tree.body if tree is not None else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id in ("QuantizationMethods", "QUANTIZATION_METHODS"):
                value = getattr(node, "value", None)
                words = (
                    {n.value for n in ast.walk(value) if isinstance(n, ast.Constant)}
                    if value is not None
                    else set()
                )
                names = frozenset(word for word in words if isinstance(word, str))
                if names:
                    return names
        return frozenset()

    @cached_property
    def config_types(self) -> frozenset[str]:
        """Model types for which vLLM has a config class of its own."""
        try:
            text = (self.folder / "transformers_utils" / "config.py").read_text(encoding="utf-8")
        except OSError:
            return frozenset()
        found = re.search(r"_CONFIG_REGISTRY[^=]*=\s*\w*\((.*?)^\)", text, re.DOTALL | re.MULTILINE)
        body = found.group(1) if found else ""
        return frozenset(re.findall(r"^\s*[\"']?([\w.-]+)[\"']?\s*[=:]\s*[\"']\w+[\"']", body, re.MULTILINE))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Environment variables that vLLM knows."""
        try:
            text = (self.folder / "envs.py").read_text(encoding="utf-8")
        except OSError:
            return frozenset()
        return frozenset(re.findall(r"[\"'](VLLM_[A-Z0-9_]+)[\"']", text))

    def _lists(self, module: str, name: str, wanted: str, seen: set[str]) -> bool | None:
        if f"{module}:{name}" in seen or len(seen) > 40:
            return False
        seen.add(f"{module}:{name}")
        tree = self._tree(module)
        if tree is None:
            return None
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [base for base in node.bases if isinstance(base, (ast.Name, ast.Attribute))]
                names = [base.id if isinstance(base, ast.Name) else base.attr for base in bases]
                if wanted in names:
                    return True
                return any(self._lists(module, base, wanted, seen) for base in names)
        for inner in ast.walk(tree):
            if isinstance(inner, ast.ImportFrom):
                for alias in inner.names:
                    if (alias.asname or alias.name) == name:
                        target = self._absolute(module, inner)
                        return self._lists(target, alias.name, wanted, seen) if target else False
        return False

    def _absolute(self, module: str, node: ast.ImportFrom) -> str | None:
        if not node.level:
            return node.module if (node.module or "").startswith("vllm") else None
        up = node.level - 1 if self._file(module, package=True) else node.level
        base = module.rsplit(".", up)[0] if up else module
        return f"{base}.{node.module}" if node.module else base

    def _file(self, module: str, *, package: bool = False) -> Path | None:
        path = self.folder.joinpath(*module.split(".")[1:])
        file = path.with_suffix(".py")
        if not package and file.is_file():
            return file
        return path / "__init__.py" if (path / "__init__.py").is_file() else None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            file = self._file(module)
            try:
                self._trees[module] = (
                    ast.parse(file.read_text(encoding="utf-8")) if file is not None else None
                )
            except (OSError, SyntaxError, ValueError):
                self._trees[module] = None
        return self._trees[module]
