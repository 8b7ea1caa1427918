"""Our methods against stock vLLM's on generated inputs; with the layouts' tests again on another release, in a process
of its own."""

# ruff: noqa: PLC0415 - vLLM, torch and NIXL are imported when they are needed
from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_fast.errors import NixlFastError
from nixl_fast.layout import GroupKind
from nixl_fast.plan import Direction

OTHER_RELEASES = os.environ.get("NIXL_FAST_RELEASES", "0.33.0").split(",")
CASES = 3000


@cache
def _classes() -> tuple[type, type]:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from nixl_fast.vllm import connector

    return NixlPullConnectorWorker, connector.pull_worker_class()


@cache
def _specs() -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    attention = {"block_size": 64, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return {
        "full": FullAttentionSpec(**attention),
        "window": SlidingWindowSpec(**attention, sliding_window=128),
        "mamba": MambaSpec(block_size=64, shapes=((4, 8), (8, 8)), dtypes=(torch.float32, torch.float32)),
    }


def _both(kinds: list[str], **attributes: Any) -> tuple[Any, Any]:
    """Two bare objects, as vLLM's own tests make them: no constructor has run."""
    specs = _specs()
    groups = [SimpleNamespace(kv_cache_spec=specs[kind], layer_names=[]) for kind in kinds]
    shared = {
        "kv_cache_config": SimpleNamespace(transfer_groups=groups, transfer_group_ids=tuple(range(len(groups)))),
        "_group_spec_types": tuple(type(specs[kind]) for kind in kinds),
        "_has_mamba": "mamba" in kinds,
        "_conv_decomp": SimpleNamespace(local_conv_offsets=[(0, 4), (4, 2), (6, 2)]) if "mamba" in kinds else None,
        "_ssm_region_indices": [],
        "_scratch_region_indices": [],
        "_ple_group_index": None,
        "region_group_ids": [],
        "_uses_region_group_mapping": False,
        "block_len_per_layer": [1024] * 2,
        "num_regions": 2,
        **attributes,
    }
    out = []
    for cls in _classes():
        made = object.__new__(cls)
        if hasattr(cls, "_requires_layer_name_routing"):  # vLLM has the attribute from 0.31 on
            made._transfer_layer_group_ids = ()
        made.__dict__.update(shared)
        out.append(made)
    return out[0], out[1]


def _lists(rng: random.Random, groups: int, limit: int, most: int = 12) -> list[list[int]]:
    """Ids that no two groups share, as vLLM's block pool hands them out."""
    ids = rng.sample(range(limit), limit)
    out = []
    for _ in range(groups):
        count = rng.randint(0, min(most, limit // groups))
        out.append([ids.pop() for _ in range(count)])
    return out


def test_the_features_are_all_active() -> None:
    stock, ours = _classes()
    assert [cls.__name__ for cls in ours.__mro__[1:6]] == ["Agent", "PullPairing", "Pairing", "Descriptors", "Expand"]
    assert issubclass(ours, stock)


def test_expansion() -> None:
    rng = random.Random(1)
    for _ in range(CASES):
        kinds = rng.choice([["full"], ["full", "window"], ["full", "mamba"], ["mamba", "window", "full"]])
        stock, ours = _both(kinds)
        ratio = rng.choice([1, 2, 3, 4, 33, 66, 131])
        ids = tuple(_lists(rng, len(kinds), 200))
        got = ours._logical_to_kernel_block_ids(ids, ratio)
        assert got == stock._logical_to_kernel_block_ids(ids, ratio)
        assert all(type(each) is int for group in got for each in group)
        assert (got is ids) == (ratio == 1)
        array = np.array(ids[0], dtype=rng.choice([np.int32, np.int64]))
        mapped = ours.get_mapped_blocks(array, ratio)
        np.testing.assert_array_equal(mapped, stock.get_mapped_blocks(array, ratio))
        assert mapped.dtype == np.int64


@pytest.mark.parametrize("form", ["flat", "mapped", "hybrid", "routed"])
def test_descriptor_ids(form: str) -> None:
    rng = random.Random(form)
    for _ in range(CASES // 2):
        split = rng.choice([None, None, 1, 2, 4])
        regions = rng.randint(1, 6)
        ratio = rng.choice([1, 2, 4])
        blocks = ratio * rng.randint(4, 12)
        kinds = {
            "flat": rng.choice([["full"], ["full", "window", "full"]]),
            "mapped": ["full", "window"],
            "hybrid": ["full", "mamba", "mamba"],
            "routed": ["full", "window"],
        }[form]
        counts = [blocks] * regions
        region_groups: list[int] | None = None
        mapped: bool | None = None
        attributes: dict[str, Any] = {"num_regions": regions, "block_len_per_layer": [64] * regions}
        if form == "mapped":
            counts = [ratio * rng.randint(4, 12) for _ in range(regions)] if rng.random() < 0.5 else counts
            region_groups = [rng.choice([0, 1, -1]) for _ in range(regions)]
            if not {0, -1} & set(region_groups) or not {1, -1} & set(region_groups):
                region_groups[0] = -1
            mapped = rng.choice([None, True]) if len(set(region_groups)) > 1 else True
        if form == "flat":
            region_groups = [0] * regions
        if form == "routed":
            if not hasattr(_classes()[0], "_requires_layer_name_routing"):
                pytest.skip("vLLM 0.30 does not route by layer name")
            attributes["_transfer_layer_group_ids"] = tuple(rng.choice([0, 1]) for _ in range(regions))
        stock, ours = _both(kinds, **attributes)
        limit = min(counts)
        ids = _lists(rng, len(kinds), limit // ratio if form == "hybrid" else limit, 5)
        if form != "hybrid" and not any(ids):
            continue
        given = None if form in ("hybrid", "flat") and rng.random() < 0.5 else counts
        arguments = (blocks, split, ratio, given, region_groups, mapped)
        got, expected = ours._compute_desc_ids(ids, *arguments), stock._compute_desc_ids(ids, *arguments)
        np.testing.assert_array_equal(got, expected, err_msg=repr((ids, arguments)))


def test_prefix_caching_without_positions() -> None:
    """What vLLM does with bare lists; where it keeps a whole list for an empty one, or guesses, ours differs."""
    rng = random.Random(2)
    same = 0
    for _ in range(CASES):
        kinds = rng.choice([["full"], ["full", "window"], ["full", "mamba"]])
        stock, ours = _both(kinds)
        prefill = _lists(rng, len(kinds), 100)
        decode = [[100 + each for each in group[: rng.randint(0, len(group))]] for group in prefill]
        ratio = rng.choice([1, 2])
        other = rng.choice([ratio, ratio, 3])
        try:
            expected = stock._apply_prefix_caching(decode, [list(each) for each in prefill], ratio, other)
        except AssertionError:
            try:
                got = ours._apply_prefix_caching(decode, prefill, ratio, other)
            except (AssertionError, NixlFastError):
                continue
            assert any(theirs and not mine for mine, theirs in zip(decode, prefill, strict=True)), (
                "a group wholly cached"
            )
            assert all(len(a) == len(b) for a, b in zip(*got, strict=True))
            continue
        wrong = any(len(a) != len(b) for a, b in zip(*expected, strict=True))
        guessed = (
            ratio != other
            and "mamba" not in kinds
            and any(len(a) != len(b) for a, b in zip(decode, prefill, strict=True) if a)
        )
        if guessed:
            with pytest.raises(NixlFastError):
                ours._apply_prefix_caching(decode, prefill, ratio, other)
            continue
        got = ours._apply_prefix_caching(decode, [list(each) for each in prefill], ratio, other)
        if wrong:
            assert all(len(a) == len(b) for a, b in zip(*got, strict=True))
            continue
        assert [[list(each) for each in side] for side in got] == [[list(each) for each in side] for side in expected]
        same += 1
    assert same > CASES // 4


def _request(
    kinds: list[str], local: Any, remote: Any, tokens: int, firsts: Any, sides: Any, direction: Any = Direction.READ
) -> Any:
    from nixl_fast.vllm.pairing import GroupPlan, GroupRule, SideRule
    from nixl_fast.vllm.worker import Note, Request

    kind = {"full": GroupKind.FULL_ATTENTION, "window": GroupKind.SLIDING_WINDOW, "mamba": GroupKind.MAMBA}
    plans = [
        GroupPlan(
            GroupRule(
                kind[name],
                128 if name == "window" else None,
                direction,
                SideRule(*sides[0]),
                SideRule(*sides[1]),
                0 if name != "full" else None,
            )
        )
        for name in kinds
    ]
    return Request(plans, direction, local, remote, tokens, Note(tuple(firsts), None), lazy=False)


def test_pairing_by_position_where_stock_is_right() -> None:
    """Equal geometry on both sides, a prefix hit of any length: the same pairs in the same order."""
    rng = random.Random(3)
    for _ in range(CASES):
        kinds = rng.choice([["full"], ["full", "window"], ["full", "mamba"]])
        stock, ours = _both(kinds)
        ratio, size = rng.choice([1, 2, 4]), 64
        tokens = rng.randint(1, 20 * size)
        blocks = -(-tokens // size)
        cached = rng.randint(0, blocks)
        pool = list(range(1, 400))
        rng.shuffle(pool)
        local, remote, firsts = [], [], []
        for name in kinds:
            whole_p, whole_d = [pool.pop() for _ in range(blocks)], [pool.pop() for _ in range(blocks)]
            if name == "mamba":
                local.append(whole_d[-1:])
                remote.append(whole_p[-1:])
                firsts.append(None)
                continue
            keep = 3 if name == "window" else blocks
            first = max(cached, blocks - keep)
            local.append(whole_d[first:])
            remote.append(whole_p[-keep:])
            firsts.append(first)
        kernel = [stock._logical_to_kernel_block_ids(ids, ratio) for ids in (local, remote)]
        request = _request(kinds, local, remote, tokens, firsts, [(size // ratio, ratio, 400)] * 2)
        ours._nixl_fast_request = request
        got = ours._apply_prefix_caching(*kernel, ratio, ratio)
        expected = stock._apply_prefix_caching(
            kernel[0],
            [list(ids) if ours_ else [] for ids, ours_ in zip(kernel[1], kernel[0], strict=True)],
            ratio,
            ratio,
        )
        assert [[list(ids) for ids in side] for side in got] == [[list(ids) for ids in side] for side in expected], (
            kinds,
            local,
            remote,
            tokens,
            firsts,
            ratio,
        )


ROWS = [
    pytest.param((64, 1), (64, 2), [7, 8, 9], [10, 11], 192, 0, [7, 8, 9], [20, 21, 22], [], id="pull, ratios differ"),
    pytest.param((64, 2), (64, 1), [7, 8], [10, 11, 12], 192, 0, [14, 15, 16], [10, 11, 12], [17], id="reversed"),
    pytest.param(
        (16, 1), (4, 1), [3], list(range(10)), 40, 2, [12, 13], [8, 9], [14, 15], id="kernels differ, cached prefix"
    ),
]


@pytest.mark.parametrize(
    ("local_side", "remote_side", "local", "remote", "tokens", "first", "ours", "theirs", "rest"), ROWS
)
def test_rows_that_stock_gets_wrong(
    local_side: Any,
    remote_side: Any,
    local: Any,
    remote: Any,
    tokens: Any,
    first: Any,
    ours: Any,
    theirs: Any,
    rest: Any,
) -> None:
    stock, worker = _both(["full"])
    sides = [(*local_side, 50), (*remote_side, 50)]
    kernel = [
        stock._logical_to_kernel_block_ids([local], local_side[1]),
        stock._logical_to_kernel_block_ids([remote], remote_side[1]),
    ]
    split = local_side[0] // remote_side[0]

    def through(target: Any) -> Any:
        lists = [[list(ids) for ids in each] for each in kernel]
        if split > 1:
            lists = list(target._map_block_ids_for_block_size_ratio(*lists, split))
        return target._apply_prefix_caching(*lists, local_side[1], remote_side[1])

    request = _request(["full"], [local], [remote], tokens, [first], sides)
    worker._nixl_fast_request = request
    assert [[list(ids) for ids in side] for side in through(worker)] == [[ours], [theirs]]
    assert request.pairs(0).unmoved.tolist() == rest
    try:
        wrong = [[list(ids) for ids in side] for side in through(stock)]
    except AssertionError:
        return
    assert wrong != [[ours], [theirs]]


def test_a_push_of_a_suffix() -> None:
    stock, worker = _both(["full"])
    request = _request(["full"], [[1, 2]], [[50, 51]], 32, [6], [(16, 1, 50), (4, 1, 99)], Direction.WRITE)
    worker._nixl_fast_request = request
    for target, expected in ((stock, [4, 5]), (worker, [10, 11])):
        local, remote = target._map_block_ids_for_block_size_ratio([[1, 2]], [[50, 51]], 4)
        decode, prefill = target._apply_prefix_caching(remote, local, 1, 1)
        assert [list(ids) for ids in decode] == [[50, 51]]
        assert [list(ids) for ids in prefill] == [expected]


def test_a_window_moves_its_last_block_whole() -> None:
    """As stock does, where both sides have equal blocks: what lies behind the last token must not be a former owner's."""
    for tokens, count in ((40, 4), (48, 4), (33, 4), (32, 2), (31, 2)):
        blocks = -(-tokens // 32)
        sides = [(16, 2, 50)] * 2
        request = _request(["window"], [[5, 8][:blocks]], [[6, 3][:blocks]], tokens, [0], sides)
        pairs = request.pairs(0)
        assert pairs.local.tolist() == [10, 11, 16, 17][:count]
        assert pairs.remote.tolist() == [12, 13, 6, 7][:count]
        assert not pairs.unmoved.tolist()
    pushed = _request(["window"], [[5, 8]], [[6, 3, 9]], 40, [0], sides, Direction.WRITE).pairs(0)
    assert (pushed.local.tolist(), pushed.remote.tolist()) == ([10, 11, 16, 17], [12, 13, 6, 7])
    assert pushed.unmoved.tolist() == [18, 19]


def test_a_window_that_ends_before_the_producers_blocks_is_refused() -> None:
    from nixl_fast.vllm.pairing import GroupPlan, GroupRule, SideRule

    sides = [SideRule(32, 1, 60)] * 2
    plan = GroupPlan(GroupRule(GroupKind.SLIDING_WINDOW, 64, Direction.READ, *sides, 0))
    for first, tokens in ((10, 288), (10, 300), (12, 96), (40, 288)):
        with pytest.raises(NixlFastError):
            plan.pair(
                [6, 7, 8], [50, 51, 52], num_tokens=tokens, consumer_first=-(-tokens // 32) - 3, producer_first=first
            )
    pairs = plan.pair([6, 7, 8], [50, 51, 52, 53], num_tokens=288, consumer_first=6, producer_first=6)
    assert (pairs.local.tolist(), pairs.remote.tolist()) == ([6, 7, 8], [50, 51, 52])


@pytest.mark.parametrize(("kind", "said"), [("window", [0]), ("full", None)])
def test_the_producer_says_where_a_window_begins(kind: str, said: Any) -> None:
    """Its list may go past the last token, so that the consumer could not tell by its length."""
    from nixl_fast.vllm.scheduler import FIRST_BLOCKS, Positions

    class Stock:
        kv_cache_config = SimpleNamespace(
            transfer_groups=[SimpleNamespace(kv_cache_spec=_specs()[kind])], transfer_group_ids=(0,)
        )

        def request_finished(self, _: Any, block_ids: Any) -> Any:
            return True, {"remote_block_ids": block_ids, "remote_num_tokens": 70}

    class Ours(Positions, Stock):
        pass

    _, params = Ours().request_finished(SimpleNamespace(request_id="r"), ([4, 5, 6],))
    assert params.get(FIRST_BLOCKS) == said


def test_one_group_fully_cached() -> None:
    stock, worker = _both(["full", "mamba"])
    local, remote = [[], [7]], [[5, 6], [8]]
    decode, prefill = stock._apply_prefix_caching(local, [list(ids) for ids in remote], 1, 1)
    assert [len(ids) for ids in decode] != [len(ids) for ids in prefill]
    for request in (None, _request(["full", "mamba"], local, remote, 128, [2, None], [(64, 1, 50)] * 2)):
        worker._nixl_fast_request = request
        decode, prefill = worker._apply_prefix_caching(local, [list(ids) for ids in remote], 1, 1)
        assert ([list(ids) for ids in decode], [list(ids) for ids in prefill]) == ([[], [7]], [[], [8]])


@pytest.mark.parametrize("bad", [10, -1])
def test_an_id_of_another_region_is_refused(bad: int) -> None:
    stock, worker = _both(["full"], region_group_ids=[0, 0])
    arguments = (10, None, 1, [10, 10], [0, 0], None)
    assert stock._compute_desc_ids([[3, bad]], *arguments).tolist() == [3, bad, 13, 10 + bad]
    with pytest.raises(NixlFastError, match=f"{bad}"):
        worker._compute_desc_ids([[3, bad]], *arguments)
    with pytest.raises(NixlFastError, match=f"{bad}"):
        _request(["full"], [[3, 4]], [[3, bad]], 128, [0], [(64, 1, 10)] * 2).pairs(0)


def test_a_peer_that_lists_nothing_is_no_full_hit() -> None:
    stock, worker = _both(["full"])
    assert stock._map_block_ids_for_block_size_ratio([[3]], [[]], 4) == ([], [[]])
    for request in (None, _request(["full"], [[3]], [[]], 40, [2], [(16, 1, 50), (4, 1, 50)])):
        worker._nixl_fast_request = request
        with pytest.raises(NixlFastError):
            worker._map_block_ids_for_block_size_ratio([[3]], [[]], 4)


def test_unknown_positions_fail_instead_of_guessing() -> None:
    request = _request(["full"], [[7, 8, 9]], [[10, 11]], None, [None], [(64, 1, 50), (64, 2, 50)])
    with pytest.raises(NixlFastError, match="num_tokens"):
        request.pairs(0)


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_the_same_on(release: str) -> None:
    from conftest import unpacked

    env = {
        **os.environ,
        "PYTHONPATH": str(unpacked(release)),
        "NIXL_FAST_PARITY_RELEASE": release,
        "VLLM_TARGET_DEVICE": "cpu",  # which the wheel is not made for
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not same_on"]
    files = [str(Path(__file__).with_name(name)) for name in ("test_parity.py", "test_layouts.py")]
    done = subprocess.run([*command, *files], env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_this_is_the_release() -> None:
    import vllm

    assert vllm.__version__.startswith(os.environ.get("NIXL_FAST_PARITY_RELEASE", "0.32.0"))
