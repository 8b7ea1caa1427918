"""`nixl-fast explain`: what it says follows from the rules; what is refused says why and what to do."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan
from nixl_fast.cli import app
from nixl_fast.explain import Deployment, RequestIds, examples, render, report


def explain(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


@pytest.mark.parametrize("name", examples())
def test_every_example_is_a_deployment_that_works(name: str, tmp_path: Path) -> None:
    printed = explain("--example", name)
    assert printed.exit_code == 0
    file = tmp_path / "deployment.json"
    file.write_text(printed.stdout)
    text, data = explain(file), explain(file, "--json")
    assert (text.exit_code, data.exit_code) == (0, 0)
    made = json.loads(data.stdout)
    assert len(made["plans"]) == text.stdout.count("  request: ")
    assert all(plan["request"]["descriptors"] > 0 for plan in made["plans"])


def test_two_layout_files_and_a_request(tmp_path: Path) -> None:
    local = EngineLayout("d", (Group(GroupKind.FULL_ATTENTION, 128),), (Region(0, 1024, 64),))
    remote = EngineLayout("p", (Group(GroupKind.FULL_ATTENTION, 16),), (Region(0, 128, 512),))
    for name, document in (("local", local), ("remote", remote), ("request", RequestIds([[3]], [[7, 9]], 20))):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(document))
    out = explain(
        *(tmp_path / f"{name}.json" for name in ("local", "remote")), "--request", tmp_path / "request.json", "--json"
    )
    (plan,) = json.loads(out.stdout)["plans"]
    assert plan["unit_tokens"] == 16
    assert plan["groups"][0]["local"] == {"block_size": 128, "ratio": 1, "blocks": 64}
    assert plan["lanes"] == [
        {
            "mem_types": ["DRAM", "DRAM"],
            "local": {"rows": 1, "descriptors": 512},
            "remote": {"rows": 1, "descriptors": 512},
        }
    ]
    # 20 tokens are two units of 16; the block's other six hold nothing
    assert plan["request"]["descriptors"] == 2
    assert plan["request"]["groups"] == [
        {"group": 0, "moved": 2, "left": [{"why": "past the last token", "units": [26, 27, 28, 29, 30, 31]}]}
    ]


def test_reasons_for_what_is_not_moved() -> None:
    window = Group(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)
    groups = (window, Group(GroupKind.FULL_ATTENTION, 16))
    layout = EngineLayout("e", groups, (Region(0, 16, 99, groups=(0,)), Region(9999, 16, 99, groups=(1,))))
    request = RequestIds([[1, 2, 3, 4, 5, 6], []], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 80, [0, 5])
    text = render(report(TransferPlan(layout, layout), request))
    assert "3 units moved; not moved, before the sliding window: 1, 2; not moved, past the last token: 6" in text
    assert "0 units moved; not moved, the consumer lists no block, it has them all" in text


def test_slices_and_source_ranks_are_shown() -> None:
    deployment = examples()["dense-gqa-tp4-to-tp1"]
    texts = [render(report(plan)) for plan in deployment.plans()]
    assert [f"prefill rank {rank}/4" in text for rank, text in enumerate(texts)] == [True] * 4
    assert "heads 2 .. 3 of 8" in texts[1]
    assert "local bytes 8192 .. 16384 of a kernel block; remote bytes 0 .. 8192 of a kernel block" in texts[1]


def test_a_plan_that_fills_blocks_only_in_part_says_so() -> None:
    plans = examples()["dense-gqa-tp4-to-tp1"].plans()
    assert "region 0 (and 7 more): 8192 of 32768 bytes of every block; other ranks of the peer" in plans[0].explain()
    assert "see plan_peer" not in examples()["mla-tp8-to-tp2"].plans()[0].explain()


def test_a_refusal_is_json_too(tmp_path: Path) -> None:
    deployment = examples()["dense-gqa-tp4-to-tp1"]
    short = msgspec.structs.replace(deployment, remote=deployment.remote[:3])
    (tmp_path / "short.json").write_bytes(msgspec.json.encode(short))
    out = explain(tmp_path / "short.json", "--json")
    assert out.exit_code == 1
    assert "8192 would stay unwritten" in json.loads(out.stdout)["refused"]


def test_an_unstated_order_is_pointed_out() -> None:
    group = (Group(GroupKind.FULL_ATTENTION, 16),)
    local = EngineLayout("d", group, (Region(0, 64, 9),), num_kv_heads=4)
    remote = EngineLayout("p", group, (Region(0, 32, 9),), None, 1, 2, 4)
    assert "taken to keep the bytes of a head together" in TransferPlan(local, remote).explain()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"tp_rank": 5}, ["local.json", "tp_rank", "5"], id="bad-field"),
        pytest.param({"num_kv_heads": 7}, ["num_kv_heads", "local 7", "remote 8"], id="refused"),
    ],
)
def test_refusals_say_why(change: dict[str, int], words: list[str], tmp_path: Path) -> None:
    deployment = examples()["dense-gqa-tp4-to-tp1"]
    local = json.loads(msgspec.json.encode(deployment.local)) | change
    (tmp_path / "local.json").write_text(json.dumps(local))
    (tmp_path / "remote.json").write_bytes(msgspec.json.encode(deployment.remote))
    out = explain(tmp_path / "local.json", tmp_path / "remote.json")
    assert out.exit_code == 1
    assert out.stdout == ""
    assert all(word in out.stderr for word in words), out.stderr
    assert len(out.stderr.splitlines()) == 1


def test_wrong_options() -> None:
    assert "dense-gqa-tp4-to-tp1" in explain("--example", "nothing").stderr
    assert explain("--example", "nothing").exit_code == 2
    assert explain().exit_code == 2
    assert explain("missing.json").exit_code == 1


def test_the_schema_describes_the_files() -> None:
    schema = json.loads(explain("--schema").stdout)
    assert set(schema["$defs"]["EngineLayout"]["required"]) == {"engine_id", "groups", "regions"}
    assert msgspec.json.decode(msgspec.json.encode(examples()["full-sliding"]), type=Deployment).plans()
