"""What every engine needs, imported once by the process that all engines are forked from."""

import vllm.entrypoints.llm
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401

import nixl_fast.vllm.connector  # noqa: F401
