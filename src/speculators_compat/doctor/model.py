"""SC70x: the model's folder, from its files alone. No code of the model's own is run, no tensor is read."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from .base import Outcome, Unavailable, check, failed, ok, skipped, warning
from .context import Context, Unreadable, read_json, size

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "tekken.json",
    "spiece.model",
)
#: A tokenizer file of this size is parsed; a larger one would take longer than all the rest.
_MAX_TOKENIZER = 40 * 2**20


def _again(context: Context) -> str:
    """The command that fetches the model again."""
    return _fetch(context, [])


def _fetch(context: Context, files: list[str], *, spoilt: bool = False) -> str:
    """The command that fetches files again, where they are spoilt after removing them."""
    model = context.options.model or ""
    wanted = " ".join(files[:3]) + (" ..." if len(files) > 3 else "")
    folder = Path(model).expanduser()
    remove = ""
    if spoilt:
        places = [os.path.realpath(context.folder / f) for f in files[:3]]
        remove = (
            f"rm -r {' '.join(places if not folder.is_dir() else [f'{model}/{f}' for f in files[:3]])} && "
        )
    if not folder.is_dir():
        return f"{remove}hf download {model} {wanted}".rstrip()
    return f"{remove}hf download ORG/NAME {wanted + ' ' if wanted else ''}--local-dir {model}"


def _few(items: list[str], shown: int = 3) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more


@check("SC700", "model", "folder")
def folder(context: Context) -> Outcome:
    model = context.options.model
    if model is None:
        return skipped("give --model")
    path = Path(model).expanduser()
    try:
        found = context.folder
        entries = len(os.listdir(found))
    except Unavailable:
        if model.startswith(("/", ".", "~")) or model.count("/") != 1 or path.exists():
            return failed(
                f"{model} is {'a file' if path.is_file() else 'no folder'}",
                expected="a folder with config.json, tokenizer and weights",
                why="vLLM would stop",
                mend="check --model",
            )
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return (failed if offline else warning)(
            f"{model} is no folder, and not in the local hub cache" + (" (HF_HUB_OFFLINE is set)" * offline),
            expected="a folder, or a model that was downloaded",
            why="vLLM would stop"
            if offline
            else "vLLM would download it inside the run, and nothing of it can be checked",
            mend=f"hf download {model}",
        )
    except OSError as error:
        return failed(
            f"{path}: {error.strerror or error}",
            expected="a folder that this user can list and read",
            why="vLLM's workers run as this user",
            mend=f"chmod -R u+rX {path}, or run as its owner",
        )
    return ok(f"{found}, {entries} entries" + ("" if found == path else " (hub cache)"))


@check("SC701", "model", "config")
def config(context: Context) -> Outcome:
    try:
        content = read_json(context.folder / "config.json")
    except Unreadable as error:
        return failed(
            str(error),
            expected="a config.json that is a JSON object",
            why="everything about the model is read from it",
            mend=_again(context),
        )
    facts = context.facts
    missing = [
        name
        for name, value in (
            ("architectures", facts.architecture),
            ("a layer count (num_hidden_layers)", facts.layers),
            ("a hidden size (hidden_size)", facts.hidden_size),
        )
        if not value
    ]
    if missing:
        return failed(
            f"config.json without {' and '.join(missing)}; it has {_few(sorted(map(str, content)), 6)}",
            expected="the config of a decoder model, or of a wrapper with a text_config",
            why="layers, buffers and the files written are sized by it",
            mend="give the folder of the whole model, not of an adapter or a part: check --model",
        )
    heads = f", {facts.heads} heads" + (f" ({facts.kv_heads} KV)" if facts.kv_heads != facts.heads else "")
    return ok(
        f"{facts.architecture} ({facts.model_type}), {facts.layers} layers, hidden {facts.hidden_size}"
        f"{heads if facts.heads else ''}, vocabulary {facts.vocab_size}"
        + "".join(f", {t}" for t in facts.traits)
    )


@check("SC702", "model", "tokenizer")
def tokenizer(context: Context) -> Outcome:
    files = [name for name in _TOKENIZERS if (context.folder / name).is_file()]
    settings: dict[str, Any] = {}
    problem = ""
    try:
        if os.path.lexists(context.folder / "tokenizer_config.json"):
            settings = read_json(context.folder / "tokenizer_config.json")
    except Unreadable as error:
        problem = str(error)
    own_code = isinstance(settings.get("auto_map"), dict)
    if not files and not own_code and not problem:
        problem = f"none of {', '.join(_TOKENIZERS)}"
    largest: int | None = None
    path = context.folder / "tokenizer.json"
    if not problem and "tokenizer.json" in files and path.stat().st_size <= _MAX_TOKENIZER:
        try:
            largest = _largest_id(read_json(path))
        except Unreadable as error:
            problem = str(error)
    if problem:
        return failed(
            problem,
            expected="the tokenizer's files beside config.json",
            why="the generator loads the tokenizer before the model, and stops there",
            mend=_again(context),
        )
    what = _few(files) or "code of the model's own"
    vocab = context.facts.vocab_size
    if largest is not None and vocab is not None and largest >= vocab:
        return warning(
            f"{what}: token ids up to {largest}, but the model's vocabulary ends at {vocab - 1}",
            expected="every token id below the config's vocab_size",
            why="prompts with such tokens are refused one by one (SC407), or the tokenizer is another "
            "model's",
            mend=_again(context),
        )
    return ok(f"{what}" + (f", token ids up to {largest}" if largest is not None else ""))


def _largest_id(content: dict[str, Any]) -> int | None:
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    largest = -1
    if isinstance(vocab, dict):
        largest = max((v for v in vocab.values() if isinstance(v, int)), default=-1)
    elif isinstance(vocab, list):
        largest = len(vocab) - 1
    for token in content.get("added_tokens") or ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            largest = max(largest, token["id"])
    return largest if largest >= 0 else None


@check("SC703", "model", "weights index")
def index(context: Context) -> Outcome:
    try:
        weights = context.weights
    except Unreadable as error:
        return failed(
            str(error),
            expected="model.safetensors.index.json with a weight_map, or *.safetensors files",
            why="vLLM finds the weights by it",
            mend=_again(context),
        )
    absent = [h.name for h in weights.headers if h.problem.endswith("not there")]
    if context.options.rehearse and not weights.other and len(absent) == len(weights.headers):
        return skipped("no weights here, and a rehearsal needs none")
    if not weights.headers and not weights.other:
        dummy = context.options.vllm_args.get("load_format") == "dummy"
        if dummy:
            return ok("no weights, and none needed (load_format dummy)")
        return failed(
            "no weights: no *.safetensors, "
            + ", ".join(f"*{ending}" for ending in (".bin", ".pt", ".pth", ".gguf")),
            expected="the files of weights",
            why="vLLM would stop after it has started its workers",
            mend=_again(context),
        )
    if absent:
        return failed(
            f"{len(absent)} of {len(weights.headers)} listed files are not there: {_few(absent)}",
            expected="every file that model.safetensors.index.json names",
            why="vLLM loads for minutes before it misses one",
            mend=_fetch(context, absent),
        )
    count = len(weights.headers) or len(weights.other)
    kind = "safetensors" if weights.headers else Path(next(iter(weights.other))).suffix[1:]
    by = "listed by the index" if weights.index is not None else "without an index"
    return ok(f"{count} {kind} file{'s' if count > 1 else ''} {by}, {size(weights.bytes)}")


@check("SC704", "model", "shards whole")
def shards(context: Context) -> Outcome:
    try:
        weights = context.weights
    except Unreadable:
        return skipped("the index can't be used (SC703)")
    if not weights.headers:
        empty = [name for name, count in weights.other.items() if count < 1024]
        if empty:
            return _incomplete(context, {name: f"has {weights.other[name]} bytes" for name in empty})
        return skipped(
            "only safetensors files say how long they are" if weights.other else "no weights here (SC703)"
        )
    broken = {h.name: h.problem for h in weights.broken if not h.problem.endswith("not there")}
    if broken:
        return _incomplete(context, broken)
    if any(h.problem for h in weights.headers):
        return skipped("files are missing (SC703)")
    if weights.index is not None:
        lost = {
            h.name: f"lacks {len(gone)} tensors of the index ({min(gone)})"
            for h in weights.headers
            if (gone := weights.index[h.name] - h.tensors.keys())
        }
        if lost:
            return _incomplete(context, lost)
    kinds: dict[str, int] = {}
    for header in weights.headers:
        for dtype, count in header.tensors.values():
            kinds[dtype] = kinds.get(dtype, 0) + count
    total = sum(kinds.values())
    mix = ", ".join(
        f"{100 * n / total:.0f}% {d}" for d, n in sorted(kinds.items(), key=lambda e: -e[1])[:3] if total
    )
    tensors = sum(len(h.tensors) for h in weights.headers)
    return ok(
        f"all whole by their headers: {tensors:,} tensors, {total:,} values" + (f" ({mix})" if mix else "")
    )


def _incomplete(context: Context, bad: dict[str, str]) -> Outcome:
    return failed(
        _few([f"{name} {problem}" for name, problem in bad.items()]),
        expected="every file as long as its header says, and readable",
        why="vLLM loads for minutes before it meets the bad one",
        mend="chmod u+r " + " ".join(f"{context.folder / name}" for name in list(bad)[:3])
        if all("Permission" in problem for problem in bad.values())
        else _fetch(context, list(bad), spoilt=True),
    )


@check("SC705", "model", "dtype")
def dtype(context: Context) -> Outcome:
    facts, method = context.facts, context.facts.quant_method
    known = context.vllm.quantization_methods if method else frozenset()
    stored = facts.dtype or "not named"
    if method and known and method.replace("_", "-") not in {k.replace("_", "-") for k in known}:
        return failed(
            f"weights quantized by {method}, which the installed vLLM does not have",
            expected=f"one of {_few(sorted(known), 8)}",
            why="vLLM stops while it reads the config",
            mend="install a vLLM that has it, or use a checkpoint in another form",
        )
    text = f"stored as {stored}, states in {context.state_dtype}" + (
        f", weights {facts.quantization_name}" if method else ""
    )
    if context.state_dtype == "float16" and stored == "bfloat16":
        return warning(
            text,
            expected="bfloat16 for a model that was trained in it",
            why="float16 ends at 65504, and the last layers' states of many models pass that: they become "
            "infinite",
            mend="leave dtype out of the vLLM arguments",
        )
    if stored == "float32" and str(context.options.vllm_args.get("dtype", "auto")) == "auto":
        text += ' (vLLM makes bfloat16 of float32; --vllm-args \'{"dtype": "float32"}\' keeps it)'
    return ok(text)


@check("SC706", "model", "own code")
def remote_code(context: Context) -> Outcome:
    named: dict[str, str] = {}
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        try:
            content = context.config if name == "config.json" else read_json(context.folder / name)
        except Unreadable:
            continue
        mapped = content.get("auto_map")
        for target in mapped.values() if isinstance(mapped, dict) else ():
            for one in target if isinstance(target, list) else [target]:
                if isinstance(one, str) and "." in one:
                    named.setdefault(one.rpartition("--")[2].rpartition(".")[0] + ".py", name)
    if not named:
        return ok("none: trust_remote_code is not needed")
    elsewhere = sorted(file for file in named if not os.path.lexists(context.folder / file))
    if elsewhere:
        return failed(
            f"{_few(elsewhere)} named by auto_map in {named[elsewhere[0]]}, but not in the folder",
            expected="the Python files of the model beside its config",
            why="they would be fetched from the hub, or the load stops",
            mend=_again(context),
        )
    bad: list[str] = []
    wanted: set[str] = set()
    for file in _with_relatives(context.folder, sorted(named)):
        try:
            wanted |= _imports(ast.parse((context.folder / file).read_text(encoding="utf-8")))
        except (OSError, SyntaxError, ValueError) as error:
            bad.append(f"{file}: {error}")
    if bad:
        return failed(
            f"code of the model's own that Python can't read: {_few(bad)}",
            expected="Python files",
            why="the config or tokenizer can't be loaded without them",
            mend=_again(context),
        )
    absent = sorted(name for name in wanted if not _importable(name))
    if absent:
        return failed(
            f"the model's own code imports {', '.join(absent)}, not installed here",
            expected="the packages that its code imports",
            why="the config or tokenizer fails to load; this is looked at by reading the code, which was "
            "not run",
            mend=f"pip install {' '.join(absent)}",
        )
    files = _few(sorted(named))
    if not bool(context.options.vllm_args.get("trust_remote_code", True)):
        if context.facts.auto_map and context.facts.model_type not in context.vllm.config_types:
            why = "vLLM has no config class of its own for this type"
        else:
            why = "the tokenizer or processor may not load without it"
        return warning(
            f"{files}, and trust_remote_code is false",
            expected="trust_remote_code for a model that brings code",
            why=why,
            mend="read the files, then leave trust_remote_code out of the vLLM arguments",
        )
    return ok(f"{files} (read, not run); trust_remote_code is set")


def _with_relatives(folder: Path, files: list[str]) -> list[str]:
    """The files, and those in the folder that they import by ``from .name import``."""
    done: list[str] = []
    todo = list(files)
    while todo:
        file = todo.pop()
        if file in done:
            continue
        done.append(file)
        try:
            text = (folder / file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for name in re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.MULTILINE):
            if (folder / f"{name}.py").is_file():
                todo.append(f"{name}.py")
    return done


def _imports(tree: ast.Module) -> set[str]:
    """Packages that a module imports without a way out (not in ``try``, not under a condition)."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _importable(name: str) -> bool:
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules


