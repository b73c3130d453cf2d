"""Reads a chain out of memory rows, for the dynamic program: the way back from `chain_instance`."""

from planner_dynamic import Chain, ChainBlock, ChainOption

from memwall.planning.solver.instance import BlockOptions, Instance, Row


def chain_of(instance: Instance) -> Chain | None:
    """A chain that holds at least as much as the rows do at every point; None where the rows are no chain.

    The rows are a chain if forward passes every block once, backward passes them once in reverse, and outside of what
    lies between a block's forward and its backward no option holds more than keeping does. Bytes of options are
    relative to keeping everything, so those a chain leaves resident are too, and may be negative.
    """
    blocks, rows = instance.blocks, instance.rows
    forwards = [_places(rows, f"forward of {block.path}") for block in blocks]
    backwards = [_places(rows, f"backward of {block.path}") for block in blocks]
    if not blocks or any(len(places) != 1 for places in (*forwards, *backwards)):
        return None
    begins, ends = [places[0] for places in forwards], [places[0] for places in backwards]
    if [*begins, *reversed(ends)] != sorted((*begins, *ends)):
        return None
    for number in range(len(blocks)):
        outside = (*rows[: begins[number]], *rows[ends[number] + 1 :])
        if any(max(row.held[number]) > 0 for row in outside):
            return None
    if any(row.fixed_bytes > instance.budget_bytes for row in (*rows[: begins[0]], *rows[ends[0] + 1 :])):
        return None
    loss_bytes = max((row.fixed_bytes for row in rows[begins[-1] + 1 : ends[-1]]), default=0)
    chain_blocks = []
    for number, block in enumerate(blocks):
        # Rows between two blocks see what is resident after the earlier one: they count as part of that block.
        next_begin = begins[number + 1] if number + 1 < len(blocks) else begins[number] + 1
        last_end = ends[number + 1] if number + 1 < len(blocks) else ends[number] - 1
        forward, backward = rows[begins[number] : next_begin], rows[last_end + 1 : ends[number] + 1]
        between = rows[begins[number] + 1 : ends[number]]
        chain_blocks.append(_chain_block(number, block, forward, backward, between))
    return Chain(blocks=tuple(chain_blocks), base_bytes=0, loss_bytes=loss_bytes)


def _places(rows: tuple[Row, ...], label: str) -> list[int]:
    return [place for place, row in enumerate(rows) if row.label == label]


def _chain_block(
    number: int, block: BlockOptions, forward: tuple[Row, ...], backward: tuple[Row, ...], between: tuple[Row, ...]
) -> ChainBlock:
    def highest(rows: tuple[Row, ...], option: int) -> int:
        return max(row.fixed_bytes + row.held[number][option] for row in rows)

    return ChainBlock(
        path=block.path,
        options=tuple(
            ChainOption(
                name=option.name,
                extra_seconds=option.extra_seconds,
                resident_bytes=max((row.held[number][place] for row in between), default=0),
                forward_bytes=highest(forward, place),
                backward_bytes=highest(backward, place),
            )
            for place, option in enumerate(block.options)
        ),
        forward_seconds=block.forward_seconds,
        backward_seconds=block.backward_seconds,
    )
