"""The roofline: what a machine allows, what a step costs, and where the time between the two goes."""

from slipstream.roofline.ceiling import Ceiling, Setting, ceiling
from slipstream.roofline.hardware import Hardware, catalogue, find_hardware
from slipstream.roofline.precision import Precision, find_precision
from slipstream.roofline.shape import ModelShape
from slipstream.roofline.source import find_source

__all__ = [
    "Ceiling",
    "Hardware",
    "ModelShape",
    "Precision",
    "Setting",
    "catalogue",
    "ceiling",
    "find_hardware",
    "find_precision",
    "find_source",
]
