"""Depth rules that people use today, and `make_scheduler`, which finds any scheduler by name."""

from .fixed import FixedDepth
from .heuristic import HeuristicDepth
from .off import Off
from .random_depth import RandomDepth
from .registry import make_scheduler
from .table import TableDepth

__all__ = [
    "FixedDepth",
    "HeuristicDepth",
    "Off",
    "RandomDepth",
    "TableDepth",
    "make_scheduler",
]
