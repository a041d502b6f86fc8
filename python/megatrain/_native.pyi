"""The native runtime. Host memory reaches torch through the buffer protocol; device memory and
streams are handed over as integers."""

from collections.abc import Sequence
from typing import ClassVar, final

__version__: str

class MemoryLimitError(MemoryError): ...

# device

class Backend:
    @property
    def name(self) -> str: ...
    @property
    def device_index(self) -> int: ...
    @property
    def numa_node(self) -> int: ...
    def device_memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
    def create_stream(self, name: str) -> Stream: ...
    def create_event(self, name: str) -> Event: ...
    def record(self, event: Event, stream: int) -> None: ...
    def wait(self, stream: int, event: Event) -> None: ...
    def copy(self, destination: int, source: int, nbytes: int, to_device: bool, stream: int) -> None:
        """Queue a copy between addresses; the caller keeps both alive until it has ended."""

@final
class HostBackend(Backend):
    def __init__(
        self, *, max_delay_us: int = 0, seed: int = 0, poison: bool = False, pin_limit: int | None = None
    ) -> None: ...

@final
class CudaBackend(Backend):
    def __init__(self, device: int = 0, *, pin_limit: int | None = None) -> None: ...

@final
class Stream:
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...

@final
class Event:
    def synchronize(self) -> None: ...
    def reached(self) -> bool: ...
    def time_ns(self) -> int: ...

# probe

@final
class ThreadSpeed:
    """Parameters/s of updates with `threads` threads, alone and beside copies, and the copies' bytes/s."""

    @property
    def threads(self) -> int: ...
    @property
    def updates_alone(self) -> float: ...
    @property
    def updates(self) -> float: ...
    @property
    def up(self) -> float: ...
    @property
    def down(self) -> float: ...

@final
class MachineSpeed:
    """Bytes/s of copies, one direction at a time and together; updates by threads."""

    @property
    def up(self) -> float: ...
    @property
    def down(self) -> float: ...
    @property
    def up_together(self) -> float: ...
    @property
    def down_together(self) -> float: ...
    @property
    def by_threads(self) -> list[ThreadSpeed]: ...
    @property
    def recommended_threads(self) -> int: ...

PROBE_DEVICE_BYTES: int

def measure_machine(
    backend: Backend,
    device_memory: int,
    nbytes: int,
    *,
    parameters: int | None = None,
    cache_bytes: int | None = None,
    seconds: float = 0.02,
    rounds: int = 2,
) -> MachineSpeed:
    """`device_memory` is an address on the backend's device, overwritten; PROBE_DEVICE_BYTES is enough.
    `parameters` of a pass of the update; None for 2 Mi a core, 8 to 32 Mi. `cache_bytes` of the last level, all its
    caches together, of which eight times are taken so that they hold nothing that is measured; None for this
    machine's. More than 512 MiB, or than a sixteenth of the host's free memory, counts as that."""

# machine

def cuda_device_count() -> int: ...
def cuda_unavailable_reason() -> str: ...
def isa_names() -> list[str]:
    """Instruction sets of the update kernel that this CPU can run, slowest first."""
def select_isa(name: str) -> str:
    """The variant that `name` stands for ("" for the fastest); ValueError lists the known names."""
def cpu_model() -> str: ...
def usable_cores() -> int: ...
def host_memory_limit(override_bytes: int = 0, root: str = "") -> tuple[int, str]:
    """(bytes that may still be allocated, who says so)."""
def require_host_memory(nbytes: int, override_bytes: int = 0, root: str = "") -> None: ...

# tiles

