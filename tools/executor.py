"""The execution engine: checks a call, runs it before a deadline, and always returns an observation."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue

from tools.base import Observation, Picture, Purity, Tool, ToolCall, ToolOutput, ToolParams
from tools.cache import ToolResultCache
from tools.checking import check_params, check_structure, check_tool
from tools.errors import ToolError, ToolErrorCode
from tools.registry import ToolRegistry

logger = logging.getLogger(__name__)


class ToolExecutor:
    """Runs tool calls in this process. Safe to share between threads, and in forked processes.

    `cache` None runs every call; `deadline_s` is the wall-clock limit of one call, in seconds.
    """

    def __init__(self, registry: ToolRegistry, cache: ToolResultCache | None, deadline_s: float) -> None:
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}, it must be above 0 seconds")
        self._registry = registry
        self._cache = cache
        self._deadline_s = deadline_s
        self._workers = _WorkerPool()

    def run(self, call: ToolCall, picture: Picture, offered: Sequence[str]) -> Observation:
        """The observation of one call. Never raises for anything that the agent wrote or a tool did."""
        begun = time.perf_counter()
        try:
            check_structure(call)
            tool = check_tool(call, self._registry, offered)
            params = check_params(tool, call)
        except ToolError as error:
            return Observation.failure(error.code, error.message, time.perf_counter() - begun)
        return replace(self._serve(tool, params, picture), seconds=time.perf_counter() - begun)

    def _serve(self, tool: Tool, params: ToolParams, picture: Picture) -> Observation:
        if self._cache is None or tool.purity is not Purity.PURE:
            return self._execute(tool, params, picture)
        key = self._cache.key(tool, params, picture)
        observation = self._cache.get(tool, key)
        if observation is None:
            observation = self._execute(tool, params, picture)
            self._cache.put(key, observation)
        return observation

    def _execute(self, tool: Tool, params: ToolParams, picture: Picture) -> Observation:
        job = _Job(lambda: _observe(tool, params, picture))
        if not self._workers.run(job, self._deadline_s):
            logger.warning("%s was still running after %s s and was left behind", tool.name, self._deadline_s)
            return Observation.failure(ToolErrorCode.DEADLINE, f"no result within {self._deadline_s:g} s")
        assert job.outcome is not None  # the job has ended
        return job.outcome


def _observe(tool: Tool, params: ToolParams, picture: Picture) -> Observation:
    """Run the tool; every way to fail becomes an observation."""
    try:
        output: ToolOutput = tool.run(picture, params)
        # The round trip finds a payload that is no JSON here and not when the agent's context is built.
        payload = json.loads(json.dumps(output.payload, allow_nan=False))
    except ToolError as error:
        return Observation.failure(error.code, error.message)
    except (Exception, SystemExit) as error:  # a tool that calls sys.exit must not take its thread along
        logger.exception("%s crashed on %s", tool.name, params)
        return Observation.failure(ToolErrorCode.TOOL_CRASHED, f"the tool raised {type(error).__name__}")
    return Observation(payload, output.picture)


class _Job:
    """A piece of work and, once it has ended, its outcome."""

    def __init__(self, work: Callable[[], Observation]) -> None:
        self.work = work
        self.outcome: Observation | None = None
        self.running = threading.Lock()  # held until the work has ended
        self.running.acquire()


class _WorkerPool:
    """Threads that outlive their jobs: a hand-over costs less than starting a thread per call.

    A thread cannot be killed. One whose job missed its deadline stays with it, as a daemon, and serves again
    if the job ever ends; later jobs get another thread.
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Job]] = deque()
        self._pid = os.getpid()

    def run(self, job: _Job, timeout_s: float) -> bool:
        """Whether the job ended within the timeout, in seconds."""
        if os.getpid() != self._pid:  # threads do not survive a fork, their queues do
            self._idle, self._pid = deque(), os.getpid()
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(target=self._work, args=(inbox, self._idle), name="tool", daemon=True).start()
        inbox.put(job)
        return job.running.acquire(timeout=timeout_s)

    @staticmethod
    def _work(inbox: SimpleQueue[_Job], idle: deque[SimpleQueue[_Job]]) -> None:
        while True:
            job = inbox.get()
            job.outcome = job.work()
            idle.append(inbox)  # before the release, so that the next call finds this thread free
            job.running.release()
            del job  # an idle thread must not keep a picture alive
