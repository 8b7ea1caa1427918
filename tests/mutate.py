"""Breaks the code in small ways and shows that the tests notice each one: ``uv run python tests/mutate.py``.

Works on a copy of the tree in a temporary folder. Every mutation is an exact text that must occur once; it is noticed if
the core's own tests or the Python tests that load the rebuilt module fail (or never end). Exits 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["vectors", "tables", "refusals", "peers", "property_peers", "property"]
PYTEST = """
import sys, pytest
from hypothesis import Phase, settings
settings.register_profile("mutate", phases=[Phase.explicit, Phase.generate])  # noticing is enough, shrinking takes long
settings.load_profile("mutate")
sys.exit(pytest.main(sys.argv[1:]))
"""
PATIENCE = 900


class Mutation(NamedTuple):
    """One way to be wrong."""

    what: str
    path: str
    old: str
    new: str


PAIR, TABLE, EXPAND = (f"rust/core/src/{name}.rs" for name in ("pair", "table", "expand"))
IDS, BINDING = (f"rust/py/src/{name}.rs" for name in ("ids", "lib"))
GEOMETRY, PLAN = (f"python/nixl_fast/{name}.py" for name in ("geometry", "plan"))

MUTATIONS = [
    # pairing by position
    Mutation("the window keeps a block less", PAIR, "sub(window.div_ceil(size) + 1)", "sub(window.div_ceil(size))"),
    Mutation("the window keeps a block more", PAIR, "sub(window.div_ceil(size) + 1)", "sub(window.div_ceil(size) + 2)"),
    Mutation(
        "the producer's clip counts consumer blocks",
        PAIR,
        "kept(blocks_p, tokens_p) * units_p)",
        "kept(blocks_c, tokens_c) * units_c)",
    ),
    Mutation(
        "the producer's list is not clipped",
        PAIR,
        "max(producer_range.start, placed.kept.1)",
        "producer_range.start",
    ),
    Mutation(
        "the consumer's list is not clipped",
        PAIR,
        "max(consumer_range.start, placed.kept.0)",
        "consumer_range.start",
    ),
    Mutation(
        "the last unit is lost unless full",
        PAIR,
        "end: tokens.div_ceil(self.group.unit_tokens.into())",
        "end: tokens / u64::from(self.group.unit_tokens)",
    ),
    Mutation(
        "blocks are counted in the other side's size",
        PAIR,
        "(tokens.div_ceil(tokens_c), tokens.div_ceil(tokens_p))",
        "(tokens.div_ceil(tokens_p), tokens.div_ceil(tokens_c))",
    ),
    Mutation("a producer may list too little", PAIR, "None if listed_p >= blocks_p => Some(0)", "None => Some(0)"),
    Mutation(
        "a clipped list starts at token 0", PAIR, "Some(_) => blocks_p.checked_sub(listed_p)", "Some(_) => Some(0)"
    ),
    Mutation(
        "the consumer's place in producer units", PAIR, "consumer: first_c * units_c", "consumer: first_c * units_p"
    ),
    Mutation(
        "the producer's place in consumer units",
        PAIR,
        "producer: first_p * units_p,\n                kept: (kept(blocks_c",
        "producer: first_p * units_c,\n                kept: (kept(blocks_c",
    ),
    Mutation(
        "the window's first token may lack a source",
        PAIR,
        "tokens.saturating_sub(window)) /",
        "tokens.saturating_sub(window) + 1) /",
    ),
    Mutation(
        "a token before the window needs a source",
        PAIR,
        "tokens.saturating_sub(window)) /",
        "tokens.saturating_sub(window + 1)) /",
    ),
    Mutation("2^48 tokens are accepted", PAIR, "if tokens >= MAX_TOKENS", "if tokens > MAX_TOKENS"),
    Mutation(
        "a position of 2^48 is accepted", PAIR, "tokens >= u128::from(MAX_TOKENS)", "tokens > u128::from(MAX_TOKENS)"
    ),
    Mutation(
        "cached blocks plus the producer's",
        PAIR,
        "Some(first) => u64::from(first) + listed_c",
        "Some(first) => u64::from(first) + listed_p",
    ),
    Mutation("lists end where the consumer's does", PAIR, "None => max(listed_c, listed_p)", "None => listed_c"),
    Mutation(
        "a producer's list may start late without tokens",
        PAIR,
        "first.is_none() || window.is_some() || *first == 0",
        "first.is_none() || window.is_some() || *first <= 1",
    ),
    Mutation(
        "two sizes without tokens, anything cached",
        PAIR,
        "if window.is_some() || self.first != Some(0)",
        "if window.is_some() || self.first.is_none()",
    ),
    Mutation(
        "two sizes, a consumer block too many",
        PAIR,
        "(end_c - units_c) >= end_p ||",
        "(end_c - units_c) > end_p ||",
    ),
    Mutation(
        "two sizes, a producer block too many",
        PAIR,
        "saturating_sub(units_p) >= end_c",
        "saturating_sub(units_p) > end_c",
    ),
    Mutation("two sizes, the longer list decides", PAIR, "end: min(end_c, end_p)", "end: max(end_c, end_p)"),
    Mutation("what is missing is not missed", PAIR, "(first < needed.end).then_some", "(first > needed.end).then_some"),
    Mutation("a hole in what is needed", PAIR, "left - len) > placed.needed", "left - len) > placed.needed + 1"),
    Mutation("producer units by the consumer's ratio", PAIR, "id * units_p + part, len", "id * units_c + part, len"),
    Mutation("a unit's place in its block is lost", PAIR, "            unit += skipped;\n", ""),
    Mutation(
        "the producer's next block comes early", PAIR, "if part == units_p {", "if part >= units_p.min(units_c) {"
    ),
    Mutation(
        "moving starts with the first producer block",
        PAIR,
        "moved.start.saturating_sub(producer_range.start)",
        "moved.start.saturating_sub(moved.start)",
    ),
    Mutation(
        "the tail of a block is not reported",
        PAIR,
        "out.leave(unit, (end - max(inside.end, at)) as u32);",
        "",
    ),
    Mutation(
        "placeholders are blocks",
        PAIR,
        "let placeholder = consumer.null == Some(block);",
        "let placeholder = consumer.null == Some(block + 1);",
    ),
    Mutation(
        "runs join although the producer's do not follow",
        PAIR,
        "to == run.0 + run.2 && from == run.1 + run.2",
        "to == run.0 + run.2",
    ),
    Mutation(
        "units join although the producer's do not follow",
        PAIR,
        "== next.local && run.remote + run.len == next.remote",
        "== next.local",
    ),
    Mutation(
        "the whole last block is reported",
        PAIR,
        "out.leave(to * consumer.units + part as u32, consumer.units - part as u32);",
        "out.leave(to * consumer.units, consumer.units);",
    ),
    Mutation(
        "a part of a block counts as a whole one",
        PAIR,
        "if self.whole && len < self.group.local.units",
        "if self.whole && len + 1 < self.group.local.units",
    ),
    # who writes
    Mutation(
        "a write fills the local side",
        PAIR,
        "Direction::Write => (remote, local),\n        };\n        self.check_writers",
        "Direction::Write => (local, remote),\n        };\n        self.check_writers",
    ),
    Mutation(
        "runs of a write are turned around",
        PAIR,
        "Direction::Write => (producer, consumer),\n        };\n        (count > 0)",
        "Direction::Write => (consumer, producer),\n        };\n        (count > 0)",
    ),
    Mutation("two writers of a block", PAIR, "        self.check_writers(consumers)?;\n", ""),
    Mutation(
        "the producer lists each block once",
        PAIR,
        "let side = self.direction.consumer();\n        for set",
        "let side = self.direction.producer();\n        for set",
    ),
    Mutation(
        "two groups never share memory",
        PAIR,
        "if members().count() < 2 && members()",
        "if members()",
    ),
    Mutation(
        "sorted lists may repeat an id", PAIR, "list.is_sorted_by(|a, b| a < b)", "list.is_sorted_by(|a, b| a <= b)"
    ),
    Mutation(
        "only the first page of a block is owned", PAIR, "first..first + count\n", "first..first + count.min(1)\n"
    ),
    Mutation(
        "ids are not checked",
        PAIR,
        "check_ids(list, positions, Ids { side: Some(side), group: Some(index) })?;",
        "let _ = check_ids(list, positions, Ids { side: Some(side), group: Some(index) });",
    ),
    Mutation("an id past the placeholder", PAIR, "**id >= positions.limit && **id != null", "**id > null"),
    # state slots
    Mutation("no slot is recomputed", PAIR, "{ listed } else { wanted };", "{ wanted } else { wanted };"),
    Mutation("a slot is recomputed from nothing", PAIR, "listed + 1 && listed > 0", "listed + 1"),
    Mutation("slots pair from the front", PAIR, "|skip| self.producer.get(skip..)", "|_| self.producer.get(..paired)"),
    Mutation(
        "a slot from a placeholder",
        PAIR,
        "if producer.null == Some(from) {",
        "if producer.null == Some(from + 1) {",
    ),
    # context parallelism
    Mutation("the consumer's rank is 0", PAIR, "* ranks_c + u64::from(consumer.rank);", "* ranks_c;"),
    Mutation("the producer counts by the consumer's ranks", PAIR, "(at / ranks_p) as usize", "(at / ranks_c) as usize"),
    Mutation(
        "every producer rank has every block",
        PAIR,
        "if at % ranks_p != u64::from(producer.rank)",
        "if at % ranks_p > ranks_p",
    ),
    Mutation(
        "dealt blocks past the data",
        PAIR,
        "end.saturating_sub(at * units).min(units) as u32",
        "(end + units).saturating_sub(at * units).min(units) as u32",
    ),
    Mutation(
        "dealt blocks placed although two counts differ",
        PAIR,
        "(own == blocks.div_ceil(ranks_c)).then",
        "(own <= blocks.div_ceil(ranks_c)).then",
    ),
    Mutation("ranks without common blocks", PAIR, "&& local.rank % fewer == remote.rank % fewer", ""),
    # indices and counts
    Mutation("a repeated pattern stays at its first place", PAIR, "unit.wrapping_add(start)", "*unit"),
    Mutation(
        "a pattern of whole blocks serves for units",
        PAIR,
        ".is_none_or(|(take, _)| *take != segment.take)",
        ".is_none()",
    ),
    Mutation("a run stands still", PAIR, "slot.put(first.wrapping_add(i))", "slot.put(first)"),
    Mutation("bytes are descriptors", PAIR, "bytes += units * kind.len", "bytes += units"),
    Mutation(
        "segments of other groups count alike",
        PAIR,
        "kind.shape == shape && kind.groups == segment.groups",
        "kind.shape == shape",
    ),
    Mutation(
        "dense and padded segments count alike",
        PAIR,
        "kind.shape == shape && kind.groups == segment.groups",
        "kind.groups == segment.groups",
    ),
    Mutation("groups merge over a gap", PAIR, " && !self.breaks(run.local, run.remote)", ""),
    Mutation("a run ends in the next block", PAIR, "(first + run.len - 1) / split", "(first + run.len) / split"),
    Mutation("units past their segment", PAIR, 'check("units", needed, needed <= count', 'check("units", needed, true'),
    # tables
    Mutation(
        "a segment starts at its end",
        TABLE,
        "starts.push(count as u32);\n            count += span.count();",
        "count += span.count();\n            starts.push(count as u32);",
    ),
    Mutation("cut blocks without padding", TABLE, "u64::from(block) * self.stride, len", "u64::from(block) * len, len"),
    Mutation(
        "padded pages without padding",
        TABLE,
        "[self.base, len, self.device, self.stride, self.count()]",
        "[self.base, len, self.device, len, self.count()]",
    ),
    Mutation("rows for NIXL before 1.5 are dense", TABLE, "addr + index * stride", "addr + index * len"),
    Mutation("blocks may overlap", TABLE, "if blocks > 1 && block", "if blocks > 2 && block"),
    Mutation("2^31 + 1 descriptors", TABLE, "if count > MAX_DESCRIPTORS", "if count > MAX_DESCRIPTORS + 1"),
    Mutation("the last block may lie anywhere", TABLE, "blocks.saturating_sub(1)", "blocks.saturating_sub(2)"),
    Mutation("any number of rows", TABLE, "rows <= MAX_ROWS", "rows <= 2 * MAX_ROWS"),
    # expansion
    Mutation("ids grow by the width", EXPAND, "block * ratio", "block * width"),
    Mutation("a width above the ratio", EXPAND, "(1..=ratio).contains(&width)", "(1..=ratio + 1).contains(&width)"),
    Mutation("the limit counts a block more", EXPAND, "u64::from(ratio - width)", "u64::from(ratio)"),
    Mutation("the limit itself is an id", EXPAND, "u64::from(id) < limit", "u64::from(id) <= limit"),
    # the binding
    Mutation("a bool is an id", IDS, "if item.is_instance_of::<PyBool>()", "if item.is_none()"),
    Mutation("values that are no u32 become its largest", IDS, "if !out.contains(&u32::MAX) ||", "if true ||"),
    Mutation(
        "both index arrays are the local ones",
        BINDING,
        "self.indices(py, &pairs, core::Side::Remote)",
        "self.indices(py, &pairs, core::Side::Local)",
    ),
    Mutation("units are paired the other way round", BINDING, "units(|run| run.remote)", "units(|run| run.local)"),
    # geometry
    Mutation("the unit is the smaller block", GEOMETRY, "units.append(math.gcd(*sizes))", "units.append(min(sizes))"),
    Mutation(
        "ranks beyond the heads hold the first",
        GEOMETRY,
        "layout.tp_rank * heads // ranks",
        "layout.tp_rank * (heads // ranks)",
    ),
    Mutation(
        "windows may differ",
        GEOMETRY,
        '        _same(f"groups[{index}].sliding_window", ours.sliding_window, theirs.sliding_window)\n',
        "",
    ),
    Mutation("units by the local block size", GEOMETRY, "else group.block_size //", "else groups[0].block_size //"),
    Mutation("a block is one page", GEOMETRY, "pages=group.blocks_per_logical", "pages=1"),
    Mutation("every slice starts with the first head", GEOMETRY, "(first + head) * size if", "head * size if"),
    Mutation("every piece is the first head's", GEOMETRY, "(first + head) * size if", "first * size if"),
    Mutation("bytes per unit may differ", GEOMETRY, "if lengths[0] != lengths[1]:", "if lengths[0] < lengths[1]:"),
    Mutation(
        "heads are cut out of token_major blocks",
        GEOMETRY,
        "if not heads.whole and order is BlockOrder.TOKEN_MAJOR:",
        "if not heads.moved and order is BlockOrder.TOKEN_MAJOR:",
    ),
    Mutation(
        "replicated bytes come from every rank",
        GEOMETRY,
        "        if replicated and not share.replicated:\n            continue\n",
        "",
    ),
    Mutation(
        "whole blocks of unequal ratios",
        GEOMETRY,
        "and ratios[0] == ratios[1] > 1 and dense",
        "and max(ratios) > 1 and dense",
    ),
    Mutation(
        "whole blocks of padded pages",
        GEOMETRY,
        "and ratios[0] == ratios[1] > 1 and dense",
        "and ratios[0] == ratios[1] > 1",
    ),
    Mutation("a slot is a page", GEOMETRY, "region.stride * ratio,\n", "region.stride,\n"),
    Mutation(
        "state offsets of the other side",
        GEOMETRY,
        "starts[0] + common.start - first[0]",
        "starts[0] + common.start - first[1]",
    ),
    Mutation(
        "unsharded projections from every rank",
        GEOMETRY,
        "if common and (sharded[0] or share.replicated):",
        "if common:",
    ),
    Mutation(
        "unsharded projections are sliced",
        GEOMETRY,
        "layout.tp_rank * size if sharded[0] else 0",
        "layout.tp_rank * size",
    ),
    # plans
    Mutation("the local side is always the consumer", PLAN, "sharing(local if reading else remote)", "sharing(local)"),
    Mutation(
        "a head is read from every copy",
        PLAN,
        "if producer.tp_rank % copies != consumer.tp_rank % readers * copies // readers:",
        "if copies < 1:",
    ),
    Mutation("bytes may be written twice", PLAN, "if distinct < size or written > distinct:", "if distinct < size:"),
    Mutation("bytes may stay unwritten", PLAN, "if distinct < size or written > distinct:", "if written > distinct:"),
    Mutation(
        "context-parallel ranks read from any",
        PLAN,
        "    if consumer.dcp_rank % common != producer.dcp_rank % common:\n        return None\n",
        "",
    ),
    Mutation(
        "a lane counts from the other side's start",
        PLAN,
        "pairing.remote_desc_ids[first:end] - lane.remote_start",
        "pairing.remote_desc_ids[first:end] - lane.local_start",
    ),
]


class Copy:
    """The tree that is broken, and mended again."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.tree, self.target = folder / "tree", target.resolve()
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)
        self.env = {
            **os.environ,
            "CARGO_TARGET_DIR": str(self.target),
            "CARGO_PROFILE_DEV_OPT_LEVEL": "1",
            "CARGO_PROFILE_DEV_DEBUG": "0",
            "PYO3_BUILD_EXTENSION_MODULE": "1",
            "PYO3_PYTHON": sys.executable,
            "PYTHONPATH": str(self.tree / "python"),  # before the checkout that the environment knows
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *command: str) -> tuple[int | None, str]:
        """Exit status, None if it did not end in time, and what it printed."""
        try:
            done = subprocess.run(
                command,
                cwd=self.tree,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout

    def build(self) -> None:
        """Builds the module that the Python tests load."""
        status, output = self.run("cargo", "build", "--quiet", "--locked", "-p", "nixl-fast-py", "--lib")
        if status != 0:
            raise ValueError(f"does not build:\n{output}")
        shutil.copy2(self.target / "debug" / "lib_native.so", self.tree / "python/nixl_fast/_native.abi3.so")

    def core_notices(self) -> str | None:
        """The Rust test that fails."""
        status, output = self.run("cargo", "test", "--quiet", "--locked", "-p", "nixl-fast-core")
        if status == 0:
            return None
        found = re.search(r"^---- (.+) stdout ----", output, re.MULTILINE)
        return (
            f"cargo test: {found.group(1)}" if found else "cargo test: no end" if status is None else _invalid(output)
        )

    def python_notices(self) -> str | None:
        """The Python test that fails."""
        tests = [f"tests/test_{name}.py" for name in TESTS]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=1"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status, output = self.run(sys.executable, "-c", PYTEST, *options, *tests)
        if status == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
        return found.group(1)[:90] if found else "pytest: no end" if status is None else _invalid(output)


def _invalid(output: str) -> str:
    raise ValueError(f"no test failed, and yet:\n{output[-2000:]}")


def noticed_by(copy: Copy, mutation: Mutation) -> str | None:
    """The first test that fails under a mutation."""
    path = copy.tree / mutation.path
    right = path.read_text()
    if (count := right.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.what}: {mutation.old!r} occurs {count} times in {mutation.path}")
    path.write_text(right.replace(mutation.old, mutation.new))
    try:
        if mutation.path.startswith("rust/core/") and (found := copy.core_notices()):
            return found
        copy.build()  # also what an earlier mutation has left
        return copy.python_notices()
    except ValueError as error:
        raise ValueError(f"{mutation.what}: {error}") from None
    finally:
        path.write_text(right)


def main() -> int:
    """Tries all mutations, or some, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="only these mutations")
    parser.add_argument("--target", type=Path, help="keep what cargo builds there")
    asked = parser.parse_args()
    numbers = asked.numbers or range(len(MUTATIONS))
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), asked.target or Path(folder) / "target")
        copy.build()
        if found := copy.core_notices() or copy.python_notices():
            print(f"the tests fail as it is: {found}")
            return 2
        for number in numbers:
            mutation = MUTATIONS[number]
            found = noticed_by(copy, mutation)
            survived += found is None
            print(f"{number:3}  {Path(mutation.path).name:12} {mutation.what:50} {found or 'SURVIVED'}", flush=True)
    print(f"{len(numbers) - survived} noticed, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
