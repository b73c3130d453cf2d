"""Runs `memwall plan --ranks`: how to divide a model among ranks, and the plan of each of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from memwall.cli.plans.without_plan import forecast_without_plan
from memwall.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from memwall.planning.forecast import Forecast
    from memwall.planning.settings import Settings
    from memwall.trace.records import Trace

_USUAL_PER_NODE = 8

RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", min=1, metavar="N", help="Devices that train together: how to divide the model."),
]
RanksPerNodeOption = Annotated[
    int | None, typer.Option("--ranks-per-node", min=1, metavar="N", help="With --ranks: devices of one node; 8.")
]
LinkOption = Annotated[
    str | None, typer.Option("--link", metavar="NAME", help="With --ranks: link between nodes, as infiniband-ndr.")
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="With --ranks: why each way to divide the model was not chosen.")
]


class RanksAsked(Struct, frozen=True, kw_only=True):
    """Holds what was asked of a number of ranks."""

    num_ranks: int
    num_ranks_per_node: int
    link: str | None
    is_explained: bool

    def check_batch(self, global_batch: int | None, trace: "Trace") -> None:
        """Checks that a recorded step is one rank's part of the global batch.

        Raises:
            UsageError: it is not.
        """
        together = trace.micro_batch * trace.num_micro_batches * self.num_ranks
        if global_batch not in (None, together):
            raise UsageError(
                f"--global-batch {global_batch}: {self.num_ranks} ranks with the recorded batch of "
                f"{together // self.num_ranks} each take {together} samples in a step; give that, or record another"
            )

    def batch_of(self, global_batch: int | None, batch: int | None) -> int | None:
        """Returns the samples of one rank's forward; None where neither of both is given.

        Raises:
            UsageError: the global batch is no multiple of the ranks, or of what they take together.
        """
        if global_batch is None:
            return batch
        each, rest = divmod(global_batch, self.num_ranks)
        if rest or (batch is not None and batch != each):
            taken = f"--batch {batch} on each of" if batch is not None else "an equal part for each of"
            raise UsageError(
                f"--global-batch {global_batch}: {taken} {self.num_ranks} ranks is {(batch or each) * self.num_ranks}; "
                f"give a multiple of {self.num_ranks}, and leave --batch out"
            )
        return each


def asked_ranks(
    ranks: int | None, num_ranks_per_node: int | None, link: str | None, *, is_explained: bool, device: str | None
) -> RanksAsked | None:
    """Returns what was asked; None where nothing was.

    Raises:
        UsageError: other options without --ranks, or no device of the table is named.
    """
    if ranks is None:
        given = {"--ranks-per-node": num_ranks_per_node, "--link": link, "--explain": is_explained or None}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise UsageError(f"{', '.join(unused)}: only together with --ranks N")
        return None
    if device is None:
        raise UsageError(f"--ranks {ranks}: only with a device of the table: --device NAME, as h100-80gb")
    per_node = num_ranks_per_node or min(ranks, _USUAL_PER_NODE)
    return RanksAsked(num_ranks=ranks, num_ranks_per_node=per_node, link=link, is_explained=is_explained)


def show_ranks(
    asked: RanksAsked, trace: "Trace", settings: "Settings", *, output: Path | None, as_json: bool
) -> "Forecast":
    """Shows how to divide the model, with the plan of a rank, and returns its forecast.

    Raises:
        InfeasibleError: no way fits.
        UsageError: the ranks or the link cannot be.
    """
    from msgspec.structs import replace

    from memwall.cli.options import write_json
    from memwall.cli.output import note, show
    from memwall.machine.collector import without_collector
    from memwall.machine.node_links import link_named
    from memwall.planning.ranks.search import infeasible_ranks, plan_ranks
    from memwall.report.ranks_grids import ranks_grids
    from memwall.report.text import plan_report, tables_of
    from memwall.trace.workload_facts import workload_facts

    link = None if asked.link is None else link_named(asked.link)
    with without_collector():
        made, ranks = plan_ranks(
            trace, settings, num_ranks=asked.num_ranks, num_ranks_per_node=asked.num_ranks_per_node, link=link
        )
    if made is None:
        error: InfeasibleError = infeasible_ranks(ranks, trace, settings)
        if as_json:
            write_json(replace(forecast_without_plan(trace, error), ranks=ranks))
        else:
            note(tables_of(ranks_grids(ranks, is_explained=True), workload_facts(trace)))
        raise error
    if output is not None:
        made.save(output)
    show(plan_report(made, is_explained=asked.is_explained), made.forecast, as_json=as_json)
    return made.forecast
