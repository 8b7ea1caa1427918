"""Two real connectors with real NIXL agents in this process, and no model: many layouts, every byte of the destination.

The configuration, the grouping of the caches, their memory, the handshake and the reads are vLLM's and NIXL's own; only
the scheduler's block ids are made up. What must arrive is worked out token by token.
"""

# ruff: noqa: PLC0415 - vLLM, torch and NIXL are imported when they are needed
from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import OURS, STOCK, free_port

KERNEL = 32
HEADS, HEAD_SIZE, WINDOW = 2, 64, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import models

    folder = tmp_path_factory.mktemp("config")
    models.CONFIGS["llama"]().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def _distributed() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class Side:
    """A worker's and a scheduler's connector with a cache of its own.

    Args:
        model: Folder with the model's configuration.
        role: ``kv_producer`` or ``kv_consumer``.
        block: Tokens per logical block.
        kinds: Per layer ``full`` or ``window``; one KV-cache group per kind.
        blocks: Logical blocks.
        connector: ``kv_connector`` and where it is; ours unless given.
        extra: ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        model: str,
        role: str,
        *,
        block: int,
        kinds: str,
        blocks: int,
        port: int | None = None,
        connector: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        import torch
        from vllm import envs
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec
        from vllm.v1.worker.utils import allocate_kv_cache

        self.port = port or free_port()
        self.block, self.ratio, self.blocks = block, block // KERNEL, blocks
        transfer = KVTransferConfig(
            **(connector or OURS),
            kv_role=role,
            engine_id=f"{role}-{self.port}-{time.monotonic_ns()}",
            kv_connector_extra_config=extra,
        )
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=block,
            max_model_len=512,
            num_gpu_blocks_override=blocks,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        attention = {"block_size": block, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}
        made = {
            "f": lambda: FullAttentionSpec(**attention),
            "w": lambda: SlidingWindowSpec(**attention, sliding_window=WINDOW),
        }
        specs = {f"model.layers.{index}.attn": made[kind]() for index, kind in enumerate(kinds)}
        grouping = kv_cache_utils
        if not hasattr(grouping, "get_kv_cache_groups"):  # it has moved in 0.33
            grouping = importlib.import_module("vllm.v1.core.kv_cache_planning")
        groups = grouping.get_kv_cache_groups(config, specs)
        self.cache = grouping.get_kv_cache_config_from_groups(config, groups, 1 << 30)
        self.kinds = [
            "w" if isinstance(group.kv_cache_spec, SlidingWindowSpec) else "f" for group in self.cache.transfer_groups
        ]
        kernels = [KERNEL] * len(self.cache.kv_cache_groups)
        layout = KVCacheLayout["LBHNC"]
        self.views = allocate_kv_cache(self.cache, torch.device("cpu"), layout, kernels)
        self.expected = allocate_kv_cache(self.cache, torch.device("cpu"), layout, kernels)
        memory = self.memory(self.views)
        memory.copy_(torch.randint(1, 255, memory.shape, dtype=torch.uint8))
        self.memory(self.expected).copy_(memory)
        with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(config):
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            patch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(lambda *_: [KERNEL]))
            patch.setattr("os.sched_setaffinity", lambda *_: None)
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(self.port))
            assert self.port == envs.VLLM_NIXL_SIDE_CHANNEL_PORT
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.cache)
            self.scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, self.cache)
            self.connector.register_kv_caches(self.views)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.connector.get_handshake_metadata()})
        self.worker = self.connector.connector_worker
        self.engine = transfer.engine_id

    @staticmethod
    def memory(views: dict[str, Any]) -> Any:
        """All bytes that the views lie in."""
        import torch

        storage = next(iter(views.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def layers(self, group: int) -> list[str]:
        return list(self.cache.transfer_groups[group].layer_names)

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()


Sides = Callable[..., tuple[Side, Side]]


@pytest.fixture
def sides(model: str) -> Iterator[Sides]:
    made: list[Side] = []

    def make(kinds: str = "ff", blocks: tuple[int, int] = (KERNEL, KERNEL), **extra: Any) -> tuple[Side, Side]:
        for role, block, count in zip(("kv_producer", "kv_consumer"), blocks, (48, 40), strict=True):
            made.append(Side(model, role, block=block, kinds=kinds, blocks=count, **extra))
        return made[-2], made[-1]

    yield make
    for side in made:
        side.close()


class Asked:
    """One request: block ids of both sides, by the rules of vLLM's scheduler.

    Args:
        cached: Logical blocks that the consumer has already.
    """

    def __init__(self, prefill: Side, decode: Side, tokens: int, cached: int = 0, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.tokens, self.name = tokens, f"request-{seed}-{time.monotonic_ns()}"
        self.cached = cached
        self.ids: list[list[list[int]]] = []
        """Per side and group."""
        self.first: list[list[int]] = []
        """Index in the sequence of each list's first block."""
        for side, skip in ((prefill, 0), (decode, cached)):
            pool = rng.sample(range(1, side.blocks), side.blocks - 1)
            ids, first = [], []
            for kind in side.kinds:
                count = -(-tokens // side.block)
                begin = max(skip, count - (-(-WINDOW // side.block) + 1)) if kind == "w" else skip
                ids.append([pool.pop() for _ in range(begin, count)])
                first.append(begin)
            self.ids.append(ids)
            self.first.append(first)

    def start(self, prefill: Side, decode: Side, remote: Any = None) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        sent = NixlConnectorMetadata()
        sent.reqs_in_batch = {self.name}
        sent.reqs_to_send = {self.name: time.perf_counter() + 600}
        prefill.worker.start_load_kv(sent)
        params = {
            "remote_block_ids": tuple(remote or self.ids[0]),
            "remote_engine_id": prefill.engine,
            "remote_request_id": self.name,
            "remote_host": "127.0.0.1",
            "remote_port": prefill.port,
            "remote_num_tokens": self.tokens,
        }
        wanted = NixlConnectorMetadata()
        computed = tuple(self.cached for _ in decode.kinds)
        wanted.add_new_req_to_recv(
            self.name, tuple(self.ids[1]), params, local_num_computed_blocks=computed, awaiting_kvs=True
        )
        decode.worker.start_load_kv(wanted)

    def finish(self, prefill: Side, decode: Side, seconds: float = 120.0) -> tuple[bool, bool]:
        """Steps both until the consumer has its result: whether it failed, and whether the producer was told."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        end, failed, told = time.monotonic() + seconds, None, False
        while failed is None or (not failed and not told):
            assert time.monotonic() < end, "no result"
            decode.worker.start_load_kv(NixlConnectorMetadata())
            results = decode.worker.get_transfer_results()
            told |= self.name in prefill.worker.get_transfer_results().finished_sending
            if self.name in results.finished_recving:
                assert failed is None, "reported twice"
                failed = self.name in results.failed_recving
            time.sleep(0.002)
        return failed, told

    def expect(self, prefill: Side, decode: Side) -> None:
        """Puts into ``decode.expected`` what must be in its memory afterwards."""
        equal = prefill.block == decode.block
        for group in range(len(decode.kinds)):
            blocks = [
                {first + at: block for at, block in enumerate(ids[group])}
                for ids, first in zip(self.ids, (self.first[0][group], self.first[1][group]), strict=True)
            ]
            for kernel in range(-(-max(prefill.block, decode.block) * 40 // KERNEL)):
                ours = blocks[1].get(kernel // decode.ratio)
                theirs = blocks[0].get(kernel // prefill.ratio)
                if ours is None:
                    continue
                end = -(-self.tokens // decode.block) * decode.ratio if equal else -(-self.tokens // KERNEL)
                target = ours * decode.ratio + kernel % decode.ratio
                for layer, source in zip(decode.layers(group), prefill.layers(group), strict=True):
                    if kernel < end:
                        assert theirs is not None
                        moved = prefill.views[source][theirs * prefill.ratio + kernel % prefill.ratio]
                        decode.expected[layer][target].copy_(moved)
                    else:
                        decode.expected[layer][target].zero_()


def unchanged(decode: Side) -> bool:
    return bool((decode.memory(decode.views) == decode.memory(decode.expected)).all())


@pytest.mark.parametrize(
    ("kinds", "blocks", "tokens", "cached"),
    [
        pytest.param("ff", (32, 32), 100, 0, id="dense"),
        pytest.param("ffff", (32, 32), 128, 0, id="dense, whole blocks"),
        pytest.param("ff", (32, 32), 200, 3, id="prefix hit"),
        pytest.param("ff", (128, 128), 300, 0, id="ratio 4"),
        pytest.param("ff", (128, 128), 300, 1, id="ratio 4, prefix hit"),
        pytest.param("ff", (128, 64), 192, 0, id="ratios 4 and 2"),
        pytest.param("ff", (128, 64), 300, 2, id="ratios 4 and 2, prefix hit"),
        pytest.param("ff", (64, 128), 192, 0, id="ratios 2 and 4"),
        pytest.param("ff", (64, 128), 320, 1, id="ratios 2 and 4, prefix hit"),
        pytest.param("f", (96, 64), 250, 0, id="ratios 3 and 2"),
        pytest.param("fw", (32, 32), 200, 0, id="full and window"),
        pytest.param("fw", (32, 32), 40, 0, id="full and window, short"),
        pytest.param("fwfw", (64, 64), 300, 0, id="full and window, ratio 2"),
    ],
)
def test_every_byte(sides: Sides, kinds: str, blocks: tuple[int, int], tokens: int, cached: int) -> None:
    prefill, decode = sides(kinds, blocks)
    for seed in range(3):
        asked = Asked(prefill, decode, tokens, cached, seed)
        asked.start(prefill, decode)
        assert asked.finish(prefill, decode) == (False, True)
        assert not unchanged(decode)
        asked.expect(prefill, decode)
        assert unchanged(decode), "a byte is wrong, or one was written that should not have been"


def test_stock_is_wrong_where_ratios_differ(sides: Sides) -> None:
    prefill, decode = sides("ff", (128, 64), connector=STOCK)
    assert not type(decode.worker).__name__.startswith("NixlFast")
    asked = Asked(prefill, decode, 192)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (False, True)
    asked.expect(prefill, decode)
    assert not unchanged(decode)


@pytest.mark.parametrize("bad", [48, -1, 10_000], ids=["next region", "negative", "far"])
def test_an_id_out_of_range_moves_nothing(sides: Sides, bad: int) -> None:
    prefill, decode = sides()
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode, remote=[[*ids[:-1], bad] for ids in asked.ids[0]])
    assert asked.finish(prefill, decode) == (True, False)
    assert decode.connector.get_block_ids_with_load_errors() == set(asked.ids[1][0])
    assert unchanged(decode)
    asked = Asked(prefill, decode, 100, seed=1)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (False, True)


def test_a_lease_runs_out_once_and_a_heartbeat_extends_it(sides: Sides) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo, NixlConnectorMetadata

    prefill, decode = sides(kv_lease_duration=300)
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode)
    asked.finish(prefill, decode)  # they know each other
    sent = NixlConnectorMetadata()
    sent.reqs_in_batch = {"extended", "forgotten"}
    sent.reqs_to_send = dict.fromkeys(sent.reqs_in_batch, time.perf_counter() + 600)
    prefill.worker.start_load_kv(sent)
    beat = NixlConnectorMetadata()
    beat.heartbeat_by_engine = {prefill.engine: HeartbeatInfo({"extended"}, "127.0.0.1", prefill.port, 1)}
    for name in sent.reqs_in_batch:
        prefill.worker._reqs_to_send[name] = time.perf_counter() - 1
    prefill.worker._reqs_to_send["extended"] += 60
    before = prefill.worker._reqs_to_send["extended"]
    decode.worker.start_load_kv(beat)
    done: list[str] = []
    end = time.monotonic() + 60
    while prefill.worker._reqs_to_send.get("extended") == before and time.monotonic() < end:
        done += prefill.worker.get_transfer_results().finished_sending
        time.sleep(0.002)
    assert prefill.worker._reqs_to_send["extended"] > before + 60
    assert done == ["forgotten"]
    assert prefill.worker.get_transfer_results().finished_sending == set()


def held(side: Side) -> threading.Lock:
    """Keeps the transfer thread out of NIXL until it is released."""
    lock: threading.Lock = side.worker.nixl_wrapper._lock
    lock.acquire()
    return lock


def test_polls_are_short_while_nothing_happens(sides: Sides) -> None:
    prefill, decode = sides()
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode)
    asked.finish(prefill, decode)
    worker, looks = decode.worker, []
    look = worker._pop_done_transfers
    worker._pop_done_transfers = lambda transfers: looks.append(1) or look(transfers)
    lock = held(decode)
    asked = Asked(prefill, decode, 100, seed=1)
    asked.start(prefill, decode)
    for _ in range(64):
        assert not worker.get_transfer_results().finished_recving
    assert len(looks) <= 5, "the books are gone through now and then, not every time"
    looks.clear()
    worker._failed_recv_reqs.put("somebody else's")
    worker.get_transfer_results()
    assert looks, "a failed handshake waits for nobody"
    lock.release()
    assert asked.finish(prefill, decode) == (False, True)


def test_shutdown_waits_for_what_is_on_its_way(sides: Sides) -> None:
    prefill, decode = sides()
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode)
    asked.finish(prefill, decode)
    asked = Asked(prefill, decode, 100, seed=1)
    lock = held(decode)
    asked.start(prefill, decode)
    ended = threading.Thread(target=decode.connector.shutdown)
    ended.start()
    ended.join(0.3)
    assert ended.is_alive(), "memory was given up while a transfer waited to be posted"
    lock.release()
    ended.join(60)
    assert not ended.is_alive()
    assert not decode.worker._registered_descs


def test_a_peer_that_comes_back_with_another_layout(sides: Sides, model: str) -> None:
    prefill, decode = sides("ff", (128, 64))
    asked = Asked(prefill, decode, 192)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (False, True)
    asked.expect(prefill, decode)
    prefill.close()
    again = Side(model, "kv_producer", block=64, kinds="ff", blocks=44, port=prefill.port)
    try:
        asked = Asked(again, decode, 192, seed=1)
        asked.start(again, decode)
        assert asked.finish(again, decode) == (False, True)
        asked.expect(again, decode)
        assert unchanged(decode)
        assert prefill.engine not in decode.worker._remote_agents
    finally:
        again.close()


def test_no_answer_is_a_failure(sides: Sides) -> None:
    """The producer is gone before the first handshake."""
    prefill, decode = sides()
    prefill.scheduler.shutdown()
    decode.worker._nixl_handshake = lambda *_: (_ for _ in ()).throw(ConnectionError("nobody there"))
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (True, False)
    assert unchanged(decode)
