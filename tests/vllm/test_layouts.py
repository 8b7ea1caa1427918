"""Two real connectors with real NIXL agents in this process, and no model: many layouts, every byte of the destination.

The configuration, the grouping of the caches, their memory, the handshake and the reads are vLLM's and NIXL's own; only
the scheduler's block ids are made up. What must arrive is worked out token by token.
"""

# ruff: noqa: PLC0415 - vLLM, torch and NIXL are imported when they are needed
from __future__ import annotations

import gc
import importlib
import math
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
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Writes a model's configuration, without weights; for caches of these kinds."""
    folder = tmp_path_factory.mktemp("config")

    def write(kinds: str) -> str:
        import models

        name = "deepseek_v2" if "m" in kinds else "llama"
        models.CONFIGS[name]().save_pretrained(folder / name)
        return str(folder / name)

    return write


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
        kinds: Per layer ``f`` for full attention, ``w`` for a sliding window, ``m`` for MLA; a KV-cache group per kind.
        blocks: Logical blocks.
        kernel: Tokens per kernel block.
        host: Whether NIXL moves host buffers, as on devices whose memory it cannot register.
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
        kernel: int = KERNEL,
        host: bool = False,
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
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MLAAttentionSpec, SlidingWindowSpec
        from vllm.v1.worker.utils import allocate_kv_cache

        self.port = port or free_port()
        self.block, self.kernel, self.ratio, self.blocks = block, kernel, block // kernel, blocks
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
            "m": lambda: MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=96, dtype=torch.float32),
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
        kernels = [kernel] * len(self.cache.kv_cache_groups)
        layout = KVCacheLayout["LBHNC"]
        self.views = allocate_kv_cache(self.cache, torch.device("cpu"), layout, kernels)
        self.expected = allocate_kv_cache(self.cache, torch.device("cpu"), layout, kernels)
        memory = self.memory(self.views)
        memory.copy_(torch.randint(1, 255, memory.shape, dtype=torch.uint8))
        self.memory(self.expected).copy_(memory)
        with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(config):
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
            from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
            from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

            for backend in (CPUAttentionBackend, CPUMLABackend, AMXMLABackend):
                patch.setattr(backend, "get_supported_kernel_block_sizes", staticmethod(lambda *_: [kernel]))
            patch.setattr("os.sched_setaffinity", lambda *_: None)
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(self.port))
            assert self.port == envs.VLLM_NIXL_SIDE_CHANNEL_PORT
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.cache)
            self.scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, self.cache)
            self.worker = self.connector.connector_worker
            if host:  # vLLM does so for accelerators only
                self.worker.use_host_buffer, self.worker.copy_blocks = True, self._copy
            self.connector.register_kv_caches(self.views)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.connector.get_handshake_metadata()})
        self.engine = transfer.engine_id

    @staticmethod
    def _copy(source: dict[str, Any], target: dict[str, Any], ours: list[int], theirs: list[int], _: str) -> None:
        for layer in source:
            target[layer][theirs] = source[layer][ours]

    @staticmethod
    def memory(views: dict[str, Any]) -> Any:
        """All bytes that the views lie in."""
        import torch

        storage = next(iter(views.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def tokens(self, views: dict[str, Any], layer: str, block: int, first: int) -> Any:
        """`KERNEL` tokens, from that number of the sequence on, in the logical block that holds them."""
        kernel, at = divmod(first % self.block, self.kernel)
        return views[layer][block * self.ratio + kernel].narrow(-2, at, KERNEL)

    def layers(self, group: int) -> list[str]:
        return list(self.cache.transfer_groups[group].layer_names)

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()


Sides = Callable[..., tuple[Side, Side]]


@pytest.fixture
def sides(configs: Callable[[str], str]) -> Iterator[Sides]:
    made: list[Side] = []

    def make(
        kinds: str = "ff",
        blocks: tuple[int, int] = (KERNEL, KERNEL),
        kernels: tuple[int, int] = (KERNEL, KERNEL),
        **extra: Any,
    ) -> tuple[Side, Side]:
        for role, block, kernel, count in zip(("kv_producer", "kv_consumer"), blocks, kernels, (48, 40), strict=True):
            made.append(Side(configs(kinds), role, block=block, kinds=kinds, blocks=count, kernel=kernel, **extra))
        return made[-2], made[-1]

    yield make
    while made:
        made.pop().close()
    gc.collect()  # an agent's threads, which keep a core busy, end with it


class Asked:
    """One request: block ids of both sides, by the rules of vLLM's scheduler.

    Args:
        cached: Logical blocks that the consumer has already.
        spare: Logical blocks of the consumer for tokens to come.
    """

    def __init__(
        self, prefill: Side, decode: Side, tokens: int, cached: int = 0, seed: int = 0, spare: int = 0
    ) -> None:
        rng = random.Random(seed)
        self.tokens, self.name = tokens, f"request-{seed}-{time.monotonic_ns()}"
        self.cached = cached
        self.ids: list[list[list[int]]] = []
        """Per side and group."""
        self.first: list[list[int]] = []
        """Index in the sequence of each list's first block."""
        for side, skip, more in ((prefill, 0, 0), (decode, cached, spare)):
            pool = rng.sample(range(1, side.blocks), side.blocks - 1)
            ids, first = [], []
            for kind in side.kinds:
                count = -(-tokens // side.block)
                begin = max(skip, count - (-(-WINDOW // side.block) + 1)) if kind == "w" else skip
                ids.append([pool.pop() for _ in range(begin, count + more)])
                first.append(begin)
            self.ids.append(ids)
            self.first.append(first)

    def start(self, prefill: Side, decode: Side, remote: Any = None, end: int | None = None) -> None:
        """Both sides' parts; ``remote`` stands in for the producer's ids, ``end`` for the tokens that are counted on."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        sent = NixlConnectorMetadata()
        sent.reqs_in_batch = {self.name}
        sent.reqs_to_send = {self.name: time.perf_counter() + 600}
        prefill.worker.start_load_kv(sent)
        if prefill.worker.use_host_buffer:
            sent.add_new_req_to_save(self.name, tuple(self.ids[0]), {})
            prefill.worker.save_kv_to_host(sent)
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
        if end is not None:
            from nixl_fast.vllm.worker import Note

            wanted.reqs_to_recv[self.name].nixl_fast = Note(tuple(self.first[1]), end)
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
        unit = math.gcd(prefill.kernel, decode.kernel)
        if (prefill.block, prefill.kernel) == (decode.block, decode.kernel):
            unit = decode.block  # equal blocks move whole
        end = -(-self.tokens // unit) * unit
        for group in range(len(decode.kinds)):
            theirs, ours = (
                {first + at: block for at, block in enumerate(ids[group])}
                for ids, first in zip(self.ids, (self.first[0][group], self.first[1][group]), strict=True)
            )
            for token in range(0, 40 * decode.block, KERNEL):
                if token // decode.block not in ours:
                    continue
                for layer, source in zip(decode.layers(group), prefill.layers(group), strict=True):
                    target = decode.tokens(decode.expected, layer, ours[token // decode.block], token)
                    block = theirs.get(token // prefill.block)
                    if block is None and decode.kinds[group] == "w" and token + KERNEL <= self.tokens - WINDOW:
                        # nobody reads it, but it lies in a kernel block with tokens that are read
                        target.copy_(decode.tokens(decode.views, layer, ours[token // decode.block], token))
                    elif token < end:
                        assert block is not None
                        target.copy_(prefill.tokens(prefill.views, source, block, token))
                    else:
                        target.zero_()


def unchanged(decode: Side) -> bool:
    return bool((decode.memory(decode.views) == decode.memory(decode.expected)).all())


def spoiled(kinds: str, kernels: tuple[int, int]) -> bool:
    """Whether this release of vLLM rearranges what arrives wrongly, so that the request has to be refused."""
    from vllm import __version__

    return __version__.startswith(("0.30.", "0.31.")) and kernels[0] != kernels[1] and "m" not in kinds


@pytest.mark.parametrize(
    ("kinds", "blocks", "kernels", "tokens", "cached"),
    [
        pytest.param("ff", (32, 32), (32, 32), 100, 0, id="dense"),
        pytest.param("ffff", (32, 32), (32, 32), 128, 0, id="dense, whole blocks"),
        pytest.param("ff", (32, 32), (32, 32), 200, 3, id="prefix hit"),
        pytest.param("ff", (128, 128), (32, 32), 300, 0, id="ratio 4"),
        pytest.param("ff", (128, 128), (32, 32), 300, 1, id="ratio 4, prefix hit"),
        pytest.param("ff", (128, 64), (32, 32), 192, 0, id="ratios 4 and 2"),
        pytest.param("ff", (128, 64), (32, 32), 300, 2, id="ratios 4 and 2, prefix hit"),
        pytest.param("ff", (64, 128), (32, 32), 192, 0, id="ratios 2 and 4"),
        pytest.param("ff", (64, 128), (32, 32), 320, 1, id="ratios 2 and 4, prefix hit"),
        pytest.param("f", (96, 64), (32, 32), 250, 0, id="ratios 3 and 2"),
        pytest.param("fw", (32, 32), (32, 32), 200, 0, id="full and window"),
        pytest.param("fw", (32, 32), (32, 32), 40, 0, id="full and window, short"),
        pytest.param("fwfw", (64, 64), (32, 32), 300, 0, id="full and window, ratio 2"),
        pytest.param("ff", (32, 64), (32, 64), 200, 0, id="kernel blocks 32 and 64"),
        pytest.param("ff", (32, 64), (32, 64), 320, 2, id="kernel blocks 32 and 64, prefix hit"),
        pytest.param("ff", (32, 128), (32, 128), 300, 1, id="kernel blocks 32 and 128, prefix hit"),
        pytest.param("ff", (64, 128), (32, 64), 300, 1, id="kernel blocks 32 and 64, ratio 2"),
        pytest.param("ff", (96, 128), (32, 64), 300, 1, id="kernel blocks 32 and 64, ratios 3 and 2"),
        pytest.param("fw", (32, 64), (32, 64), 300, 0, id="kernel blocks 32 and 64, full and window"),
        pytest.param("fw", (64, 64), (32, 32), 270, 0, id="full and window, ratio 2, last block half full"),
        pytest.param("mm", (32, 32), (32, 32), 200, 2, id="MLA, prefix hit"),
        pytest.param("mm", (128, 64), (32, 32), 300, 2, id="MLA, ratios 4 and 2, prefix hit"),
        pytest.param("mm", (32, 64), (32, 64), 300, 1, id="MLA, kernel blocks 32 and 64, prefix hit"),
    ],
)
def test_every_byte(
    sides: Sides, kinds: str, blocks: tuple[int, int], kernels: tuple[int, int], tokens: int, cached: int
) -> None:
    prefill, decode = sides(kinds, blocks, kernels)
    for seed in range(3):
        asked = Asked(prefill, decode, tokens, cached, seed)
        asked.start(prefill, decode)
        if spoiled(kinds, kernels):
            assert asked.finish(prefill, decode) == (True, False)
            assert unchanged(decode)
            continue
        assert asked.finish(prefill, decode) == (False, True)
        assert not unchanged(decode)
        asked.expect(prefill, decode)
        assert unchanged(decode), "a byte is wrong, or one was written that should not have been"


@pytest.mark.parametrize(
    ("blocks", "kernels", "host"),
    [
        pytest.param((32, 32), (32, 32), False, id="equal"),
        pytest.param((64, 64), (32, 32), False, id="ratio 2"),
        pytest.param((128, 64), (32, 32), False, id="ratios 4 and 2"),
        pytest.param((64, 128), (32, 32), False, id="ratios 2 and 4"),
        pytest.param((32, 64), (32, 64), False, id="kernel blocks 32 and 64"),
        pytest.param((32, 32), (32, 32), True, id="equal, host buffers"),
        pytest.param((64, 64), (32, 32), True, id="ratio 2, host buffers"),
        pytest.param((128, 64), (32, 32), True, id="ratios 4 and 2, host buffers"),
        pytest.param((64, 128), (32, 32), True, id="ratios 2 and 4, host buffers"),
    ],
)
def test_blocks_for_tokens_to_come_are_cleared(
    sides: Sides, blocks: tuple[int, int], kernels: tuple[int, int], host: bool
) -> None:
    prefill, decode = sides("ff", blocks, kernels, host=host)
    for seed, cached in enumerate((0, 1)):
        asked = Asked(prefill, decode, 200, cached, seed, spare=2)
        asked.start(prefill, decode)
        if spoiled("ff", kernels):
            assert asked.finish(prefill, decode) == (True, False)
            continue
        assert asked.finish(prefill, decode) == (False, True)
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


@pytest.mark.parametrize("blocks", [(32, 32), (128, 64)], ids=["equal", "different ratios"])
def test_a_producer_with_fewer_tokens_than_are_counted_on_is_refused(sides: Sides, blocks: tuple[int, int]) -> None:
    prefill, decode = sides("ff", blocks)
    asked = Asked(prefill, decode, 160, spare=1)
    asked.start(prefill, decode, end=190)
    assert asked.finish(prefill, decode) == (True, False)
    assert unchanged(decode)
    for seed, end in enumerate((150, 161), 1):  # a prompt that is one token longer: vLLM computes that itself
        asked = Asked(prefill, decode, 160, seed=seed, spare=1)
        asked.start(prefill, decode, end=end)
        assert asked.finish(prefill, decode) == (False, True)


def test_a_lease_runs_out_once_and_a_heartbeat_extends_it(sides: Sides) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo, NixlConnectorMetadata

    prefill, decode = sides(kv_lease_duration=300)
    if not hasattr(prefill.worker, "_reap_expired_send_leases"):
        pytest.skip("vLLM 0.30 looks no further than the first lease that has not run out")
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
    assert len(looks) <= 2, "the books are gone through now and then, not every time"
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


def test_sleep_and_wake(sides: Sides) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    if not hasattr(NixlBaseConnectorWorker, "unregister_kv_caches"):
        pytest.skip(
            "this release of vLLM does not take registrations back for sleep; 0.33 does, and runs this test too"
        )
    prefill, decode = sides("ff", (128, 64))

    def works(seed: int) -> bool:
        asked = Asked(prefill, decode, 192, seed=seed)
        asked.start(prefill, decode)
        failed, told = asked.finish(prefill, decode)
        if not failed:
            assert told
            asked.expect(prefill, decode)
        assert unchanged(decode)
        return not failed

    assert works(0)
    lock = held(decode)
    (agent,) = decode.worker._remote_agents[prefill.engine].values()
    decode.worker.nixl_wrapper.send_notif(agent, b"HB:nobody")
    asleep = threading.Thread(target=decode.connector.unregister_kv_caches)
    asleep.start()
    asleep.join(0.3)
    assert asleep.is_alive(), "memory was given up while something waited for NIXL"
    lock.release()
    asleep.join(60)
    assert not asleep.is_alive()
    decode.connector.unregister_kv_caches()
    decode.connector.restore_kv_caches()
    assert works(1)
    prefill.connector.unregister_kv_caches()
    prefill.connector.restore_kv_caches()
    works(2)  # the consumer may still hold the old registration: right or refused
    assert works(3)


def test_a_peer_that_comes_back_with_another_layout(sides: Sides, configs: Callable[[str], str]) -> None:
    prefill, decode = sides("ff", (128, 64))
    asked = Asked(prefill, decode, 192)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (False, True)
    asked.expect(prefill, decode)
    prefill.close()
    again = Side(configs("ff"), "kv_producer", block=64, kinds="ff", blocks=44, port=prefill.port)
    try:
        asked = Asked(again, decode, 192, seed=1)
        asked.start(again, decode)
        assert asked.finish(again, decode) == (False, True)
        asked.expect(again, decode)
        assert unchanged(decode)
        if hasattr(decode.worker, "_cleanup_remote_engines"):  # from 0.32 on
            assert prefill.engine not in decode.worker._remote_agents
    finally:
        again.close()


def test_a_peer_with_larger_kernel_blocks_is_turned_away(sides: Sides) -> None:
    prefill, decode = sides("ff", (64, 32), (64, 32))
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (True, False)
    assert unchanged(decode)


def test_no_answer_is_a_failure(sides: Sides) -> None:
    """The producer is gone before the first handshake."""
    prefill, decode = sides()
    prefill.scheduler.shutdown()
    decode.worker._nixl_handshake = lambda *_: (_ for _ in ()).throw(ConnectionError("nobody there"))
    asked = Asked(prefill, decode, 100)
    asked.start(prefill, decode)
    assert asked.finish(prefill, decode) == (True, False)
    assert unchanged(decode)
