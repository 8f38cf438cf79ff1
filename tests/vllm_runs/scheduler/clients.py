"""Actions of users, for vllm_runs.scheduler."""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_runs.scheduler.engine import STOP_TOKENS, Engine, new_tokens
from vllm_runs.scheduler.truth import BLOCK, MAX_LEN, MAX_POSITIONS, Chat, Life


class Clients:
    """Random actions of users."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(f"clients {engine.run}")
        self.open: list[Chat] = []
        """Conversations whose next turn has not begun."""
        self.absent: list[str] = []
        """Traces that must not be."""
        self.ready: list[list[Life]] = []
        """Requests of traces that have ended."""
        self._load = self.rng.choice((6, 24, 60))
        self._names = count()
        self._systems = [new_tokens(self.rng, self.rng.randrange(20, 200)) for _ in range(4)]
        self._past: deque[list[int]] = deque(maxlen=40)
        self._settled = 0

    def act(self) -> None:
        """Something happens between two steps."""
        engine, rng = self.engine, self.rng
        while len(engine.lives) < self._load and rng.random() < 0.6:
            self._ask()
        for life in [x for x in engine.lives.values() if x.session]:
            if rng.random() < 0.1 and not (life.inputs and life.inputs[-1] is None):
                self._input(life)
        if rng.random() < 0.02:
            self.abort()
        for request in list(engine.scheduler.requests.values()):
            # Its KV has arrived, for others to find, and it has not got to run.
            arrived = request.status == RequestStatus.WAITING and request.num_computed_tokens
            if arrived and not engine.case.sessions and rng.random() < 0.5:
                engine.abort(request.request_id)
                engine.counts["aborts after a load"] += 1
        if rng.random() < 0.005 and engine.case.depth == 1:
            self._replace()  # vLLM cannot, while a step of the other one is in flight
        if rng.random() < 0.004:
            engine.reset()
        if engine.case.faults and rng.random() < 0.004:
            engine.break_down()
        if rng.random() < 0.015:
            engine.set_weight_version(max(engine.version, 0) + rng.choice((1, 1, 7, -2)))
        if engine.paused and rng.random() < 0.3:
            engine.pause(False)
        elif rng.random() < 0.002:
            engine.pause(True)
        self.settle()

    def abort(self) -> Life | None:
        """A client goes away, if there is one."""
        lives = list(self.engine.lives.values())
        if not lives:
            return None
        life = self.rng.choice(lives)
        self.engine.abort(life.request_id)
        return life

    def _replace(self) -> None:
        """A request takes the name of one that goes away, in the step that tells of the end."""
        life = self.abort()
        if (
            life
            and life.request_id[1] != "_"
            and life.request_id not in self.engine.scheduler.requests
        ):
            prompt = life.shown[: MAX_LEN - 30]
            trace_id = f"again/{next(self._names)}"
            self._begin(life.request_id, trace_id, prompt, {"routetrace.trace_id": trace_id})
            self.engine.counts["names used again"] += 1

    def settle(self) -> None:
        """Check which traces have ended."""
        ended = self.engine.ended[self._settled :]
        self._settled = len(self.engine.ended)
        for life in ended:
            self.engine.counts["never scheduled"] += not life.attempts
            if not life.kept:
                self.absent.append(life.trace_id)
            elif life.chat is None:
                self.ready.append([life])
            elif life.reason != "abort" and len(life.shown) < 200 and self.rng.random() < 0.7:
                self.open.append(life.chat)
            else:
                self.ready.append(life.chat.lives)
            if life.reason != "abort":
                self._past.append(life.shown)

    def hang_up(self) -> None:
        """No conversation goes on."""
        self.ready += [chat.lives for chat in self.open]
        self.open = []

    def leave(self) -> None:
        """The last client goes away in mid-answer; no step comes after it."""
        self._begin("last-01234567", "last", self._systems[0], {})
        for _ in range(4):
            self.engine.step()
        self.abort()

    # ------------------------------------------------------------------ requests

    def _ask(self) -> None:
        rng = self.rng
        kinds = ["new", "shared", "again", "turn", "samples", "chat", "next turn"]
        chats = not self.engine.case.faults
        kind = rng.choices(kinds, (2, 4, 1, 3, 1, chats, 2 * chats))[0]
        tail = new_tokens(rng, rng.choice((1, 5, 20, 60)))
        if kind == "next turn" and self.open:
            chat = self.open.pop(rng.randrange(len(self.open)))
            prompt = [*chat.lives[-1].shown, *tail]
            self._begin(self._unique("cmpl-turn"), chat.trace_id, prompt, {}, chat)
            self.engine.counts["turns in one trace"] += 1
            return
        prompt = tail if len(tail) > 1 else [*tail, 5]
        if kind == "chat":
            trace_id = f"chat {next(self._names)}"
            self._begin(self._unique("x"), trace_id, prompt, {}, Chat(trace_id))
            return
        if kind in {"shared", "samples"}:
            prompt = [*rng.choice(self._systems), *prompt]
        if kind in {"again", "turn"} and self._past:
            past = rng.choice(self._past)
            prompt = past if kind == "again" else [*past, *prompt]
        n = rng.randint(2, 4) if kind == "samples" else 0
        self._named(prompt, n)

    def _named(self, prompt: list[int], n: int) -> None:
        """A request, or n samples of one, by one of the names that vLLM makes."""
        rng = self.rng
        name = f"traj-{next(self._names)}/turn-{rng.randrange(4)}"
        options: dict[str, Any] = {}
        form = rng.choice(("{}", "cmpl-{}-0", "chatcmpl-{}", "counter", "option"))
        if form == "option":
            options["routetrace.trace_id"] = name
            user = f"r{next(self._names)}"
        elif form == "counter":
            user = str(next(self._names))
        else:
            user = form.format(name)
        request_id = self._unique(user)
        if rng.random() < 0.06:
            options["routetrace.capture"] = rng.choice((False, 0, "false"))
        for i in range(n or 1):
            one = f"{i}_{request_id}" if n else request_id
            trace_id = f"{name}/{i}" if n else name
            if form == "counter":
                trace_id = f"{self.engine.engine_id}/{one}"
            self._begin(one, trace_id, prompt, {**options, "routetrace.group": name})

    def _unique(self, user: str) -> str:
        return f"{user}-{self.rng.randrange(1 << 32):08x}"

    def _begin(
        self,
        request_id: str,
        trace_id: str,
        prompt: list[int],
        options: dict[str, Any],
        chat: Chat | None = None,
    ) -> None:
        rng = self.rng
        prompt = prompt[: MAX_LEN - 12]
        room = MAX_LEN - len(prompt)
        life = Life(
            request_id,
            trace_id,
            list(prompt),
            max_tokens=min(rng.choice((1, 8, 30, 100)), room - 1),
            kept="routetrace.capture" not in options,
            chat=chat,
        )
        if chat:
            chat.lives.append(life)
            options["routetrace.trace_id"] = trace_id
        if group := options.get("routetrace.group"):
            life.labels["group"] = group
        params: dict[str, Any] = {}
        if chat is None and self._room_for_session() and rng.random() < 0.5:
            life.session = True
        elif rng.random() < 0.5:
            params["stop_token_ids"] = STOP_TOKENS
        if rng.random() < 0.04:
            params["skip_reading_prefix_cache"] = True
        self.engine.add(life, options, **params)

    def _room_for_session(self) -> bool:
        """Sessions that wait for input keep their blocks: vLLM hangs where all are taken so."""
        sessions = 1 + sum(life.session for life in self.engine.lives.values())
        room = (sessions + 1) * MAX_POSITIONS < self.engine.slots.num_blocks * BLOCK
        return self.engine.case.sessions and room

    def _input(self, life: Life) -> None:
        """A session gets more input, or ends."""
        rng = self.rng
        used = len(life.shown) + sum(len(t) + life.max_tokens for t in life.inputs if t)
        if not life.waits:
            used += life.max_tokens
        tokens = new_tokens(rng, rng.choice((1, 3, 20)))
        more = used + len(tokens) + life.max_tokens < MAX_LEN - 8 and rng.random() < 0.8
        self.engine.extend(life, tokens if more else None)
