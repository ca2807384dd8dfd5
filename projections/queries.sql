-- Every read of the projections. A query begins with "-- name:" and is followed by one sentence that says what it
-- gives; parameters are named. Lists are pages: rows after (or before) a cursor made of the columns they are ordered
-- by, at most max_rows of them. The first page's cursor: '' for an id, 0 for a number, -infinity for a time that goes
-- up, infinity for one that goes down (with '' replaced by chr(1114111), which sorts after every id).

-- name: positions
-- Next offset to be applied of every partition of every topic that the projector reads.
SELECT topic, partition, next_offset FROM checkpoints ORDER BY topic, partition;

-- name: position_of_decisions
-- Next offset to be applied of one partition of the decisions: a read with min_position waits until it is beyond that.
SELECT next_offset FROM checkpoints WHERE topic = 'berth.decisions' AND partition = %(partition)s;

-- name: agent
-- One agent with its settings, flags and counts; no row when it was never created.
SELECT agents.*, CASE WHEN serial THEN 1 ELSE parallelism_limit END AS max_parallel
  FROM agents
 WHERE agent_id = %(agent_id)s AND created;

-- name: agents_page
-- Agents by id after a cursor, all of them or only those in visible (null: all).
SELECT agents.*, CASE WHEN serial THEN 1 ELSE parallelism_limit END AS max_parallel
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
-- An agent's waiting triggers in start order after a cursor, each with the head of its conversation, which it waits for
-- when that is another one.
SELECT triggers.trigger_id, triggers.conversation_id, triggers.kind, triggers.interactive, triggers.requested_by,
       triggers.created_at, triggers.available_at, triggers.expires_at, triggers.accepted_at, triggers.state_since,
       triggers.execution_class, triggers.priority, triggers.site, triggers.environment_id, triggers.folder,
       triggers.organization_id, triggers.department_id, triggers.attempt, triggers.failures, triggers.max_attempts,
       triggers.place_number, head.trigger_id AS head_trigger_id, head.state AS head_state,
       head.state_since AS head_state_since, head.execution_id AS head_execution_id
  FROM triggers
  LEFT JOIN LATERAL (
        SELECT live.trigger_id, live.state, live.state_since, live.execution_id
          FROM triggers AS live
         WHERE live.agent_id = triggers.agent_id AND live.conversation_id = triggers.conversation_id
           AND live.ended_at IS NULL AND live.place_rank IS NOT NULL
         ORDER BY live.place_rank, live.place_number
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
-- One trigger with everything that is stored of it, and the head of its conversation.
SELECT triggers.*, head.trigger_id AS head_trigger_id, head.state AS head_state, head.state_since AS head_state_since,
       head.execution_id AS head_execution_id
  FROM triggers
  LEFT JOIN LATERAL (
        SELECT live.trigger_id, live.state, live.state_since, live.execution_id
          FROM triggers AS live
         WHERE live.agent_id = triggers.agent_id AND live.conversation_id = triggers.conversation_id
           AND live.ended_at IS NULL AND live.place_rank IS NOT NULL
         ORDER BY live.place_rank, live.place_number
         LIMIT 1) AS head ON true
 WHERE triggers.agent_id = %(agent_id)s AND triggers.trigger_id = %(trigger_id)s;

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

-- name: decisions_of_partition_page
-- The decisions of one partition of the log, oldest first after a cursor.
SELECT agent_id, seq, decided_at, log_offset, command_type, command_id, settles, refusal_code, ignored_reason, record
  FROM decisions
 WHERE log_partition = %(partition)s AND log_offset > %(after_offset)s
 ORDER BY log_offset
 LIMIT %(max_rows)s;

-- name: snapshot_at
-- The newest snapshot of an agent that is not after this time.
SELECT seq, decided_at, state
  FROM agent_snapshots
 WHERE agent_id = %(agent_id)s AND decided_at <= %(at)s
 ORDER BY seq DESC
 LIMIT 1;

-- name: snapshot_at_seq
-- The newest snapshot of an agent that is not after this decision.
SELECT seq, decided_at, state
  FROM agent_snapshots
 WHERE agent_id = %(agent_id)s AND seq <= %(seq)s
 ORDER BY seq DESC
 LIMIT 1;

-- name: decisions_since_snapshot
-- The decisions that follow a snapshot (after_seq 0: none) and are not after this time: as a rule at most 1,000, more
-- while the projector has not come to making the next snapshot.
SELECT seq, decided_at, record
  FROM decisions
 WHERE agent_id = %(agent_id)s AND seq > %(after_seq)s AND decided_at <= %(at)s
 ORDER BY seq;

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

-- name: dead_letters_page
-- Dead letters, newest first before a cursor.
SELECT log_partition, log_offset, written_at, reason, source_topic, source_partition, source_offset, key, value
  FROM dead_letters
 WHERE (written_at, log_partition, log_offset) < (%(before_written_at)s, %(before_partition)s, %(before_offset)s)
 ORDER BY written_at DESC, log_partition DESC, log_offset DESC
 LIMIT %(max_rows)s;
