"""The proof that captured states belong to their prompts, and the silent faults that capture must not let through.

A model of a few token-wise layers in the form of vLLM's, driven by a runner that lays out batches as vLLM's does, under
the real Capture, Alignment and Session. Each fault is planted, and must be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture works on tensors; these tests run where vLLM is installed")

from speculators_compat import alignment, capture, residual, settings  # noqa: E402
from speculators_compat.alignment import Alignment, Proof, judge  # noqa: E402
from speculators_compat.capture import Capture  # noqa: E402
from speculators_compat.errors import CompatError  # noqa: E402
from speculators_compat.extraction import Session, UnprovedError, input_ids, results  # noqa: E402

HIDDEN, VOCAB, LAYERS = 16, 64, 4
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24, 25], [31, 32, 33]]


class RMSNorm(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Any, residual: Any = None) -> Any:
        whole = x if residual is None else x + residual
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, whole)


class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = RMSNorm(), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, residual: Any) -> Any:
        normed, residual = (self.norm(x), x) if residual is None else self.norm(x, residual)
        return self.mix(normed), residual


class Inner(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()

    def forward(self, tokens: Any) -> Any:
        x, residual = self.embed(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x, residual)[0]


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Inner(), torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Any) -> Any:
        return self.model(tokens)

    def compute_logits(self, hidden_states: Any) -> Any:
        return self.head(hidden_states)


class Runner:
    """A model runner: its batch order is not the scheduler's."""

    device = "cpu"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.input_batch = SimpleNamespace(req_ids=[])
        self.input_ids = torch.zeros(256, dtype=torch.long)
        self.prompts: dict[str, list[int]] = {}

    def tokens_of(self, id: str, start: int, count: int) -> list[int]:
        return self.prompts[id][start : start + count]

    def head_rows(self, rows: list[int]) -> list[int]:
        return rows

    @torch.inference_mode()  # type: ignore[misc]
    def execute_model(self, scheduled: Any) -> dict[str, int]:
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            self.prompts.setdefault(new.req_id, list(new.prompt_token_ids))
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        order = sorted(scheduled.num_scheduled_tokens, reverse=True)
        self.input_batch.req_ids = order
        tokens, ends = [], []
        for id in order:
            tokens += self.tokens_of(id, computed[id], scheduled.num_scheduled_tokens[id])
            ends.append(len(tokens) - 1)
        self.input_ids[: len(tokens)] = torch.tensor(tokens)
        hidden = self.model(self.input_ids[: len(tokens)].clone())
        logits = self.model.compute_logits(hidden[self.head_rows(ends)])
        return dict(zip(order, logits.argmax(-1).tolist(), strict=True))


