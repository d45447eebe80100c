"""The user's settings: environment variables, or :func:`configure`, which wins.

================================= ======================================================================
``SPECULATORS_COMPAT``            ``0`` or ``off``: importing the package changes nothing
``SPECULATORS_COMPAT_STRICT``     ``1``: refuse combinations that the matrix does not list
``SPECULATORS_COMPAT_WAY``        ``in-process`` or ``engine``: overrides the way that the matrix picks
``SPECULATORS_COMPAT_VLLM_ARGS``  JSON object of vLLM arguments, for example ``{"dtype": "float32"}``
``SPECULATORS_COMPAT_FINAL_NORM`` ``1``: take the last layer's state after the model's final norm
``SPECULATORS_COMPAT_LAYER_IDS``  ``after-layer`` or ``boundary``: what ``layer_ids`` of the generator count
``SPECULATORS_COMPAT_WATCHDOG``   seconds without progress that end a run (1800); ``0``: never
``SPECULATORS_COMPAT_SERVE``      ``1``: in vLLM's processes, the adapters of the server path (see :mod:`.serving`)
``SPECULATORS_COMPAT_WITHOUT``    adapter ids, with commas, that are left out: for diagnosis only
================================= ======================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import CompatError
from .layer_ids import CONVENTIONS, Convention

OFF_SWITCH = "SPECULATORS_COMPAT"
STRICT = "SPECULATORS_COMPAT_STRICT"
WAY = "SPECULATORS_COMPAT_WAY"
FINAL_NORM = "SPECULATORS_COMPAT_FINAL_NORM"
LAYER_IDS = "SPECULATORS_COMPAT_LAYER_IDS"
WATCHDOG = "SPECULATORS_COMPAT_WATCHDOG"
VLLM_ARGS = "SPECULATORS_COMPAT_VLLM_ARGS"
WITHOUT = "SPECULATORS_COMPAT_WITHOUT"
WAYS = ("in-process", "engine")


@dataclass
class Settings:
    """See :func:`configure`."""

    vllm_args: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = True
    final_norm: bool = False
    layer_convention: Convention | None = None
    watchdog: float = 1800.0


_configured: dict[str, Any] = {}


def configure(
    *,
    vllm_args: Mapping[str, Any] | None = None,
    final_norm: bool | None = None,
    layer_convention: Convention | None = None,
    watchdog: float | None = None,
) -> None:
    """Set what ``VllmHiddenStatesGenerator``'s signature has no place for.

    Applies to generators made from now on, and replaces all settings of an earlier call; what is left out comes from the
    environment.

    Args:
        vllm_args: names as on vLLM's command line with underscores (``dtype``, ``kv_cache_dtype``, ``max_num_seqs``,
            ``enable_expert_parallel``, ``distributed_executor_backend``, ...). vLLM's own config classes validate the
            values; an unknown name is refused when the generator is made. The generator trusts the code in a model
            folder, as released; ``trust_remote_code=False`` is obeyed for the model, its config and its tokenizer.
        final_norm: take the last layer's state after the model's final norm, as the trainer of speculators 0.3 wants
            it; without it before the norm, as speculators from 0.4 on do.
        layer_convention: what ``layer_ids`` of the generator count, with every speculators: ``after-layer``, the state
            that leaves decoder layer k, as the class always did; or ``boundary``, the state that enters it, as EAGLE-3,
            vLLM and speculators from 0.5 on. Without it after-layer, with a warning from 0.5 on.
        watchdog: seconds without progress after which a start or a call is ended, with its workers; 0 means never.

    Raises:
        CompatError: SC401 if ``vllm_args`` is not a mapping with string keys; SC412 for a convention that does not exist.
    """
    _checked_convention(layer_convention or "", "configure(layer_convention=...)")
    _configured["vllm_args"] = _checked(vllm_args or {}, "configure(vllm_args=...)")
    _configured["final_norm"] = final_norm
    _configured["layer_convention"] = layer_convention
    _configured["watchdog"] = watchdog


def current() -> Settings:
    """The settings in force."""
    args = _configured.get("vllm_args")
    if args is None:
        text = os.environ.get(VLLM_ARGS, "")
        try:
            args = _checked(json.loads(text) if text.strip() else {}, VLLM_ARGS)
        except json.JSONDecodeError as error:
            raise CompatError(
                "SC401",
                found=f"{VLLM_ARGS}={text!r} ({error})",
                expected="a JSON object",
                why="the vLLM arguments in it would be lost",
                mend=f"""export {VLLM_ARGS}='{{"dtype": "float32"}}'""",
            ) from None
    final_norm = _configured.get("final_norm")
    if final_norm is None:
        final_norm = _on(FINAL_NORM)
    return Settings(
        vllm_args=dict(args),
        trust_remote_code=bool(args.get("trust_remote_code", True)),
        final_norm=bool(final_norm),
        layer_convention=_configured.get("layer_convention")
        or _checked_convention(os.environ.get(LAYER_IDS, "").strip(), LAYER_IDS),
        watchdog=_watchdog(),
    )


def _checked_convention(text: str, source: str) -> Convention | None:
    for known in CONVENTIONS:
        if text == known:
            return known
    if not text:
        return None
    raise CompatError(
        "SC412",
        found=f"{source}: {text!r}",
        expected=" or ".join(CONVENTIONS),
        why="the states of neighbouring layers would be taken, without any error",
        mend=f"export {LAYER_IDS}={CONVENTIONS[0]}, or unset it",
    )


def _watchdog() -> float:
    given = _configured.get("watchdog")
    text = os.environ.get(WATCHDOG, "").strip() if given is None else str(given)
    try:
        seconds = float(text) if text else Settings.watchdog
        if not 0 <= seconds < float("inf"):
            raise ValueError
    except ValueError:
        raise CompatError(
            "SC410",
            found=f"{WATCHDOG}={text!r}",
            expected="a number of seconds, 0 for no watchdog",
            why="a run that hangs would never be ended",
            mend=f"export {WATCHDOG}={Settings.watchdog:.0f}",
        ) from None
    return seconds


def _on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "on", "true", "yes")


def _checked(args: Any, source: str) -> dict[str, Any]:
    if not isinstance(args, Mapping) or not all(isinstance(key, str) for key in args):
        raise CompatError(
            "SC401",
            found=f"{source} holds {type(args).__name__} {args!r:.80}",
            expected="an object that maps argument names to values",
            why="the vLLM arguments in it would be lost",
            mend='pass for example {"dtype": "float32", "max_num_seqs": 64}',
        )
    return dict(args)


def switched_off() -> bool:
    """Whether the off switch is set."""
    return os.environ.get(OFF_SWITCH, "").strip().lower() in ("0", "off", "false", "no")


def strict() -> bool:
    """Whether unlisted combinations are refused."""
    return _on(STRICT)


def without() -> tuple[str, ...]:
    """Adapters that are left out. For diagnosis only: results without a needed adapter can be wrong."""
    return tuple(filter(None, (id.strip() for id in os.environ.get(WITHOUT, "").split(","))))


def forced_way() -> str | None:
    """The way set by the environment, or ``None``.

    Raises:
        CompatError: SC402 for a way that does not exist.
    """
    way = os.environ.get(WAY, "").strip()
    if way and way not in WAYS:
        raise CompatError(
            "SC402",
            found=f"{WAY}={way!r}",
            expected=" or ".join(WAYS),
            why="the plugin cannot tell how you want vLLM to be driven",
            mend=f"unset {WAY}",
        )
    return way or None
