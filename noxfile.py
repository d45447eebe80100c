# SPDX-License-Identifier: Apache-2.0
"""Long-running checks; `make` has the everyday ones."""

import nox

nox.options.sessions = []


@nox.session
def sweep(session: nox.Session) -> None:
    """Run every vLLM with every speculators: `nox -s sweep -- --vllm 0.24.0 --again`."""
    session.install("uv", ".")
    session.run("python", "tools/sweep.py", *session.posargs)


@nox.session
def drift(session: nox.Session) -> None:
    """Say what a new vLLM moved, from its wheel: `nox -s drift -- 0.34.0`, or the path of a wheel."""
    session.install("pip", ".")
    session.run("python", "tools/drift.py", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Extract from a tiny model of every architecture: `nox -s models -- --vllm 0.32.0`."""
    session.install("uv", ".")
    session.run("python", "tools/models_sweep.py", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Extract on a local Ray cluster and kill parts of it: `nox -s ray -- --vllm 0.32.0`."""
    session.install("uv", ".")
    session.run("python", "tools/ray_test.py", *session.posargs)


@nox.session
def server(session: nox.Session) -> None:
    """Run `vllm serve` for hidden states and speculators' client on several releases: `nox -s server -- --vllm 0.32.0`."""
    session.install("uv", ".")
    session.run("python", "tools/server_sweep.py", *session.posargs)


@nox.session
def wide(session: nox.Session) -> None:
    """The tests that `make test` leaves out: each adapter switched off under a rehearsal."""
    session.run("make", "test", "ARGS=-m wide", external=True)
