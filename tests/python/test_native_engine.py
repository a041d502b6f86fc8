"""The engine through the bindings: a small training run on the host backend with delays and poison
equals the same run done one thing at a time, and does not when a wait is removed."""

import gc
from collections.abc import Iterable

import numpy as np
import pytest

from megatrain import _native
from megatrain._native import Engine, HostBackend, ParameterUpdate, Section, TileFormat, TileLayout, TileStore

TILES = 5
STEPS = 12
STATE = (Section.weights, Section.master_low, Section.exp_avg, Section.exp_avg_sq)
HYPERPARAMETERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def update_of(parameter: int, step: int) -> ParameterUpdate:
    return ParameterUpdate(parameter, step=step, **HYPERPARAMETERS)


class Training:
    """Compute is copies on a stream: the first half of a gradient is the weights as the slot held them,
    the second half comes from a table. Parameter 0 is updated in backward, parameter 1 in forward too."""

    def __init__(
        self,
        backend: HostBackend,
        *,
        format: TileFormat = TileFormat.fp32,
        slots: int = 2,
        one_at_a_time: bool = False,
        expect: Iterable[int] | None = None,
        staging_bytes: int = 1 << 20,
        without_wait: str = "",
    ) -> None:
        self.backend, self.one_at_a_time = backend, one_at_a_time
        self.dtype = np.float32 if format == TileFormat.fp32 else np.uint16
        self.expected = list(expect) if expect is not None else [*range(TILES), *reversed(range(TILES))]
        threads, isa = (1, "scalar") if one_at_a_time else (2, "")
        self.store = TileStore(backend, threads=threads, isa=isa, staging_bytes=staging_bytes)
        rng = np.random.default_rng(3)
        for tile in range(TILES):
            self.store.add(TileLayout(format, [(1000 + 13 * tile, True), (90, True), (64, False)]))
            for parameter, size in enumerate((1000 + 13 * tile, 90, 64)):
                assert self.store.set_master(tile, parameter, rng.standard_normal(size).astype(np.float32))
        self.engine = Engine(self.store, without_wait=without_wait)
        largest = self.store.layout(TILES - 1)
        self.slots = [np.zeros(largest.weight_elements, self.dtype) for _ in range(slots)]
        for slot in self.slots:
            self.engine.add_slot(slot.ctypes.data, slot.nbytes, 0)
        self.gradient = np.zeros(largest.trainable_elements, self.dtype)
        self.compute = backend.create_stream("compute")
        self.seen: list[np.ndarray] = []
        self.tables: list[np.ndarray] = []  # kept until the copies have ended
        self.ticket: int | None = None
        self.counts: dict[tuple[int, int], int] = {}

    def copy(self, destination: np.ndarray, source: np.ndarray, nbytes: int, to_device: bool) -> None:
        handle = self.compute.handle
        self.backend.copy(destination.ctypes.data, source.ctypes.data, nbytes, to_device, handle)

    def settle(self) -> None:
        if self.one_at_a_time:
            self.compute.synchronize()
            self.engine.synchronize()

    def read(self, tile: int) -> np.ndarray:
        slot = self.engine.acquire(tile, self.compute.handle)
        out = np.empty(self.store.layout(tile).weight_elements, self.dtype)
        self.seen.append(out)
        self.copy(out, self.slots[slot], out.nbytes, False)
        self.engine.release(slot, self.compute.handle)
        self.settle()
        return out

    def update(self, tile: int, parameters: Iterable[int]) -> None:
        updates = []
        for parameter in parameters:
            step = self.counts[tile, parameter] = self.counts.get((tile, parameter), 0) + 1
            updates.append(update_of(parameter, step))
        self.engine.update(tile, updates, 0.5, tile)
        self.settle()

    def backward(self, tile: int, rng: np.random.Generator) -> None:
        elements = self.store.layout(tile).trainable_elements
        table = rng.standard_normal(elements).astype(np.float32)
        if self.dtype is np.uint16:
            table = (table.view(np.uint32) >> 16).astype(np.uint16)
        self.tables.append(table)
        if self.ticket is not None:
            self.engine.wait_drain(self.ticket, self.compute.handle)
        self.copy(self.gradient, table, table.nbytes, True)
        weights = self.read(tile)
        self.copy(self.gradient, weights, table.nbytes // 2, True)
        self.ticket = self.engine.drain(
            tile, Section.gradients, 0, elements, self.gradient.ctypes.data, self.compute.handle
        )
        self.settle()

    def run(self) -> list[np.ndarray]:
        """What compute saw, then the state of the tiles."""
        rng = np.random.default_rng(4)
        try:
            for step in range(STEPS):
                self.engine.begin_step(step)
                if not self.one_at_a_time:
                    self.engine.expect(self.expected)
                for tile in range(TILES):
                    self.read(tile)
                    self.update(tile, [1])
                for tile in reversed(range(TILES)):
                    self.backward(tile, rng)
                    self.update(tile, [1, 0])
            self.engine.synchronize()
        finally:
            self.compute.synchronize()
            self.engine.close()
        state = [np.frombuffer(self.store.view(tile, s), np.uint8) for tile in range(TILES) for s in STATE]
        return [*self.seen, *state]


def adversarial(seed: int = 9, **options: object) -> HostBackend:
    return HostBackend(max_delay_us=200, seed=seed, poison=True, **options)


def differences(result: list[np.ndarray], reference: list[np.ndarray]) -> int:
    """Arrays that differ in any bit."""
    assert len(result) == len(reference)
    pairs = zip(result, reference, strict=True)
    return sum(not np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)


def small_engine(
    tiles: int = 3,
    slots: int = 2,
    *,
    backend: HostBackend | None = None,
    without_wait: str = "",
    **options: object,
) -> tuple[Engine, TileStore, list[np.ndarray]]:
    store = TileStore(backend or HostBackend(**options), threads=1)
    for tile in range(tiles):
        store.add(TileLayout(TileFormat.fp32, [(64, True)]))
        assert store.set_master(tile, 0, np.full(64, tile + 1.0, np.float32))
    engine = Engine(store, without_wait=without_wait)
    memory = [np.zeros(64, np.float32) for _ in range(slots)]
    for slot in memory:
        engine.add_slot(slot.ctypes.data, slot.nbytes, 0)
    return engine, store, memory


@pytest.fixture(scope="module", params=["fp32", "bf16_split"])
def reference(request: pytest.FixtureRequest) -> tuple[TileFormat, list[np.ndarray]]:
    format = getattr(TileFormat, request.param)
    return format, Training(HostBackend(), format=format, slots=1, one_at_a_time=True).run()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 3},
        {"slots": 3, "expect": [4, 4, 1, 0]},
        {"expect": []},
        {"staging_bytes": 4096, "pin_limit": 0},
    ],
    ids=["two slots", "three slots", "wrong guesses", "no guesses", "small staging ring"],
)
def test_training_equals_one_thing_at_a_time(
    reference: tuple[TileFormat, list[np.ndarray]], options: dict[str, object]
) -> None:
    format, expected = reference
    options = dict(options)
    backend = adversarial(pin_limit=options.pop("pin_limit", None))
    assert differences(Training(backend, format=format, **options).run(), expected) == 0


