"""Planted faults of asks, claims, sites, dependencies and budgets; the letters are those of the site protocol."""

from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """``old`` is one place of the file."""

    fault: str
    file: str
    old: str
    new: str


STATE: Final = "streams/rules/agent/state.py"
PUMP: Final = "streams/rules/agent/pump.py"
EVOLVE: Final = "streams/rules/agent/evolve.py"
ACCEPT: Final = "streams/rules/agent/accept.py"
ANSWERS: Final = "streams/rules/agent/answers.py"
CONTROLS: Final = "streams/rules/agent/controls.py"
DECIDE: Final = "streams/rules/agent/decide.py"
STEP: Final = "streams/rules/agent/step.py"
TIMERS: Final = "streams/rules/agent/timers.py"
ROWS: Final = "streams/rules/agent/rows.py"
SITE_STATE: Final = "streams/rules/site/state.py"
SITE_DECIDE: Final = "streams/rules/site/decide.py"
SITE_EVOLVE: Final = "streams/rules/site/evolve.py"
FOREST: Final = "streams/rules/site/forest.py"

OF_SITES: Final = (
    Mutant(
        "a late grant of a full agent is kept", PUMP, "for key in list(agent.held):", "for key in list(agent.held)[:0]:"
    ),
    Mutant("a late grant is always returned", PUMP, "row.late >= limits.LATE_GRANTS_MAX", "row.late < 0"),
    Mutant("any often-returned grant is held", PUMP, "if key == oldest and row.late", "if row.late"),
    Mutant("folders: ancestors forgotten", FOREST, "and not self.is_held and (own", "and (own"),
    Mutant(
        "folders: descendants forgotten", FOREST, "and not self.held_below and (old", "and not self.is_held and (old"
    ),
    Mutant(
        "folders by prefix of the text",
        "streams/rules/folders.py",
        'part for part in composed.split("/")',
        "part for part in (composed[1:],)",
    ),
    Mutant("a stop does not withdraw the claim", CONTROLS, 'end_claim(step, row, "stop")', "pass"),
    Mutant(
        "no claim numbers",
        ANSWERS,
        "row is not None and row.claim_n == answer.n and row.claim_state in",
        "row is not None and row.claim_state in",
    ),
    Mutant("the site ignores numbers", SITE_DECIDE, "if claim is None or claim.n != command.n:", "if claim is None:"),
    Mutant("a failed attempt keeps what it had", DECIDE, 'end_claim(step, row, "failed")', "pass"),
    Mutant("a finished attempt keeps what it had", DECIDE, 'end_claim(step, row, "finished")', "pass"),
    Mutant("a lost attempt keeps what it had", DECIDE, 'end_claim(step, row, "lease_expired")', "pass"),
    Mutant("a paused attempt keeps what it had", DECIDE, 'end_claim(step, row, "paused")', "pass"),
    Mutant(
        "reservations are nothing",
        STATE,
        "self.running + int(self.asking.bisect_left(key)) < limit",
        "self.running < limit",
    ),
    Mutant(
        "younger reservations count", STATE, "int(self.asking.bisect_left(key)) < limit", "len(self.asking) < limit"
    ),
    Mutant(
        "force passes a serial agent",
        STATE,
        "return not self.is_serial and limit is not None",
        "return limit is not None",
    ),
    Mutant("an ask waits at the site", SITE_DECIDE, "if not command.ask:", "if True:"),
    Mutant(
        "often-passed claims block nobody",
        SITE_EVOLVE,
        "if passed.passed == limits.CLAIM_PASSES_MAX and",
        "if False and",
    ),
    Mutant("the site grants by ids", SITE_STATE, "ClaimKey(claim.available_at, claim.created_at,", "ClaimKey(0, 0,"),
    Mutant("a slot stays reserved after waiting", EVOLVE, 'row.claim_state = "standing"', 'row.claim_state = "asking"'),
    Mutant(
        "what is given back stays at the site",
        STEP,
        "    step.messages.append(\n        Release(",
        "    [].append(\n        Release(",
    ),
    Mutant(
        "pool counted only for claims with a folder",
        SITE_STATE,
        "self.pool_used += claim.worker",
        "self.pool_used += claim.worker and claim.path is not None",
    ),
    Mutant(
        "the pool has one more", SITE_STATE, "self.pool_used < self.row.capacity", "self.pool_used <= self.row.capacity"
    ),
    Mutant(
        "an unknown site grants",
        SITE_STATE,
        "return self.row.created and not self.row.paused",
        "return not self.row.paused",
    ),
    Mutant("closing a gate recalls nothing", SITE_DECIDE, "elif site.recalls(walk):", "elif False:"),
    Mutant(
        "a gate with a used-up budget is not closed",
        SITE_DECIDE,
        " != was_open or enabled != was_enabled:",
        " != was_open:",
    ),
    Mutant("a used-up budget recalls what used it", SITE_STATE, "walk[2])).enabled", "walk[2])).is_open"),
    Mutant("a pause keeps the claims", PUMP, "while agent.claimed:", "while False:"),
    Mutant(
        "gated often-passed claims still block",
        SITE_STATE,
        "self.forest.leave(place, key_of(claim), claim.worker, claim.passed >= limits.CLAIM_PASSES_MAX)",
        "self.forest.leave(place, key_of(claim), claim.worker, False)",
    ),
    Mutant(
        "a forced trigger skips the site",
        PUMP,
        'if row.site_id is None or row.claim_state == "held":',
        'if row.site_id is None or row.claim_state == "held" or row.on_busy == "force":',
    ),
    Mutant(
        "a recall frees a running attempt",
        ANSWERS,
        'row.claim_n == answer.n and row.claim_state == "held":',
        "row.claim_n == answer.n:",
    ),
    Mutant("a reservation never lapses", TIMERS, 'if row.claim_state == "asking":', "if False:"),
    Mutant(
        "a mute site is asked on", STATE, "in self.ready.items() if site not in self.mute)", "in self.ready.items())"
    ),
    Mutant("mute for ever", EVOLVE, "    agent.set_mute(row, False)\n", ""),
    Mutant("(a) nobody is counted", SITE_EVOLVE, "passed.passed += 1", "passed.passed += 0"),
    Mutant("(a) the younger one is counted", SITE_DECIDE, "oldest < key_of(claim)", "oldest > key_of(claim)"),
    Mutant("(b) force without its own limit", STATE, "and self.forced_running < limit", ""),
    Mutant("(b) force waits when it may not start", PUMP, "        if not agent.urgent:\n", "        if True:\n"),
    Mutant(
        "(b) force stays force at a retry",
        EVOLVE,
        'agent.wait_again(row, event.retry_at, "queue", origin.at)',
        'agent.wait_again(row, event.retry_at, "force", origin.at)',
    ),
    Mutant(
        "(b) force ignores a pause",
        ACCEPT,
        "    if agent.row.paused:\n",
        "    if agent.row.paused and command.on_busy != 'force':\n",
    ),
    Mutant("(b) forced starts are not marked", PUMP, "forced = not agent.has_room", "forced = False"),
    Mutant("(c) an interrupt comes last", PUMP, "place=(0 if comes_next else 1,", "place=(1,"),
    Mutant("(c) an interrupt stops nobody", PUMP, "if comes_next and head.grace_until is None:", "if False:"),
    Mutant("(c) an interrupt that is over stops", PUMP, " and not row.is_over(step.at)\n", "\n"),
    Mutant("a reply is one before its site says so", ACCEPT, "and not (urgent and uses_site):", "and True:"),
    Mutant("a reply that starts leaves the paused one", PUMP, "if row.is_urgent else None\n", "if False else None\n"),
    Mutant("a reply that asks stands behind the paused one", PUMP, 'comes_next = head.state == "paused"', "pass"),
    Mutant("(e) a late grant starts", PUMP, "row.decide_before <= step.at:", "False:"),
    Mutant(
        "what waits for a site is not bounded", ACCEPT, "if (reason is not None or uses_site)", "if reason is not None"
    ),
    Mutant("approved before it failed", EVOLVE, 'event.outcome not in ("failed", "stopped")', "True"),
    Mutant("what is forgotten is told to nobody", EVOLVE, "        agent.conversation_changed(conversation_id)\n", ""),
    Mutant("a parked agent forgets what it had to stop", DECIDE, "elif isinstance(step.command, Continue):", "else:"),
    Mutant("unparked, it starts who was to be stopped", PUMP, " or not isinstance(step.command, Continue))", ")"),
    Mutant(
        "a late repeat of a site's control is late",
        SITE_DECIDE,
        "if remembered is not None and remembered.digest",
        "if command.decide_before is None and remembered is not None and remembered.digest",
    ),
    Mutant("anybody holds what is waited for", SITE_STATE, 'if reason == "site_workers_busy":', "if claim.worker:"),
    Mutant("nobody inherits a class", ACCEPT, "return parent.execution_class if", "return None if"),
    Mutant(
        "(c) an ask waits behind its conversation",
        ACCEPT,
        '    if behind:\n        return "conversation_busy"',
        '    if False:\n        return "conversation_busy"',
    ),
    Mutant("(e) decide_before ignored", TIMERS, "if row.is_urgent and row.decide_before is not None:", "if False:"),
    Mutant("(e) decide_before forgets the claim", DECIDE, 'end_claim(step, row, "site_not_answering")', "pass"),
    Mutant(
        "(f) grants go on beside a walk",
        SITE_DECIDE,
        "while _walk(step) and (claim",
        "while (_walk(step) or True) and (claim",
    ),
    Mutant(
        "(f) a walk forgets the rest",
        SITE_DECIDE,
        "        if step.parked_left == 0:\n            step.more = True\n            return False\n",
        "",
    ),
    Mutant(
        "a deletion forgets who came in its instant",
        SITE_STATE,
        "claim.accepted_at <= one.deleted_at",
        "claim.accepted_at < one.deleted_at",
    ),
    Mutant(
        "a deletion takes running folders",
        SITE_DECIDE,
        "if claim.granted or not site.is_deleted(claim):",
        "if not site.is_deleted(claim):",
    ),
    Mutant("a site's budget is not given back", SITE_EVOLVE, "if claim.granted and not event.started:", "if False:"),
    Mutant(
        "a site's budget is given back after a run",
        SITE_EVOLVE,
        "if claim.granted and not event.started:",
        "if claim.granted:",
    ),
    Mutant("the agent's budget is not spent", EVOLVE, "agent.row.run_budget -= 1", "agent.row.run_budget -= 0"),
    Mutant(
        "claims reserve no budget",
        STATE,
        "self.row.run_budget > len(self.held) + len(self.asking)",
        "self.row.run_budget > 0",
    ),
    Mutant(
        "an ask takes the last of a budget",
        ACCEPT,
        "len(agent.asking) + len(starting) >= budget",
        "len(agent.asking) >= budget",
    ),
    Mutant("a serial agent keeps its limit", CONTROLS, '        after["parallelism_limit"] = 1\n', "        pass\n"),
    Mutant("approval makes up for what nobody heard of", ROWS, ' and outcome in ("failed", "stopped"))', ")"),
    Mutant(
        "the agent's environment is not taken",
        ACCEPT,
        "command.environment_id or agent.row.default_environment_id",
        "command.environment_id",
    ),
    Mutant("watchers that know are kept", STATE, 'if outcome == "finished":', "if False:"),
    Mutant("watchers are told once only", STATE, "if row.told == standing:", 'if row.told != "nothing":'),
    Mutant("a reply may lose its conversation to an older one", ACCEPT, "or row.conversation_id == replied", ""),
)