class Rig:
    """A generator in small: the real session, capture and proof around the runner."""

    layer_ids: list[int]

    def __init__(self, model: Any = None, layer_ids: list[int] | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Model()
        self.runner = Runner(self.model)
        self.layer_ids = layer_ids or [2, 0, LAYERS - 1, 0]
        self.layers: Callable[[Any], Any] = lambda layers: layers
        self.first = 0  # tokens of a prompt that are already computed
        self.step_tokens = 64
        self.session: Session | None = None

    def rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        if method == "speculators_compat_reset":
            self.capture.reset()
            return [{}]
        ids, depot, normed, *_ = args
        inner = self.model.model
        norm = alignment.final_norm_of(self.model, "model.layers") if normed else None
        layers = self.layers(inner.layers)
        self.capture = Capture(self.runner, layers, sorted(set(ids)), depot, 64, final_norm=norm)
        self.alignment = Alignment(self.capture, self.model, "model.layers", inner.layers, normed=normed)
        return [{"model": "Model", "path": "model.layers", "num_layers": LAYERS, "unproved": self.alignment.reason}]

    def generate(self, prompts: list[list[int]] = PROMPTS) -> list[dict[str, Any]]:
        if self.session is None:
            self.session = Session(self.rpc, self.layer_ids)
        session = self.session
        ids = [f"req_{len(self.runner.prompts)}_{index}" for index in range(len(prompts))]
        session.expect(ids)
        done = dict.fromkeys(ids, self.first)
        states: dict[str, Any] = {}
        verdicts: dict[str, Any] = {}
        ended: list[str] = []
        new = set(ids)
        try:
            while len(states) < len(ids):
                left, count = self.step_tokens, {}
                for id, prompt in zip(ids, prompts, strict=True):
                    if id not in states and left and done[id] < len(prompt):
                        count[id] = min(left, len(prompt) - done[id])
                        left -= count[id]
                tokens = self.runner.execute_model(self.scheduled(ids, prompts, done, count, new, ended))
                new -= count.keys()
                ended = []
                for id, prompt in zip(ids, prompts, strict=True):
                    done[id] += count.get(id, 0)
                    if id in count and done[id] == len(prompt):
                        ended.append(id)
                if self.first:  # the worker says what is missing when it hears that the request is over
                    self.runner.execute_model(self.scheduled(ids, prompts, done, {}, set(), ended))
                for id in ended:
                    states[id] = session.collect(id)
                    verdicts[id] = session.prove(id, states[id], tokens[id])
        except BaseException:
            session.reset()
            raise
        return results(session, [input_ids(p) for p in prompts], [states[id] for id in ids], [verdicts[id] for id in ids])

    @staticmethod
    def scheduled(ids: Any, prompts: Any, done: Any, count: Any, new: set[str], ended: list[str]) -> Any:
        by_id = dict(zip(ids, prompts, strict=True))
        cached = [id for id in count if id not in new]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=id, prompt_token_ids=by_id[id], num_computed_tokens=done[id])
                for id in count
                if id in new
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=cached, num_computed_tokens=[done[id] for id in cached]),
            finished_req_ids=set(ended),
            num_scheduled_tokens=count,
            total_num_scheduled_tokens=sum(count.values()),
        )

    def reference(self, prompt: list[int], *, normed: bool = False) -> list[Any]:
        """What leaves each requested layer, computed by hand."""
        with torch.inference_mode():
            inner = self.model.model
            x, residual, left = inner.embed(torch.tensor(prompt)), None, []
            for layer in inner.layers:
                x, residual = layer.forward(x, residual)
                left.append(x + residual)
            if normed:
                left[-1] = inner.norm.forward(x, residual)[0]
            return [left[k] for k in self.layer_ids]


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_configured", {})


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    if made.session is not None:
        made.session.close()


def caught(rig: Rig, prompts: list[list[int]] = PROMPTS) -> CompatError:
    with pytest.raises(CompatError) as info:
        rig.generate(prompts)
    return info.value


# ---- without a fault


@pytest.mark.parametrize("step_tokens", [64, 4, 3, 1])
def test_states_are_right_and_proved(rig: Rig, step_tokens: int) -> None:
    rig.step_tokens = step_tokens
    for result, prompt in zip(rig.generate(), PROMPTS, strict=True):
        for got, wanted in zip(result["hidden_states"], rig.reference(prompt), strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)
    assert rig.session is not None
    assert rig.session.alignment.to_dict() == {"proved": 4, "not_proved": {}, "failed": {}}


def test_it_is_proved_without_the_last_layer_too(rig: Rig) -> None:
    rig.layer_ids = [1]
    rig.generate()
    assert rig.session is not None
    assert rig.session.alignment.proved == 4


def test_the_state_after_the_final_norm_on_request(rig: Rig) -> None:
    settings.configure(final_norm=True)
    for result, prompt in zip(rig.generate(), PROMPTS, strict=True):
        for got, wanted in zip(result["hidden_states"], rig.reference(prompt, normed=True), strict=True):
            assert torch.allclose(got, wanted, atol=1e-6)
    assert rig.session is not None
    assert rig.session.alignment.proved == 4


def test_the_same_prompt_many_times(rig: Rig) -> None:
    rig.generate([PROMPTS[0]] * 5)
    assert rig.session is not None
    assert rig.session.alignment.proved == 5


