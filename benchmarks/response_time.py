"""Response time on 8×8 maps: all optimisations on against the plain loop, at equal accuracy.

On: slots that decode together, KV cache kept between turns, prompts read once, tool results cached, and with
`--prune fatal` hopeless episodes ended (`agent.prune`). Off: one episode at a time, transformers `generate` once per
turn from the whole conversation, every tool call live. Both are greedy and answer alike unless episodes are pruned.
The mean response time of a question is the wall time until all of the questions are answered, divided by their
number; the time from asking one until its answer is reported too. Run `make run` first: the policy is outputs/grpo.
"""

from __future__ import annotations

from statistics import median

from benchmarks.peers.measure import alternate, parser, ratio, report, single_thread


def main() -> None:
    arguments = parser("response_time", __doc__ or "", " --questions 60")
    arguments.add_argument("--questions", type=int, default=60, help="questions a repeat (default: 60)")
    arguments.add_argument("--size", type=int, default=8, help="cells of a map's side (default: 8)")
    arguments.add_argument("--prune", choices=("never", "fatal"), default="never", help="default: never")
    options = arguments.parse_args()
    measure(options.questions, options.size, options.repeats, options.prune)


def measure(questions: int, size: int, repeats: int, prune: str) -> None:
    """Ask `questions` new questions a repeat."""
    import time

    from benchmarks.peers.generate_engine import GenerateEngine
    from benchmarks.peers.questions import fresh_prompts
    from environments.vsp.prompts import VSP
    from models.rollout import RolloutEngine, RolloutRequest
    from tasks.engines import open_policy, rollout_engine
    from tasks.params import override
    from tasks.workspace import OUTPUTS
    from tools.cache import ToolResultCache
    from tools.executor import ToolExecutor

    params = single_thread({"rollout.slots": questions})
    policy, grade = open_policy(OUTPUTS / "grpo", params), VSP().grade
    live = ToolExecutor(policy.encoder.registry, None, params.rollout.call_deadline_s)
    cache = ToolResultCache(params.rollout.cached_results)
    engines: dict[str, RolloutEngine] = {
        "off": GenerateEngine(policy, live, params.agent, batch=1),
        "on": rollout_engine(policy, override(params, {"agent.prune": prune}), cache),
    }

    def run(name: str, number: int) -> dict[str, float]:
        prompts = fresh_prompts(params, questions, f"response-{number}", sizes=(size,))
        began = time.perf_counter()
        told = engines[name].sample([RolloutRequest(prompt, 0, 0) for prompt in prompts], 0.0)
        seconds = time.perf_counter() - began
        right = sum(t.response is not None and grade(t.prompt, t.response) for t in told)
        return {
            "seconds_per_question": seconds / questions,
            "seconds_from_start_to_answer": sum(t.seconds for t in told) / questions,
            "accuracy": right / questions,
            "calls": sum(t.calls for t in told),
            "tokens": sum(t.sampled_tokens for t in told),
        }

    rounds = alternate({name: lambda n, name=name: run(name, n) for name in engines}, repeats)
    seconds = {name: [each["seconds_per_question"] for each in rows] for name, rows in rounds.items()}
    accuracy = {name: 100 * sum(each["accuracy"] for each in rows) / repeats for name, rows in rounds.items()}
    faster = ratio(seconds["off"], seconds["on"])
    report(
        "response_time",
        f"mean response time on {size}×{size} maps, {questions} questions",
        "the plain loop",
        f"{faster['median']:.1f}× ({1000 * median(seconds['on']):.0f} against {1000 * median(seconds['off']):.0f} ms; "
        f"accuracy {accuracy['on']:.1f} and {accuracy['off']:.1f} %)",
        "≥ 6.8× at ± 1 point",
        {
            "faster": faster,
            "accuracy_percent": accuracy,
            "questions": questions,
            "size": size,
            "prune": prune,
            "rounds": rounds,
            "cache": cache.stats(),
        },
    )


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, FileNotFoundError, ValueError)
