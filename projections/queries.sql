-- Every read of the projections. A query begins with "-- name:" and is followed by one sentence that says what it
-- gives; parameters are named. Lists are pages: rows after (or before) a cursor made of the columns they are ordered
-- by, at most max_rows of them. The first page's cursor: '' for an id, 0 for a number, -infinity for a time that goes
-- up, infinity for one that goes down (with '' replaced by chr(1114111), which sorts after every id).

-- name: positions
-- Next offset to be applied of every partition of every topic that the projector reads.
SELECT topic, partition, next_offset FROM checkpoints ORDER BY topic, partition;

-- name: agent
-- One agent with its settings, flags and counts; no row when it was never created.
SELECT agents.*, CASE WHEN serial THEN 1 ELSE parallelism_limit END AS max_parallel,
       (serial OR agent_type IS NOT DISTINCT FROM 'acp' OR default_environment_id IS NOT NULL) AS is_serial
  FROM agents
 WHERE agent_id = %(agent_id)s AND created;

-- name: agents_page
-- Agents by id after a cursor, all of them or only those in visible (null: all).
SELECT agents.*, CASE WHEN serial THEN 1 ELSE parallelism_limit END AS max_parallel,
       (serial OR agent_type IS NOT DISTINCT FROM 'acp' OR default_environment_id IS NOT NULL) AS is_serial
  FROM agents
 WHERE created AND agent_id > %(after_agent_id)s
   AND (%(visible)s::text[] IS NULL OR agent_id = ANY(%(visible)s::text[]))
 ORDER BY agent_id
 LIMIT %(max_rows)s;

-- name: slots_of_agents_page
-- How many slots each agent may use and uses, by id after a cursor, of all or only those in visible (null: all).
SELECT agent_id, max_parallel, running, forced, waiting, paused, available
  FROM slots_of_agents
 WHERE agent_id > %(after_agent_id)s
   AND (%(visible)s::text[] IS NULL OR agent_id = ANY(%(visible)s::text[]))
 ORDER BY agent_id
 LIMIT %(max_rows)s;

