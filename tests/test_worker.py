"""Request metadata to the peer's kernel block ids."""

import pytest

from nixl_fast import GeometryError, GroupKind
from nixl_fast.worker import ExpandRule, RemoteBlocks

FULL, WINDOW, MAMBA = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


@pytest.mark.parametrize(
    ("request_blocks", "rule", "expected"),
    [
        pytest.param(
            RemoteBlocks((FULL, WINDOW), ([0, 1, 2], [3, 4]), local_ratio=2, remote_ratio=2),
            ExpandRule.FULL,
            [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]],
            id="no-mamba-ratio-2",
        ),
        pytest.param(
            RemoteBlocks((FULL, MAMBA), ([0, 1, 2], [10, 11]), local_ratio=2, remote_ratio=261),
            ExpandRule.LOCAL_WIDTH,
            [[0, 1, 261, 262, 522, 523], [10, 11]],
            id="mamba-older-rule",
        ),
        pytest.param(
            RemoteBlocks((FULL, MAMBA), ([0, 1, 2], [10, 11]), local_ratio=2, remote_ratio=261),
            ExpandRule.FULL,
            [list(range(783)), [10, 11]],
            id="mamba-full-width",
        ),
        pytest.param(
            RemoteBlocks((FULL, WINDOW), ([0, 1], [2]), local_ratio=2, remote_ratio=3),
            ExpandRule.LOCAL_WIDTH,
            [[0, 1, 2, 3, 4, 5], [6, 7, 8]],
            id="no-mamba-unequal-ratios-use-the-remote-ratio",
        ),
        pytest.param(
            RemoteBlocks((FULL, MAMBA), ([5, 6], [2]), local_ratio=66, remote_ratio=34),
            ExpandRule.FULL,
            [list(range(170, 238)), [2]],
            id="P02-ratios-34-and-66",
        ),
    ],
)
def test_kernel_ids(request_blocks: RemoteBlocks, rule: ExpandRule, expected: list[list[int]]) -> None:
    assert [ids.tolist() for ids in request_blocks.kernel_ids(rule)] == expected


def test_older_rule_never_names_a_block_of_somebody_else() -> None:
    blocks = RemoteBlocks((FULL, MAMBA), ([5, 6], [2]), local_ratio=66, remote_ratio=34)
    with pytest.raises(GeometryError, match="width is 66, it must be between 1 and the ratio 34"):
        blocks.kernel_ids(ExpandRule.LOCAL_WIDTH)