@final
class TileFormat:
    """weights: "bf16_split" (with an int16 low half of the fp32 master), "bf16" (rounded stochastically) or
    "fp32"; gradients are of their type. moments: "fp32", "bf16" or "int8" (both rounded stochastically). rule:
    "adamw", or "lion", which has no section exp_avg_sq."""

    bf16_split: ClassVar[TileFormat]
    """With fp32 moments."""
    fp32: ClassVar[TileFormat]
    """All of it fp32, no low half."""
    def __init__(self, weights: str, moments: str = "fp32", rule: str = "adamw") -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def moments(self) -> str: ...
    @property
    def rule(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Section:
    """Parts of a tile. The exponents are those of int8 moments, a byte each 128 elements of the tile.
    accumulator (fp32) exists only after TileStore.add_accumulator."""

    weights: Section
    master_low: Section
    gradients: Section
    exp_avg: Section
    exp_avg_sq: Section
    exp_avg_exponents: Section
    exp_avg_sq_exponents: Section
    accumulator: Section
    __members__: ClassVar[dict[str, Section]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...

@final
class TileLayout:
    """Where each parameter of a tile lies: pure arithmetic. Trainable parameters come first, in the
    order given, frozen ones behind them in the weights section only. A parameter has one element
    offset, the same in every section it is in."""

    def __init__(
        self, format: TileFormat, parameters: Sequence[tuple[int, bool]], rank: int = 0, ranks: int = 1
    ) -> None:
        """parameters: (elements, trainable) each."""
    @property
    def format(self) -> TileFormat: ...
    @property
    def trainable_elements(self) -> int:
        """Elements of the trainable part, alignment gaps included."""
    @property
    def weight_elements(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Host bytes of the whole tile (without an accumulator)."""
    def element_offset(self, parameter: int) -> int: ...
    def section(self, section: Section) -> tuple[int, int]:
        """(offset in the tile, bytes); bytes 0 where the tile has no such section."""

@final
class TileStore:
    """Owns the tiles. Memory that cannot be pinned is used all the same, through a staging ring."""

    def __init__(
        self, backend: Backend, *, threads: int = 0, isa: str = "", staging_bytes: int = 67108864
    ) -> None: ...
    def add(self, layout: TileLayout) -> int:
        """Allocate a zeroed tile and return its index."""
    def add_accumulator(self, tile: int) -> None:
        """Give the tile an fp32 accumulator section (once; later calls do nothing)."""
    def has_accumulator(self, tile: int) -> bool: ...
    def view(self, tile: int, section: Section) -> memoryview:
        """The section's bytes, writable; keeps the store alive."""
    def layout(self, tile: int) -> TileLayout: ...
    def set_master(self, tile: int, parameter: int, values: object) -> bool:
        """Write fp32 values (buffer of `elements` floats) into the weights and low half; False if
        one is not finite (they are written all the same)."""
    def get_master(self, tile: int, parameter: int, values: object) -> None:
        """Read the exact fp32 master into a writable buffer of floats."""
    def set_moments(self, tile: int, parameter: int, section: Section, values: object) -> None:
        """Write fp32 values into exp_avg or exp_avg_sq, rounded to the nearest that the format has."""
    def get_moments(self, tile: int, parameter: int, section: Section, values: object) -> None:
        """Read exp_avg or exp_avg_sq exactly into a writable buffer of floats."""
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

# stream

@final
class ParameterUpdate:
    """Hyperparameters of one parameter, or of its elements [begin, end), in one update, captured by value; an end of
    -1 is the parameter's. step counts from 1; with the seed it keys stochastic rounding."""

    def __init__(
        self,
        parameter: int,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        seed: int = 0,
        begin: int = 0,
        end: int = -1,
    ) -> None: ...

@final
class TraceSpan:
    @property
    def kind(self) -> str:
        """copy_up, copy_down, compute, update, or what the compute stream waited for: wait (a copy up) or
        wait_down (a copy down that reads memory; the caller may wait for it, and the stream for the caller)."""
    @property
    def tile(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def begin_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def gate_ns(self) -> int:
        """Of a copy_up: how long its queueing was held by an update of the tile."""

@final
class Engine:
    """The ring: prefetcher, gradient drain, update queue. Calls come from one thread at a time. An
    exception of a worker thread surfaces in the next call, after which the engine is stopped.

    `without_wait` removes one wait, for the tests that prove that each is needed: slot_free,
    slot_arrived, part_arrived, gate_update, gate_fetch, gradient_ready, gradient_landed, staging_free,
    kept_ready, kept_landed, kept_arrived, resident_updated."""

    def __init__(
        self,
        store: TileStore,
        *,
        trace_capacity: int = 65536,
        without_wait: str = "",
    ) -> None: ...
    def add_slot(self, device_pointer: int, nbytes: int, stream: int, tile: int = -1) -> int:
        """Give the ring a device buffer, which is written only after the work on `stream` so far; with `tile`,
        one that only this tile's weights use. The caller keeps it alive until `clear_device` has returned or the
        engine is closed."""
    def clear_device(self) -> None:
        """Take back all slots and resident tiles, whose changes are written to the host: their memory may
        be freed, and other be given."""
    def copy_by_parameter(self, on: bool) -> None:
        """From now on weights go up in one copy a parameter instead of one a tile."""
    def expect(self, tiles: Sequence[int]) -> None:
        """The tiles that will be acquired next, in order: what was expected before is forgotten. A
        guess: other acquisitions are right, only slower."""
    def acquire(self, tile: int, stream: int) -> int:
        """The slot that holds the tile's weights, after all updates queued so far. Blocks until the
        copy is queued; work put on `stream` after this call sees the weights."""
    def release(self, slot: int, stream: int) -> None:
        """The work queued on `stream` so far was the last that reads this acquisition of the slot."""
    def split(self, tile: int, parts: Sequence[Sequence[tuple[int, int]]]) -> None:
        """From now on the tile's weights go up in parts, each of them ranges of elements (begin, end) of the
        weights section; nothing of the tile may be in a slot. Once a tile."""
    def want(self, tile: int, parts: Sequence[int]) -> None:
        """The parts that later copies of the tile have besides what is in no part; at first none. A guess."""
    def bring(self, slot: int, parts: Sequence[int], stream: int) -> None:
        """Copy up those of these parts that an acquired slot lacks; work put on `stream` after this call sees
        them."""
    def release_all(self, stream: int) -> None:
        """Give up every acquisition that is outstanding: for work that was cut short by an exception."""
    def version(self, tile: int) -> int:
        """Counts the updates and edits queued for the tile."""
    def mark_edited(self, tile: int) -> None:
        """The host weights were written by the caller: copies in slots are stale."""
    def drain(
        self, tile: int, section: Section, element_offset: int, elements: int, device_pointer: int, stream: int
    ) -> int:
        """Copy device memory (elements of the section's type) into the section, after the work on
        `stream` so far. Returns a ticket."""
    def wait_drain(self, ticket: int, stream: int) -> None:
        """Work put on `stream` after this call may overwrite what the drain reads."""
    def fetch(
        self, tile: int, section: Section, element_offset: int, elements: int, device_pointer: int, stream: int
    ) -> None:
        """Copy a section up; after earlier drains of the tile. Work on `stream` after this call sees it,
        and the copy starts after the work on `stream` so far."""
    def add_resident(self, tile: int, device_pointer: int, non_finite: int) -> None:
        """The whole tile also lies at `device_pointer` (layout.nbytes), laid out as on the host, and is
        updated there; `non_finite` is a zeroed int on the device. The caller keeps both alive until
        `clear_device` has returned or the engine is closed."""
    def use_resident(self, tile: int, stream: int) -> None:
        """Work put on `stream` after this call sees the resident tile's weights. Instead of acquire."""
    def keep(self, tile: int, device_pointer: int, nbytes: int, stream: int) -> int:
        """Copy device memory to pinned host memory, after the work on `stream` so far; returns its number.
        The device memory must stay as it is until wait_kept has returned. `tile` names the block, for the trace."""
    def wait_kept(self, kept: int, stream: int) -> None:
        """Block until it has landed. For how long `stream` had no work meanwhile is a wait_down."""
    def bring_back(self, kept: int, device_pointer: int, stream: int) -> None:
        """Copy it up, after the work on `stream` so far."""
    def wait_back(self, kept: int, stream: int) -> None:
        """Work put on `stream` after this call sees what was brought back."""
    def drop_kept(self, kept: int) -> None:
        """Its host memory may be used for others."""
    def limit_kept(self, nbytes: int) -> None:
        """Host memory that may be taken for what is kept: MemoryLimitError beyond. Without this call each new
        piece is held against what the machine has free."""
    def kept_bytes(self) -> int:
        """Host memory taken for what is kept."""
    def update(
        self,
        tile: int,
        parameters: Sequence[ParameterUpdate],
        gradient_scale: float,
        priority: int,
        stream: int = 0,
    ) -> None:
        """Queue the update of the listed parameters; the lowest priority goes first. Starts when the
        tile's drains have landed and no copy reads its weights. A resident tile is updated on `stream`,
        from the gradients in its device memory."""
    def wait_updates(self) -> None:
        """Block until all queued updates have ended, the host's tiles hold what they made, and none is held."""
    def hold(self, tiles: Sequence[int]) -> None:
        """Block like `wait_updates`, then keep each of these tiles as it is until its release: updates queued
        later wait for it."""
    def release_hold(self, tile: int) -> None:
        """From any thread; every hold must be released before `close` can return."""
    def held_up_ns(self) -> int:
        """Time so far in which some update waited for a release."""
    def updates_pending(self) -> bool: ...
    def synchronize(self) -> None:
        """Block until drains, updates and copies have ended."""
    def begin_step(self, step: int) -> None:
        """Number of the step that the spans from here on belong to."""
    def begin_compute(self, tile: int, stream: int) -> None: ...
    def end_compute(self, stream: int) -> None: ...
    def trace(self) -> list[TraceSpan]:
        """Spans that have ended, oldest first; waits for those that were queued."""
    def wait_totals(self) -> tuple[int, int, int]:
        """Nanoseconds that compute streams have waited, over all waits that have ended: for copies up, of
        it for updates behind which such a copy was held, and for copies down to free the memory they read."""
    def clear_trace(self) -> None: ...
    def close(self) -> None:
        """Stop the worker threads. Further calls raise. Called by the destructor."""