@check("SC707", "model", "architecture")
def architecture(context: Context) -> Outcome:
    facts, source = context.facts, context.vllm
    if not source.architectures:
        return skipped("this vLLM's registry of models has a form that is not known")
    known = [name for name in facts.architectures if name in source.architectures]
    version = context.installed("vllm").version
    if known:
        return ok(f"{known[0]} is in the registry of vLLM {version}")
    name = facts.architecture or "no architecture"
    if name in source.dropped:
        return failed(
            f"{name}, which vLLM had until {source.dropped[name]} (here: {version})",
            expected="an architecture of the installed vLLM",
            why="the model can't be built",
            mend=f"pip install vllm=={source.dropped[name]}",
        )
    near = difflib.get_close_matches(name, source.architectures, n=2)
    unknown = f"{name} is not among the {len(source.architectures)} architectures of vLLM {version}"
    if facts.auto_map.get("AutoModelForCausalLM") or facts.auto_map.get("AutoModel"):
        return warning(
            f"{unknown}, but the model brings code of its own",
            expected="an architecture of the installed vLLM",
            why="vLLM would run it through transformers: slower, and not for every model",
            mend="compat-check --rehearse tries it; or install a newer vLLM",
        )
    return failed(
        unknown + (f"; near it: {', '.join(near)}" if near else ""),
        expected="an architecture of the installed vLLM",
        why="the model can't be built, unless another package registers it as a vLLM plugin",
        mend="pip install --upgrade vllm, then compat-check again",
    )


@check("SC708", "model", "capture")
def capture(context: Context) -> Outcome:
    layers, hidden = context.shape
    facts = context.facts
    found = context.vllm.model_class(facts.architecture)
    if found is None:
        return skipped("the architecture is not in vLLM's registry (SC707)")
    native = {
        True: "SupportsEagle3 is native",
        False: "SupportsEagle3 is shimmed",
        None: "SupportsEagle3 unknown (source not found)",
    }[found.native]
    path = facts.layer_path
    return ok(f"{native}; decoder layers expected at {path}, {layers} x {hidden}")