# ---- models that are not judged, or are although they are odd


def test_a_model_that_scales_its_states_is_judged(rig: Rig) -> None:
    inner = rig.model.model.forward
    rig.model.model.forward = lambda tokens: inner(tokens) / 7
    rig.generate()
    assert rig.session is not None
    assert rig.session.alignment.proved == 4


def test_a_model_that_changes_its_states_before_the_head_is_not(rig: Rig) -> None:
    inner = rig.model.model.forward
    rig.model.model.forward = lambda tokens: inner(tokens).flip(-1)
    rig.generate()
    assert rig.session is not None
    assert "between the final norm and the LM head" in str(rig.session.alignment.to_dict()["not_proved"])


def test_a_model_that_changes_its_states_before_the_norm_is_not(rig: Rig) -> None:
    norm = rig.model.model.norm
    rig.model.model.forward = lambda tokens: norm(_through(rig, tokens).flip(-1))
    rig.generate()
    assert rig.session is not None
    assert "is given something else" in str(rig.session.alignment.to_dict()["not_proved"])


def _through(rig: Rig, tokens: Any) -> Any:
    x, residual = rig.model.model.embed(tokens), None
    for layer in rig.model.model.layers:
        x, residual = layer(x, residual)
    return x + residual


def test_a_model_without_a_final_norm_is_not(rig: Rig) -> None:
    rig.model.model.forward = lambda tokens: _through(rig, tokens)
    rig.model.model.norm = torch.nn.Identity()
    rig.generate()
    assert rig.session is not None
    assert rig.session.alignment.to_dict()["not_proved"] == {"no final norm beside model.layers": 4}
    settings.configure(final_norm=True)
    other = Rig(rig.model)
    assert caught(other).id == "SC409"


def test_a_model_whose_norm_is_never_called_is_not(rig: Rig) -> None:
    rig.model.model.forward = lambda tokens: _through(rig, tokens)
    rig.generate()
    assert rig.session is not None
    assert "no final norm was called" in str(rig.session.alignment.to_dict()["not_proved"])


def test_a_model_whose_logits_cannot_be_observed_is_not(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculators_compat.extraction.PATIENCE", 0.05)
    monkeypatch.setattr(Alignment, "_hand_over", lambda *_: None)
    rig.generate()
    assert rig.session is not None
    assert "could not be observed" in str(rig.session.alignment.to_dict()["not_proved"])


def test_an_error_in_the_proof_leaves_the_model_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "_directions", lambda rows: 1 / 0)
    rig.generate()
    assert rig.session is not None
    assert "ZeroDivisionError" in str(rig.session.alignment.to_dict()["not_proved"])


# ---- silent faults, planted


