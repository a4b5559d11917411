"""Fair turns for the connections of the gRPC listener: who forwards next, and how much.

Two things are shared: the event loop's time, counted in frames, and the places of calls that the
gate has not judged yet. Hosts take turns, and so do the connections of a host, so that the backlog
of one connection delays no other for longer than a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

# Calls of a host, and of one connection, that the gate has not judged yet. A call beyond either is
# not forwarded, or a flood of calls would queue ahead of those of others.
MAX_UNJUDGED = 16
MAX_UNJUDGED_OF_CONNECTION = 4
# Frames that a connection forwards in a turn, and turns that are taken before the event loop goes
# on with everything else: together two milliseconds.
FRAMES_PER_TURN = 64
_TURNS_AT_ONCE = 8
# Calls of a host that may be reset before they are judged: per second, and at once. A connection
# that resets more rests, as gRPC starts the handlers of most of them all the same.
_RESETS_PER_S = 100.0
_RESETS_AT_ONCE = 50


class Host:
    """State that all connections of one host share."""

    def __init__(self) -> None:
        self.num_unjudged = 0
        # Connections with something to forward, and those whose next call waits for a place.
        self.ready: deque[Share] = deque()
        self.waiting: deque[Share] = deque()
        # When all resets so far will be within the rate.
        self._rested_at = 0.0

    def rest_s(self) -> float:
        """Count a reset; returns the seconds for which its connection has to rest."""
        now = asyncio.get_running_loop().time()
        self._rested_at = max(self._rested_at, now) + 1 / _RESETS_PER_S
        return self._rested_at - now - _RESETS_AT_ONCE / _RESETS_PER_S


class Turns:
    """Queue of the hosts that have something to forward."""

    def __init__(self) -> None:
        self._hosts: deque[Host] = deque()
        # A host is here for as long as it has connections, which refer to it.
        self._named: WeakValueDictionary[str, Host] = WeakValueDictionary()
        self._next: asyncio.Handle | None = None

    def host(self, name: str) -> Host:
        """Return the state that all connections of a host share."""
        host = self._named.get(name)
        if host is None:
            self._named[name] = host = Host()
        return host

    def add(self, share: Share) -> None:
        """Queue a connection that has something to forward."""
        if not share.host.ready:
            self._hosts.append(share.host)
        share.host.ready.append(share)
        self._go_on()

    def _go_on(self) -> None:
        if self._hosts and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._take_some)

    def _take_some(self) -> None:
        self._next = None
        try:
            for _ in range(_TURNS_AT_ONCE):
                self._take_one()
        finally:
            # Whatever goes wrong with one connection, the others go on.
            self._go_on()

    def _take_one(self) -> None:
        if self._hosts:
            host = self._hosts.popleft()
            share = host.ready.popleft()
            if host.ready:
                self._hosts.append(host)
            share.begin_turn()


class Share:
    """The turns and places of one connection.

    `advance` forwards a turn's worth of the bytes that have arrived. A connection asks for a turn
    and then gets one. It is ready (queued for a turn), waiting (its next call has found no place,
    so it gets a turn once there is one), resting (it has reset calls) or none of these.
    """

    def __init__(self, host: Host, turns: Turns, advance: Callable[[], None]) -> None:
        self.host = host
        self._turns = turns
        self._advance = advance
        self._num_unjudged = 0
        self._is_ready = False
        self._is_waiting = False
        self._is_resting = False
        # A place that another call gave back, and that is kept for this connection's next call.
        self._has_place = False
        self._has_ended = False

    def ask(self) -> None:
        """Ask for a turn; a connection that waits for a place gets its turn with the place."""
        is_put_off = self._is_waiting or self._is_resting
        if not (self._is_ready or is_put_off or self._has_ended):
            self._is_ready = True
            self._turns.add(self)

    def begin_turn(self) -> None:
        """Take the turn that was asked for."""
        self._is_ready = False
        if not self._has_ended:
            self._advance()

    def take(self) -> bool:
        """Take a place for a call, or wait for one."""
        host = self.host
        if not self._has_place:
            if self._num_unjudged >= MAX_UNJUDGED_OF_CONNECTION:
                self._is_waiting = True
                return False
            if host.num_unjudged >= MAX_UNJUDGED:
                self._is_waiting = True
                host.waiting.append(self)
                return False
            host.num_unjudged += 1
        self._has_place = False
        self._num_unjudged += 1
        return True

    def give_back(self) -> None:
        """Give back the place of a call that has been judged or has ended."""
        if self._is_waiting and self._num_unjudged >= MAX_UNJUDGED_OF_CONNECTION:
            self.host.waiting.append(self)
        self._num_unjudged -= 1
        self._pass_on()

    def rest(self) -> None:
        """Count a call that was reset before it was judged; too many make the connection rest."""
        rest_s = self.host.rest_s()
        if rest_s > 0:
            self._is_resting = True
            asyncio.get_running_loop().call_later(rest_s, self._go_on)

    def _go_on(self) -> None:
        self._is_resting = False
        self.ask()

    def decline(self) -> None:
        """Pass the place that was kept for this connection on: it can forward nothing now."""
        if self._has_place:
            self._has_place = False
            self._pass_on()

    def end(self) -> None:
        """End the connection's turns, once the places of its calls are given back."""
        self._has_ended = True
        self.decline()

    def _pass_on(self) -> None:
        """Keep a free place for the connection that has waited longest."""
        host = self.host
        while host.waiting:
            share = host.waiting.popleft()
            if not share._has_ended:
                share._has_place, share._is_waiting = True, False
                share.ask()
                return
        host.num_unjudged -= 1
