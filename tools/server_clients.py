# SPDX-License-Identifier: Apache-2.0
"""Speculators' client, as released, against servers that behave as vLLM's releases and file systems do.

    python server_clients.py --mended 0|1        prints one line "CLIENT {json}"

Run it with a speculators release (0.5 to 0.9) on PYTHONPATH. The client is the real one; the server is a few lines of HTTP
that answer as vLLM does and write real files, late, slowly, locked or wrong. Each situation ends in ``right`` (the states
that belong to the prompt were read), ``wrong`` (others were), or the error that the caller sees.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import inspect
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPT = list(range(10, 40))


class Situation:
    """A server's behaviour: how long it takes to answer, what it answers, and how the file comes to be."""

    def __init__(
        self, *, after: float = 0.0, params: bool = True, write: Callable[[Path], None] | None = None
    ) -> None:
        self.after, self.params, self.write = after, params, write


def content(*, nan: bool = False, other: bool = False) -> bytes:
    import torch
    from safetensors.torch import save

    states = torch.arange(len(PROMPT) * 2 * 8, dtype=torch.float32).reshape(len(PROMPT), 2, 8) + 1
    if nan:
        states[3, 1, 2] = float("nan")
    ids = [k + 1 for k in PROMPT] if other else PROMPT
    return save({"hidden_states": states, "token_ids": torch.tensor(ids)})


def at_once(path: Path) -> None:
    path.write_bytes(content())


def late(path: Path) -> None:
    """A file system that shows the file after a second."""

    def later() -> None:
        time.sleep(1)
        path.write_bytes(content())

    threading.Thread(target=later, daemon=True).start()


def halves(path: Path) -> None:
    """A file whose end comes a second after its beginning; no lock."""
    data = content()
    path.write_bytes(data[: len(data) // 2])

    def later() -> None:
        time.sleep(1)
        with open(path, "ab") as file:
            file.write(data[len(data) // 2 :])

    threading.Thread(target=later, daemon=True).start()


def locked(seconds: float) -> Callable[[Path], None]:
    """As vLLM from 0.22 on: the lock is there before the answer and held until the file is whole."""

    def write(path: Path) -> None:
        handle = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        data = content()
        path.write_bytes(data[: len(data) // 2])

        def later() -> None:
            time.sleep(seconds)
            path.write_bytes(data)
            os.close(handle)

        threading.Thread(target=later, daemon=True).start()

    return write


def spoilt(**how: bool) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content(**how)) and None


SITUATIONS: dict[str, Situation] = {
    "file there when the server answers, no lock (vLLM 0.17 to 0.20)": Situation(write=at_once),
    "lock held for 1 s after the answer (vLLM from 0.22 on)": Situation(write=locked(1)),
    "lock held for 12 s after the answer (large states)": Situation(write=locked(12)),
    "file seen 1 s after the answer, no lock (a network file system)": Situation(write=late),
    "half a file for 1 s, no lock (a network file system)": Situation(write=halves),
    "answer after 17 s (a long prompt, a queue)": Situation(after=17, write=at_once),
    "no kv_transfer_params (a server without connector)": Situation(params=False),
    "a state that is not finite": Situation(write=spoilt(nan=True)),
    "states of another prompt": Situation(write=spoilt(other=True)),
}
#: Locks as NFS has them: an exclusive one needs a handle that may write.
NFS = "lock on a file system that wants a writable handle (NFS)"


def serve(folder: Path) -> str:
    """A server that behaves as its model's name says; its base URL."""
    names = list(SITUATIONS)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            situation = SITUATIONS[names[int(asked["model"])]] if asked["model"] != "nfs" else Situation(write=locked(0.5))
            time.sleep(situation.after)
            path = folder / f"{asked['model']}-{time.monotonic_ns()}.safetensors"
            if situation.write is not None:
                situation.write(path)
            choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_token_ids": asked["prompt"]}
            params = {"hidden_states_path": str(path)} if situation.params else None
            answer = {
                "id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice],
                "kv_transfer_params": params,
            }  # fmt: skip
            body = json.dumps(answer).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the client did not wait
                return

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def ask(url: str, model: str) -> str:
    """One request with the released client, and its file read as that release's data set reads it."""
    import openai
    import speculators.data_generation.vllm_client as client_module
    import torch
    from safetensors.torch import load_file

    client = openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0)
    names = inspect.signature(client_module.generate_hidden_states).parameters
    item: Any = PROMPT if "token_ids" in names else {"input_ids": PROMPT}
    began = time.monotonic()
    try:
        # No second try: it is the first one that is looked at.
        found = client_module.generate_hidden_states(client, model, item, max_retries=0)
        path = found[0] if isinstance(found, tuple) else found
        wait = getattr(client_module, "wait_for_lock", None)
        if wait is not None and Path(f"{path}.lock").exists():
            wait(f"{path}.lock")
        states = load_file(path)["hidden_states"]
        expected = torch.arange(states.numel(), dtype=torch.float32).reshape(states.shape) + 1
        same = load_file(path)["token_ids"].tolist() == PROMPT and torch.equal(states, expected)
        left = ", lock file left" if Path(f"{path}.lock").exists() else ""
        said = ("right" if same else "wrong") + left
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    # Folders differ from run to run.
    return re.sub(r"/\S*/(?=\d+-\d+\.)", "", said) + f" ({time.monotonic() - began:.0f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mended", type=int, default=1)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if not args.mended:
        os.environ["SPECULATORS_COMPAT"] = "0"  # what is imported of the project must not mend anything
    import speculators.data_generation.vllm_client  # noqa: F401

    import speculators_compat  # noqa: F401
    from speculators_compat.detect import detect_all

    with tempfile.TemporaryDirectory() as name:
        url = serve(Path(name))
        with ThreadPoolExecutor(len(SITUATIONS)) as pool:
            asked = {s: pool.submit(ask, url, str(n)) for n, s in enumerate(SITUATIONS)}
            said = {s: future.result() for s, future in asked.items()}
        real = fcntl.flock

        def flock(handle: int, kind: int) -> None:
            if kind & fcntl.LOCK_EX and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            real(handle, kind)

        fcntl.flock = flock
        said[NFS] = ask(url, "nfs")
    row = {
        "speculators": str(detect_all()["speculators"].version),
        "mended": bool(args.mended),
        "date": time.strftime("%Y-%m-%d"),
        "situations": said,
    }
    print("CLIENT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
