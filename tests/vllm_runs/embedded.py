"""vLLM's AsyncLLM, as RL frameworks embed it: requests are named by their ids alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm_runs.engine import Answer, Ask, Prompts, Setup, answers

_T = TypeVar("_T")


class Embedded:
    """An AsyncLLM with an event loop of its own."""

    def __init__(self, setup: Setup) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.prompts = Prompts(0)
        self._loop = asyncio.new_event_loop()
        arguments = setup.arguments()
        # Counters are not asked for here, and this class counts by default.
        arguments = AsyncEngineArgs(**{**arguments, "disable_log_stats": True})

        async def make() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._llm = self.do(make())

    def do(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run it in the loop."""
        return self._loop.run_until_complete(work)

    async def complete(self, ask: Ask, stop_after: int | None = None) -> list[Answer]:
        """Ask for for a completion; the request's id is the trace's.

        Args:
            ask: the request.
            stop_after: tokens after which the client gives up.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        words = ask.extra_args
        del words["routetrace.trace_id"]
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            extra_args=words,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            **ask.sampling,
        )
        latest: dict[str, Answer] = {}
        stream = self._llm.generate({"prompt_token_ids": ask.prompt}, params, ask.trace_id)
        async for output in stream:
            for answer in answers(ask, output):
                latest[answer.trace_id] = answer
                # What comes at once is put together, with one handle.
                answer.has_handle = (answer.handle or {}).get("trace_id") == answer.trace_id
            if stop_after and len(output.outputs[0].token_ids) >= stop_after:
                for answer in latest.values():
                    answer.cut = True
                await self._llm.abort(ask.trace_id)
                break
        done = list(latest.values())
        done[0].has_handle |= len(done) == 1
        return done

    def agents(self) -> list[dict[str, Any]]:
        """Counters of the agents."""
        self.do(self._llm.collective_rpc("routetrace_flush", args=(10.0,)))
        return [stats for stats in self.do(self._llm.collective_rpc("routetrace_stats")) if stats]

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()
        self._loop.close()


def embedded(engine: Embedded) -> list[Answer]:
    """Requests at a time, one with samples, one that is aborted."""
    prompts = [engine.prompts.make(n) for n in (20, 64, 100, 7)]
    asks = [Ask(f"rollout-{i}", p, words={"group": "g"}) for i, p in enumerate(prompts)]
    asks.append(Ask("rollout-samples", engine.prompts.make(40), sampling={"n": 2}))
    gives_up = Ask("rollout-given-up", engine.prompts.make(30), max_tokens=180)

    async def all_of_them() -> list[list[Answer]]:
        return await asyncio.gather(
            *map(engine.complete, asks), engine.complete(gives_up, stop_after=6)
        )

    return [answer for done in engine.do(all_of_them()) for answer in done]
