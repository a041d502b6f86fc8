"""A run drawn: the timeline of a step, where memory goes, curves, and what was achieved against the plan."""

from megatrain.charts.page import write_report
from megatrain.charts.run_files import RunFiles

__all__ = ["RunFiles", "write_report"]
