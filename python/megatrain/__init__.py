"""megatrain: training language models at full precision on one GPU, from host memory."""

from megatrain import rng
from megatrain._native import CudaBackend, HostBackend, MemoryLimitError, __version__
from megatrain.errors import CheckpointError, StaleGraphError, UnsupportedModelError
from megatrain.hardware_probe import measured_hardware
from megatrain.machine import MachineSpeed, UpdateSpeed, machine_speed
from megatrain.model import StreamedModel
from megatrain.placement import BlockPlacement, Placement
from megatrain.report import EvaluationReport, MemoryReport, StepReport
from megatrain.rules import AdamW, Lion
from megatrain.transfers import Transfers

__all__ = [
    "AdamW",
    "BlockPlacement",
    "CheckpointError",
    "CudaBackend",
    "EvaluationReport",
    "HostBackend",
    "Lion",
    "MachineSpeed",
    "MemoryLimitError",
    "MemoryReport",
    "Placement",
    "StaleGraphError",
    "StepReport",
    "StreamedModel",
    "Transfers",
    "UnsupportedModelError",
    "UpdateSpeed",
    "__version__",
    "machine_speed",
    "measured_hardware",
    "rng",
]
