"""Clients of the API server that send mixed requests, several at once, and hang up at times; must never know faults.

What a `Mix` draws depends on the seed alone; which client comes first is a matter of time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .client import Request, Server
from .lab import prompts

CLIENTS = 8
PATIENCE = 60.0
"""Seconds within which what was begun must end, and a fault must be met."""


@dataclass(frozen=True)
class Answer:
    """What a client got. `leave_after`: it hung up when it had so many tokens."""

    request: Request
    leave_after: int | None
    tokens: tuple[int, ...] = ()
    error: str | None = None
    began: float = 0.0
    ended: float = 0.0

    def is_right(self, right: tuple[int, ...]) -> bool:
        if self.error is not None:
            return False
        if self.leave_after is None:
            return self.tokens == right
        return len(self.tokens) >= self.leave_after and self.tokens == right[: len(self.tokens)]


class Mix:
    """Draws requests; the known prompts are the same for the same seed, whoever draws."""

    def __init__(self, seed: int) -> None:
        self.known = [
            Request(prompt, max_tokens=3 + 7 * (number % 4))
            for number, prompt in enumerate(prompts((seed, "known"), *[31, 64, 100, 150, 200, 260, 330, 420] * 4))
        ]
        self.long = [Request(prompt, max_tokens=40) for prompt in prompts((seed, "long"), 900, 800, 650)]
        self.beginnings = prompts((seed, "beginnings"), 96, 128, 200, 256)

    def draw(self, draw: random.Random) -> tuple[Request, int | None]:
        """A request, and after how many tokens its client hangs up, if it does."""
        kind = draw.choices(("known", "begins", "new", "long"), (8, 6, 4, 1))[0]
        if kind == "known":
            request = draw.choice(self.known)
        elif kind == "begins":
            request = Request(draw.choice(self.beginnings) + words(draw, draw.randint(1, 90)), max_tokens=6)
        elif kind == "new":
            request = Request(words(draw, draw.choice((5, 40, 100, 180, 400))), max_tokens=draw.choice((2, 8, 16)))
        else:
            request = draw.choice(self.long)
        leaves = draw.random() < 0.15
        return request, draw.randrange(request.max_tokens) if leaves else None

    def victim(self, draw: random.Random) -> tuple[int, ...]:
        """A prompt that many requests share."""
        return draw.choice([*self.beginnings, *(request.prompt for request in self.known if len(request.prompt) > 99)])


def words(draw: random.Random, count: int) -> tuple[int, ...]:
    return prompts(draw.random(), count)[0]


class Traffic:
    """Clients that send one request after the other, and pause together."""

    def __init__(self, server: Server, mix: Mix, seed: int) -> None:
        self._server, self.mix = server, mix
        self._changed = threading.Condition()
        self._open, self._over, self._busy = True, False, 0
        self._answers: list[Answer] = []
        self._clients = [threading.Thread(target=self._run, args=(f"{seed} {n}",)) for n in range(CLIENTS)]
        for client in self._clients:
            client.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While no client waits for an answer; AssertionError if one is not given in time."""
        with self._changed:
            self._open = False
            assert self._changed.wait_for(lambda: not self._busy, PATIENCE), f"{self._busy} requests hang"
        yield
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def take(self) -> list[Answer]:
        """The answers since the last time."""
        with self._changed:
            answers, self._answers = self._answers, []
            return answers

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for client in self._clients:
            client.join(2 * PATIENCE)

    def _run(self, seed: str) -> None:
        draw = random.Random(seed)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._over)
                if self._over:
                    return
                self._busy += 1
            self.ask(*self.mix.draw(draw))
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def ask(self, request: Request, leave_after: int | None) -> None:
        """Be a client once; not while the others are paused."""
        began = time.monotonic()
        answer = replace(self._answer(request, leave_after), began=began, ended=time.monotonic())
        with self._changed:
            self._answers.append(answer)

    def _answer(self, request: Request, leave_after: int | None) -> Answer:
        try:
            if leave_after is None:
                return Answer(request, None, self._server.complete(request).tokens)
            return Answer(request, leave_after, self._server.leave(request, leave_after))
        except Exception as error:  # whatever it is, it is no answer
            return Answer(request, leave_after, error=repr(error)[:500])