def fault_order_of_the_batch(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Rows are given out in the order in which prompts were sent (0.3.0)."""
    patch.setattr(rig.runner, "input_batch", _Sorted())


class _Sorted:
    """A batch that tells its requests in another order than its rows have."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    @property
    def req_ids(self) -> list[str]:
        return sorted(self._ids)

    @req_ids.setter
    def req_ids(self, ids: list[str]) -> None:
        self._ids = ids


def fault_order_unseen_by_tokens(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The same, where the engine does not tell its token ids."""
    fault_order_of_the_batch(rig, patch)
    patch.setattr(capture, "_check_tokens", lambda *_: None)


def fault_order_of_results(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """States are handed to the wrong prompts afterwards (0.4.x sorts ids as text)."""
    real = Session.collect
    kept: dict[str, Any] = {}

    def collect(self: Session, id: str) -> Any:
        kept[id] = real(self, id)
        return kept[next(iter(kept))]

    patch.setattr(Session, "collect", collect)


def fault_neighbours_tokens(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The engine computes another prompt's tokens."""
    patch.setattr(
        rig.runner, "tokens_of", lambda id, start, count: [token + 1 for token in rig.runner.prompts[id]][start:][:count]
    )


def fault_another_layer(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Each state is taken one layer too early."""
    rig.layers = lambda layers: [layers[max(k - 1, 0)] for k in range(LAYERS)]


def fault_norm_applied(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The last state is taken after the norm although the one before it was asked for."""
    rig.layers = lambda layers: [*layers[: LAYERS - 1], _First(rig.model.model.norm)]


def fault_norm_missing(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The state after the norm was asked for, the one before it is taken."""
    settings.configure(final_norm=True)
    patch.setattr(alignment, "final_norm_of", lambda *_: _First(rig.model.model.layers[-1], whole=True))


class _First:
    """Stands in for a module: its hooks see the sum, or the first part, of what that returned."""

    def __init__(self, module: Any, whole: bool = False) -> None:
        self.module, self.whole = module, whole

    def register_forward_hook(self, hook: Any) -> Any:
        return self.module.register_forward_hook(
            lambda m, a, out: hook(m, a, out[0] + out[1] if self.whole else out[0])
        )


def fault_residual_left_out(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Only a part of the residual stream is taken."""
    _leaves(patch, lambda layer, output: (output[0], None))


def fault_residual_added_wrongly(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The residual is scaled, which the sum does not show."""
    _leaves(patch, lambda layer, output: (output[0], output[1] * 0.5))


def _leaves(patch: pytest.MonkeyPatch, left_layer: Any) -> None:
    for module in (residual, capture):
        patch.setattr(module, "left_layer", left_layer)


def fault_cached_prefix(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Two tokens come from the prefix cache and are not computed."""
    rig.first = 2


def fault_positions_shifted(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Rows are stored one position too late, round the end."""
    real = Capture._target

    def target(self: Capture, span: Any, like: Any) -> Any:
        return real(self, span, like)

    def collect(self: Session, id: str) -> Any:
        return [state.roll(1, 0) for state in collected(self, id)]

    collected = Session.collect
    patch.setattr(Capture, "_target", target)
    patch.setattr(Session, "collect", collect)


def _poison(value: float, layer: int = 1) -> Callable[[Rig, pytest.MonkeyPatch], None]:
    def plant(rig: Rig, patch: pytest.MonkeyPatch) -> None:
        def hook(module: Any, args: Any, output: Any) -> Any:
            if value:
                output[0][-1, 3] = value
                return output
            return torch.zeros_like(output[0]), torch.zeros_like(output[1])

        rig.model.model.layers[2].register_forward_hook(hook)

    return plant


def fault_hooks_skipped(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """A compiled layer is not called as a module."""
    layer = rig.model.model.layers[2]
    patch.setattr(type(layer), "__call__", lambda self, *args: self.forward(*args))


def fault_head_rows(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The LM head gets the rows in another order than the batch has."""
    patch.setattr(rig.runner, "head_rows", lambda rows: rows[::-1])


FAULTS: dict[str, tuple[Callable[[Rig, pytest.MonkeyPatch], None], set[str], str]] = {
    "rows in the order of the prompts": (fault_order_of_the_batch, {"SC506"}, "belong to another request"),
    "the same, without token ids": (fault_order_unseen_by_tokens, {"SC516"}, "order of the batch"),
    "results sorted as text": (fault_order_of_results, {"SC515", "SC516"}, "not the one that left that layer"),
    "a neighbour's tokens": (fault_neighbours_tokens, {"SC506"}, "other tokens"),
    "another layer": (fault_another_layer, {"SC516"}, "layer convention"),
    "after the norm instead of before": (fault_norm_applied, {"SC516"}, "not the one that left that layer"),
    "before the norm instead of after": (fault_norm_missing, {"SC516"}, "not the one that left that layer"),
    "the residual left out": (fault_residual_left_out, {"SC516"}, "after the final norm differs"),
    "the residual scaled": (fault_residual_added_wrongly, {"SC516"}, "not what the last layer handed on"),
    "tokens from the prefix cache": (fault_cached_prefix, {"SC503"}, "2 of its"),
    "positions shifted": (fault_positions_shifted, {"SC516"}, "not the one that left that layer"),
    "NaN": (_poison(float("nan")), {"SC511"}, "NaN"),
    "infinity": (_poison(float("inf")), {"SC511"}, "infinite"),
    "all zeros": (_poison(0), {"SC511"}, "zeros"),
    "hooks skipped": (fault_hooks_skipped, {"SC502"}, "without their forward hooks"),
    "rows of the LM head in another order": (fault_head_rows, {"SC515", "SC516"}, "place"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_silent_fault_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, ids, said = FAULTS[name]
    plant(rig, monkeypatch)
    error = caught(rig)
    assert error.id in ids
    assert said in str(error)


# ---- one bad sample, and many


def test_one_bad_sample_is_named_and_the_others_are_there(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.collect

    def collect(self: Session, id: str) -> Any:
        states = real(self, id)
        return [state + 1 for state in states] if id.endswith("_2") else states

    monkeypatch.setattr(Session, "collect", collect)
    with pytest.raises(UnprovedError, match=r"SC515(.|\n)*prompt 2: ") as info:
        rig.generate()
    assert list(info.value.failed) == [2]
    assert info.value.results[2] is None
    kept = [result for result in info.value.results if result is not None]
    for result, prompt in zip(kept, [PROMPTS[0], PROMPTS[1], PROMPTS[3]], strict=True):
        assert torch.allclose(result["hidden_states"][0], rig.reference(prompt)[0], atol=1e-5)
    monkeypatch.setattr(Session, "collect", real)
    assert len(rig.generate()) == 4


def test_nothing_is_said_to_be_kept_that_was_handed_on() -> None:
    session: Any = SimpleNamespace(alignment=alignment.Report())
    verdicts = [alignment.Verdict(), alignment.Verdict(fault="another token", cause="order")]
    with pytest.raises(UnprovedError, match=r"SC515(.|\n)*given to on_result") as info:
        results(session, [input_ids([1]), input_ids([2])], [[], []], verdicts, kept=False)
    assert info.value.results == [None, None]


def test_many_bad_samples_end_the_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fault_another_layer(rig, monkeypatch)
    with pytest.raises(UnprovedError, match=r"SC516(.|\n)*likely cause") as info:
        rig.generate()
    assert info.value.results == [None] * 4


# ---- judging


GOOD = Proof("r", dtype="bfloat16", row=1, error=0.004, own=0.0, raw=0.5, tokens=(7, 8, 9), logits=(4.0, 3.99, 1.0))


@pytest.mark.parametrize(
    ("token", "fault"), [(7, False), (8, False), (9, True), (50, True), (None, False)]
)
def test_a_token_within_rounding_of_the_maximum_passes(token: int | None, fault: bool) -> None:
    assert bool(judge(GOOD, token=token, row=1).fault) == fault


def test_where_all_that_was_kept_is_a_tie_any_token_passes() -> None:
    proof = Proof("r", dtype="bfloat16", tokens=(7, 8), logits=(4.0, 4.0))
    assert not judge(proof, token=50).fault


def test_causes() -> None:
    assert judge(Proof("r", dtype="float32", error=1.0, raw=0.0)).cause == "norm"
    assert judge(Proof("r", dtype="float32", error=1.0, raw=1.0)).cause == "layer"
    assert judge(Proof("r", dtype="float32", error=1.0, own=1.0, twin=3)).cause == "order"
    assert judge(Proof("r", dtype="float32", error=1.0, own=1.0)).skipped
    assert judge(Proof("r", dtype="float32", error=1.0, own=1.0, headed=True)).cause == "order"
    assert judge(Proof("r", dtype="float32", fed=1.0)).skipped
    assert judge(Proof("r", dtype="float32", fed=1.0, direct=True)).cause == "layer"
    assert judge(Proof("r", skipped="why")).skipped == "why"
    assert judge(Proof("r", dtype="float32", row=1), row=2).cause == "layer"
