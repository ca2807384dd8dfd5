"""Planted faults of asks, claims, sites, dependencies and budgets; the letters are those of the site protocol."""

from typing import Final, NamedTuple


class Edit(NamedTuple):
    """``old`` is one place of the file."""

    file: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A fault and the line that makes it; ``also``: what must change with it, or it would only crash."""

    fault: str
    file: str
    old: str
    new: str
    also: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        return Edit(self.file, self.old, self.new), *self.also


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
        "self.running + starting + int(self.asking.bisect_left(key)) < limit",
        "self.running + starting < limit",
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
    Mutant("a mute site is asked on", STATE, "if keys and site not in self.mute and (oldest", "if keys and (oldest"),
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
    Mutant("(e) a late grant starts", PUMP, "row.answer_until <= step.at:", "False:"),
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
    Mutant("(e) decide_before ignored", TIMERS, "if row.answer_until is not None:", "if False:"),
    Mutant("(e) decide_before binds a resume", ROWS, "if self.is_urgent and self.attempt == 0", "if self.is_urgent"),
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
        "budget > len(self.held) + len(self.asking) + starting",
        "self.row.run_budget > 0",
    ),
    Mutant(
        "an ask takes the last of a budget",
        ACCEPT,
        "agent.has_budget(len(starting))",
        "agent.budget_left",
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
    Mutant("who has ended is watched for", STEP, "            self._unwatch(row, sender)", "            pass"),
    Mutant(
        "only who waited is watched for no more",
        STEP,
        "sender = self.sender() if row is not None and row.depends_on else None",
        'sender = self.sender() if row is not None and row.depends_on and row.state == "waiting" else None',
    ),
    Mutant(
        "words to other agents without bound",
        STEP,
        "self.changes_left = max(0, self.changes_left - 1)",
        "pass",
    ),
    Mutant(
        "a failed dependency is watched on",
        ROWS,
        'strict=True) if outcome != "finished"]',
        'strict=True) if outcome in (None, "unknown")]',
    ),
    Mutant(
        "one that ends takes the others' watches along",
        STATE,
        "        watchers = self.watches[conversation_id]\n        del watchers[watcher]\n",
        "        watchers = self.watches[conversation_id]\n        watchers.clear()\n",
    ),
    Mutant(
        "an unwatch of nobody fails",
        ANSWERS,
        "if watcher not in step.agent.watches.get(command.conversation_id, {}):",
        "if False:",
    ),
    Mutant(
        "a claim's number may fall",
        SITE_DECIDE,
        "if command.n <= known.n:",
        "if command.n == known.n:",
    ),
    Mutant(
        "a newer claim ends no older one",
        SITE_DECIDE,
        "if command.n <= known.n:",
        "if command.n:",
    ),
    Mutant(
        "a release that was given up gives the budget back",
        SITE_DECIDE,
        "n=known.n, started=known.granted",
        "n=known.n, started=False",
    ),
    Mutant("watchers are told once only", STATE, "if row.told == standing:", 'if row.told != "nothing":'),
    Mutant("a reply may lose its conversation to an older one", ACCEPT, "or row.conversation_id == replied", ""),
    Mutant(
        "what asks is not withdrawn",
        STEP,
        "    if row.claim_n is None or row.site_id is None:\n",
        '    if row.claim_n is None or row.site_id is None or row.claim_state == "asking":\n',
    ),
    Mutant(
        "the site ignores numbers, the agent releases a stale grant again",
        ANSWERS,
        '        case _:\n            step.ignored = verdicts.Ignored(reason="stale")\n',
        "        case Granted():\n"
        "            from streams.rules.site_messages import Release\n"
        "            about = {'agent_id': step.agent.agent_id, 'trigger_id': answer.trigger_id, 'n': answer.n}\n"
        "            sender = step.sender()\n"
        "            step.messages.append(\n"
        "                Release(at=step.at, sender=sender, site='default', started=False, **about)\n"
        "            )\n"
        '            step.ignored = verdicts.Ignored(reason="stale")\n'
        '        case _:\n            step.ignored = verdicts.Ignored(reason="stale")\n',
        (Edit(SITE_DECIDE, "if claim is None or claim.n != command.n:", "if claim is None:"),),
    ),
    Mutant(
        "a retry keeps the old available_at",
        EVOLVE,
        'agent.wait_again(row, event.retry_at, "queue", origin.at)',
        'agent.wait_again(row, row.available_at, "queue", origin.at)',
    ),
    Mutant(
        "a reservation is trusted after the limit was lowered",
        PUMP,
        "        if key is not None and agent.room_for(key):\n",
        "        if key is not None and (agent.room_for(key) or key in agent.held):\n",
    ),
    Mutant(
        "a slot is freed, and the next not started",
        DECIDE,
        "and not isinstance(command, Park | LosePayload):",
        "or (step.emitted and not isinstance(command, Park | LosePayload | Status)):",
    ),
    Mutant(
        "a release gives nothing to the next",
        SITE_DECIDE,
        "    _give_out(step)\n    if isinstance",
        "    if not isinstance(command, Release):\n        _give_out(step)\n    if isinstance",
    ),
    Mutant(
        "a release is sent twice",
        STEP,
        "    step.messages.append(\n        Release(",
        "    (lambda message: step.messages.extend((message, message)))(\n        Release(",
    ),
    Mutant(
        "(a) every older one is counted",
        SITE_EVOLVE,
        "        passed.passed += 1\n",
        "        for one in site.claims.values():\n"
        "            one.passed += not one.granted and key_of(one) < key_of(claim)\n",
    ),
    Mutant(
        "(a) the youngest passed one is counted",
        SITE_DECIDE,
        "    oldest = site.forest.oldest_waiting(place) if place is not None else None\n",
        "    older = [key_of(one) for one in site.claims.values() if one.id in site.shown and one.path is not None]\n"
        "    older = [key for key in older if key < key_of(claim)]\n"
        "    oldest = max(older, default=None) if place is not None else None\n",
    ),
    Mutant(
        "(a) gated ones are counted too",
        SITE_DECIDE,
        "    oldest = site.forest.oldest_waiting(place) if place is not None else None\n",
        "    waiting = [key_of(one) for one in site.claims.values() if not one.granted and one.path is not None]\n"
        "    oldest = min(waiting, default=None) if place is not None else None\n",
    ),
    Mutant(
        "(b) a force claim reserves a slot",
        STATE,
        'elif row.claim_state == "asking" and row.on_busy != "force":\n                self.asking.add(key)',
        'elif row.claim_state == "asking":\n                self.asking.add(key)',
        (
            Edit(
                STATE,
                'elif row.claim_state == "asking" and row.on_busy != "force":\n                self.asking.remove(key)',
                'elif row.claim_state == "asking":\n                self.asking.remove(key)',
            ),
        ),
    ),
    Mutant(
        "(c) not only the head may act",
        STATE,
        "        return oldest if oldest is not None and oldest.available_at",
        "        rows = (self.triggers[key.id.decode()] for key in self.waiting)\n"
        "        rows = (row for row in rows if row.claim_state is None and row.place)\n"
        "        oldest = next((row.key for row in rows), oldest)\n"
        "        return oldest if oldest is not None and oldest.available_at",
    ),
    Mutant(
        "(c) the line is ordered by key",
        PUMP,
        "place=(0 if comes_next else 1, agent.row.places + 1)",
        "place=(0 if comes_next else 1, row.available_at)",
        (
            Edit(
                STATE,
                "        row.forced = False\n",
                "        row.forced = False\n"
                "        self.leave_line(row)\n"
                "        row.place = (1, available_at)\n"
                "        self.enter_line(row)\n",
            ),
        ),
    ),
    Mutant(
        "(c) a retried trigger goes to the end of its line",
        STATE,
        "        row.forced = False\n",
        "        row.forced = False\n"
        "        self.leave_line(row)\n"
        "        self.row.places += 1\n"
        "        row.place = (1, self.row.places)\n"
        "        self.enter_line(row)\n",
    ),
    Mutant(
        "(c) who waits for a person leaves the line",
        EVOLVE,
        '    row.state = "paused"\n',
        '    row.state = "paused"\n    agent.leave_line(row)\n    row.place = None\n    agent.enter_line(row)\n',
    ),
    Mutant(
        "(d) claim numbers count per trigger",
        PUMP,
        "    n = agent.row.claims + 1\n",
        "    n = row.attempt + row.late + 1\n",
        (Edit(EVOLVE, " and row.claim_state is None and event.n == agent.row.claims + 1\n", "\n"),),
    ),
    Mutant("(d) execution ids count per trigger", PUMP, "-{step.seq}-{len(step.emitted)}", "-{row.attempt + 1}-0"),
    Mutant(
        "(d) a live id is taken over by a new trigger",
        STEP,
        'live = agent.triggers.get(id) if kind == "trigger" else None',
        "live = None",
    ),
    Mutant(
        "(e) decide_before not when granted",
        PUMP,
        "if row.answer_until is not None and row.answer_until <= step.at:",
        'if row.answer_until is not None and row.answer_until <= step.at and row.claim_state != "held":',
    ),
    Mutant(
        "(f) a pause takes everything back at once",
        PUMP,
        "    while agent.claimed:\n        if not step.may_change():",
        "    while agent.claimed:\n        if False:",
    ),
    Mutant(
        "(f) a pause stops after M and forgets the rest",
        PUMP,
        "    while agent.claimed:\n        if not step.may_change():\n            return",
        "    while agent.claimed:\n        if not step.may_change():\n"
        "            step.more = False\n            return",
    ),
    Mutant(
        "(f) a gate recalls everything at once",
        SITE_DECIDE,
        "    elif site.recalls(walk):\n        if step.changes_left == 0:",
        "    elif site.recalls(walk):\n        if False:",
    ),
    Mutant(
        "(f) a gate recalls the first M only",
        SITE_DECIDE,
        "    elif site.recalls(walk):\n        if step.changes_left == 0:\n            return False",
        "    elif site.recalls(walk):\n        if step.changes_left == 0:\n            return True",
    ),
    Mutant(
        "(f) a pause blocks starts only when it is worked off",
        PUMP,
        "    if agent.held_back:\n        _withdraw(step)\n",
        "    if agent.held_back:\n        _withdraw(step)\n        step.changes_left = step.more and 1\n"
        "        step.more = step.more and _start(step)\n",
    ),
    Mutant("a resume skips admission", EVOLVE, '"force" if event.force else "queue", origin.at', '"force", origin.at'),
    Mutant(
        "a refusal changes a count",
        ACCEPT,
        "        step.refusal = refusal\n        return",
        "        step.refusal = refusal\n        agent.row.places += 1\n        return",
    ),
    Mutant(
        "who has ended within the step is told of later",
        PUMP,
        "        _tell(step)\n",
        "        pass\n",
    ),
)
