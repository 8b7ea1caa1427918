"""One real vLLM engine in a process of its own, and what a test may ask of it.

The engine's process takes commands from a pipe and answers each.
"""

# ruff: noqa: PLC0415 - vLLM, torch and NIXL are imported when they are needed
from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def _context() -> Any:
    """Engines are forked from one process that has imported vLLM; importing it takes longer than starting an engine."""
    folder = str(Path(__file__).parent)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    return context


BLOCKS = 256
"""Logical blocks of every engine's cache."""


class Engine:
    """The test's end of an engine's process."""

    def __init__(self, log: Path, *, port: int, env: dict[str, str] | None = None, **settings: Any) -> None:
        self.log = log
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), **(env or {})}
        context = _context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(settings, environment, str(log), theirs))
        self.process.start()
        theirs.close()

    def ask(self, command: str, timeout: float = 600.0, **arguments: Any) -> Any:
        """Sends a command and waits for its answer."""
        self.send(command, **arguments)
        return self.answer(timeout)

    def send(self, command: str, **arguments: Any) -> None:
        self._pipe.send((command, arguments))

    def answer(self, timeout: float = 600.0) -> Any:
        """The answer to the oldest command that has none yet; first of all, None once the engine is up."""
        try:
            if not self._pipe.poll(timeout):
                self.kill()
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the engine ended ({self.process.exitcode}); {self.log} ends with\n{tail}") from None
        if kind == "error":
            raise RuntimeError(f"the engine raised {value}; its log is {self.log}")
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()


def run(settings: dict[str, Any], environment: dict[str, str], log: str, pipe: Any) -> None:
    """An engine's process."""
    os.environ.update(environment)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)
    try:
        _serve(settings, pipe)
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    os._exit(0)  # threads of UCX outlive an orderly end


