"""A file of trajectories, line by line: rows of the cold start, and what is wrong with the other lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.conversations import openai_messages, sharegpt
from tasks.conversations.conversation import Conversation, Record, UnfitError, read_object
from tasks.conversations.fitting import Fitter
from tasks.conversations.pictures import PictureLoader
from tasks.gate.tokens import TokenCounter
from tasks.params import ValidateConfig


@dataclass(frozen=True)
class Problem:
    """Why a line, counted from 1, does not fit."""

    line: int
    reason: str


@dataclass(frozen=True)
class Reading:
    """What a file holds."""

    rows: tuple[dict[str, Any], ...]
    problems: tuple[Problem, ...]


def read_file(
    file: Path,
    fitter: Fitter,
    counter: TokenCounter,
    limits: ValidateConfig,
    known: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Reading:
    """Read and check every line; `known` says where a trajectory of that id is already.

    `progress(done, total)` counts bytes. Raises OSError if the file cannot be read; all else is a problem.
    """
    load = PictureLoader(file.parent)
    places = dict(known)
    lines: list[tuple[int, dict[str, Any]]] = []
    problems: list[Problem] = []
    done, total = 0, file.stat().st_size
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            done += len(raw)
            if not raw.strip():
                continue
            try:
                row = fitter.row(_conversation(raw, load))
                identity = row["trajectory_id"]
                if identity in places:
                    raise UnfitError(f"the same trajectory is in {places[identity]}")
            except UnfitError as error:
                problems.append(Problem(number, str(error)))
            else:
                places[identity] = f"line {number}"
                lines.append((number, row))
            progress(done, total)
    tokens = counter.token_lengths([row for _, row in lines])
    for (number, row), length in zip(lines, tokens, strict=True):
        problems += [Problem(number, reason) for reason in _beyond(limits, len(row["turns"]), length)]
    long = {problem.line for problem in problems}
    rows = tuple(row for number, row in lines if number not in long)
    return Reading(rows, tuple(sorted(problems, key=lambda problem: problem.line)))


def _conversation(raw: bytes, load: PictureLoader) -> Conversation:
    record = parse_line(raw)
    if "messages" in record:
        return openai_messages.read(record, load)
    if "conversations" in record:
        return sharegpt.read(record, load)
    raise UnfitError("has neither messages (OpenAI) nor conversations (ShareGPT)")


def parse_line(raw: bytes) -> Record:
    """The JSON object on a line. Raises UnfitError."""
    try:
        text = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UnfitError("is not UTF-8 text") from None
    if text.startswith("["):
        raise UnfitError("is a JSON array; write one object per line: jq -c '.[]' FILE.json > FILE.jsonl")
    return read_object(text, "the line")


def _beyond(limits: ValidateConfig, turns: int, tokens: int) -> Iterator[str]:
    if turns > limits.max_turns:
        yield f"has {turns} turns; gate.max_turns is {limits.max_turns}"
    if tokens > limits.max_tokens:
        yield f"has {tokens} tokens; gate.max_tokens is {limits.max_tokens}"
