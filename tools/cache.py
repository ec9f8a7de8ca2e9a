"""Results of pure tools, kept by content: the same call on the same picture is computed once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tools.base import Observation, Picture, Purity, Tool, ToolParams
from tools.errors import ToolErrorCode


@dataclass(frozen=True)
class _Entry:
    """A result that no caller can change for the next one. No pixels are kept: a picture nobody looked at yet is
    the function that draws it.
    """

    payload: str
    picture: bytes | Callable[[], bytes] | None
    error: ToolErrorCode | None


class ToolResultCache:
    """Least-recently-used results of pure tools. Thread safe.

    `capacity` counts results. One with a cropped or looked-at 512×512 picture takes about 25 kB, others less than
    1 kB, beside the picture that they were drawn on, which all results on it share.
    Errors that a pure tool raises depend on the same inputs and are kept too; a missed deadline or a crash is
    not.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(
                f"cache capacity is {capacity}, it must be at least 1 (for no cache, pass None instead)"
            )
        self._capacity = capacity
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._lock = threading.Lock()

    @staticmethod
    def key(tool: Tool, params: ToolParams, picture: Picture) -> bytes:
        """SHA-256 over tool name, version, canonical parameters and the picture's bytes.

        Raises ValueError for a tool that is not pure: those inputs would not determine its result.
        """
        if tool.purity is not Purity.PURE:
            raise ValueError(
                f"{tool.name} is {tool.purity}: its result depends on more than picture and parameters"
            )
        canonical = json.dumps(params.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(
            "\0".join((tool.name, tool.version, canonical, picture.sha256)).encode()
        ).digest()

    def get(self, tool: Tool, key: bytes) -> Observation | None:
        """The stored observation, marked as cached, or None. Counts a hit or a miss of the tool."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses[tool.name] += 1
                return None
            self._hits[tool.name] += 1
            self._entries.move_to_end(key)
        picture = None if entry.picture is None else Picture(entry.picture)
        return Observation(json.loads(entry.payload), picture, entry.error, cached=True)

    def put(self, key: bytes, observation: Observation) -> None:
        """Keep an observation. One that another attempt might change (DEADLINE, TOOL_CRASHED) is ignored."""
        if observation.error in (ToolErrorCode.DEADLINE, ToolErrorCode.TOOL_CRASHED):
            return
        picture = None if observation.picture is None else observation.picture.source
        entry = _Entry(json.dumps(observation.payload), picture, observation.error)
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def stats(self) -> dict[str, dict[str, int]]:
        """`{tool name: {"hits": …, "misses": …}}` since the start, names sorted."""
        with self._lock:
            names = sorted(self._hits.keys() | self._misses.keys())
            return {name: {"hits": self._hits[name], "misses": self._misses[name]} for name in names}

    def __len__(self) -> int:
        return len(self._entries)
