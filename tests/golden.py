"""Pins public results: ``uv run python tests/golden.py`` rewrites ``golden.json``, CONTRIBUTING.md says when.

The requests are made by formula, over every kind, ratio, block-size direction and kind of parallelism. What is pinned is
what a caller sees: descriptor tables, index arrays, units, counts, the words of refusals, a layout's bytes. Nothing is
pinned that does not move the right bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nixl_fast import (
    Direction,
    EngineLayout,
    Group,
    NixlFastError,
    Region,
    TransferPlan,
    expand_block_ids,
    expand_groups,
    plan_peer,
)
from worlds import FULL, MAMBA, MLA, WINDOW, Layer, Side, World, model_bytes, move, own_memory, wrong_ranks

FILE = Path(__file__).with_name("golden.json")
LITERAL = 24
"""Larger arrays are pinned by their digest."""

KINDS = [[FULL], [MLA], [WINDOW], [MAMBA], [FULL, WINDOW], [FULL, MAMBA], [MLA, FULL], [WINDOW, MAMBA, MLA]]
SHAPES = [((1, 4), (1, 4)), ((2, 4), (2, 4)), ((1, 4), (1, 2)), ((1, 2), (1, 4)), ((2, 3), (3, 2)), ((3, 4), (1, 4))]
"""Kernel blocks per logical block and tokens per kernel block, producer and consumer."""
TENSOR = [(1, 1), (1, 2), (4, 2), (2, 8), (8, 8)]
STAGES = [(1, 1), (2, 1), (1, 2), (2, 2)]
DEALT = [((2, 2), (2, 2)), ((4, 2), (1, 1)), ((1, 1), (4, 4)), ((4, 4), (8, 2))]
"""Ranks and context-parallel ranks, producer and consumer."""
POOL = 34


def worlds() -> Iterator[World]:
    """Requests that between them have everything."""
    for number, (kinds, shapes) in enumerate(product(KINDS, SHAPES)):
        yield made(number, kinds, shapes, TENSOR[number % 5], STAGES[number % 4])
    for number, dealt in enumerate(DEALT):
        yield made(number, [MLA], SHAPES[0], (dealt[0][0], dealt[1][0]), (1, 1), (dealt[0][1], dealt[1][1]))


def made(
    number: int,
    kinds: list[Any],
    shapes: tuple[tuple[int, int], tuple[int, int]],
    tp: tuple[int, int],
    stages: tuple[int, int],
    dcp: tuple[int, int] = (1, 1),
) -> World:
    tokens, heads = 13 + 5 * (number % 4), (8, 2, 1)[number % 3]
    layers = [
        Layer(f"{group}.{index}", group, model_bytes(np.random.default_rng(index), kind, heads))
        for group, kind in enumerate(kinds)
        for index in range(2)
    ]
    sides = []
    for consumes, (ratio, kernel) in enumerate(shapes):
        lists, firsts = [], []
        for group, kind in enumerate(kinds):
            needed = 3 if kind is MAMBA else -(-tokens // (ratio * kernel * dcp[consumes]))
            first = number % 2 if consumes and needed > 1 else 0
            ahead = number % 3 == 0 if consumes and kind is not MAMBA else 0
            lists.append(
                [(7 * index + 3 * group + 11 * consumes + number) % POOL for index in range(needed - first + ahead)]
            )
            firsts.append(first)
        every = len(kinds)
        pads = [5 * (number % 5 == consumes)] * every
        ratios, kernels = [ratio] * every, [kernel] * every
        sides.append(Side(tp[consumes], stages[consumes], ratios, kernels, pads, lists, firsts, POOL, dcp[consumes]))
    windows = [9 if kind is WINDOW else None for kind in kinds]
    direction = (Direction.READ, Direction.WRITE)[number % 7 % 2]
    return World(kinds, windows, layers, heads, tokens, sides[0], sides[1], direction)


def shown(array: NDArray[Any]) -> Any:
    """An array, or its shape and digest."""
    if array.size <= LITERAL:
        return array.tolist()
    return [*array.shape, hashlib.sha256(array.dtype.str.encode() + array.tobytes()).hexdigest()[:24]]


def pinned(plan: TransferPlan, ids: list[list[list[int]]], tokens: int | None, computed: Any) -> dict[str, Any]:
    """What a caller sees of a plan and a request."""
    pairing = plan.pair(*ids, num_tokens=tokens, num_computed_blocks=computed)
    return {
        "plan": repr(plan),
        "tables": [shown(plan.local_table), shown(plan.remote_table)],
        "ids": [shown(pairing.local_desc_ids), shown(pairing.remote_desc_ids)],
        "groups": [
            [*map(shown, pairing.kernel_pairs(group)), shown(pairing.untransferred(group))]
            for group in range(len(plan.local.groups))
        ],
        "counts": [pairing.num_descs, pairing.num_runs, pairing.num_bytes],
    }


def of_world(world: World) -> list[dict[str, Any]]:
    """The plans of the first and the last rank."""
    sides = (world.consumer, world.producer) if world.direction is Direction.READ else (world.producer, world.consumer)
    engines = [
        [world.layout(name, side, *rank, origin=(number + 1) << 32) for number, rank in enumerate(side.ranks)]
        for name, side in zip("LR", sides, strict=True)
    ]
    ids = [side.blocks for side in sides]
    return [
        pinned(plan, ids, world.tokens, world.computed)
        for local in dict.fromkeys((0, len(engines[0]) - 1))
        for plan in plan_peer(engines[0][local], engines[1], direction=world.direction)
    ]


def long_requests() -> Iterator[dict[str, Any]]:
    """A hundred thousand descriptors in short and in long runs."""
    for ratio, block, run in product((1, 4), (16, 32), (1, 3, 5000)):
        sides = []
        for index, size in enumerate((16, block)):
            regions = [Region((layer + 1) << 40, size * 4 // ratio, 10_000 * ratio) for layer in range(8)]
            sides.append(EngineLayout("LR"[index], [Group(FULL, size, ratio)], regions))
        count = 5000 * 16 // block
        ids = [number * 3 % 10_000 // run * run + number % run for number in range(9999)]
        lists = [list(dict.fromkeys(ids))[:5000], list(range(9000, 9000 - count, -1))]
        yield pinned(TransferPlan(*sides), [[lists[0]], [lists[1]]], 5000 * 16 - 7, [0])


def refusals() -> Iterator[str]:
    """The words of what is refused."""
    layout = EngineLayout("E", [Group(FULL, 16)], [Region(4096, 64, 8)], null_block_id=0)
    other = EngineLayout("F", [Group(FULL, 32)], [Region(4096, 128, 8)])
    plan, uneven = TransferPlan(layout, layout), TransferPlan(layout, other)
    for ids, words in [
        ([[[8]], [[1]]], {}),
        ([[[-1]], [[1]]], {}),
        ([[[1, 1]], [[1, 2]]], {}),
        ([[[True]], [[1]]], {}),
        ([[[1]], [[1], [2]]], {}),
        ([[[1, 2]], [[1]]], {"num_tokens": 32}),
        ([[[1, 2]], [[1, 3]]], {"num_tokens": 16}),
        ([[[1]], [[1]]], {"num_tokens": 2**48}),
        ([[[1]], [[1]]], {"num_computed_blocks": [1, 2]}),
    ]:
        yield refusal(lambda ids=ids, words=words: plan.pair(*ids, **words))
    yield refusal(lambda: uneven.pair([[1]], [[1]]))
    yield refusal(lambda: EngineLayout("E", [Group(FULL, 16)], []))
    yield refusal(lambda: Region(2**64 - 1, 2, 1))


def refusal(call: Any) -> str:
    try:
        return f"not refused: {call()!r}"
    except NixlFastError as error:
        return f"{type(error).__name__}: {error}"


def results() -> dict[str, Any]:
    """Everything that is pinned."""
    mixed = next(world for world in worlds() if len(world.kinds) == 3)
    return {
        "worlds": [of_world(world) for world in worlds()],
        "long": list(long_requests()),
        "refusals": list(refusals()),
        "expanded": [
            shown(expand_block_ids([5, 0, 3], 4)),
            shown(expand_block_ids([5, 0, 3], 4, width=2)),
            [shown(each) for each in expand_groups([[0, 1, 2], [10, 11]], [FULL, MAMBA], 261, width=2)],
        ],
        "layout": mixed.layout("L", mixed.producer, 0, 0).to_bytes().decode(),
    }


def main() -> None:
    """Rewrites the file, if every request in it moves the right bytes."""
    for world in worlds():
        assert list(wrong_ranks(world, own_memory, move)) == []
    lines = [f"{json.dumps(name)}: {indented(value)}" for name, value in results().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def indented(value: Any) -> str:
    """JSON with a line for every plan."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    if isinstance(value[0], list) and value[0] and isinstance(value[0][0], dict):
        return "[\n" + ",\n".join(indented(each) for each in value) + "\n]"
    return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"


def processor_features() -> list[str]:
    """What numpy has code of its own for and finds on this processor."""
    from numpy._core._multiarray_umath import (  # type: ignore[import-not-found] # noqa: PLC0415 - not public
        __cpu_dispatch__,
        __cpu_features__,
    )

    return [name for name in __cpu_dispatch__ if __cpu_features__[name]]


if __name__ == "__main__":
    main()
