"""The rules' worked examples and the field cases, through the public interface."""

from typing import Any

import numpy as np
import pytest

from nixl_fast import Direction, PairingError, TransferPlan, expand_block_ids, expand_groups
from vectors import UNIT_BYTES, VECTORS, layouts, numbers


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in VECTORS["expand"]])
def test_expand(case: dict[str, Any]) -> None:
    ids = [numbers(items) for items in case["ids"]]
    out = expand_groups(ids, case["kinds"], case["ratio"], width=case.get("width"))
    assert [array.tolist() for array in out] == [numbers(items) for items in case["expect"]]
    assert {array.dtype for array in out} == {np.dtype(np.int32)}


@pytest.mark.parametrize("ratio", [1, 2, 33, 34, 66, 131, 261])
def test_p03_expansion_is_the_per_id_definition(ratio: int) -> None:
    ids = np.random.default_rng(ratio).integers(0, 8_000_000, 500)
    expected = [b * ratio + k for b in ids.tolist() for k in range(ratio)]
    assert expand_block_ids(ids, ratio).tolist() == expected
    assert expand_block_ids(ids.tolist(), ratio).tolist() == expected


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in VECTORS["pair"]])
def test_pair(case: dict[str, Any]) -> None:
    local, remote = layouts(case)
    plan = TransferPlan(local, remote, direction=Direction(case.get("direction", "read")))
    ids = [[numbers(items) for items in case[f"{side}_ids"]] for side in ("local", "remote")]

    def pair() -> Any:
        return plan.pair(*ids, num_tokens=case.get("num_tokens"), num_computed_blocks=case.get("computed"))

    if "error" in case:
        with pytest.raises(PairingError) as refused:
            pair()
        assert all(word in str(refused.value) for word in case["error"])
        return
    pairing = pair()
    for group, expect in enumerate(case["expect"]):
        remote_units, local_units = pairing.kernel_pairs(group)
        assert remote_units.tolist() == numbers(expect["remote"])
        assert local_units.tolist() == numbers(expect["local"])
        assert pairing.untransferred(group).tolist() == numbers(expect["rest"])
    count = sum(len(numbers(expect["local"])) for expect in case["expect"])
    assert pairing.num_bytes == count * UNIT_BYTES
    assert pairing.notify_only == case.get("notify_only", False) == (count == 0)
    if "runs" in case:
        assert pairing.num_runs == case["runs"]
