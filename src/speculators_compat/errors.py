"""Errors of this package: each has a stable id and says what was found, expected, why it matters and what to do.

``compat-check --explain ID`` prints the longer text kept in :data:`CATALOG`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorInfo:
    """What is always true of one error id, whatever the values in a particular case."""

    title: str
    explain: str


class CompatError(RuntimeError):
    """An error with a stable id.

    Args:
        id: key of :data:`CATALOG`, for example ``SC301``.
        found: what is there.
        expected: what should be there.
        why: what would go wrong otherwise.
        mend: what the user can do, as a command where there is one.
    """

    def __init__(self, id: str, *, found: str, expected: str, why: str, mend: str) -> None:
        if id not in CATALOG:
            raise KeyError(f"error id {id} has no entry in speculators_compat.errors.CATALOG")
        self.id = id
        self.found = found
        self.expected = expected
        self.why = why
        self.mend = mend
        super().__init__(self.render())

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel from vLLM's workers to the caller as pickles.
        return (_rebuild, (self.id, self.found, self.expected, self.why, self.mend))

    def render(self) -> str:
        """The message as the user reads it, one fact a line."""
        return (
            f"[{self.id}] {CATALOG[self.id].title}\n"
            f"  found:    {self.found}\n"
            f"  expected: {self.expected}\n"
            f"  why:      {self.why}\n"
            f"  mend:     {self.mend}\n"
            f"  more:     compat-check --explain {self.id}"
        )


def _rebuild(id: str, found: str, expected: str, why: str, mend: str) -> CompatError:
    return CompatError(id, found=found, expected=expected, why=why, mend=mend)


class CompatWarning(UserWarning):
    """Something works, but not as well proved as it should be."""


# SC1xx what is installed / SC2xx the matrix / SC3xx adapters and activation / SC4xx the caller's input /
# SC5xx the engine and the capture / SC6xx data read and written / SC9xx the check itself
CATALOG: dict[str, ErrorInfo] = {}