-- name: slots_of_agent
-- The running attempts of an agent by slot number, each with the first characters of its trigger's message.
SELECT slots.slot_number, slots.execution_id, slots.trigger_id, slots.conversation_id, slots.attempt, slots.forced,
       slots.dispatched_at, slots.lease_until, left(texts.content #>> '{}', 100) AS message_preview
  FROM slots
  LEFT JOIN texts ON texts.agent_id = slots.agent_id AND texts.trigger_id = slots.trigger_id
        AND texts.execution_id = '' AND texts.kind = 'message'
 WHERE slots.agent_id = %(agent_id)s
 ORDER BY slots.slot_number, slots.execution_id;

-- name: queue_page
-- An agent's waiting triggers in start order after a cursor, each with its claim and the head of its conversation, which
-- it waits for when that is another one: the running one, else the first in line.
SELECT triggers.agent_id, triggers.trigger_id, triggers.conversation_id, triggers.kind, triggers.interactive,
       triggers.on_busy, triggers.requested_by, triggers.created_at, triggers.available_at, triggers.expires_at,
       triggers.accepted_at, triggers.state_since, triggers.execution_class, triggers.priority, triggers.site,
       triggers.worker, triggers.environment_id, triggers.folder, triggers.organization_id, triggers.department_id,
       triggers.attempt, triggers.failures, triggers.max_attempts, triggers.place_rank, triggers.place_number,
       triggers.approval_required,
       triggers.approved_at, triggers.failures_approved, triggers.degraded, triggers.dependencies,
       trigger_claims.n AS claim_n, trigger_claims.state AS claim_state, trigger_claims.since AS claim_since,
       trigger_claims.asked_at AS claim_asked_at, trigger_claims.reason AS claim_reason,
       head.trigger_id AS head_trigger_id, head.state AS head_state, head.state_since AS head_state_since,
       head.execution_id AS head_execution_id
  FROM triggers
  LEFT JOIN trigger_claims ON trigger_claims.agent_id = triggers.agent_id
        AND trigger_claims.trigger_id = triggers.trigger_id
  LEFT JOIN LATERAL (
        SELECT first.*
          FROM (VALUES (0), (1)) AS ranks (rank)
         CROSS JOIN LATERAL (
               SELECT live.trigger_id, live.state, live.state_since, live.execution_id, live.place_rank
                 FROM triggers AS live
                WHERE live.agent_id = triggers.agent_id AND live.conversation_id = triggers.conversation_id
                  AND live.ended_at IS NULL AND live.place_rank = ranks.rank
                ORDER BY live.place_number
                LIMIT 1) AS first
         ORDER BY first.state <> 'running', first.place_rank
         LIMIT 1) AS head ON true
 WHERE triggers.agent_id = %(agent_id)s AND triggers.state = 'waiting'
   AND (triggers.available_at, triggers.created_at, triggers.trigger_id)
       > (%(after_available_at)s, %(after_created_at)s, %(after_trigger_id)s)
 ORDER BY triggers.available_at, triggers.created_at, triggers.trigger_id
 LIMIT %(max_rows)s;

-- name: position_in_queue
-- How many waiting triggers of the agent are before this order key, and so the position of the one that has it, less 1.
SELECT count(*) AS before
  FROM triggers
 WHERE agent_id = %(agent_id)s AND state = 'waiting'
   AND (available_at, created_at, trigger_id) < (%(available_at)s, %(created_at)s, %(trigger_id)s);

-- name: trigger
-- One trigger with everything that is stored of it, its claim, and the head of its conversation.
SELECT triggers.*, trigger_claims.n AS claim_n, trigger_claims.state AS claim_state,
       trigger_claims.since AS claim_since, trigger_claims.asked_at AS claim_asked_at,
       trigger_claims.reason AS claim_reason, head.trigger_id AS head_trigger_id, head.state AS head_state,
       head.state_since AS head_state_since, head.execution_id AS head_execution_id
  FROM triggers
  LEFT JOIN trigger_claims ON trigger_claims.agent_id = triggers.agent_id
        AND trigger_claims.trigger_id = triggers.trigger_id
  LEFT JOIN LATERAL (
        SELECT first.*
          FROM (VALUES (0), (1)) AS ranks (rank)
         CROSS JOIN LATERAL (
               SELECT live.trigger_id, live.state, live.state_since, live.execution_id, live.place_rank
                 FROM triggers AS live
                WHERE live.agent_id = triggers.agent_id AND live.conversation_id = triggers.conversation_id
                  AND live.ended_at IS NULL AND live.place_rank = ranks.rank
                ORDER BY live.place_number
                LIMIT 1) AS first
         ORDER BY first.state <> 'running', first.place_rank
         LIMIT 1) AS head ON true
 WHERE triggers.agent_id = %(agent_id)s AND triggers.trigger_id = %(trigger_id)s;

-- name: slot_holders
-- Who holds the agent's slots, the oldest first, and when the newest of all was taken.
SELECT trigger_id, conversation_id, execution_id, dispatched_at, max(dispatched_at) OVER () AS newest_at
  FROM attempts
 WHERE agent_id = %(agent_id)s AND ended_at IS NULL
 ORDER BY dispatched_at, trigger_id
 LIMIT %(max_rows)s;

-- name: reservations
-- Claims of the agent that reserve a slot (asking) or hold a grant and none yet (held), in the start order of triggers.
SELECT triggers.trigger_id, triggers.conversation_id, triggers.available_at, triggers.created_at, trigger_claims.state,
       trigger_claims.since
  FROM trigger_claims
  JOIN triggers ON triggers.agent_id = trigger_claims.agent_id AND triggers.trigger_id = trigger_claims.trigger_id
 WHERE trigger_claims.agent_id = %(agent_id)s
   AND (trigger_claims.state = 'asking' AND trigger_claims.reserves OR trigger_claims.state = 'held')
 ORDER BY triggers.available_at, triggers.created_at, triggers.trigger_id
 LIMIT %(max_rows)s;

-- name: sites_not_answering
-- Sites that owe the agent an answer past its time, and since when: it asks nothing more of them.
SELECT DISTINCT ON (trigger_claims.site) trigger_claims.site, trigger_claims.trigger_id, triggers.conversation_id, since
  FROM trigger_claims
  JOIN triggers ON triggers.agent_id = trigger_claims.agent_id AND triggers.trigger_id = trigger_claims.trigger_id
 WHERE trigger_claims.agent_id = %(agent_id)s AND reason = 'site_not_answering'
 ORDER BY trigger_claims.site, trigger_claims.n;

-- name: unmet_dependencies
-- What triggers of an agent depend on that has not finished, as it was told last; lives_since: when the oldest trigger was
-- received that lives in that conversation.
SELECT trigger_id, dependency_agent_id, dependency_conversation_id, outcome, told_at,
       (SELECT min(live.accepted_at)
          FROM triggers AS live
         WHERE live.agent_id = dependency_agent_id AND live.conversation_id = dependency_conversation_id
           AND live.ended_at IS NULL) AS lives_since
  FROM dependencies
 WHERE agent_id = %(agent_id)s AND trigger_id = ANY(%(trigger_ids)s::text[]) AND outcome IS DISTINCT FROM 'finished'
 ORDER BY trigger_id, position;

-- name: dependencies_of_trigger
-- What a live trigger depends on, in its order.
SELECT dependency_agent_id, dependency_conversation_id, outcome, told_at
  FROM dependencies
 WHERE agent_id = %(agent_id)s AND trigger_id = %(trigger_id)s
 ORDER BY position;

-- name: is_in_dependency_cycle
-- Whether a trigger waits for its own conversation, by way of what waits in those it depends on and so on, as far as
-- 1,000 of them tell.
WITH RECURSIVE waits (agent_id, conversation_id) AS (
        SELECT dependency_agent_id, dependency_conversation_id
          FROM dependencies
         WHERE agent_id = %(agent_id)s AND trigger_id = %(trigger_id)s AND outcome IS NULL
    UNION
        SELECT further.dependency_agent_id, further.dependency_conversation_id
          FROM waits
          JOIN triggers AS live ON live.agent_id = waits.agent_id AND live.conversation_id = waits.conversation_id
               AND live.ended_at IS NULL
          JOIN dependencies AS further ON further.agent_id = live.agent_id AND further.trigger_id = live.trigger_id
         WHERE further.outcome IS NULL AND live.place_rank IS NULL)
SELECT EXISTS (
        SELECT FROM (SELECT * FROM waits LIMIT 1000) AS met
         WHERE agent_id = %(agent_id)s AND conversation_id = %(conversation_id)s) AS is_in_cycle;

-- name: attempts_of_trigger
-- The attempts of a trigger, oldest first.
SELECT execution_id, attempt, slot_number, forced, dispatched_at, dispatched_seq, lease_until, ended_at, ended_seq,
       outcome, phase, last_seen_at, retry_at
  FROM attempts
 WHERE agent_id = %(agent_id)s AND trigger_id = %(trigger_id)s
 ORDER BY dispatched_seq, execution_id;

-- name: texts_of_trigger
-- The texts that are still kept of a trigger: its message, and errors and results of its attempts.
SELECT execution_id, kind, content, truncated, written_at
  FROM texts
 WHERE agent_id = %(agent_id)s AND trigger_id = %(trigger_id)s
 ORDER BY execution_id, kind;

-- name: decisions_of_id_page
-- The decisions that name an id (of a trigger or of a command) of an agent, oldest first after a cursor: a timeline.
SELECT decisions.seq, decisions.decided_at, decisions.log_partition, decisions.log_offset, decisions.command_type,
       decisions.command_id, decisions.settles, decisions.refusal_code, decisions.ignored_reason, decisions.record
  FROM decision_ids
  JOIN decisions ON decisions.agent_id = decision_ids.agent_id AND decisions.seq = decision_ids.seq
 WHERE decision_ids.agent_id = %(agent_id)s AND decision_ids.id = %(id)s AND decision_ids.seq > %(after_seq)s
 ORDER BY decision_ids.seq
 LIMIT %(max_rows)s;

-- name: decisions_of_agent_page
-- The decisions of an agent, oldest first after a cursor.
SELECT seq, decided_at, log_partition, log_offset, command_type, command_id, settles, refusal_code, ignored_reason,
       record
  FROM decisions
 WHERE agent_id = %(agent_id)s AND seq > %(after_seq)s
 ORDER BY seq
 LIMIT %(max_rows)s;

-- name: conversation
-- One conversation with its state, which is that of its newest live trigger, else its last outcome.
SELECT *
  FROM conversation_states
 WHERE agent_id = %(agent_id)s AND conversation_id = %(conversation_id)s;

-- name: triggers_of_conversation_page
-- The triggers of a conversation, newest first before a cursor.
SELECT trigger_id, state, state_since, kind, interactive, requested_by, created_at, available_at, accepted_at,
       place_rank, place_number, attempt, failures, execution_id, ended_at, end_reason, replied_by
  FROM triggers
 WHERE agent_id = %(agent_id)s AND conversation_id = %(conversation_id)s
   AND (accepted_at, trigger_id) < (%(before_accepted_at)s, %(before_trigger_id)s)
 ORDER BY accepted_at DESC, trigger_id DESC
 LIMIT %(max_rows)s;

-- name: triggers_of_agents_page
-- Triggers of some agents, newest first before a cursor, with a state, kind and organization (null: any).
SELECT page.*
  FROM unnest(%(agent_ids)s::text[]) AS wanted (agent_id)
 CROSS JOIN LATERAL (
        SELECT agent_id, trigger_id, conversation_id, state, state_since, kind, interactive, requested_by, created_at,
               available_at, accepted_at, organization_id, department_id, attempt, failures, execution_id, ended_at,
               end_reason
          FROM triggers
         WHERE triggers.agent_id = wanted.agent_id COLLATE "C"
           AND accepted_at >= %(since)s AND accepted_at <= %(before_accepted_at)s
           AND (accepted_at, triggers.agent_id, trigger_id)
               < (%(before_accepted_at)s, %(before_agent_id)s, %(before_trigger_id)s)
           AND (%(state)s::text IS NULL OR state = %(state)s)
           AND (%(kind)s::text IS NULL OR kind = %(kind)s)
           AND (%(organization_id)s::text IS NULL OR organization_id = %(organization_id)s)
         ORDER BY accepted_at DESC, trigger_id DESC
         LIMIT %(max_rows)s) AS page
 ORDER BY accepted_at DESC, agent_id DESC, trigger_id DESC
 LIMIT %(max_rows)s;

-- name: triggers_of_organization_page
-- Triggers of an organization, newest first before a cursor, with a state and kind (null: any).
SELECT agent_id, trigger_id, conversation_id, state, state_since, kind, interactive, requested_by, created_at,
       available_at, accepted_at, organization_id, department_id, attempt, failures, execution_id, ended_at, end_reason
  FROM triggers
 WHERE organization_id = %(organization_id)s
   AND accepted_at >= %(since)s
   AND (accepted_at, agent_id, trigger_id) < (%(before_accepted_at)s, %(before_agent_id)s, %(before_trigger_id)s)
   AND (%(state)s::text IS NULL OR state = %(state)s)
   AND (%(kind)s::text IS NULL OR kind = %(kind)s)
 ORDER BY accepted_at DESC, agent_id DESC, trigger_id DESC
 LIMIT %(max_rows)s;

-- name: triggers_in_state_page
-- Triggers in a state, newest first before a cursor, of a kind (null: any).
SELECT agent_id, trigger_id, conversation_id, state, state_since, kind, interactive, requested_by, created_at,
       available_at, accepted_at, organization_id, department_id, attempt, failures, execution_id, ended_at, end_reason
  FROM triggers
 WHERE state = %(state)s
   AND accepted_at >= %(since)s
   AND (accepted_at, agent_id, trigger_id) < (%(before_accepted_at)s, %(before_agent_id)s, %(before_trigger_id)s)
   AND (%(kind)s::text IS NULL OR kind = %(kind)s)
 ORDER BY accepted_at DESC, agent_id DESC, trigger_id DESC
 LIMIT %(max_rows)s;

-- name: triggers_of_kind_page
-- Triggers of a kind, newest first before a cursor.
SELECT agent_id, trigger_id, conversation_id, state, state_since, kind, interactive, requested_by, created_at,
       available_at, accepted_at, organization_id, department_id, attempt, failures, execution_id, ended_at, end_reason
  FROM triggers
 WHERE kind = %(kind)s
   AND accepted_at >= %(since)s
   AND (accepted_at, agent_id, trigger_id) < (%(before_accepted_at)s, %(before_agent_id)s, %(before_trigger_id)s)
 ORDER BY accepted_at DESC, agent_id DESC, trigger_id DESC
 LIMIT %(max_rows)s;

-- name: triggers_page
-- All triggers, newest first before a cursor.
SELECT agent_id, trigger_id, conversation_id, state, state_since, kind, interactive, requested_by, created_at,
       available_at, accepted_at, organization_id, department_id, attempt, failures, execution_id, ended_at, end_reason
  FROM triggers
 WHERE accepted_at >= %(since)s
   AND (accepted_at, agent_id, trigger_id) < (%(before_accepted_at)s, %(before_agent_id)s, %(before_trigger_id)s)
 ORDER BY accepted_at DESC, agent_id DESC, trigger_id DESC
 LIMIT %(max_rows)s;

-- name: site
-- One site with its counts: drained when it is paused and nothing is granted any more.
SELECT sites.*, (paused AND granted = 0) AS drained
  FROM sites
 WHERE site = %(site)s;

-- name: sites_page
-- Sites by id after a cursor, all of them or only those in visible (null: all).
SELECT sites.*, (paused AND granted = 0) AS drained
  FROM sites
 WHERE site > %(after_site)s AND (%(visible)s::text[] IS NULL OR site = ANY(%(visible)s::text[]))
 ORDER BY site
 LIMIT %(max_rows)s;

-- name: sites_by_id
-- Some sites.
SELECT sites.*
  FROM sites
 WHERE site = ANY(%(sites)s::text[]);

-- name: site_gate
-- One gate of a site; no row: it was never changed, is enabled, and has no budget.
SELECT scope, name, enabled, disabled_at, run_budget, run_budget_at, granted, drained
  FROM site_gate_states
 WHERE site = %(site)s AND scope = %(scope)s AND name = %(gate_name)s;

-- name: site_gates_page
-- The gates of a site that were ever changed, by scope and name after a cursor.
SELECT scope, name, enabled, disabled_at, run_budget, run_budget_at, granted, drained
  FROM site_gate_states
 WHERE site = %(site)s AND (scope, name) > (%(after_scope)s, %(after_name)s)
 ORDER BY scope, name
 LIMIT %(max_rows)s;

-- name: site_waiting_page
-- Claims that wait at a site, in start order after a cursor.
SELECT agent_id, trigger_id, opened_at, available_at, created_at, worker, environment_id, path, organization_id,
       department_id, passed, blocks_since
  FROM site_claims
 WHERE site = %(site)s AND granted_at IS NULL
   AND (available_at, created_at, trigger_id, agent_id)
       > (%(after_available_at)s, %(after_created_at)s, %(after_trigger_id)s, %(after_agent_id)s)
 ORDER BY available_at, created_at, trigger_id, agent_id
 LIMIT %(max_rows)s;

-- name: site_granted_page
-- Claims that are granted at a site, the oldest grant first after a cursor: the workers and folders that are held, and by
-- whom; execution_id is null before the attempt has started, as far as the agent's decisions are projected.
SELECT site_claims.agent_id, site_claims.trigger_id, granted_at, site_claims.worker, site_claims.environment_id, path,
       site_claims.organization_id, site_claims.department_id, recalled_at, triggers.conversation_id,
       CASE triggers.state WHEN 'running' THEN triggers.execution_id END AS execution_id
  FROM site_claims
  LEFT JOIN triggers ON triggers.agent_id = site_claims.agent_id AND triggers.trigger_id = site_claims.trigger_id
 WHERE site_claims.site = %(site)s AND granted_at IS NOT NULL
   AND (granted_at, site_claims.agent_id, site_claims.trigger_id)
       > (%(after_granted_at)s, %(after_agent_id)s, %(after_trigger_id)s)
 ORDER BY granted_at, site_claims.agent_id, site_claims.trigger_id
 LIMIT %(max_rows)s;

-- name: gates_by_key
-- Some gates: the n-th site, scope and name of three lists.
SELECT site_gates.*
  FROM site_gates
  JOIN unnest(%(sites)s::text[], %(scopes)s::text[], %(names)s::text[]) AS wanted (site, scope, name)
       ON site_gates.site = wanted.site AND site_gates.scope = wanted.scope AND site_gates.name = wanted.name;

-- name: site_claims_of_triggers
-- The claims of triggers of an agent, as their sites hold them: the n-th site and trigger of two lists.
SELECT site_claims.*
  FROM site_claims
  JOIN unnest(%(sites)s::text[], %(trigger_ids)s::text[]) AS wanted (site, trigger_id)
       ON site_claims.site = wanted.site AND site_claims.trigger_id = wanted.trigger_id
 WHERE site_claims.agent_id = %(agent_id)s;

-- name: deletions_by_path
-- When folders were deleted, and environments (path ''): the n-th site, environment and path of three lists.
SELECT site_deletions.*
  FROM site_deletions
  JOIN unnest(%(sites)s::text[], %(environment_ids)s::text[], %(paths)s::text[]) AS wanted (site, environment_id, path)
       ON site_deletions.site = wanted.site AND site_deletions.environment_id = wanted.environment_id
       AND site_deletions.path = wanted.path;

-- name: worker_holders
-- For each of some sites who has a worker of its pool, the oldest grants first, and when the newest of all was granted.
SELECT wanted.site, holders.*
  FROM unnest(%(sites)s::text[]) AS wanted (site)
 CROSS JOIN LATERAL (
        SELECT claims.agent_id, claims.trigger_id, claims.granted_at, newest.granted_at AS newest_at,
               triggers.conversation_id,
               CASE triggers.state WHEN 'running' THEN triggers.execution_id END AS execution_id
          FROM site_claims AS claims
          LEFT JOIN triggers ON triggers.agent_id = claims.agent_id AND triggers.trigger_id = claims.trigger_id
         CROSS JOIN LATERAL (
               SELECT last.granted_at
                 FROM site_claims AS last
                WHERE last.site = wanted.site COLLATE "C" AND last.granted_at IS NOT NULL AND last.worker
                ORDER BY last.granted_at DESC
                LIMIT 1) AS newest
         WHERE claims.site = wanted.site COLLATE "C" AND claims.granted_at IS NOT NULL AND claims.worker
         ORDER BY claims.granted_at, claims.granted_seq, claims.agent_id, claims.trigger_id
         LIMIT %(max_rows)s) AS holders;

-- name: folder_holders
-- For each of some folders, the n-th site, environment and path of three lists, who has an overlapping one, by segments:
-- the oldest grants first, their number, and when the newest of all was granted.
SELECT wanted.site, wanted.environment_id, wanted.path AS wanted_path, holders.*
  FROM unnest(%(sites)s::text[], %(environment_ids)s::text[], %(paths)s::text[])
       AS wanted (site, environment_id, path)
 CROSS JOIN LATERAL (
        SELECT found.*, triggers.conversation_id,
               CASE triggers.state WHEN 'running' THEN triggers.execution_id END AS execution_id
          FROM (SELECT claims.agent_id, claims.trigger_id, claims.path, claims.granted_at, claims.granted_seq,
                       count(*) OVER () AS holders_count, max(claims.granted_at) OVER () AS newest_at
                  FROM site_claims AS claims
                 WHERE claims.site = wanted.site COLLATE "C" AND claims.granted_at IS NOT NULL
                   AND claims.environment_id = wanted.environment_id COLLATE "C" AND claims.path IS NOT NULL
                   AND (claims.path = wanted.path OR claims.path = '/' OR wanted.path = '/'
                        OR starts_with(claims.path, wanted.path || '/')
                        OR starts_with(wanted.path, claims.path || '/'))
                 ORDER BY claims.granted_at, claims.granted_seq, claims.agent_id, claims.trigger_id
                 LIMIT %(max_rows)s) AS found
          LEFT JOIN triggers ON triggers.agent_id = found.agent_id AND triggers.trigger_id = found.trigger_id
         ORDER BY found.granted_at, found.granted_seq, found.agent_id, found.trigger_id) AS holders;

-- name: folder_blockers
-- For each of some folders, as in folder_holders, who waits for an overlapping one, was passed too often and is behind no
-- closed gate, in start order: younger claims wait behind it.
SELECT wanted.site, wanted.environment_id, wanted.path AS wanted_path, blockers.*
  FROM unnest(%(sites)s::text[], %(environment_ids)s::text[], %(paths)s::text[])
       AS wanted (site, environment_id, path)
 CROSS JOIN LATERAL (
        SELECT claims.agent_id, claims.trigger_id, claims.path, claims.available_at, claims.created_at,
               claims.blocks_since
          FROM site_claims AS claims
         WHERE claims.site = wanted.site COLLATE "C" AND claims.granted_at IS NULL AND claims.blocks_since IS NOT NULL
           AND claims.environment_id = wanted.environment_id COLLATE "C"
           AND (claims.path = wanted.path OR claims.path = '/' OR wanted.path = '/'
                OR starts_with(claims.path, wanted.path || '/') OR starts_with(wanted.path, claims.path || '/'))
           AND NOT EXISTS (
               SELECT FROM site_gates
                WHERE site_gates.site = claims.site AND (NOT enabled OR run_budget = 0)
                  AND (site_gates.scope = 'organization' AND site_gates.name = claims.organization_id
                       OR site_gates.scope = 'department' AND site_gates.name = claims.department_id))
         ORDER BY claims.available_at, claims.created_at, claims.trigger_id, claims.agent_id
         LIMIT %(max_rows)s) AS blockers;
