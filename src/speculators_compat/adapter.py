"""What an adapter is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .patcher import Journal
    from .settings import Settings
    from .surface import Surface

GENERATOR_MODULE = "speculators.data_generation.vllm_hidden_states_generator"
GENERATOR_PACKAGE = GENERATOR_MODULE.rpartition(".")[0]


class State(str, Enum):
    """What became of an adapter in this process."""

    WAITING = "waiting"  # the module it mends has not been imported yet
    APPLIED = "applied"
    NOT_NEEDED = "not-needed"  # what it would mend is in order
    NOT_APPLICABLE = "not-applicable"  # what it would mend does not exist here
    DRIFTED = "drifted"  # the code it mends has a shape it does not know
    FAILED = "failed"
    UNDONE = "undone"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Probe:
    """A probe's answer: ``APPLIED`` here means *apply it*, the other states explain themselves."""

    state: State
    reason: str


@dataclass(frozen=True)
class Context:
    """What :meth:`Adapter.apply` works with.

    Attributes:
        module: the module whose import triggered the adapter.
        journal: through which every change is made.
        settings: the user's settings.
        versions: package name to version text.
    """

    module: ModuleType
    journal: Journal
    settings: Settings
    versions: Mapping[str, str]


class Adapter(ABC):
    """Mends one seam between speculators and vLLM.

    The class attributes are data: ``compat-check --explain ID`` and the adapter table print them.

    Attributes:
        id: stable name, also used in ``compat_matrix.yaml``.
        seam: the place where two packages meet, in a few words.
        why: what breaks.
        since: the first vLLM (or other) release in which it breaks.
        how: how it is mended.
        upstream: the change that caused it, or where it is tracked.
        retire_when: when the adapter can be deleted.
        trigger: module after whose import the adapter is applied.
        required: whether extraction is impossible, or wrong, without it.
        vllm: version specifier for adapters that the matrix does not list (those of other packages); empty for any.
    """

    id: ClassVar[str]
    seam: ClassVar[str]
    why: ClassVar[str]
    since: ClassVar[str]
    how: ClassVar[str]
    upstream: ClassVar[str]
    retire_when: ClassVar[str]
    trigger: ClassVar[str] = GENERATOR_MODULE
    required: ClassVar[bool] = True
    vllm: ClassVar[str] = ""

    @abstractmethod
    def probe(self, surface: Surface) -> Probe:
        """Decide from names and signatures alone whether the adapter is needed and knows what it sees."""

    @abstractmethod
    def apply(self, context: Context) -> None:
        """Make the changes, all through ``context.journal``."""


class CallAdapter(Adapter):
    """An adapter for one call that speculators makes with keywords and vLLM's callee no longer takes as they are.

    The call in speculators' source is compared with the callee's parameters, whatever the versions. Whatever
    :attr:`fill` and :attr:`drop` do not cover is drift, and refused.

    Attributes:
        name: the callee's name in the generator's module.
        callee: where vLLM defines it.
        fill: parameters that can be supplied, each with a few words on the value.
        drop: arguments that can be left out, each with a few words on why that is safe.
        ours: keywords with which the plugin itself makes the call, where it replaces speculators' call.
    """

    name: ClassVar[str]
    callee: ClassVar[str]
    fill: ClassVar[Mapping[str, str]] = {}
    drop: ClassVar[Mapping[str, str]] = {}
    ours: ClassVar[tuple[str, ...] | None] = None

    def probe(self, surface: Surface) -> Probe:
        parameters = surface.parameters(self.callee)
        if parameters is None:
            return Probe(State.DRIFTED, f"{self.callee} no longer exists")
        given = self.ours or surface.call_keywords(GENERATOR_MODULE, self.name)
        if given is None:
            return Probe(State.NOT_APPLICABLE, f"this speculators does not call {self.name}")
        missing, unknown = parameters.missing(given), parameters.unknown(given)
        strange = [n for n in missing if n not in self.fill] + [n for n in unknown if n not in self.drop]
        if strange:
            return Probe(State.DRIFTED, f"{self.callee} and its call disagree on {', '.join(strange)}")
        changes = [f"supplies {n}" for n in missing] + [f"leaves out {n}" for n in unknown]
        extra = self.always(parameters.names)
        if not changes and not extra:
            return Probe(State.NOT_NEEDED, f"the call fits {self.callee}")
        return Probe(State.APPLIED, ", ".join(changes + extra))

    def always(self, names: tuple[str, ...]) -> list[str]:
        """Changes this adapter makes even where the call fits, in words; none by default."""
        return []

    def value(self, parameter: str, kwargs: Mapping[str, Any]) -> Any:
        """The value for a parameter named in :attr:`fill`, given the call's other arguments."""
        raise NotImplementedError

    def amend(self, names: tuple[str, ...], kwargs: dict[str, Any]) -> None:
        """Change arguments in place after filling and dropping; does nothing by default."""

    def apply(self, context: Context) -> None:
        from .surface import live_parameters

        parameters = live_parameters(getattr(context.module, self.name))

        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kwargs = {k: v for k, v in kwargs.items() if k not in parameters.unknown([k]) or k not in self.drop}
            if not args:  # speculators calls with keywords only; a positional call is somebody else's, left alone
                for name in parameters.missing(kwargs):
                    if name in self.fill:
                        kwargs[name] = self.value(name, kwargs)
                self.amend(parameters.names, kwargs)
            return wrapped(*args, **kwargs)

        context.journal.wrap(context.module, self.name, call, adapter=self.id)