@pytest.mark.parametrize(
    "wait",
    [
        "slot_free",
        "slot_arrived",
        "gate_update",
        "gradient_ready",
        "gradient_landed",
        "staging_free",
    ],
)
def test_training_goes_wrong_without(wait: str) -> None:
    expected = Training(HostBackend(), slots=1, one_at_a_time=True).run()
    # One run is enough nearly always; a busy machine may delay just what the wait would have.
    for seed in range(5):
        try:
            result = Training(adversarial(seed=seed), slots=3, without_wait=wait).run()
        except RuntimeError as error:
            assert "infinite or NaN" in str(error)  # poison that went through an update
            return
        if differences(result, expected) > 0:
            return
    pytest.fail(f"five runs without {wait} were right")


@pytest.mark.parametrize("wait, seen", [("", 2.0), ("gate_fetch", 1.0)])
def test_an_update_waits_for_a_copy_that_still_reads(wait: str, seen: float) -> None:
    """In training a tile's gradient comes from its weights, so that a copy up has ended long before the
    tile's update. Here the copy is held back, behind the last reader of the only slot, and the update
    (which halves the weights) needs no gradient."""
    backend = HostBackend(max_delay_us=1000, seed=5)
    engine, _, (slot,) = small_engine(2, 1, backend=backend, without_wait=wait)
    compute = backend.create_stream("compute")
    out = np.zeros(64, np.float32)
    held = engine.acquire(0, compute.handle)
    for _ in range(100):  # 50 ms
        backend.copy(out.ctypes.data, slot.ctypes.data, out.nbytes, False, compute.handle)
    engine.release(held, compute.handle)
    engine.acquire(1, compute.handle)
    halving = ParameterUpdate(0, lr=1.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.5, step=1)
    engine.update(1, [halving], 1.0, 0)
    backend.copy(out.ctypes.data, slot.ctypes.data, out.nbytes, False, compute.handle)
    compute.synchronize()
    np.testing.assert_array_equal(out, np.full(64, seen, np.float32))
    engine.close()


