"""Curves as figures in plotly's own form: stacks of layers.

Data and layout are dictionaries, because that is what plotly.js takes; their keys are plotly's attributes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from memwall.report.curves import Curve, PhaseBand, PositionUnit
from memwall.units import format_bytes

_AXIS_TITLES: dict[PositionUnit, str] = {
    "seconds": "seconds of computing",
    "operations": "operations",
}
# Distinguishable with the common colour blindnesses, and on both a light and a dark page.
_COLOURS = {
    "base": "#8a93a1",
    "parameter": "#3b6fb6",
    "buffer": "#5f9ed1",
    "optimizer_state": "#7a5ea8",
    "gradient": "#c8679b",
    "input": "#6bb8a9",
    "activation": "#e08e3c",
    "temporary": "#e5c453",
    "unknown": "#9aa6b5",
}
_OTHER_COLOUR = "#a0a0a0"
_SHADES = {"forward": 0.05, "loss": 0.3, "backward": 0.13, "optimizer": 0.22, "eval": 0.05}
_WIDE_BAND = 0.13
_NARROW_BAND = 0.025


class Legend(Struct, frozen=True, kw_only=True):
    """Holds name and colour of one layer."""

    name: str
    colour: str


class Scale(Struct, frozen=True, kw_only=True):
    """Holds what curves that are drawn beside each other share."""

    unit: str
    unit_bytes: int
    most_bytes: int
    last_positions: dict[str, float]
    """Right end of the axis by the unit of positions."""


def scale_of(curves: Iterable[Curve]) -> Scale:
    """Returns common axes: same bytes and, where the unit is the same, same time."""
    highest_bytes = 1
    last_positions: dict[str, float] = {}
    for curve in curves:
        highest_bytes = max(highest_bytes, *curve.total_bytes, curve.budget_bytes or 0, curve.process_peak_bytes or 0)
        last = max(last_positions.get(curve.position_unit, 0.0), curve.positions[-1])
        last_positions[curve.position_unit] = last
    unit, unit_bytes = ("GiB", 1 << 30) if highest_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return Scale(unit=unit, unit_bytes=unit_bytes, most_bytes=int(highest_bytes * 1.12), last_positions=last_positions)


def legend_of(curves: Iterable[Curve]) -> tuple[Legend, ...]:
    """Returns the layers of all curves, bottom of the stack first."""
    present = {layer.category for curve in curves for layer in curve.layers}
    ordered = [name for name in _COLOURS if name in present] + sorted(present - set(_COLOURS))
    return tuple(Legend(name=name.replace("_", " "), colour=_COLOURS.get(name, _OTHER_COLOUR)) for name in ordered)


def chart_of(curve: Curve, scale: Scale) -> dict[str, Any]:
    """Returns data and layout of one curve: stacked layers, phases, budget, peak."""
    last = scale.last_positions[curve.position_unit]
    data = [_layer(curve, index, scale) for index in range(len(curve.layers))]
    data.append(_peak_mark(curve, scale))
    shapes = [_band_shape(band) for band in curve.bands]
    notes = _band_notes(curve.bands, last)
    # At the end away from the peak, and away from each other: the levels and the peak are often close together.
    side = "left" if curve.peak_position > last / 2 else "right"
    levels = [(curve.budget_bytes, "budget", "dash"), (curve.process_peak_bytes, "process peak", "dot")]
    highest_bytes = max((level_bytes or 0 for level_bytes, _, _ in levels), default=0)
    for level_bytes, name, dash in levels:
        if level_bytes is not None:
            shapes.append(_level_shape(level_bytes / scale.unit_bytes, name, dash))
            edge = "bottom" if level_bytes == highest_bytes else "top"
            notes.append(_level_note(level_bytes, name, side, edge, scale))
    return {"data": data, "layout": _layout(curve, scale, shapes, notes, names_phases=bool(curve.bands))}


def _layout(
    curve: Curve, scale: Scale, shapes: list[dict[str, Any]], notes: list[dict[str, Any]], *, names_phases: bool
) -> dict[str, Any]:
    last = scale.last_positions[curve.position_unit]
    return {
        "shapes": shapes,
        "annotations": notes,
        **({} if names_phases else {"margin": {"t": 16}}),
        "xaxis": {"range": [0, last], "title": {"text": _AXIS_TITLES[curve.position_unit]}},
        "yaxis": {"range": [0, scale.most_bytes / scale.unit_bytes], "title": {"text": scale.unit}},
    }


def _line(curve: Curve, values: Sequence[int], scale: Scale, name: str, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round(position, 7) for position in curve.positions],
        "y": [round(value / scale.unit_bytes, 4) for value in values],
        "line": line,
        "hovertemplate": f"%{{y:,.{1 if scale.unit == 'MiB' else 3}f}} {scale.unit} {name}<extra></extra>",
    }


def _layer(curve: Curve, index: int, scale: Scale) -> dict[str, Any]:
    layer = curve.layers[index]
    colour = _COLOURS.get(layer.category, _OTHER_COLOUR)
    line = {"shape": "hv", "width": 0.5, "color": colour}
    return {
        **_line(curve, layer.live_bytes, scale, layer.category.replace("_", " "), line),
        "stackgroup": "live",
        "fillcolor": colour,
    }


def _peak_mark(curve: Curve, scale: Scale) -> dict[str, Any]:
    peak_bytes = max(curve.total_bytes)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "peak",
        "x": [curve.peak_position],
        "y": [peak_bytes / scale.unit_bytes],
        "text": [format_bytes(peak_bytes)],
        "textposition": "top center",
        "cliponaxis": False,
        "marker": {"size": 9, "symbol": "diamond"},
        "hoverinfo": "skip",
    }


def _band_shape(band: PhaseBand) -> dict[str, Any]:
    return {
        "type": "rect",
        "layer": "below",
        "xref": "x",
        "yref": "paper",
        "x0": band.begin,
        "x1": band.end,
        "y0": 0,
        "y1": 1,
        "line": {"width": 0},
        "fillcolor": "#8a93a1",
        "opacity": _SHADES.get(band.phase, 0.1),
    }


def _band_notes(bands: Sequence[PhaseBand], last: float) -> list[dict[str, Any]]:
    """Puts names of phases above the plot; upright where a band is narrow, none where it cannot be seen."""
    notes = []
    named: set[str] = set()
    for band in bands:
        share = (band.end - band.begin) / last if last else 0.0
        if share < _NARROW_BAND and band.phase in named:
            continue
        named.add(band.phase)
        notes.append(
            {
                "text": band.phase,
                "x": (band.begin + band.end) / 2,
                "xref": "x",
                "y": 1.0,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "textangle": 0 if share >= _WIDE_BAND else -90,
            }
        )
    return notes


def _level_shape(level: float, name: str, dash: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": level,
        "y1": level,
        "line": {"width": 1.5, "dash": dash},
    }


def _level_note(level_bytes: int, name: str, side: str, edge: str, scale: Scale) -> dict[str, Any]:
    # As in the tables beside it: what there is is shown rounded down, what is needed rounded up.
    text = format_bytes(level_bytes, rounding="down" if name == "budget" else "up")
    return {
        "name": name,
        "text": f"{name} {text}",
        "xref": "paper",
        "x": 1 if side == "right" else 0,
        "xanchor": side,
        "y": level_bytes / scale.unit_bytes,
        "yanchor": edge,
        "showarrow": False,
    }
