"""Turns of one agent, written a second time from the text of the rules: places, slots, claims, and what time does.

Lists, ifs, and a sort for every question (site protocol: PUMP, A2).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.model.work import SECOND, Json, Work

DAY = 86_400 * SECOND
RESERVED_SECONDS = 30
LATE_GRANTS = 3
Verdict = tuple[str, ...]
Sent = tuple[str, str, str, int | str | None, bool | str | None]
"""claim: (to site, trigger, n, ask), release: (to site, trigger, n, started), watch, unwatch: (to agent, trigger,
conversation), resolved: (to agent, trigger, conversation, outcome)."""


@dataclass
class NaiveTurns:
    """One agent. ``learn`` tells what can't be known: retry_at of (trigger id, attempt)."""

    default_limit: int | str
    learn: Callable[[str, int], int]
    exists: bool = False
    set_limit: int | str = 1
    serial: bool = False
    budget: int | None = None
    depth: int = 1000
    default_timeout: int | None = None
    paused: bool = False
    archived: bool = False
    places: int = 0
    live: list[Work] = field(default_factory=list)
    ended: dict[str, Work] = field(default_factory=dict)
    known: dict[tuple[str, str], tuple[str, int, str]] = field(default_factory=dict)
    """(kind, id) -> content, when it was settled, state."""
    outcomes: dict[str, tuple[str, int]] = field(default_factory=dict)
    executions: dict[str, str] = field(default_factory=dict)
    """Every execution id that was ever given -> trigger id."""
    dispatches: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """(trigger id, attempt, slot, whether it exceeded the limit)."""
    silence_from: int = 0
    unnamed: list[Work] = field(default_factory=list)

    claims: int = 0
    sent: list[Sent] = field(default_factory=list)
    watches: dict[str, dict[tuple[str, str], str | None]] = field(default_factory=dict)
    """By conversation: who depends on it, and what they were told last."""

    # Questions

    def work(self, id: str) -> Work | None:
        return next((work for work in self.live if work.id == id), None)

    def running(self) -> list[Work]:
        return [work for work in self.live if work.state == "running"]

    def waiting(self) -> list[Work]:
        return sorted((work for work in self.live if work.state == "waiting"), key=lambda work: work.key)

    def line(self, conversation: str) -> list[Work]:
        placed = [work for work in self.live if work.conversation == conversation and work.place is not None]
        return sorted(placed, key=lambda work: work.place or (0, 0))

    def head(self, conversation: str) -> Work | None:
        """Who runs, else who is first."""
        line = self.line(conversation)
        return next((work for work in line if work.state == "running"), line[0] if line else None)

    @property
    def limit(self) -> int | str:
        return 1 if self.serial else self.set_limit

    def has_room(self) -> bool:
        return self.limit == "unlimited" or len(self.running()) < int(self.limit)

    def asking(self) -> list[Work]:
        """Whose claim is not answered: a slot is kept for each, but for those that exceed the limit anyway."""
        return [work for work in self.live if work.claim == "asking" and work.on_busy != "force"]

    def held(self) -> list[Work]:
        return sorted((work for work in self.live if work.claim == "held"), key=lambda work: work.key)

    def room_for(self, key: tuple[int, int, bytes]) -> bool:
        older = [work for work in self.asking() if work.key < key]
        return self.limit == "unlimited" or len(self.running()) + len(older) < int(self.limit)

    def budget_left(self) -> bool:
        return self.budget is None or self.budget > len(self.asking()) + len(self.held())

    def is_mute(self, site: str | None) -> bool:
        return any(work.mute and work.uses_site == site for work in self.live)

    def standing_of(self, conversation: str) -> str | None:
        """None: it lives."""
        if any(work.conversation == conversation for work in self.live):
            return None
        return self.outcomes[conversation][0] if conversation in self.outcomes else "unknown"

    def may_force(self) -> bool:
        if self.serial or self.limit == "unlimited":
            return False
        return len([work for work in self.running() if work.forced]) < int(self.limit)

    # Claims

    def release(self, work: Work) -> None:
        if work.n is not None and work.uses_site is not None:
            self.sent.append(("release", work.uses_site, work.id, work.n, work.claim == "granted"))
        work.n, work.claim, work.mute = None, None, False

    def answer(self, message: Json, at: int) -> Verdict:
        """What a site says of a claim, or another agent of a conversation; or asks about one of ours."""
        kind = message["type"]
        if kind == "watch":
            watchers = self.watches.setdefault(message["conversation_id"], {})
            watchers[message["watcher_agent_id"], message["trigger_id"]] = "nothing"
        elif kind == "unwatch":
            watchers = self.watches.get(message["conversation_id"], {})
            if watchers.pop((message["watcher_agent_id"], message["trigger_id"]), "none") == "none":
                return "ignored", "stale"
            if not watchers:
                del self.watches[message["conversation_id"]]
        elif not (self.resolve(message) if kind == "resolved" else self.answer_claim(message, at)):
            return "ignored", "stale/unchanged"
        self.pump(at)
        return ("done",)

    def resolve(self, message: Json) -> bool:
        work = self.work(message["trigger_id"])
        on = (message["dependency_agent_id"], message["conversation_id"])
        if (
            work is None
            or work.place is not None
            or work.outcomes.get(on, "not asked")
            in (
                "not asked",
                message.get("outcome"),
            )
        ):
            return False
        work.outcomes[on] = message.get("outcome")
        if message.get("outcome") in ("failed", "stopped"):
            work.failures_approved = False
        return True

    def answer_claim(self, message: Json, at: int) -> bool:
        work, kind = self.work(message["trigger_id"]), message["type"]
        if work is None or work.n != message["n"]:
            return False
        if kind == "degraded":
            work.degraded = True
        elif kind == "recall" and work.claim == "held":
            self.release(work)
        elif kind in ("granted", "waiting") and work.claim in ("asking", "standing"):
            work.claim, work.mute = ("held" if kind == "granted" else "standing"), False
        elif kind == "denied" and work.claim == "asking":
            work.n = work.claim = None
            self.end(work, "refused", at)
        else:
            return False
        return True

    # Ends

    def retry(self, work: Work) -> None:
        self.free(work)
        work.state, work.late = "waiting", 0
        work.available = self.learn(work.id, work.attempt)

    def free(self, work: Work) -> None:
        self.release(work)
        work.slot = work.dispatched = work.lease = work.seen = work.grace = None
        work.forced, work.on_busy = False, "queue"

    def end(self, work: Work, state: str, at: int) -> None:
        self.release(work)
        for (agent, conversation), outcome in work.outcomes.items():
            if outcome != "finished":
                self.sent.append(("unwatch", agent, work.id, conversation, None))
        self.live.remove(work)
        work.state = state
        self.ended[work.id] = work
        self.known["trigger", work.id] = work.content, at, state
        if state != "refused":
            self.outcomes[work.conversation] = "stopped" if state == "expired" else state, at

    # Time

    def deadlines(self) -> list[tuple[int, int, bytes, str]]:
        """(rank, at, id, kind) of everything that time will do."""
        found = []
        for work in self.live:
            id = work.id.encode("utf-8")
            if work.state == "running":
                found.append((0, self.lease_ends(work), id, "lease"))
                if work.grace is not None:
                    found.append((1, work.grace, id, "grace"))
                continue
            if work.state == "waiting" and work.expires is not None:
                found.append((3, work.expires, id, "expiry"))
            if work.is_urgent and work.decide_before is not None:
                found.append((3, work.decide_before, id, "answer"))
            if work.claim == "asking":
                found.append((3, work.asked + RESERVED_SECONDS * SECOND, id, "reservation"))
        return found

    def lease_ends(self, work: Work) -> int:
        assert work.lease is not None and work.dispatched is not None
        if work.heartbeat is None:
            return work.lease
        heard = max(work.dispatched if work.seen is None else work.seen, self.silence_from)
        silent = heard + work.heartbeat * SECOND
        promised = work.dispatched + (work.timeout + 300) * SECOND
        return silent if work.lease > promised else min(work.lease, silent)

    def next_time(self, now: int) -> int | None:
        """When time does something next, strictly after now or still due."""
        times = [at for _, at, _, _ in self.deadlines()]
        times += [work.available for work in self.live if work.state == "waiting" and work.available > now]
        times += [at + 7 * DAY for _, at, _ in self.known.values()]
        times += [at + 90 * DAY for _, at in self.outcomes.values()]
        return min(times, default=None)

    def fire(self, now: int) -> None:
        """Everything that is due: leases, then grace; then who has become available; then the rest."""
        while True:
            due = sorted(item for item in self.deadlines() if item[1] <= now)
            for rank in (0, 1, 3):
                for item in due:
                    if item[0] == rank:
                        self.fire_one(item, now)
                if rank == 1:
                    self.pump(now)
            if not due:
                break
        self.known = {key: row for key, row in self.known.items() if row[1] + 7 * DAY > now}
        self.outcomes = {id: row for id, row in self.outcomes.items() if row[1] + 90 * DAY > now}
        self.tell()

    def fire_one(self, item: tuple[int, int, bytes, str], now: int) -> None:
        if item not in self.deadlines():
            return
        work = self.work(item[2].decode("utf-8"))
        assert work is not None
        if item[3] == "lease":
            absent = work.seen is None and work.heartbeat is not None and work.absences < 10
            work.absences += absent
            work.failures += not absent
            if work.grace is not None:
                self.end(work, "stopped", now)
            elif work.failures >= work.tries:
                self.end(work, "failed", now)
            else:
                self.retry(work)
        elif item[3] == "reservation" and not work.is_urgent:
            work.claim, work.mute = "standing", True
        else:
            self.end(work, {"grace": "stopped", "expiry": "expired"}.get(item[3], "refused"), now)
        self.pump(now)

    def pump(self, at: int) -> None:
        """Everything that has become possible (site protocol PUMP)."""
        self.tell()
        self.take_places(at)
        self.refuse_hopeless(at)
        if self.paused or self.archived:
            for work in sorted((work for work in self.live if work.n is not None), key=lambda work: work.n or 0):
                if work.state == "waiting":
                    urgent = work.is_urgent
                    self.release(work)
                    if urgent:
                        self.end(work, "refused", at)
        else:
            while self.give_a_slot(at):
                pass
            self.give_back(at)
        self.tell()

    def tell(self) -> None:
        """Those that depend on a conversation, how it stands now."""
        for conversation in list(self.watches):
            standing = self.standing_of(conversation)
            for (agent, trigger), told in list(self.watches[conversation].items()):
                if told != standing:
                    self.sent.append(("resolved", agent, trigger, conversation, standing))
                    self.watches[conversation][agent, trigger] = standing
                    if standing == "finished":
                        del self.watches[conversation][agent, trigger]
            if not self.watches[conversation]:
                del self.watches[conversation]

    def take_places(self, at: int) -> None:
        """In order of the keys; an interrupt the next one, and a reply that may be refused before what it answers."""
        for work in self.waiting():
            if work.place is not None or work.available > at or work.is_blocked:
                continue
            head = self.head(work.conversation)
            comes_next = False
            if head is not None and work.on_busy == "interrupt" and head.state == "running" and not work.is_over(at):
                comes_next = True
                head.grace = at + 60 * SECOND if head.grace is None else head.grace
            if head is not None and work.is_urgent and head.state == "paused":
                comes_next = True
            self.places += 1
            work.place = (0 if comes_next else 1, self.places)

    def urgent(self) -> list[Work]:
        """Asks and forces that don't wait for a site's answer, oldest first."""
        return [work for work in self.waiting() if work.is_urgent and work.place and work.claim in (None, "held")]

    def refuse_hopeless(self, at: int) -> None:
        for work in self.urgent():
            over = work.decide_before is not None and work.decide_before <= at
            stuck = self.paused or self.archived or self.head(work.conversation) is not work or work.available > at
            if over or (work.claim is None and (stuck or self.is_mute(work.uses_site))):
                self.end(work, "refused", at)

    def oldest_waiter(self, at: int) -> Work | None:
        """Of the heads that could start or ask."""
        found = []
        for work in self.waiting():
            if work.claim is None and self.head(work.conversation) is work:
                if work.available <= at and not self.is_mute(work.uses_site) and self.budget_left():
                    found.append(work)
            elif work.claim == "held" and self.budget != 0:
                found.append(work)
        return found[0] if found else None

    def give_a_slot(self, at: int) -> bool:
        """To the oldest, else to who may exceed the limit; False: nobody can do anything."""
        work = self.oldest_waiter(at)
        if work is not None and self.room_for(work.key):
            if work.is_over(at):
                self.end(work, "expired", at)
            else:
                self.go(work, at)
            return True
        for work in self.urgent():
            if work.on_busy == "force" and self.may_force() and self.budget != 0:
                self.go(work, at)
            else:
                self.end(work, "refused", at)
            return True
        return False

    def go(self, work: Work, at: int) -> None:
        if work.uses_site is None or work.claim == "held":
            self.start(work, at)
            return
        self.claims += 1
        work.n, work.claim, work.asked = self.claims, "asking", at
        self.sent.append(("claim", work.uses_site, work.id, work.n, work.is_urgent))

    def give_back(self, at: int) -> None:
        """What was granted while there is no slot for it; the oldest keeps its own when that was often so."""
        if self.has_room() and self.budget != 0:
            return
        oldest = self.oldest_waiter(at)
        for work in self.held():
            if work is oldest and work.late >= LATE_GRANTS and self.budget != 0:
                continue
            self.release(work)
            work.late += self.budget != 0

    def start(self, work: Work, at: int) -> None:
        if work.is_urgent:
            for other in self.line(work.conversation):
                if other.state == "paused":
                    self.end(other, "finished", at)
        work.forced = not self.has_room()
        if self.budget is not None:
            self.budget -= 1
        slots = [other.slot for other in self.running()]
        work.slot = next(number for number in range(1, len(slots) + 2) if number not in slots)
        work.state = "running"
        work.claim = "granted" if work.uses_site is not None else None
        work.attempt += 1
        work.dispatched = at
        work.lease = at + (work.timeout + 300) * SECOND
        work.execution = None
        self.dispatches.append((work.id, work.attempt, work.slot, work.forced))
        self.unnamed.append(work)

    def name(self, executions: list[str]) -> None:
        """The execution ids of the dispatches since the last time, in their order."""
        assert len(executions) == len(self.unnamed)
        for work, execution in zip(self.unnamed, executions, strict=True):
            if work.attempt and work.state == "running":
                work.execution = execution
            self.executions[execution] = work.id
        self.unnamed.clear()
