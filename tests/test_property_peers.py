"""Random engines of several ranks against what every byte has to be; `worlds` says both."""

from hypothesis import given, note, settings

from worlds import World, move, own_memory, worlds, wrong_ranks


@settings(max_examples=400, deadline=None, derandomize=True)
@given(worlds())
def test_every_byte_of_every_rank(world: World) -> None:
    note(repr([world.kinds, world.windows, world.heads, world.tokens, world.direction, world.order]))
    note(repr(world.producer))
    note(repr(world.consumer))
    assert list(wrong_ranks(world, own_memory, move)) == []