class _Recorder:
    """Keeps what real NIXL was asked to move, and the destination's bytes at the moment it says DONE."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, int, int, str]] = []
        """Source address, destination address, length, destination bytes as hex."""
        self.requests: list[dict[str, Any]] = []

    def install(self) -> None:
        from nixl_cu13._api import nixl_agent

        rows: dict[int, Any] = {}
        lists: dict[int, Any] = {}
        transfers: dict[int, Any] = {}
        keep: list[Any] = []
        get_descs, prepare, make = nixl_agent.get_xfer_descs, nixl_agent.prep_xfer_dlist, nixl_agent.make_prepped_xfer
        telemetry = nixl_agent.get_xfer_telemetry

        def get_xfer_descs(agent: Any, blocks: Any, *args: Any) -> Any:
            descs = get_descs(agent, blocks, *args)
            rows[id(descs)] = blocks
            keep.append(descs)
            return descs

        def prep_xfer_dlist(agent: Any, name: str, descs: Any, *args: Any, **kwargs: Any) -> Any:
            handle = prepare(agent, name, descs, *args, **kwargs)
            lists[handle._handle] = rows.get(id(descs), descs)
            return handle

        def make_prepped_xfer(
            agent: Any,
            operation: str,
            local: Any,
            local_ids: Any,
            remote: Any,
            remote_ids: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            handle = make(agent, operation, local, local_ids, remote, remote_ids, *args, **kwargs)
            ours, theirs = lists[local._handle], lists[remote._handle]
            pairs = [(ours[a], theirs[b]) for a, b in zip(local_ids, remote_ids, strict=True)]
            transfers[handle._handle] = (operation, pairs)
            return handle

        def get_xfer_telemetry(agent: Any, handle: Any) -> Any:
            operation, pairs = transfers.pop(handle._handle, ("", []))
            for local, remote in pairs:
                data = ctypes.string_at(int(local[0]), int(local[1])).hex()
                ends = (remote, local) if operation == "READ" else (local, remote)
                self.moved.append((int(ends[0][0]), int(ends[1][0]), int(local[1]), data))
            return telemetry(agent, handle)

        nixl_agent.get_xfer_descs, nixl_agent.prep_xfer_dlist = get_xfer_descs, prep_xfer_dlist
        nixl_agent.make_prepped_xfer, nixl_agent.get_xfer_telemetry = make_prepped_xfer, get_xfer_telemetry


def _serve(settings: dict[str, Any], pipe: Any) -> None:
    os.sched_setaffinity = lambda *_: None  # type: ignore[assignment] # vLLM's CPU worker would pin itself to one core
    recorder = _Recorder()
    recorder.install()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if kernel := settings.pop("kernel_block_size", None):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [kernel])  # type: ignore[method-assign]
    transfer = KVTransferConfig(**settings.pop("transfer"))
    common = {
        "enforce_eager": True,
        "max_model_len": 1024,
        "num_gpu_blocks_override": BLOCKS,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "max_num_seqs": 8,
        "seed": 0,
    }
    llm = LLM(**{**common, **settings}, kv_transfer_config=transfer)
    commands = _Commands(llm, llm.llm_engine, SamplingParams, recorder)
    if settings.get("tensor_parallel_size", 1) == 1:
        commands.watch()
    pipe.send(("ready", None))
    while True:
        command, arguments = pipe.recv()
        try:
            pipe.send(("ok", getattr(commands, command)(**arguments)))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("error", repr(error)))


class _Commands:
    def __init__(self, llm: Any, engine: Any, sampling: Any, recorder: _Recorder) -> None:
        self._llm, self._engine, self._sampling, self._recorder = llm, engine, sampling, recorder
        self._count = 0

    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        inner = getattr(group, "_connectors", [group])
        return inner[0].connector_worker

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        params: dict[str, Any] | None = None,
        request: str | None = None,
        after: int = 0,
        seconds: float = 300.0,
    ) -> dict[str, Any]:
        """Adds a request and steps until it is over; ``after`` more steps let it free its blocks."""
        extra = {"kv_transfer_params": params} if params else None
        sampling = self._sampling(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args=extra, detokenize=False
        )
        self._count += 1
        name = request or f"request-{self._count}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for output in self._engine.step():
                if output.finished:
                    for _ in range(after):
                        self._engine.step()
                    return {
                        "tokens": list(output.outputs[0].token_ids),
                        "params": output.kv_transfer_params,
                        "cached": output.num_cached_tokens,
                        "reason": output.outputs[0].finish_reason,
                    }
        raise TimeoutError(name)

    def start(self, prompt: list[int], tokens: int, params: dict[str, Any], request: str) -> None:
        sampling = self._sampling(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
            detokenize=False,
        )
        self._engine.add_request(request, {"prompt_token_ids": prompt}, sampling)

    def step(self, count: int = 1, wait: float = 0.0) -> list[dict[str, Any]]:
        finished = []
        for _ in range(count):
            for output in self._engine.step():
                if output.finished:
                    finished.append(
                        {
                            "request": output.request_id,
                            "tokens": list(output.outputs[0].token_ids),
                            "reason": output.outputs[0].finish_reason,
                        }
                    )
            time.sleep(wait)
        return finished

    def abort(self, request: str) -> None:
        self._engine.abort_request([request])

    def reset(self) -> None:
        """Forgets cached prefixes and what has been recorded."""
        self._llm.reset_prefix_cache()
        self._recorder.moved.clear()
        self._recorder.requests.clear()

    def moved(self) -> list[tuple[int, int, int, str]]:
        out, self._recorder.moved = self._recorder.moved, []
        return out

    def watch(self) -> None:
        """Notes every request whose blocks are to be filled, the consumer's as local."""
        worker = self._worker()
        start = worker.start_load_kv

        def start_load_kv(metadata: Any) -> None:
            for meta in metadata.reqs_to_recv.values():
                remote = [list(ids) for ids in meta.remote.block_ids]
                local = [list(ids) for ids in meta.local_block_ids]
                self._recorder.requests.append({"local": local, "remote": remote, "tokens": meta.remote.num_tokens})
            start(metadata)

        worker.start_load_kv = start_load_kv
        if not hasattr(worker, "_xfer_blocks_for_req"):
            return
        push = worker._xfer_blocks_for_req

        def xfer_blocks_for_req(req_id: str, meta: Any) -> None:
            ours = [list(ids) for ids in meta.local_block_ids]
            theirs = [list(ids) for ids in meta.remote.block_ids]
            self._recorder.requests.append({"local": theirs, "remote": ours})
            push(req_id, meta)

        worker._xfer_blocks_for_req = xfer_blocks_for_req

    def hold(self) -> None:
        """Keeps the transfer thread out of NIXL."""
        self._worker().nixl_wrapper._lock.acquire()

    def let_go(self) -> None:
        self._worker().nixl_wrapper._lock.release()

    def requests(self) -> list[dict[str, Any]]:
        out, self._recorder.requests = self._recorder.requests, []
        return out

    def metrics(self) -> dict[str, float]:
        """Values of the counters and histograms about NIXL."""
        self._engine.do_log_stats()
        found = {}
        for metric in self._llm.get_metrics():
            if "nixl" in metric.name:
                found[metric.name] = getattr(metric, "value", getattr(metric, "count", 0))
        return found

    def side_channel(self) -> dict[str, Any]:
        """How a decode engine's request names this one, before it has prefilled anything."""
        scheduler = self._engine.engine_core.engine_core.scheduler.connector.connector_scheduler
        return {
            "remote_engine_id": scheduler.engine_id,
            "remote_host": scheduler.side_channel_host,
            "remote_port": scheduler.side_channel_port,
        }

    def layout(self) -> dict[str, Any]:
        worker = self._worker()
        return {
            "bases": worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank],
            "strides": worker.block_stride_per_layer,
            "kernel": worker.block_size,
            "ratio": worker._physical_blocks_per_logical_kv_block,
            "class": type(worker).__name__,
            "features": [cls.__name__ for cls in type(worker).__mro__],
            "blocks": worker.num_blocks,
        }

    def stats(self) -> dict[str, Any]:
        from nixl_fast.vllm import shadow

        scheduler = self._engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        worker = self._worker()
        return {
            "shadow": dict(shadow.counts),
            "free": pool.get_num_free_blocks(),
            "receiving": len(worker._recving_transfers) + len(worker._recving_metadata),
            "sending": len(worker._reqs_to_send),
        }
