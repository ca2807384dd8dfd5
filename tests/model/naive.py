"""The rules of one agent, written a second time from the text of the rules: what each command does.

Nothing of ``streams`` is used. The model takes the same wire messages (JSON objects) and must come to the same verdict,
the same dispatches in the same order, the same messages, and the same state after every step. What only the real one
can know is told: ``retry_at`` of an attempt (its jitter), and the execution id under which an attempt was dispatched.
"""

from typing import Any

from tests.model.turns import NaiveTurns, Verdict
from tests.model.work import SECOND, Json, Work, content, instant

FINAL = ("finished", "failed", "stopped", "expired")
RESOURCES = ("site", "worker", "environment_id", "folder", "organization_id", "department_id")
NEVER_INTERACTIVE = ("task_assigned", "comment_mention", "description_write", "schedule")


class NaiveAgent(NaiveTurns):
    """One agent and its commands."""

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

    def accept(self, command: Json, at: int, via: str) -> Verdict:
        if not self.exists and via == "http":
            return "refused", "agent_not_found"
        if self.archived:
            return "refused", "agent_archived"
        early = (instant(command.get("available_at")) or 0) > at
        new = self.work_of(command, at)
        gone = new.is_over(at)
        head = self.paused_in(new.conversation)
        reply = head if new.interactive and not early and not gone else None
        why = self.why_not_now(new, reply, early, at)
        if new.on_busy == "force" and why == "agent_parallelism_limit_reached" and not self.serial:
            why = None if self.may_force() else "force_limit_reached"
        elif why is None and new.is_urgent and self.is_mute(new.uses_site):
            why = "site_not_answering"
        if why is not None and new.is_urgent:
            return "refused", why
        waits = why is not None or new.uses_site is not None
        if waits and not new.is_urgent and len(self.waiting()) >= self.depth:
            return "refused", "agent_backlog_full"
        if not self.exists:
            self.exists, self.set_limit = True, self.default_limit
        if reply is not None and not (new.is_urgent and new.uses_site is not None):
            self.end(reply, "finished", at)
        self.live.append(new)
        for agent, conversation in new.outcomes:
            self.sent.append(("watch", agent, new.id, conversation, None))
        if gone:
            self.end(new, "expired", at)
        return ("done",)

    def work_of(self, command: Json, at: int) -> Work:
        """The trigger as it would be accepted."""
        interactive = bool(command.get("interactive")) and command.get("kind") not in NEVER_INTERACTIVE
        on_busy = (command.get("on_busy") or "ask") if interactive else "queue"
        created = instant(command.get("created_at"))
        available = instant(command.get("available_at"))
        if available is None:
            available = at if created is None else min(created, at)
        if on_busy in ("ask", "force"):
            available = at
        uses_site = bool(command.get("worker")) or command.get("environment_id") is not None
        return Work(
            command["id"],
            command["conversation_id"],
            at if created is None else created,
            max(available, at - 300 * SECOND),
            interactive,
            command.get("timeout_seconds") or self.default_timeout or 1800,
            command.get("heartbeat_seconds"),
            command.get("max_attempts") or 3,
            instant(command.get("expires_at")),
            content(command),
            on_busy,
            bool(command.get("approval_required")),
            uses_site=command.get("site", "default") if uses_site else None,
            resources={name: command[name] for name in RESOURCES if name in command},
            decide_before=instant(command.get("decide_before")),
            outcomes={(one["agent_id"], one["conversation_id"]): None for one in command.get("depends_on", ())},
            accepted=at,
        )

    def paused_in(self, conversation: str) -> Work | None:
        """The trigger that waits for a person, which a reply answers."""
        return next((work for work in self.line(conversation)[:2] if work.state == "paused"), None)

    def why_not_now(self, new: Work, replied: Work | None, early: bool, at: int) -> str | None:
        """The first reason why it would not start, or ask its site, now; the last ones by trying it on a copy."""
        if self.paused:
            return "agent_paused"
        if any(work is not replied for work in self.line(new.conversation)):
            return "conversation_busy"
        if new.needs_approval:
            return "approval_required"
        if new.outcomes:
            return "dependency_unfinished"
        if early:
            return "not_yet_available"
        if not self.budget_left():
            return "run_budget_used_up"
        if self.exists and not self.room_for(new.key):
            return "agent_parallelism_limit_reached"
        return self.why_not_beside(new, replied, at)

    def why_not_beside(self, new: Work, instead_of: Work | None, at: int) -> str | None:
        """Why it would not start with the others, of whom some may have become available since the last pump."""
        trial, copy = self.tried(new, instead_of, at, "queue")
        if copy.state == "running":
            return None
        if trial.head(new.conversation) is not copy:
            return "conversation_busy"
        return "run_budget_used_up" if trial.room_for(copy.key) else "agent_parallelism_limit_reached"

    def tried(self, new: Work, instead_of: Work | None, at: int, on_busy: str) -> tuple["NaiveAgent", Work]:
        trial = NaiveAgent(self.default_limit, self.learn, True, self.set_limit if self.exists else self.default_limit)
        trial.serial, trial.budget, trial.places = self.serial, self.budget, self.places
        trial.live = [
            Work(**vars(work))
            for work in self.live
            if work is not instead_of and not (work.state == "waiting" and work.claim is None and work.is_over(at))
        ]
        trial.live.append(copy := Work(**{**vars(new), "on_busy": on_busy, "expires": None, "uses_site": None}))
        trial.pump(at)
        return trial, copy

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
            self.release(work)
            work.available = max(instant(command["available_at"]) or 0, at - 300 * SECOND)
        elif command["type"] == "approve":
            failed = any(outcome in ("failed", "stopped") for outcome in work.outcomes.values())
            if work.state != "waiting" or not (work.needs_approval or (failed and not work.failures_approved)):
                return "ignored", "unchanged"
            work.needs_approval, work.failures_approved = False, failed
        else:
            return self.resume_trigger(work, command.get("on_busy"), at)
        return ("done",)

    def resume_trigger(self, work: Work, on_busy: str | None, at: int) -> Verdict:
        if on_busy not in (None, "", "ask", "queue", "force", "interrupt"):
            return "refused", "agent_on_busy_invalid"
        if work.state != "paused":
            return "ignored", "not_paused"
        if on_busy in ("ask", "force"):
            again = Work(**{**vars(work), "state": "waiting", "available": at, "late": 0, "decide_before": None})
            code = self.why_not_again(work, again, at)
            force = on_busy == "force" and code == "agent_parallelism_limit_reached"
            if force and not self.serial and work.uses_site is None:
                code = None if self.may_force() else "force_limit_reached"
                if code is None and self.tried(again, work, at, "force")[1].state != "running":
                    code = "run_budget_used_up"
                work.on_busy = "force" if code is None else work.on_busy
            elif code is None and self.is_mute(work.uses_site):
                code = "site_not_answering"
            if code is not None:
                return "refused", code
        work.state, work.available, work.late, work.decide_before = "waiting", at, 0, None
        return ("done",)

    def why_not_again(self, work: Work, again: Work, at: int) -> str | None:
        """The first reason why what is paused would not start, or ask its site, now."""
        if self.paused:
            return "agent_paused"
        if self.head(work.conversation) is not work:
            return "conversation_busy"
        if not self.budget_left():
            return "run_budget_used_up"
        return self.why_not_beside(again, work, at)

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
