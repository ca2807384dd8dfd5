"""The rules of one agent, written a second time from the text of the rules: lists, ifs, and a sort for every question.

Nothing of ``streams`` is used. The model takes the same wire messages (JSON objects) and must come to the same verdict,
the same dispatches in the same order, and the same state after every step. What only the real one can know is told:
``retry_at`` of an attempt (its jitter), and the execution id under which an attempt was dispatched.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.model.work import SECOND, Json, Work, content, instant

DAY = 86_400 * SECOND
Verdict = tuple[str, ...]
FINAL = ("finished", "failed", "stopped", "expired")
NEVER_INTERACTIVE = ("task_assigned", "comment_mention", "description_write", "schedule")


@dataclass
class NaiveAgent:
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

    def may_force(self) -> bool:
        if self.serial or self.limit == "unlimited":
            return False
        return len([work for work in self.running() if work.forced]) < int(self.limit)

    # Commands

    def handle(self, command: Json, at: int, via: str = "kafka") -> Verdict:
        verdict = self._handle(command, at, via)
        if verdict[0] == "done":
            self.pump(at)
        return verdict

    def _handle(self, command: Json, at: int, via: str) -> Verdict:
        if command["type"] == "status":
            return self.status(command, at)
        if command["type"] == "trigger":
            return self.trigger(command, at, via)
        kind = "stop" if command["type"] == "stop" else "control"
        verdict = self.answered(kind, command, at)
        if verdict is None:
            verdict = self.stop(command, at) if kind == "stop" else self.control(command, at)
            self.known[kind, command["id"]] = content(command), at, "done"
        return verdict

    def answered(self, kind: str, command: Json, at: int) -> Verdict | None:
        """Repeats, late ones and conflicts."""
        work = self.work(command["id"]) if kind == "trigger" else None
        known = work.content if work else self.known.get((kind, command["id"]), ("", 0, ""))[0]
        before = instant(command.get("decide_before"))
        if known == content(command):
            return "ignored", "duplicate"
        if before is not None and at >= before:
            return "refused", "request_expired"
        if known:
            return "refused", "trigger_id_conflict"
        return None

    def trigger(self, command: Json, at: int, via: str) -> Verdict:
        id = command["id"]
        if command.get("on_busy") not in (None, "", "ask", "queue", "force", "interrupt"):
            if self.work(id) is None and ("trigger", id) not in self.known:
                self.known["trigger", id] = content(command), at, "refused"
            return "refused", "agent_on_busy_invalid"
        verdict = self.answered("trigger", command, at)
        if verdict is not None:
            return verdict
        verdict = self.accept(command, at, via)
        if verdict[0] == "refused":
            self.known["trigger", id] = content(command), at, "refused"
        return verdict

    def accept(self, command: Json, at: int, via: str) -> Verdict:  # noqa: C901 - as the rules say it, in one go
        interactive = bool(command.get("interactive")) and command.get("kind") not in NEVER_INTERACTIVE
        if not self.exists and via == "http":
            return "refused", "agent_not_found"
        if self.archived:
            return "refused", "agent_archived"
        on_busy = (command.get("on_busy") or "ask") if interactive else "queue"
        created = instant(command.get("created_at"))
        available = instant(command.get("available_at"))
        if available is None:
            available = at if created is None else min(created, at)
        if created is None:
            created = at
        available = max(available, at - 300 * SECOND)
        expires = instant(command.get("expires_at"))
        gone = expires is not None and expires <= at
        early = available > at
        if on_busy in ("ask", "force"):
            available = at
        new = Work(
            command["id"],
            command["conversation_id"],
            created,
            available,
            interactive,
            command.get("timeout_seconds") or self.default_timeout or 1800,
            command.get("heartbeat_seconds"),
            command.get("max_attempts") or 3,
            expires,
            content(command),
            on_busy,
            bool(command.get("approval_required")),
        )
        head = self.head(new.conversation)
        reply = head is not None and head.state == "paused" and interactive and not early and not gone
        why = self.why_not_now(new, head if reply else None, early, at)
        if on_busy == "force" and why == "agent_parallelism_limit_reached" and not self.serial:
            why = None if self.may_force() else "force_limit_reached"
        if why is not None and on_busy in ("ask", "force"):
            return "refused", why
        if why is not None and len(self.waiting()) >= self.depth:
            return "refused", "agent_backlog_full"
        if not self.exists:
            self.exists, self.set_limit = True, self.default_limit
        if reply and head is not None:
            self.end(head, "finished", at)
        if on_busy == "interrupt" and head is not None and head.state == "running" and head.grace is None:
            head.grace = at + 60 * SECOND
        self.live.append(new)
        if gone:
            self.end(new, "expired", at)
        return ("done",)

    def why_not_now(self, new: Work, replied: Work | None, early: bool, at: int) -> str | None:
        """The first reason why it would not start now; the last ones by trying it on a copy."""
        if self.paused:
            return "agent_paused"
        if any(work is not replied for work in self.line(new.conversation)):
            return "conversation_busy"
        if new.needs_approval:
            return "approval_required"
        if early:
            return "not_yet_available"
        if self.budget == 0:
            return "run_budget_used_up"
        if self.exists and not self.has_room():
            return "agent_parallelism_limit_reached"
        trial = NaiveAgent(self.default_limit, self.learn, True, self.set_limit if self.exists else self.default_limit)
        trial.serial, trial.budget, trial.places = self.serial, self.budget, self.places
        trial.live = [
            Work(**vars(work))
            for work in self.live
            if work is not replied and not (work.state == "waiting" and work.expires is not None and work.expires <= at)
        ]
        trial.live.append(copy := Work(**{**vars(new), "on_busy": "queue", "expires": None}))
        trial.pump(at)
        if copy.state == "running":
            return None
        if trial.head(new.conversation) is not copy:
            return "conversation_busy"
        return "agent_parallelism_limit_reached" if not trial.has_room() else "run_budget_used_up"

    def status(self, command: Json, at: int) -> Verdict:
        execution = command.get("execution_id")
        if execution is None:
            work = self.head(command["conversation_id"])
            if work is None:
                return "ignored", "after_final" if command["conversation_id"] in self.outcomes else "unknown"
            if work.state != "running" or work.dispatched is None or work.dispatched >= (instant(command["at"]) or 0):
                return "ignored", "stale"
        else:
            if execution not in self.executions:
                return "ignored", "unknown"
            found = [work for work in self.running() if work.execution == execution]
            if not found:
                return "ignored", "stale/after_final/duplicate"
            work = found[0]
        return self.word(work, command, at)

    def word(self, work: Work, command: Json, at: int) -> Verdict:
        status = command["status"]
        if status in ("running", "heartbeat"):
            work.seen = at
            work.lease = max(work.lease or 0, at + (work.heartbeat or 300) * SECOND)
            return ("nothing",)
        if status == "finished":
            self.end(work, "finished", at)
        elif status == "stopped" or work.grace is not None:
            self.end(work, "stopped", at)
        elif status == "paused":
            self.free(work)
            work.state = "paused"
        else:
            work.failures += 1
            if command.get("retryable") is False or work.failures >= work.tries:
                self.end(work, "failed", at)
            else:
                self.retry(work)
        return ("done",)

    def retry(self, work: Work) -> None:
        self.free(work)
        work.state = "waiting"
        work.available = self.learn(work.id, work.attempt)

    def free(self, work: Work) -> None:
        work.slot = work.dispatched = work.lease = work.seen = work.grace = None
        work.forced, work.on_busy = False, "queue"

    def end(self, work: Work, state: str, at: int) -> None:
        self.live.remove(work)
        work.state = state
        self.ended[work.id] = work
        self.known["trigger", work.id] = work.content, at, state
        self.outcomes[work.conversation] = "stopped" if state == "expired" else state, at

    def stop(self, command: Json, at: int) -> Verdict:
        if self.archived:
            return "refused", "agent_archived"
        if command.get("trigger_id") is not None:
            id = command["trigger_id"]
            work = self.work(id)
            if work is None:
                ended = self.known.get(("trigger", id), ("", 0, ""))[2] in FINAL
                return ("ignored", "already_final") if ended else ("refused", "trigger_unknown")
            if work.state != "running":
                self.end(work, "stopped", at)
            elif work.grace is not None:
                return "ignored", "already_stopping"
            else:
                work.grace = at + 60 * SECOND
            return ("done",)
        works = [work for work in self.live if work.conversation == command["conversation_id"]]
        if not works:
            known = command["conversation_id"] in self.outcomes
            return ("ignored", "already_final") if known else ("refused", "trigger_unknown")
        if len(works) == 1 and works[0].grace is not None:
            return "ignored", "already_stopping"
        for work in works:
            if work.state != "running":
                self.end(work, "stopped", at)
            elif work.grace is None:
                work.grace = at + 60 * SECOND
        return ("done",)

    def control(self, command: Json, at: int) -> Verdict:
        name = command["type"]
        if name == "configure":
            return self.configure(command)
        if not self.exists:
            return "refused", "agent_not_found"
        if self.archived:
            return "refused", "agent_archived"
        if name in ("pause", "resume"):
            wanted = name == "pause"
            if self.paused == wanted:
                return "ignored", "unchanged"
            self.paused = wanted
        elif name == "archive":
            self.archived = True
            for work in list(self.live):
                if work.state != "running":
                    self.end(work, "stopped", at)
                elif work.grace is None:
                    work.grace = at + 60 * SECOND
        else:
            return self.control_trigger(command, at)
        return ("done",)

    def control_trigger(self, command: Json, at: int) -> Verdict:
        id = command["trigger_id"]
        work = self.work(id)
        if work is None:
            ended = self.known.get(("trigger", id), ("", 0, ""))[2] in FINAL
            return ("ignored", "already_final") if ended else ("refused", "trigger_unknown")
        if command["type"] == "reschedule":
            if work.state != "waiting":
                return "ignored", "not_waiting"
            work.available = max(instant(command["available_at"]) or 0, at - 300 * SECOND)
        elif command["type"] == "approve":
            if work.state != "waiting" or not work.needs_approval:
                return "ignored", "unchanged"
            work.needs_approval = False
        else:
            return self.resume_trigger(work, command.get("on_busy"), at)
        return ("done",)

    def resume_trigger(self, work: Work, on_busy: str | None, at: int) -> Verdict:
        if on_busy not in (None, "", "ask", "queue", "force", "interrupt"):
            return "refused", "agent_on_busy_invalid"
        if work.state != "paused":
            return "ignored", "not_paused"
        if on_busy in ("ask", "force"):
            if self.paused:
                return "refused", "agent_paused"
            if self.budget == 0:
                return "refused", "run_budget_used_up"
            if not self.has_room():
                if on_busy == "ask" or self.serial:
                    return "refused", "agent_parallelism_limit_reached"
                if not self.may_force():
                    return "refused", "force_limit_reached"
                work.on_busy = "force"
        work.state, work.available = "waiting", at
        return ("done",)

    def configure(self, command: Json) -> Verdict:
        serial = bool(command["serial"]) if "serial" in command else self.serial
        if serial and command.get("parallelism_limit") not in (None, 1):
            return "refused", "agent_parallelism_limit_unsupported"
        before = (self.exists, self.archived, self.settings())
        self.serial = serial
        if not self.exists:
            self.set_limit = self.default_limit
        if "run_budget" in command:
            self.budget = command["run_budget"]
        self.exists, self.archived = True, False
        if "parallelism_limit" in command:
            limit = command["parallelism_limit"]
            self.set_limit = self.default_limit if limit is None else limit
        if self.serial:
            self.set_limit = 1
        if "max_backlog_depth" in command:
            depth = command["max_backlog_depth"]
            self.depth = 1000 if depth is None else depth
        if "default_timeout_seconds" in command:
            self.default_timeout = command["default_timeout_seconds"]
        after = (self.exists, self.archived, self.settings())
        return ("ignored", "unchanged") if before == after else ("done",)

    def settings(self) -> tuple[Any, ...]:
        return self.set_limit, self.serial, self.budget, self.depth, self.default_timeout

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
            elif work.state == "waiting" and work.expires is not None:
                found.append((3, work.expires, id, "expiry"))
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
        elif item[3] == "grace":
            self.end(work, "stopped", now)
        else:
            self.end(work, "expired", now)
        self.pump(now)

    def pump(self, at: int) -> None:
        """Places in order of the keys; then the oldest heads start while there is room, then who may force."""
        for work in self.waiting():
            if work.place is None and work.available <= at and not work.needs_approval:
                self.places += 1
                runs = any(other.state == "running" for other in self.line(work.conversation))
                work.place = (0 if work.on_busy == "interrupt" and runs else 1, self.places)
        while not self.paused and not self.archived and self.budget != 0:
            ready = [work for work in self.waiting() if work.available <= at and self.head(work.conversation) is work]
            if not self.has_room():
                ready = [work for work in ready if work.on_busy == "force"]
            if not ready:
                return
            self.start(ready[0], at)

    def start(self, work: Work, at: int) -> None:
        if work.expires is not None and work.expires <= at:
            self.end(work, "expired", at)
            return
        work.forced = not self.has_room()
        if self.budget is not None:
            self.budget -= 1
        slots = [other.slot for other in self.running()]
        work.slot = next(number for number in range(1, len(slots) + 2) if number not in slots)
        work.state = "running"
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
