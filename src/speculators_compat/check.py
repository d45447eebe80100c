"""What ``compat-check`` finds out. Reads files only: neither vLLM nor torch is imported.

The check goes the way that activation goes - detection, row, adapters, probes - and reports what that would
refuse under the same ids, so that *ready* means that activation will go through.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from . import restored, settings
from .detect import Installed, detect, detect_all
from .errors import CATALOG, CompatError
from .matrix import RESTORED, Matrix, Selection, load_matrix

if TYPE_CHECKING:
    from .doctor import Options, Result

__all__ = ["JSON_SCHEMA", "AdapterReport", "Finding", "Report", "broken_report", "run_check"]

#: Version of the JSON form. A field may be added under the same number; none changes its meaning or goes.
JSON_SCHEMA = 1

#: Verdict and exit status by the worst level among the findings, worst first.
_VERDICTS = {
    "error": ("not-supported", 1),
    "failed": ("not-ready", 1),
    "broken": ("broken", 4),
    "untested": ("untested", 3),
    "note": ("ready", 0),
}

#: What a probe answers, and how the check calls it: nothing is applied here.
_STATES = {
    "applied": "needed",
    "not-needed": "not-needed",
    "not-applicable": "not-applicable",
    "drifted": "drifted",
}


class _Probe(Protocol):
    @property
    def state(self) -> Any: ...
    @property
    def reason(self) -> str: ...


class _Adapter(Protocol):
    """As much of :class:`speculators_compat.adapter.Adapter` as the check uses."""

    @property
    def id(self) -> str: ...
    @property
    def seam(self) -> str: ...
    @property
    def required(self) -> bool: ...
    @property
    def vllm(self) -> str: ...

    def probe(self, surface: Any, /) -> _Probe: ...


class _Registry(Protocol):
    @property
    def adapters(self) -> Mapping[str, Any]: ...
    @property
    def third_party(self) -> Collection[str]: ...
    @property
    def broken(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Finding:
    """Something that the user should know.

    Attributes:
        id: key of :data:`speculators_compat.errors.CATALOG`.
        level: ``error`` (not supported), ``broken`` (the check can't tell), ``untested`` or ``note``.
        subject: the package, adapter or file concerned.
        found: what is there.
        why: what follows from it; may be empty.
        mend: what to do; may be empty.
        trace: the traceback, where an exception is behind it.
    """

    id: str
    level: str
    subject: str
    found: str
    why: str
    mend: str
    trace: str = ""


@dataclass(frozen=True)
class AdapterReport:
    """An adapter, whether it is chosen here, and what its probe answered.

    Attributes:
        state: ``needed``, ``not-needed``, ``not-applicable``, ``drifted``, ``failed`` (its probe broke), or
            ``not-selected``.
    """

    id: str
    seam: str
    selected: bool
    state: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Everything the check found.

    Attributes:
        installed: what is installed, by package.
        selection: the matrix cell; ``None`` where none could be chosen.
        way: name of the adapter set in use; empty where there is none.
        adapters: those selected, in the order of application, then the others.
        findings: worst first.
        checks: those of the run that is to be made, see :mod:`speculators_compat.doctor`; empty for a plain check.
    """

    installed: Mapping[str, Installed]
    selection: Selection | None
    way: str
    adapters: tuple[AdapterReport, ...]
    findings: tuple[Finding, ...]
    checks: tuple[Result, ...] = ()

    @property
    def verdict(self) -> str:
        """``ready``, ``untested``, ``not-supported``, ``not-ready`` (a check of the run failed) or ``broken``."""
        return self._worst[0]

    @property
    def exit_code(self) -> int:
        """0 ready, 1 not supported or a check failed, 3 untested, 4 the check broke."""
        return self._worst[1]

    @property
    def _worst(self) -> tuple[str, int]:
        levels = {finding.level for finding in self.findings}
        levels |= {"broken" if c.crashed else "failed" for c in self.checks if c.status == "failed"}
        return next((outcome for level, outcome in _VERDICTS.items() if level in levels), ("ready", 0))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, schema :data:`JSON_SCHEMA`."""
        from . import __version__

        chosen = self.selection
        return {
            "schema": JSON_SCHEMA,
            "speculators_compat": __version__,
            "installed": {name: _installed_json(found) for name, found in self.installed.items()},
            "row": None
            if chosen is None
            else {
                "vllm": chosen.row.vllm,
                "speculators": chosen.lineage,
                "status": chosen.cell.status,
                "exact": chosen.exact,
                "reason": chosen.reason,
                "adapter_set": self.way or None,
                "evidence": chosen.cell.evidence,
                "note": chosen.cell.note,
            },
            "adapters": [
                {"id": a.id, "seam": a.seam, "selected": a.selected, "state": a.state, "reason": a.reason}
                for a in self.adapters
            ],
            "findings": [
                {
                    "id": f.id,
                    "level": f.level,
                    "title": CATALOG[f.id].title,
                    "subject": f.subject,
                    "found": f.found,
                    "why": f.why,
                    "mend": f.mend,
                }
                for f in self.findings
            ],
            **({"checks": [c.to_json() for c in self.checks]} if self.checks else {}),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
        }


def _installed_json(found: Installed) -> dict[str, Any]:
    return {
        "present": found.present,
        "distribution": found.distribution,
        "version": None if found.version is None else str(found.version),
        "raw_version": found.raw_version,
        "location": found.location,
        "problem": None if found.problem is None else found.problem.id,
    }


def run_check(
    *,
    strict: bool = False,
    installed: Mapping[str, Installed] | None = None,
    matrix: Matrix | None = None,
    registry: _Registry | None = None,
    options: Options | None = None,
) -> Report:
    """Check this environment, and the run that ``options`` describe.

    Args:
        options: with ``only`` they restrict the check to these ids.
        strict: count an untested combination as not supported; so does ``SPECULATORS_COMPAT_STRICT=1``.
        installed: what to take as installed instead of looking.
        matrix: the matrix to use instead of the one that comes with the package.
        registry: the adapters to use instead of those that are registered.
    """
    checks: tuple[Result, ...] = ()
    if options is not None and options.wanted:
        from .doctor import known_ids, run_doctor

        if installed is None:
            installed = detect_all()
        others = set(options.only) - known_ids()
        if others != set(options.only) or not options.only:
            checks = run_doctor(options, installed)
        if options.only and not others:
            return Report({}, None, "", (), (), checks)
    report = _environment(strict, installed, matrix, registry)
    if options is not None and options.only:
        findings = tuple(f for f in report.findings if f.id in options.only)
        return Report({}, None, "", (), findings, checks)
    return replace(report, checks=checks)


def _environment(
    strict: bool,
    installed: Mapping[str, Installed] | None,
    matrix: Matrix | None,
    registry: _Registry | None,
) -> Report:
    if registry is None:
        from .registry import registry as registered

        registry = registered()
    if installed is None:
        installed = detect_all()
    findings = [*_package_findings(installed), *_connector_findings(installed)]
    if settings.switched_off():
        findings.append(
            Finding(
                "SC106",
                "note",
                "settings",
                f"{settings.OFF_SWITCH} is set to off",
                "",
                f"unset {settings.OFF_SWITCH}",
            )
        )
    without = settings.without()
    if without:
        unknown = [id for id in without if id not in registry.adapters]
        found = f"{settings.WITHOUT}={','.join(without)}" + (f"; there is no {', '.join(unknown)}" if unknown else "")
        why = "it exists for diagnosis: without a needed adapter the extraction fails, or is wrong"
        findings.append(Finding("SC107", "error", "settings", found, why, f"unset {settings.WITHOUT}"))
    for name, reason in registry.broken.items():
        mend = "update or uninstall the package that brings it"
        findings.append(Finding("SC902", "note", f"plugin {name}", f"it is left out: {reason}", "", mend))

    forced: str | None = None
    try:
        forced = settings.forced_way()
        settings.current()
    except CompatError as error:
        findings.append(_from_error(error, "error", "settings"))

    selection: Selection | None = None
    ids: tuple[str, ...] = ()
    way = ""
    try:
        matrix = load_matrix(known_adapters=registry.adapters) if matrix is None else matrix
    except CompatError as error:
        findings.append(_from_error(error, "broken", "compat_matrix.yaml"))
    else:
        vllm, speculators = installed["vllm"].version, installed["speculators"].version
        if vllm is not None and speculators is not None:
            try:
                selection = matrix.select(vllm, speculators)
            except CompatError as error:
                findings.append(_from_error(error, "error", "versions"))
        if selection is not None:
            strict = strict or settings.strict()
            try:
                way, ids = matrix.choose(selection, forced)
            except CompatError as error:
                findings.append(_from_error(error, "error", "settings"))
            else:
                findings += _row_findings(selection, forced, strict)

    adapters: list[AdapterReport] = []
    if ids and selection is not None:
        others = [
            i for i in registry.third_party if i not in ids and _admits(registry.adapters[i], installed)
        ]
        ids = tuple(id for id in ids if id not in without)
        reports = _probe_all([*ids, *(id for id in others if id not in without)], registry, installed)
        adapters += [report for report, _ in reports]
        findings += [finding for _, finding in reports if finding is not None]
    done = {report.id for report in adapters}
    unused = "not in the row's set" if ids else "no adapters are chosen"
    adapters += [
        AdapterReport(i, a.seam, False, "not-selected", f"{settings.WITHOUT} names it" if i in without else unused)
        for i, a in registry.adapters.items()
        if i not in done
    ]
    levels = list(_VERDICTS)
    findings.sort(key=lambda finding: levels.index(finding.level))
    return Report(installed, selection, way, tuple(adapters), tuple(findings))


def broken_report(error: Exception) -> Report:
    """The report for an exception that ended the check: an error of this package, or else SC901."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, CompatError):
        finding = Finding(error.id, "broken", "compat-check", error.found, error.why, error.mend, trace)
    else:
        found = f"{type(error).__name__}: {error}"
        why = "whether the extraction would work is not known"
        mend = "run compat-check --debug, and report the traceback"
        finding = Finding("SC901", "broken", "compat-check", found, why, mend, trace)
    return Report({}, None, "", (), (finding,))


def _from_error(error: CompatError, level: str, subject: str) -> Finding:
    return Finding(error.id, level, subject, error.found, error.why, error.mend)


def _package_findings(installed: Mapping[str, Installed]) -> list[Finding]:
    findings = []
    for name, found in installed.items():
        # The row depends on the versions of these two. Of the others only the code matters: probes read it.
        decides = name in ("vllm", "speculators")
        if found.problem is not None:
            level = "error" if decides or not found.present else "untested"
            findings.append(_from_error(found.problem, level, name))
        elif not found.present:
            command = (
                "pip install --no-deps speculators==0.4.0.1"
                if name == "speculators"
                else f"pip install {name}"
            )
            findings.append(
                Finding("SC100", "error", name, f"{name} is not installed in this environment", "", command)
            )
    return findings


def _connector_findings(installed: Mapping[str, Installed]) -> list[Finding]:
    """hs-connectors, which ``import speculators`` needs from 0.8 on, and ``pip install --no-deps`` leaves out."""
    from packaging.version import Version

    version = installed["speculators"].version
    if version is None or version < Version("0.8.dev0") or detect("hs_connectors").present:
        return []
    found = "hs_connectors is not installed in this environment"
    why = f"import speculators fails without it, speculators being {version}"
    mend = f"pip install --no-deps hs-connectors=={version.base_version}"
    return [Finding("SC100", "error", "hs_connectors", found, why, mend)]


def _row_findings(selection: Selection, forced: str | None, strict: bool) -> list[Finding]:
    cell = selection.cell
    where = f"vLLM {selection.row.vllm}, speculators {selection.lineage}"
    if cell.status == "unsupported" and forced is None:
        return [
            Finding(
                "SC301", "error", where, cell.why or selection.reason, "", cell.mend or "compat-check --list"
            )
        ]
    if not selection.exact:
        found = selection.reason
    elif cell.status in ("untested", "unsupported"):
        found = f"the matrix lists {where} as {cell.status}"
    elif forced is not None and forced != cell.adapter_set and cell.adapter_set != RESTORED:
        found = f"{settings.WAY}={forced} replaces {cell.adapter_set}, which the matrix lists for {where}"
    elif cell.status == "structural":
        return [Finding("SC205", "note", where, f"the matrix lists {where} as structural: not run", "", "")]
    else:
        return []
    mend = "compat-check --list shows what is verified"
    if strict:
        return [
            Finding("SC303", "error", where, found, "untested combinations are refused in strict mode", mend)
        ]
    return [Finding("SC204", "untested", where, found, "", mend)]


def _admits(adapter: _Adapter, installed: Mapping[str, Installed]) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(adapter.vllm).contains(str(installed["vllm"].version), prereleases=True)
    except InvalidSpecifier:
        return False


def _probe_all(
    ids: list[str], registry: _Registry, installed: Mapping[str, Installed]
) -> list[tuple[AdapterReport, Finding | None]]:
    from .surface import SourceSurface

    roots = {i.package: Path(i.location).parent for i in installed.values() if i.location}
    surface = SourceSurface(roots, supplied=restored.FILES if "restored_generator" in ids else None)
    return [_probe(registry.adapters[id], id in registry.third_party, surface) for id in ids]


def _probe(adapter: _Adapter, third_party: bool, surface: object) -> tuple[AdapterReport, Finding | None]:
    """One adapter's answer. What goes wrong in it stays in it: the others are still examined."""
    id = adapter.id
    optional = third_party or not adapter.required
    try:
        answer = adapter.probe(surface)
        state, reason = _STATES.get(str(answer.state)), str(answer.reason)
        if state is None:
            raise ValueError(f"the probe answered with the state {answer.state!s}, which a probe can't give")
    except Exception as error:  # a probe may be somebody else's code: anything can happen
        reason = f"{type(error).__name__}: {error}"
        return AdapterReport(id, adapter.seam, True, "failed", reason), Finding(
            "SC902",
            "note" if optional else "broken",
            f"adapter {id}",
            f"its probe failed: {reason}",
            "" if optional else "whether the extraction would work is not known",
            "compat-check --debug shows the traceback; please report it",
            traceback.format_exc(),
        )
    finding = None
    if state == "drifted":
        finding = Finding(
            "SC302",
            "note" if optional else "error",
            f"adapter {id}",
            f"{adapter.seam}: {reason}",
            "it is left out, and the extraction does not depend on it"
            if optional
            else "applied blindly it could give wrong results",
            "compat-check --list shows vLLM releases that work; please report this one",
        )
    return AdapterReport(id, adapter.seam, True, state, reason), finding
