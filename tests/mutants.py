"""Planted faults: one-line mutants of the rules, each of which the pure tests must kill.

``python -m tests.mutants`` copies the tree, plants one fault at a time, runs the pure tests until the first failure,
and lists the survivors (exit 1). ``python -m tests.mutants 3 17`` runs only those. The recorded logs are left out: they
tell every change of a byte, and would kill what no test understands.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.mutants_of_sites import OF_SITES, Mutant

ROOT: Final = Path(__file__).parents[1]
AT_ONCE: Final = 2
SECONDS_MAX: Final = 400
RULES: Final = "streams/rules/"
AGENT: Final = "streams/rules/agent/"
TESTS: Final = (
    *(
        "test_rules_limits",
        "test_rules_backlog",
        "test_rules_order",
        "test_rules_repeats",
        "test_rules_attempts",
        "test_rules_leases",
    ),
    *("test_rules_asks", "test_rules_sites", "test_rules_folders", "test_rules_dependencies", "test_rules_site_gates"),
    *(
        "test_rules_interrupts",
        "test_rules_replies",
        "test_rules_stops",
        "test_rules_gates",
        "test_codec_routes",
        "test_codec_bad_records",
        "test_codec_rows",
    ),
)
COMMAND: Final = (
    *(sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"),
    *(f"tests/unit/{name}.py" for name in TESTS),
    *("tests/cases", "tests/model", "tests/unit/test_partition_steps.py"),
)


MUTANTS: Final = (
    *OF_SITES,
    Mutant("limit off by one", AGENT + "state.py", "self.running < limit", "self.running <= limit"),
    Mutant(
        "unlimited is one",
        AGENT + "state.py",
        'return None if self.row.parallelism_limit == "unlimited"',
        'return 1 if self.row.parallelism_limit == "unlimited"',
    ),
    Mutant("a pause starts work", AGENT + "state.py", "return self.row.paused or", "return False or"),
    Mutant("a parked agent starts work", AGENT + "state.py", " or self.row.parked is not None", ""),
    Mutant(
        "a retry loses created_at",
        AGENT + "state.py",
        "        row.available_at = available_at\n        row.on_busy",
        "        row.available_at = row.created_at = available_at\n        row.on_busy",
    ),
    Mutant(
        "a retry loses its place",
        AGENT + "state.py",
        "        row.forced = False\n",
        "        self.leave_line(row)\n        row.place, row.forced = None, False\n        self.enter_line(row)\n",
    ),
    Mutant(
        "an end keeps the slot",
        AGENT + "state.py",
        "            self.leave_slot(row)\n        self.set_mute(row, False)",
        "            pass\n        self.set_mute(row, False)",
    ),
    Mutant(
        "a pause keeps the slot",
        AGENT + "evolve.py",
        '    agent.leave_slot(row)\n    row.state = "paused"',
        '    row.state = "paused"',
    ),
    Mutant(
        "grace never ends",
        AGENT + "timers.py",
        "        if row.grace_until is not None:\n",
        "        if row.grace_until is None and False:\n",
    ),
    Mutant(
        "grace of a minute and a second",
        RULES + "limits.py",
        "STOP_GRACE_SECONDS: Final = 60",
        "STOP_GRACE_SECONDS: Final = 61",
    ),
    Mutant(
        "lease without its five minutes",
        AGENT + "pump.py",
        "(row.timeout_seconds + limits.LEASE_GRACE_SECONDS) * SECOND\n    step",
        "row.timeout_seconds * SECOND\n    step",
    ),
    Mutant(
        "lease from the agent's present default",
        AGENT + "pump.py",
        "lease_until = step.at + (row.timeout_seconds",
        "lease_until = step.at + ((agent.row.default_timeout_seconds or row.timeout_seconds)",
    ),
    Mutant(
        "a sign of life may shorten a lease",
        AGENT + "evolve.py",
        "row.lease_until = max(row.lease_until, at + ",
        "row.lease_until = max(0, at + ",
    ),
    Mutant(
        "a sign of life moves no lease",
        AGENT + "evolve.py",
        "row.lease_until = max(row.lease_until, at + ",
        "row.lease_until = max(row.lease_until, 0 * ",
    ),
    Mutant(
        "silence is never noticed",
        AGENT + "timers.py",
        "if row.heartbeat_seconds is None:\n        return row.lease_until",
        "if True:\n        return row.lease_until",
    ),
    Mutant("silence counts through an outage", AGENT + "timers.py", "silence_from or 0)", "0)"),
    Mutant(
        "a lease kept by heartbeats ends at take-over",
        AGENT + "timers.py",
        "        return silent_at  # it",
        "        pass  # it",
    ),
    Mutant(
        "resume keeps the old key",
        AGENT + "controls.py",
        "available_at=step.at, force",
        "available_at=row.available_at, force",
    ),
    Mutant(
        "backdated is accepted",
        RULES + "order.py",
        "return created, max(available, at - limits.ORDER_WINDOW_SECONDS * SECOND)",
        "return created, available",
    ),
    Mutant(
        "reschedule has no window",
        AGENT + "controls.py",
        "available_at=max(command.available_at, bound)",
        "available_at=command.available_at",
    ),
    Mutant(
        "a future created_at is available later",
        RULES + "order.py",
        "min(created, at) if available_at is None",
        "created if available_at is None",
    ),
    Mutant(
        "milliseconds only",
        RULES + "order.py",
        "return (moment - _EPOCH) // _MICROSECOND",
        "return (moment - _EPOCH) // _MICROSECOND // 1000 * 1000",
    ),
    Mutant(
        "order without created_at",
        RULES + "order.py",
        "return OrderKey(available_at, created_at, trigger_id.encode())",
        "return OrderKey(available_at, 0, trigger_id.encode())",
    ),
    Mutant("times outside of the calendar", RULES + "order.py", ".astimezone(UTC)  # fails", "  # fails"),
    Mutant("repeats are not noticed", AGENT + "step.py", "if known_digest == digest:", "if known_digest is True:"),
    Mutant(
        "conflicts are not noticed", AGENT + "step.py", "elif known_digest is not None:", "elif known_digest == '':"
    ),
    Mutant(
        "late before repeated",
        AGENT + "step.py",
        "if known_digest == digest:",
        "if known_digest == digest and not (decide_before and step.at >= decide_before):",
    ),
    Mutant(
        "the deadline itself is in time", AGENT + "step.py", "step.at >= decide_before:", "step.at > decide_before:"
    ),
    Mutant("what came late is remembered", AGENT + "evolve.py", 'frozenset({"request_expired", ', "frozenset({"),
    Mutant("a conflict replaces the answer", AGENT + "evolve.py", ', "trigger_id_conflict"})', "})"),
    Mutant(
        "an invalid choice replaces the answer",
        AGENT + "evolve.py",
        "if refusal is not None and not known:",
        "if refusal is not None:",
    ),
    Mutant(
        "a repeat renews the memory",
        AGENT + "evolve.py",
        'if ignored is not None and ignored.reason == "duplicate":',
        "if False:",
    ),
    Mutant(
        "stops collide with controls",
        AGENT + "evolve.py",
        '"stop" if isinstance(command, Stop) else "control"',
        '"control" if isinstance(command, Stop) else "control"',
    ),
    Mutant("payloads are not compared", RULES + "messages.py", 'ignored = {"v", ', 'ignored = {"payload", "v", '),
    Mutant(
        "on_busy after the id",
        AGENT + "accept.py",
        "if command.on_busy not in ON_BUSY:",
        "if command.on_busy not in ON_BUSY and command.id not in agent.triggers:",
    ),
    Mutant(
        "a schedule may be interactive",
        RULES + "messages.py",
        "return bool(self.interactive) and self.kind not in NEVER_INTERACTIVE",
        "return bool(self.interactive)",
    ),
    Mutant(
        "ask is queued",
        AGENT + "accept.py",
        'urgent = command.effective_on_busy in ("ask", "force")',
        'urgent = command.effective_on_busy == "force"',
    ),
    Mutant("http creates agents", AGENT + "accept.py", 'elif not agent.row.created and via == "http":', "elif False:"),
    Mutant("an archived agent accepts", AGENT + "accept.py", "    elif agent.row.archived:\n", "    elif False:\n"),
    Mutant(
        "backlog off by one",
        AGENT + "accept.py",
        "len(agent.waiting) >= _backlog_depth(agent)",
        "len(agent.waiting) > _backlog_depth(agent)",
    ),
    Mutant(
        "bytes of the backlog are free",
        AGENT + "accept.py",
        "if full or agent.payload_bytes + size > limits.BACKLOG_BYTES_MAX:",
        "if full:",
    ),
    Mutant(
        "payload bytes leak", AGENT + "state.py", "self.payload_bytes -= row.payload_bytes", "self.payload_bytes -= 0"
    ),
    Mutant(
        "the youngest first",
        AGENT + "state.py",
        "keys = (keys[0] for site, keys",
        "keys = (keys[max(0, keys.bisect_left((at, at + 1, b'')) - 1)] for site, keys",
    ),
    Mutant(
        "the future starts now",
        AGENT + "state.py",
        "return oldest if oldest is not None and oldest.available_at <= at else None",
        "return oldest",
    ),
    Mutant(
        "the future takes places now",
        AGENT + "pump.py",
        "while agent.unplaced and agent.unplaced[0].available_at <= step.at:",
        "while agent.unplaced:",
    ),
    Mutant(
        "an expired one starts",
        AGENT + "pump.py",
        "if row.is_over(step.at):  # its timer",
        "if False:  # its timer",
    ),
    Mutant("nothing expires", AGENT + "timers.py", "        if row.expires_at is not None:\n", "        if False:\n"),
    Mutant("an expired reply answers", AGENT + "accept.py", "available_at <= at and not is_over", "available_at <= at"),
    Mutant("any trigger is a reply", AGENT + "accept.py", "is_reply = command.is_interactive and", "is_reply ="),
    Mutant(
        "a future trigger is a reply",
        AGENT + "accept.py",
        "is_reply = command.is_interactive and available_at <= at and",
        "is_reply = command.is_interactive and",
    ),
    Mutant("steps without bound", AGENT + "step.py", "if self.changes_left == 0:", "if self.changes_left == -1000000:"),
    Mutant("steps of fifty-one", RULES + "limits.py", "STEP_CHANGES_MAX: Final = 50", "STEP_CHANGES_MAX: Final = 51"),
    Mutant(
        "left-over work waits for a timer",
        "streams/partition.py",
        "        self._work_off(now)\n        try:\n            self._handle",
        "        try:\n            self._handle",
    ),
    Mutant(
        "left-over work is forgotten by a restart",
        "streams/partition.py",
        "                self._unfinished[agent.agent_id] = None\n        self._timers.rebuild",
        "                pass\n        self._timers.rebuild",
    ),
    Mutant(
        "the position is one behind",
        "streams/partition.py",
        "self.positions[record.topic] = record.offset + 1",
        "self.positions[record.topic] = record.offset",
    ),
    Mutant(
        "time goes back", "streams/partition.py", "at = max(now, self.at, command.at if", "at = max(now, command.at if"
    ),
    Mutant("texts are kept", "streams/partition.py", "if self._texts.pop(text_key, None) is not None:", "if False:"),
    Mutant(
        "the default limit is not stamped",
        "streams/partition.py",
        "if self._uses_default_limit(agent, command):",
        "if False:",
    ),
    Mutant(
        "timers in order of time only",
        "streams/timers.py",
        "due.sort(key=lambda item: (item[1].rank, item[1].at,",
        "due.sort(key=lambda item: (item[1].at,",
    ),
    Mutant(
        "parked timers are lost",
        "streams/timers.py",
        "self._parked.setdefault(agent.agent_id, []).append(deadline)",
        "pass",
    ),
    Mutant("a wake-up is lost by a restart", AGENT + "state.py", "or row.trigger_id == may_start", ""),
    Mutant(
        "holders in the order of rows",
        AGENT + "state.py",
        "key=lambda item: _dispatch_order(item[0])",
        "key=lambda item: item[0][::-1]",
    ),
    Mutant(
        "slots are numbered on",
        AGENT + "state.py",
        "return self.free_slots[0] if self.free_slots else self.highest_slot + 1",
        "return self.highest_slot + 1",
    ),
    Mutant(
        "one attempt too many",
        AGENT + "decide.py",
        "command.retryable is False or failures >= row.max_attempts",
        "command.retryable is False or failures > row.max_attempts",
    ),
    Mutant("what can't be retried is", AGENT + "decide.py", "final = command.retryable is False or", "final ="),
    Mutant(
        "a lost attempt costs nothing",
        AGENT + "decide.py",
        "failures = row.failures + (0 if absent else 1)",
        "failures = row.failures",
    ),
    Mutant("absences count", AGENT + "decide.py", "absent = timer.last_seen_at is None and", "absent = False and"),
    Mutant("absences without end", RULES + "limits.py", "ABSENCES_MAX: Final = 10", "ABSENCES_MAX: Final = 11"),
    Mutant("the backoff doubles from the second", RULES + "backoff.py", "max(failures - 1, 0)", "max(failures - 2, 0)"),
    Mutant(
        "the backoff has no cap",
        RULES + "backoff.py",
        "min(limits.BACKOFF_BASE_SECONDS << doublings, limits.BACKOFF_CAP_SECONDS)",
        "limits.BACKOFF_BASE_SECONDS << doublings",
    ),
    Mutant("no jitter", RULES + "backoff.py", "_JITTER_SHARE: Final = 0.1", "_JITTER_SHARE: Final = 0.0"),
    Mutant(
        "an old attempt's word counts",
        AGENT + "decide.py",
        "        step.ignored = _no_attempt(agent, command, command.execution_id)\n",
        "        if (it := agent.head(command.conversation_id)) and it.state == 'running':\n            return it\n",
    ),
    Mutant(
        "a status at the instant of the dispatch counts",
        AGENT + "decide.py",
        "head.dispatched_at >= command.at:",
        "head.dispatched_at > command.at:",
    ),
    Mutant(
        "a stopping attempt is retried",
        AGENT + "decide.py",
        'case "paused" | "failed" | "stopped" if row.grace_until is not None:',
        'case "paused" | "stopped" if row.grace_until is not None:',
    ),
    Mutant(
        "a stopping lease is retried",
        AGENT + "decide.py",
        '    if row.grace_until is not None:\n        final = "stopped"',
        '    if False:\n        final = "stopped"',
    ),
    Mutant(
        "the runner is not told of the stop",
        AGENT + "step.py",
        "    step.outputs.append(\n        dispatches.StopRequest(",
        "    [].append(\n        dispatches.StopRequest(",
    ),
    Mutant(
        "the runner is not told of the lease",
        AGENT + "decide.py",
        '    _revoke(step, row, "lease expired")',
        "    pass",
    ),
    Mutant(
        "stopping a conversation leaves one",
        AGENT + "controls.py",
        "for trigger_id in ids:\n        if agent",
        "for trigger_id in ids[:-1] or ids:\n        if agent",
    ),
    Mutant(
        "archiving leaves the paused",
        AGENT + "controls.py",
        "if row.grace_until is None]",
        "if row.grace_until is None and row.state == 'running']",
    ),
    Mutant("a revival is not noted", AGENT + "controls.py", "        step.emit(events.Revived())", "        pass"),
    Mutant(
        "raising the limit starts nobody",
        AGENT + "decide.py",
        "or (step.emitted and not isinstance(command, Park)):",
        "or (step.emitted and not isinstance(command, Park | Configure)):",
    ),
    Mutant(
        "resume starts nobody",
        AGENT + "decide.py",
        "or (step.emitted and not isinstance(command, Park)):",
        "or (step.emitted and not isinstance(command, Park | Resume)):",
    ),
    Mutant(
        "ids are forgotten a day early",
        RULES + "limits.py",
        "REMEMBERED_SECONDS: Final = 7 * 24",
        "REMEMBERED_SECONDS: Final = 6 * 24",
    ),
    Mutant(
        "forgetting in the order of memory", AGENT + "decide.py", "return sorted(found)[:count]", "return found[:count]"
    ),
    Mutant(
        "conversations are kept for ever",
        AGENT + "evolve.py",
        "        del agent.conversations[conversation_id]\n",
        "        pass\n",
    ),
    Mutant(
        "who becomes available late is overtaken",
        AGENT + "accept.py",
        "taken + len(starting) >= limit",
        "taken >= limit",
    ),
    Mutant(
        "re-keyed for ever",
        "streams/codec.py",
        "if any(name == ORIGIN_HEADER for name, _ in record.headers):",
        "if False:",
    ),
    Mutant(
        "the key is not looked at",
        "streams/codec.py",
        "if record.key is None or record.partition != partition:",
        "if record.partition != partition:",
    ),
    Mutant("what is too large is read", "streams/codec.py", "if size > limits.RECORD_BYTES_MAX:", "if False:"),
    Mutant("the API's mark is not read", "streams/codec.py", 'value == b"http" for', 'value == b"" for'),
)


def main(chosen: list[int]) -> int:
    numbers = chosen or list(range(len(MUTANTS)))
    survivors = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(AT_ONCE) as pool:
        for number, killer, seconds in pool.map(lambda number: _try(Path(directory), number), numbers):
            fault = MUTANTS[number].fault
            _say(f"{number:3} {'killed' if killer else 'SURVIVED':8} {seconds:5.1f} s  {fault}: {killer or ''}")
            if not killer:
                survivors.append(fault)
    _say(f"{len(numbers) - len(survivors)} killed, {len(survivors)} survived" + "".join(f"\n  {s}" for s in survivors))
    return 1 if survivors else 0


def _try(directory: Path, number: int) -> tuple[int, str | None, float]:
    tree = directory / str(number)
    _plant(tree, MUTANTS[number])
    begun = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            COMMAND, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return number, "it never ended", time.monotonic() - begun
    killer = None
    if done.returncode != 0:
        found = re.search(r"^(?:FAILED|ERROR) \S*?/(\S+)", done.stdout, re.MULTILINE)
        killer = found.group(1) if found else done.stdout[-300:] + done.stderr[-300:]
    shutil.rmtree(tree)
    return number, killer, time.monotonic() - begun


def _plant(tree: Path, mutant: Mutant) -> None:
    tree.mkdir()
    for name in ("streams", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    for name in ("api", "projections", "docs", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    file = tree / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.fault}: {mutant.file} has the planted line {text.count(mutant.old)} times")
    file.write_text(text.replace(mutant.old, mutant.new))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
