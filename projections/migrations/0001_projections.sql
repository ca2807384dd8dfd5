-- What the log of decisions says, as rows for readers. Every row is a fold of the log: nothing here is decided, and
-- everything can be built again (berth projections rebuild). Applied with the target schema first in search_path, so
-- that live tables and those of a rebuild are made by the same file.
--
-- Ids are compared and ordered by their bytes (COLLATE "C"), as the rules do. Texts are copies: U+0000 and lone
-- surrogates, which PostgreSQL can't hold, are U+FFFD in them. Reasons why something waits are not stored: readers
-- compute them from the facts below.

-- One row an agent that has any decision. created is false while nothing but refused or ignored records named it.
CREATE TABLE agents (
    agent_id text COLLATE "C" PRIMARY KEY,
    log_partition integer NOT NULL,
    seq bigint NOT NULL,                        -- of its newest decision that is applied
    decided_at timestamptz NOT NULL,            -- when that was
    created boolean NOT NULL,
    created_at timestamptz,
    parallelism_limit integer,                  -- null: unlimited. What holds is max_parallel of the view slots_of_agents
    serial boolean NOT NULL,                    -- then the limit that holds is 1
    max_backlog_depth bigint NOT NULL,
    default_timeout_seconds bigint,
    agent_type text COLLATE "C",
    default_environment_id text COLLATE "C",
    default_folder text COLLATE "C",
    run_budget bigint,
    owner text COLLATE "C",
    display_name text,
    paused boolean NOT NULL,
    archived boolean NOT NULL,
    parked text,                                -- the error for which it dispatches nothing until it is configured
    -- Now:
    running bigint NOT NULL,                    -- attempts that hold a slot, forced ones included
    forced bigint NOT NULL,                     -- those of them that exceeded the limit
    waiting bigint NOT NULL,                    -- triggers in the queue
    on_hold bigint NOT NULL,                    -- triggers that are paused: they wait for a person
    -- Ever:
    accepted bigint NOT NULL,                   -- triggers
    attempts bigint NOT NULL,                   -- dispatches
    finished bigint NOT NULL,                   -- triggers, as the next three
    failed bigint NOT NULL,
    stopped bigint NOT NULL,
    expired bigint NOT NULL,
    refused bigint NOT NULL,                    -- decisions that refused a command
    ignored bigint NOT NULL,                    -- decisions that had nothing to do
    snapshot_seq bigint NOT NULL                -- newest in agent_snapshots, 0: none
) WITH (fillfactor = 60);

-- One row a conversation that ever had a trigger. Its state is that of its newest live trigger, else last_outcome:
-- see the view conversation_states.
CREATE TABLE conversations (
    agent_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL,            -- acceptance of its first trigger
    triggers bigint NOT NULL,                   -- ever accepted
    live bigint NOT NULL,                       -- waiting, running or paused
    last_outcome text COLLATE "C",              -- finished, failed, stopped (expired counts as stopped); null: none yet
    last_outcome_at timestamptz,
    forgotten boolean NOT NULL,                 -- the rules no longer know last_outcome
    PRIMARY KEY (agent_id, conversation_id)
) WITH (fillfactor = 80);

-- One row a trigger that was ever accepted. Refused ones are only in decisions.
CREATE TABLE triggers (
    agent_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,            -- waiting, running, paused, finished, failed, stopped, expired
    state_since timestamptz NOT NULL,           -- when it came into that state
    kind text COLLATE "C" NOT NULL,
    interactive boolean NOT NULL,
    on_busy text COLLATE "C",
    requested_by text COLLATE "C",
    created_at timestamptz NOT NULL,            -- with available_at and trigger_id its place in the start order
    available_at timestamptz NOT NULL,
    expires_at timestamptz,
    accepted_at timestamptz NOT NULL,
    accepted_seq bigint NOT NULL,               -- the decision that accepted it
    content_sha256 text COLLATE "C" NOT NULL,
    site text COLLATE "C",
    worker boolean NOT NULL,
    environment_id text COLLATE "C",
    folder text COLLATE "C",
    organization_id text COLLATE "C",
    department_id text COLLATE "C",
    execution_class text COLLATE "C" NOT NULL,
    parent_agent_id text COLLATE "C",
    parent_trigger_id text COLLATE "C",
    restarts text COLLATE "C",
    priority bigint,
    timeout_seconds bigint NOT NULL,
    heartbeat_seconds bigint,
    max_attempts bigint NOT NULL,
    payload_bytes bigint NOT NULL,
    place_rank bigint,                          -- (rank, number) orders its conversation; null: not yet available
    place_number bigint,
    attempt bigint NOT NULL,                    -- number of the newest attempt, 0: none
    failures bigint NOT NULL,
    absences bigint NOT NULL,
    execution_id text COLLATE "C",              -- of the newest attempt
    stop_requested_by text COLLATE "C",
    stop_requested_at timestamptz,              -- the running attempt was asked to stop
    grace_until timestamptz,                    -- and ends as stopped then
    ended_at timestamptz,                       -- null while it lives
    end_reason text COLLATE "C",                -- replied; why it was stopped: stop, conversation_stop, archive, ...
    replied_by text COLLATE "C",                -- the trigger that was the reply to it
    PRIMARY KEY (agent_id, trigger_id)
);
CREATE INDEX triggers_waiting ON triggers (agent_id, available_at, created_at, trigger_id) WHERE state = 'waiting';
CREATE INDEX triggers_live ON triggers (agent_id, conversation_id, place_rank, place_number, trigger_id)
    WHERE ended_at IS NULL;
