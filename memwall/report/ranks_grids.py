"""Tables of how a model can be divided among ranks: those that fit, the reason against each, and the curve."""

from memwall.planning.ranks.forecast import CurvePoint, RankChoice, RanksForecast
from memwall.report.grid import DASH, Grid, bytes_or_dash, seconds_or_dash
from memwall.units import format_bytes


def ranks_grids(ranks: RanksForecast | None, *, is_explained: bool) -> tuple[Grid, ...]:
    """Returns the tables of many ranks, with the reason against each way or without; none of a plan for one process."""
    if ranks is None:
        return ()
    explained = (_reasons_grid(ranks), *((_bytes_grid(ranks),) if ranks.peak else ())) if is_explained else ()
    return (_kinds_grid(ranks), *explained, _curve_grid(ranks))


def _kinds_grid(ranks: RanksForecast) -> Grid:
    """Returns the ways that fit, the fastest first."""
    fitting = [one for one in ranks.choices if one.step_seconds is not None]
    return Grid(
        title=f"{_ranks_text(ranks)} (simulated)",
        columns=("", "each rank", "host", "step, at least", "waiting", _unit(ranks.choices)),
        rows=tuple(_row(one) for one in sorted(fitting, key=lambda one: one.step_seconds or 0.0)),
    )


def _reasons_grid(ranks: RanksForecast) -> Grid:
    """Returns why each way was not chosen."""
    return Grid(
        title="Why so",
        columns=("", "not chosen, since"),
        rows=tuple((one.words, one.reason or "(chosen)") for one in ranks.choices),
        text_columns=(0, 1),
    )


def _bytes_grid(ranks: RanksForecast) -> Grid:
    """Returns what a rank holds at its peak, by what becomes of it with more ranks."""
    rows = (
        ("its own of parameters, gradients and state", [one.standing_bytes for one in ranks.peak]),
        ("gathered parameters", [one.gathered_bytes for one in ranks.peak]),
        ("in flight", [one.in_flight_bytes for one in ranks.peak]),
        ("activations and temporaries", [one.activation_bytes for one in ranks.peak]),
        ("outside of tensors", [one.outside_bytes for one in ranks.peak]),
    )
    return Grid(
        title="What a rank holds at the peak of its step (simulated)",
        columns=("", *(f"{one.num_ranks} ranks" for one in ranks.peak)),
        rows=tuple((name, *map(format_bytes, sizes)) for name, sizes in rows),
    )


def _curve_grid(ranks: RanksForecast) -> Grid:
    """Returns the best kind for each number of ranks, in outline."""
    return Grid(
        title="By number of ranks, each with the same batch (in outline, simulated)",
        columns=("ranks", "", "each rank", "step, at least", _unit(ranks.curve), ""),
        rows=tuple(
            (
                str(point.num_ranks),
                point.words or "none fits",
                format_bytes(point.process_bytes),
                seconds_or_dash(point.step_seconds),
                _rate(point),
                "all recomputed" if point.is_recomputed else "",
            )
            for point in ranks.curve
        ),
        text_columns=(1, 5),
    )


def _row(one: RankChoice) -> tuple[str, ...]:
    return (
        one.words if one.reason else f"{one.words} (chosen)",
        format_bytes(one.process_bytes),
        bytes_or_dash(one.host_bytes or None),
        seconds_or_dash(one.step_seconds),
        seconds_or_dash(one.exposed_seconds),
        _rate(one),
    )


def _unit(figures: tuple[RankChoice, ...] | tuple[CurvePoint, ...]) -> str:
    return "tokens/s" if any(one.tokens_per_second is not None for one in figures) else "samples/s"


def _rate(one: RankChoice | CurvePoint) -> str:
    figure = one.samples_per_second if one.tokens_per_second is None else one.tokens_per_second
    return DASH if figure is None else f"{figure:,.0f}" if figure >= 10 else f"{figure:.3g}"


def _ranks_text(ranks: RanksForecast) -> str:
    network = ranks.network
    where = "one node" if network.num_nodes == 1 else f"{network.num_nodes} nodes over {ranks.link}"
    return f"{network.num_ranks} ranks on {where}"