def test_unknown_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_free, slot_arrived, part_arrived, gate_update"):
        Engine(TileStore(HostBackend(), threads=1), without_wait="everything")


def test_update_equals_adamw() -> None:
    engine, store, _ = small_engine(1, 1)
    rng = np.random.default_rng(5)
    w, m, v = np.ones(64), np.zeros(64), np.zeros(64)
    h = HYPERPARAMETERS
    for step in range(1, 11):
        gradient = rng.standard_normal(64).astype(np.float32)
        ticket = engine.drain(0, Section.gradients, 0, 64, gradient.ctypes.data, 0)
        engine.wait_drain(ticket, 0)
        engine.update(0, [update_of(0, step)], 0.5, 0)
        g = 0.5 * gradient.astype(np.float64)
        w *= 1 - h["lr"] * h["weight_decay"]
        m += (1 - h["beta1"]) * (g - m)
        v += (1 - h["beta2"]) * (g * g - v)
        denominator = np.sqrt(v / (1 - h["beta2"] ** step)) + h["eps"]
        w -= h["lr"] * m / (1 - h["beta1"] ** step) / denominator
    engine.wait_updates()
    np.testing.assert_allclose(np.frombuffer(store.view(0, Section.weights), np.float32), w, rtol=1e-6)
    assert not engine.updates_pending()
    assert engine.version(0) == 10


def test_edits_are_seen_by_the_next_acquisition() -> None:
    engine, store, memory = small_engine()
    engine.release(engine.acquire(1, 0), 0)
    np.frombuffer(store.view(1, Section.weights), np.float32)[:] = 42
    engine.mark_edited(1)
    slot = engine.acquire(1, 0)
    np.testing.assert_array_equal(memory[slot], np.full(64, 42, np.float32))
    assert engine.version(1) == 1


def test_released_slots_are_poisoned_once_stale() -> None:
    engine, _, memory = small_engine(poison=True)
    slot = engine.acquire(0, 0)
    engine.mark_edited(0)
    assert (memory[slot] == 1).all()
    engine.release(slot, 0)
    assert np.isnan(memory[slot]).all()


def test_fetch_brings_back_what_was_drained() -> None:
    engine, store, _ = small_engine(1, 1, max_delay_us=300, seed=1)
    store.add_accumulator(0)
    values, fetched = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    engine.drain(0, Section.accumulator, 8, 40, values.ctypes.data, 0)
    engine.fetch(0, Section.accumulator, 8, 40, fetched.ctypes.data, 0)
    np.testing.assert_array_equal(fetched, values)