CREATE INDEX triggers_by_time ON triggers (accepted_at, agent_id, trigger_id);
CREATE INDEX triggers_by_agent ON triggers (agent_id, accepted_at, trigger_id);
CREATE INDEX triggers_by_conversation ON triggers (agent_id, conversation_id, accepted_at, trigger_id);
CREATE INDEX triggers_by_kind ON triggers (kind, accepted_at, agent_id, trigger_id);
CREATE INDEX triggers_by_state ON triggers (state, accepted_at, agent_id, trigger_id);
CREATE INDEX triggers_by_organization ON triggers (organization_id, accepted_at, agent_id, trigger_id)
    WHERE organization_id IS NOT NULL;

-- One row an attempt.
CREATE TABLE attempts (
    agent_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    execution_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    attempt bigint NOT NULL,                    -- its number, from 1
    slot_number bigint NOT NULL,
    forced boolean NOT NULL,
    dispatched_at timestamptz NOT NULL,
    dispatched_seq bigint NOT NULL,
    lease_until timestamptz NOT NULL,           -- as dispatched; signs of life move it and are no decisions
    ended_at timestamptz,                       -- null: it holds its slot
    ended_seq bigint,
    outcome text COLLATE "C",                   -- finished, failed, lease_expired, paused, stopped
    phase text COLLATE "C",                     -- of a failed one: preparation, execution
    last_seen_at timestamptz,                   -- of one whose lease expired; null: no word ever came
    retry_at timestamptz,                       -- when the trigger may start again
    PRIMARY KEY (agent_id, trigger_id, execution_id)
);
CREATE INDEX attempts_running ON attempts (agent_id, slot_number, execution_id) WHERE ended_at IS NULL;

-- The log itself. record is the whole decision (docs/events.md); the exact bytes, for the chain of hashes, are in Kafka.
CREATE TABLE decisions (
    agent_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    decided_at timestamptz NOT NULL,
    log_partition integer NOT NULL,
    log_offset bigint NOT NULL,
    command_type text COLLATE "C" NOT NULL,
    command_id text COLLATE "C",
    settles text[] COLLATE "C" NOT NULL,        -- ids of the commands whose outcome this is
    refusal_code text COLLATE "C",
    ignored_reason text COLLATE "C",
    record jsonb NOT NULL,
    PRIMARY KEY (agent_id, seq)
);
CREATE UNIQUE INDEX decisions_by_position ON decisions (log_partition, log_offset);

-- Which decisions name an id: that of a trigger whose life it changed or that it was asked about, or of its command.
CREATE TABLE decision_ids (
    agent_id text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (agent_id, id, seq)
);

-- An agent's settings and live triggers after every 1,000th of its decisions, so that a read of the past folds at most
-- 1,000 decisions. state: {"agent": ..., "triggers": [...]}, rows as the rules keep them.
CREATE TABLE agent_snapshots (
    agent_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    decided_at timestamptz NOT NULL,
    state jsonb NOT NULL,
    PRIMARY KEY (agent_id, seq)
);

-- Texts of people: kept BERTH_TEXT_DAYS after written_at, which is Kafka's time of the record.
CREATE TABLE texts (
    agent_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    execution_id text COLLATE "C" NOT NULL,     -- '': of the trigger itself
    kind text COLLATE "C" NOT NULL,             -- message, error, result
    content jsonb NOT NULL,                     -- a string, or any JSON that a runner gave as result
    truncated boolean NOT NULL,
    written_at timestamptz NOT NULL,
    log_partition integer NOT NULL,
    log_offset bigint NOT NULL,
    PRIMARY KEY (agent_id, trigger_id, execution_id, kind)
);
CREATE INDEX texts_by_time ON texts (written_at);

-- Records that nobody could be answered for. Kept as long as texts, which they may hold.
CREATE TABLE dead_letters (
    log_partition integer NOT NULL,
    log_offset bigint NOT NULL,
    written_at timestamptz NOT NULL,
    reason text NOT NULL,
    source_topic text COLLATE "C",              -- where the record was, when its headers say so
    source_partition integer,
    source_offset bigint,
    key bytea,
    value bytea,
    PRIMARY KEY (log_partition, log_offset)
);
CREATE INDEX dead_letters_by_time ON dead_letters (written_at, log_partition, log_offset);

-- What is applied, moved in the transaction that applies it and only from the value that it was read with.
CREATE TABLE checkpoints (
    topic text COLLATE "C" NOT NULL,
    partition integer NOT NULL,
    next_offset bigint NOT NULL,
    PRIMARY KEY (topic, partition)
) WITH (fillfactor = 50);

-- A slot is a running attempt.
CREATE VIEW slots AS
    SELECT attempts.agent_id, slot_number, attempts.execution_id, attempts.trigger_id, attempts.conversation_id,
           attempt, forced, dispatched_at, lease_until
      FROM attempts
     WHERE ended_at IS NULL;

-- max_parallel null: unlimited. available never negative, null: unlimited.
CREATE VIEW slots_of_agents AS
    SELECT agent_id, running, forced, waiting, paused, archived, parked, serial,
           CASE WHEN serial THEN 1 ELSE parallelism_limit END AS max_parallel,
           greatest(0, CASE WHEN serial THEN 1 ELSE parallelism_limit END - running) AS available
      FROM agents
     WHERE created;

CREATE VIEW conversation_states AS
    SELECT conversations.*,
           CASE newest.state WHEN 'waiting' THEN 'queued' ELSE coalesce(newest.state, last_outcome) END AS state,
           newest.trigger_id AS live_trigger_id
      FROM conversations
      LEFT JOIN LATERAL (
            SELECT triggers.state, triggers.trigger_id
              FROM triggers
             WHERE triggers.agent_id = conversations.agent_id
               AND triggers.conversation_id = conversations.conversation_id
               AND triggers.ended_at IS NULL
             ORDER BY triggers.accepted_seq DESC, triggers.trigger_id DESC
             LIMIT 1) AS newest ON true;
