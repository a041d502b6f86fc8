"""The backend through the bindings: streams, events, copies, what the machine is asked."""

import gc
import itertools

import numpy as np
import pytest

import megatrain
from megatrain import _native


def test_version_is_the_packages() -> None:
    assert _native.__version__ == megatrain.__version__


def test_host_backend_says_what_it_is() -> None:
    backend = _native.HostBackend(max_delay_us=10, seed=3, poison=True, pin_limit=0)
    assert isinstance(backend, _native.Backend)
    assert (backend.name, backend.device_index, backend.numa_node) == ("host", 0, -1)
    free, total = backend.device_memory()
    assert 0 < free <= total


def test_copies_run_in_the_order_of_their_stream() -> None:
    backend = _native.HostBackend(max_delay_us=500, seed=1)
    stream = backend.create_stream("copies")
    chain = [np.full(1000, float(i)) for i in range(6)]
    for source, destination in itertools.pairwise(chain):
        backend.copy(destination.ctypes.data, source.ctypes.data, source.nbytes, True, stream.handle)
    stream.synchronize()
    for values in chain:
        np.testing.assert_array_equal(values, np.zeros(1000))


def test_an_event_orders_two_streams() -> None:
    backend = _native.HostBackend(max_delay_us=2000, seed=2)
    first, second = backend.create_stream("first"), backend.create_stream("second")
    event = backend.create_event("between")
    assert event.reached() and event.time_ns() == 0  # never recorded
    source, middle, end = np.ones(100), np.zeros(100), np.zeros(100)
    for _ in range(5):
        backend.copy(middle.ctypes.data, source.ctypes.data, source.nbytes, True, first.handle)
    backend.record(event, first.handle)
    backend.wait(second.handle, event)
    backend.copy(end.ctypes.data, middle.ctypes.data, source.nbytes, False, second.handle)
    second.synchronize()
    assert event.reached() and event.time_ns() > 0
    np.testing.assert_array_equal(end, source)


def test_streams_and_events_keep_their_backend() -> None:
    stream = _native.HostBackend().create_stream("kept")
    event = _native.HostBackend().create_event("kept")
    gc.collect()
    stream.synchronize()
    event.synchronize()


def test_instruction_sets() -> None:
    names = _native.isa_names()
    assert names[0] == "scalar"
    assert _native.select_isa("") == names[-1]
    assert [_native.select_isa(name) for name in names] == names
    with pytest.raises(ValueError, match="scalar"):
        _native.select_isa("mmx")
    assert _native.cpu_model()
    assert _native.usable_cores() >= 1


def test_memory_limits() -> None:
    available, source = _native.host_memory_limit()
    assert available > 0 and source
    _native.require_host_memory(1)
    with pytest.raises(_native.MemoryLimitError, match=str(2**60)):
        _native.require_host_memory(2**60)
    assert issubclass(_native.MemoryLimitError, MemoryError)


def test_cuda_is_there_or_says_why_not() -> None:
    if _native.cuda_device_count():
        assert _native.cuda_unavailable_reason() == ""
        assert _native.CudaBackend().name == "cuda"
        with pytest.raises(ValueError):
            _native.CudaBackend(1000)
    else:
        assert _native.cuda_unavailable_reason()
        with pytest.raises(RuntimeError):
            _native.CudaBackend()
