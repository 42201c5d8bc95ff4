"""What a run measures: metrics that know their reduction, where they go, and how they look.

The report draws with matplotlib, so it is imported where it is made:
``from qurl_megatron.observe.report import write_report, save_overview_png``.
"""

from qurl_megatron.observe.metrics import (
    EffectiveSampleSize,
    Max,
    Mean,
    Metric,
    Min,
    Sum,
    Timer,
    merge,
    values,
)
from qurl_megatron.observe.progress import Progress
from qurl_megatron.observe.sinks import (
    JsonlSink,
    Record,
    Sink,
    TensorBoardSink,
    WandbSink,
    read_metrics,
)

__all__ = [
    "EffectiveSampleSize",
    "JsonlSink",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "Progress",
    "Record",
    "Sink",
    "Sum",
    "TensorBoardSink",
    "Timer",
    "WandbSink",
    "merge",
    "read_metrics",
    "values",
]
