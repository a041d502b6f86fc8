"""Tiles through the bindings: layout, memory that outlives its store's name, masters, refusals."""

import gc

import numpy as np
import pytest

from megatrain import _native
from megatrain._native import Section, TileFormat, TileLayout, TileStore


def host_store(**options: object) -> TileStore:
    return TileStore(_native.HostBackend(), threads=2, **options)


def array(store: TileStore, tile: int, section: Section, dtype: type = np.float32) -> np.ndarray:
    return np.frombuffer(store.view(tile, section), dtype=dtype)


def test_layout_places_trainable_parameters_first() -> None:
    layout = TileLayout(TileFormat.bf16_split, [(100, True), (7, False), (129, True)])
    assert [layout.element_offset(i) for i in range(3)] == [0, 384, 128]
    assert (layout.trainable_elements, layout.weight_elements) == (384, 512)
    assert layout.section(Section.weights) == (0, 1024)
    assert layout.section(Section.master_low) == (4096, 768)
    assert layout.section(Section.gradients) == (8192, 768)
    assert layout.section(Section.exp_avg) == (12288, 1536)
    assert layout.section(Section.exp_avg_sq) == (16384, 1536)
    assert layout.section(Section.accumulator) == (0, 1536)
    assert layout.nbytes == 20480
    assert layout.format == TileFormat.bf16_split


def test_layout_counts_in_sixty_four_bits() -> None:
    layout = TileLayout(TileFormat.fp32, [(2**33 + 1, True), (5, True)])
    assert layout.element_offset(1) == 2**33 + 64
    assert layout.section(Section.master_low)[1] == 0
    assert layout.nbytes == 4 * (4 * 2**33 + 4096)  # four sections, each a whole number of pages


@pytest.mark.parametrize(
    "parameters, shard", [([(-1, True)], (0, 1)), ([(2**60, True)], (0, 1)), ([], (1, 1)), ([], (0, 0))]
)
def test_layout_refuses_what_cannot_be(parameters: list[tuple[int, bool]], shard: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        TileLayout(TileFormat.fp32, parameters, *shard)


def test_views_are_writable_memory_of_the_tile() -> None:
    store = host_store()
    store.add(TileLayout(TileFormat.fp32, [(10, True), (3, False)]))
    weights = array(store, 0, Section.weights)
    assert weights.shape == (128,) and not weights.any()
    weights[:] = 7
    assert (array(store, 0, Section.weights) == 7).all()
    assert not array(store, 0, Section.gradients).any()
    assert len(store.view(0, Section.master_low)) == 0


def test_a_view_keeps_the_store_alive() -> None:
    store = host_store()
    store.add(TileLayout(TileFormat.fp32, [(1 << 20, True)]))
    weights = array(store, 0, Section.weights)
    weights[:] = np.arange(1 << 20)
    del store
    gc.collect()
    # Had the mapping gone, reading it would end the process.
    np.testing.assert_array_equal(weights, np.arange(1 << 20, dtype=np.float32))


def test_store_reports_its_memory() -> None:
    layout = TileLayout(TileFormat.bf16_split, [(5000, True)])
    store = TileStore(_native.HostBackend(pin_limit=layout.nbytes), threads=3, isa="scalar")
    assert [store.add(layout), store.add(layout)] == [0, 1]
    assert (len(store), store.threads, store.isa) == (2, 3, "scalar")
    assert store.nbytes == 2 * layout.nbytes
    assert store.pinned_bytes == layout.nbytes
    assert not store.has_accumulator(1)
    with pytest.raises(ValueError, match="no accumulator"):
        store.view(1, Section.accumulator)
    store.add_accumulator(1)
    assert store.has_accumulator(1) and not store.has_accumulator(0)
    assert len(store.view(1, Section.accumulator)) == 4 * 5120
    assert store.layout(1).trainable_elements == 5120


@pytest.mark.parametrize("format", [TileFormat.bf16_split, TileFormat.fp32])
def test_masters_come_back_to_the_bit(format: TileFormat) -> None:
    store = host_store()
    store.add(TileLayout(format, [(3, True), (100_000, True), (0, True)]))
    written = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    assert store.set_master(0, 1, written)
    read = np.empty_like(written)
    store.get_master(0, 1, read)
    np.testing.assert_array_equal(read.view(np.uint32), written.view(np.uint32))
    assert store.set_master(0, 2, np.empty(0, np.float32))
    written[5] = np.inf
    assert not store.set_master(0, 1, written)


def test_masters_take_the_bytes_of_floats_too() -> None:
    store = host_store()
    store.add(TileLayout(TileFormat.fp32, [(4, True)]))
    values = np.arange(4, dtype=np.float32)
    assert store.set_master(0, 0, values.tobytes())
    np.testing.assert_array_equal(array(store, 0, Section.weights)[:4], values)


def test_masters_refuse_other_buffers() -> None:
    store = host_store()
    store.add(TileLayout(TileFormat.fp32, [(4, True)]))
    for wrong in (np.zeros(5, np.float32), np.zeros(2, np.float64), np.zeros(4, np.int32)):
        with pytest.raises(ValueError, match="4 floats are needed"):
            store.set_master(0, 0, wrong)
    with pytest.raises(BufferError):
        store.get_master(0, 0, np.zeros(4, np.float32).tobytes())  # bytes cannot be written
    with pytest.raises((BufferError, ValueError)):
        store.set_master(0, 0, np.zeros(8, np.float32)[::2])
    with pytest.raises(TypeError):
        store.set_master(0, 0, [1.0, 2.0, 3.0, 4.0])


def test_store_refuses_what_cannot_be() -> None:
    store = host_store()
    with pytest.raises(ValueError, match="tile 0 of a store with 0 tiles"):
        store.layout(0)
    with pytest.raises(ValueError):
        TileStore(_native.HostBackend(), isa="avx1024")
    with pytest.raises(ValueError, match="at least 4096"):
        TileStore(_native.HostBackend(), staging_bytes=1)