def test_callers_mistakes_are_value_errors() -> None:
    engine, _, memory = small_engine()
    wrong = {
        "tile 9 of a store with 3 tiles": lambda: engine.acquire(9, 0),
        "slot 0 is not in use": lambda: engine.release(0, 0),
        "60 elements at offset 5": lambda: engine.drain(0, Section.gradients, 5, 60, 0, 0),
        "ticket 3": lambda: engine.wait_drain(3, 0),
        "parameter 1 of a tile with 1": lambda: engine.update(0, [update_of(1, 1)], 1.0, 0),
        "steps count from 1": lambda: engine.update(0, [update_of(0, 0)], 1.0, 0),
        "end_compute without begin_compute": lambda: engine.end_compute(0),
        "a slot of 8 bytes for tile 1": lambda: engine.add_slot(memory[0].ctypes.data, 8, 0, tile=1),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    slots = [engine.acquire(0, 0), engine.acquire(1, 0)]
    with pytest.raises(ValueError, match="all 2 slots are in use"):
        engine.acquire(2, 0)
    engine.release(slots[0], 0)
    engine.acquire(2, 0)


def test_a_workers_failure_surfaces_and_stops_the_engine() -> None:
    engine, _, _ = small_engine()
    gradient = np.full(64, np.inf, np.float32)
    engine.drain(2, Section.gradients, 0, 64, gradient.ctypes.data, 0)
    engine.update(2, [update_of(0, 1)], 1.0, 0)
    for call in (engine.wait_updates, engine.synchronize, lambda: engine.acquire(0, 0), engine.trace):
        with pytest.raises(RuntimeError, match="infinite or NaN: parameter 0 of tile 2"):
            call()
    engine.close()


def test_closing_finishes_what_is_queued() -> None:
    engine, store, _ = small_engine(max_delay_us=1000, seed=2)
    gradient = np.ones(64, np.float32)
    for tile in range(3):
        engine.drain(tile, Section.gradients, 0, 64, gradient.ctypes.data, 0)
        engine.update(tile, [update_of(0, 1)], 1.0, 0)
    engine.close()
    engine.close()
    for tile in range(3):
        assert (np.frombuffer(store.view(tile, Section.weights), np.float32) < tile + 1).all()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.acquire(0, 0)


def test_closing_throws_a_failure_that_no_call_has_thrown() -> None:
    engine, _, _ = small_engine(max_delay_us=1000, seed=2)
    gradient = np.full(64, np.nan, np.float32)
    engine.drain(0, Section.gradients, 0, 64, gradient.ctypes.data, 0)
    engine.update(0, [update_of(0, 1)], 1.0, 0)
    with pytest.raises(RuntimeError, match="infinite or NaN"):
        engine.close()
    engine.close()


def test_an_engine_keeps_its_store_and_can_be_dropped_with_work_queued() -> None:
    engine, store, memory = small_engine(max_delay_us=1000, seed=2)
    del store
    gc.collect()
    engine.expect([2, 1, 0])
    engine.update(0, [update_of(0, 1)], 1.0, 0)
    assert (memory[engine.acquire(1, 0)] == 2).all()
    del engine
    gc.collect()


def test_trace_shows_an_update_inside_the_compute_of_the_next_step() -> None:
    engine, _, _ = small_engine()
    gradient = np.ones(64, np.float32)
    engine.begin_step(1)
    slot = engine.acquire(0, 0)
    engine.begin_compute(0, 0)
    engine.end_compute(0)
    engine.release(slot, 0)
    engine.begin_step(2)
    slot = engine.acquire(1, 0)
    engine.begin_compute(1, 0)
    engine.begin_step(1)  # what is queued here belongs to the step before
    engine.drain(0, Section.gradients, 0, 64, gradient.ctypes.data, 0)
    engine.update(0, [update_of(0, 1)], 1.0, 0)
    engine.wait_updates()
    engine.release(engine.acquire(2, 0), 0)
    engine.end_compute(0)
    engine.release(slot, 0)
    spans = engine.trace()
    assert [span.begin_ns for span in spans] == sorted(span.begin_ns for span in spans)
    assert all(span.begin_ns <= span.end_ns for span in spans)

    def inside(kind: str, tile: int) -> _native.TraceSpan:
        (span,) = [s for s in spans if s.kind == kind and s.tile == tile]
        assert outer.begin_ns <= span.begin_ns and span.end_ns <= outer.end_ns
        return span

    (outer,) = [span for span in spans if span.kind == "compute" and span.step == 2]
    update = inside("update", 0)
    assert (update.step, update.nbytes) == (1, 28 * 64)
    assert inside("copy_down", 0).nbytes == 256
    assert inside("copy_up", 2).nbytes == 256
    assert {span.kind for span in spans} == {"copy_up", "copy_down", "compute", "update", "wait"}
    waited, for_updates, _ = engine.wait_totals()
    assert waited > 0 and 0 <= for_updates <= waited
    engine.clear_trace()
    assert engine.trace() == []


def test_trace_keeps_the_last_spans() -> None:
    store = TileStore(HostBackend(), threads=1)
    store.add(TileLayout(TileFormat.fp32, [(4, True)]))
    engine = Engine(store, trace_capacity=3)
    for step in range(7):
        engine.begin_step(step)
        engine.begin_compute(0, 0)
        engine.end_compute(0)
    assert [span.step for span in engine.trace()] == [4, 5, 6]
