"""When a VSP episode is beyond hope, judged only from what the agent itself has seen (S1 §3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from environments.base import Prompt
from environments.vsp.task import Task
from tools.base import Observation, ToolCall

Strictness = Literal["never", "fatal", "strict"]


class SeenTurn(Protocol):
    """The part of an agent's turn that the rule may look at."""

    @property
    def call(self) -> ToolCall | None: ...

    @property
    def observation(self) -> Observation | None: ...


def hopeless(prompt: Prompt, turns: Sequence[SeenTurn], strictness: Strictness) -> bool:
    """Whether to end the episode after these turns.

    `strict` is S1's own rule: the first path of a navigation that crosses a hole. It also ends who would have
    corrected the path, so `fatal` waits until the agent shows that it does not learn: a second path with the same
    safe part into the same hole, or a second time the same failing call. (Another way into a hole met before is no
    sign of that: the cells around it may have been free. The rule ends 0.8 % of the experts' searches, which can come
    by the same part twice.) In verification a crossed hole is the answer, no failure.
    """
    if strictness == "never":
        return False
    crossed: list[str] = []
    failed: list[str] = []
    for turn in turns:
        if turn.call is None or turn.observation is None:
            continue
        seen = turn.observation.payload
        if not turn.observation.ok or seen.get("result") == "path_out_of_bounds":
            failed.append(turn.call.to_json())
        elif seen.get("result") == "path_crosses_hole" and prompt.task == Task.NAVIGATION:
            crossed.append(str((seen["at"], seen.get("safe"))))
    if strictness == "strict" and crossed:
        return True
    return len(set(crossed)) < len(crossed) or len(set(failed)) < len(failed)
