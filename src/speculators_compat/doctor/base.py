"""What a check of the run is, and how checks are run.

A check is a function with a stable id. It gets the :class:`~speculators_compat.doctor.context.Context` and
returns one :class:`Outcome`. What it cannot know it skips, with the reason; what it raises becomes its
outcome.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CATALOG, CompatError

if TYPE_CHECKING:
    from .context import Context

#: Areas in the order in which they are run and shown.
AREAS = ("model", "memory", "data", "host", "rehearsal")


class Unavailable(Exception):
    """A check cannot be made; the message says why, for the user."""


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        status: ``ok``, ``warning``, ``failed`` or ``skipped``.
        found: what is there, or why the check was skipped.
        expected, why, mend: what should be there, what follows from it, the command that mends it; for
            warnings and failures.
        id: the id, where it is another than the check's own (a rehearsal's stages have one each).
    """

    status: str
    found: str
    expected: str = ""
    why: str = ""
    mend: str = ""
    id: str = ""


def ok(found: str) -> Outcome:
    return Outcome("ok", found)


def skipped(reason: str) -> Outcome:
    return Outcome("skipped", reason)


def warning(found: str, *, expected: str, why: str, mend: str) -> Outcome:
    return Outcome("warning", found, expected, why, mend)


def failed(found: str, *, expected: str, why: str, mend: str) -> Outcome:
    return Outcome("failed", found, expected, why, mend)


@dataclass(frozen=True)
class Check:
    """A check: id, area, a name for the report, and the function."""

    id: str
    area: str
    name: str
    run: Callable[[Context], Outcome]
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """A check that was made.

    Attributes:
        crashed: the check itself raised an exception; what it would have found is not known.
        trace: the traceback then.
    """

    id: str
    area: str
    name: str
    outcome: Outcome
    seconds: float
    crashed: bool = False
    trace: str = ""

    @property
    def status(self) -> str:
        return self.outcome.status

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "title": CATALOG[self.id].title,
            "area": self.area,
            "name": self.name,
            "status": self.status,
            "found": self.outcome.found,
            "expected": self.outcome.expected,
            "why": self.outcome.why,
            "mend": self.outcome.mend,
            "seconds": round(self.seconds, 4),
            "crashed": self.crashed,
        }


#: Every check by its id, in the order of definition.
CHECKS: dict[str, Check] = {}


def check(
    id: str, area: str, name: str, *, also: Iterable[str] = ()
) -> Callable[[Callable[[Context], Outcome]], Callable[[Context], Outcome]]:
    """Register a check.

    Args:
        also: other ids that its outcome may carry.
    """

    def register(function: Callable[[Context], Outcome]) -> Callable[[Context], Outcome]:
        ids = (id, *also)
        unknown = [one for one in ids if one not in CATALOG]
        if unknown:
            raise KeyError(f"no entry in the catalogue for {unknown}")
        CHECKS[id] = Check(id, area, name, function, ids)
        return function

    return register


def perform(one: Check, context: Context) -> Result:
    """Make a check; whatever it raises is part of the result."""
    began = time.perf_counter()
    crashed, trace = False, ""
    try:
        outcome = one.run(context)
    except Unavailable as error:
        outcome = skipped(str(error))
    except CompatError as error:
        outcome = failed(error.found, expected=error.expected, why=error.why, mend=error.mend)
    except Exception as error:
        crashed, trace = True, traceback.format_exc()
        outcome = failed(
            f"the check itself broke: {type(error).__name__}: {error}",
            expected="a check that ends with an answer",
            why="what it looks for is not known; the other checks were made all the same",
            mend=f"compat-check --only {one.id} --debug shows the traceback; please report it",
        )
    return Result(
        outcome.id or one.id, one.area, one.name, outcome, time.perf_counter() - began, crashed, trace
    )
