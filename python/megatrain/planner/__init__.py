"""What will go where, how long a step takes and why, before anything is allocated."""

from megatrain.planner.hardware import PRESETS, Hardware, preset
from megatrain.planner.job import Batch, Job
from megatrain.planner.memory import Memory
from megatrain.planner.plan import CannotFit, Plan, make_plan, make_plan_for_tokens, predict
from megatrain.planner.shape import ModelShape
from megatrain.planner.text import describe
from megatrain.planner.timeline import Timeline

__all__ = [
    "PRESETS",
    "Batch",
    "CannotFit",
    "Hardware",
    "Job",
    "Memory",
    "ModelShape",
    "Plan",
    "Timeline",
    "describe",
    "make_plan",
    "make_plan_for_tokens",
    "predict",
    "preset",
]
