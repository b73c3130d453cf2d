"""Two curves in one figure, in plotly's own form: the first filled, the second a line, each with its peak."""

from typing import Any

from memwall.report.chart import AXIS_TITLES, scale_of
from memwall.report.curves import Curve
from memwall.units import format_bytes

__all__ = ["COLOURS", "overlay_chart"]

COLOURS = ("#5f8fc9", "#d9731a")
"""Of A and B: apart for the common colour blindnesses, on a light and on a dark page."""


def overlay_chart(first: Curve, second: Curve) -> dict[str, Any]:
    """Data and layout of the totals of two curves over the same unit.

    A dictionary, because that is what plotly.js takes; its keys are plotly's attributes.
    """
    scale = scale_of((first, second))
    last = scale.last_positions[first.position_unit]
    data: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    higher = 0 if max(first.total_bytes) >= max(second.total_bytes) else 1
    for index, (name, curve) in enumerate((("A", first), ("B", second))):
        values = [round(value / scale.unit_bytes, 4) for value in curve.total_bytes]
        line: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [round(position, 7) for position in curve.positions],
            "y": values,
            "line": {"shape": "hv", "width": 1.75, "color": COLOURS[index]},
            "hovertemplate": f"%{{y:,.{1 if scale.unit == 'MiB' else 3}f}} {scale.unit} {name}<extra></extra>",
        }
        if index == 0:
            line |= {"fill": "tozeroy", "fillcolor": COLOURS[0] + "40"}
        data.append(line)
        is_left = curve.peak_position <= last / 2
        notes.append(
            {
                "name": name,
                "text": f"{name}: {format_bytes(max(curve.total_bytes))}",
                "x": curve.peak_position,
                "y": max(values),
                "xanchor": "left" if is_left else "right",
                # The higher label above its curve, the lower one below: they never meet.
                "yanchor": "bottom" if index == higher else "top",
                "yshift": 2 if index == higher else -12,
                "showarrow": False,
                "font": {"color": COLOURS[index]},
            }
        )
    return {
        "data": data,
        "layout": {
            "shapes": [],
            # No phases are named above it.
            "margin": {"t": 16},
            "annotations": notes,
            "xaxis": {"range": [0, last], "title": {"text": AXIS_TITLES[first.position_unit]}},
            "yaxis": {"range": [0, scale.most_bytes / scale.unit_bytes], "title": {"text": scale.unit}},
        },
    }
