-- Sites, claims, dependencies, approvals and run budgets: what a trigger waits for beside its agent, since when, and who
-- has it. Facts only, as before: why a trigger waits is computed by who reads. Agents and sites are decided in different
-- partitions, so their rows may be some decisions apart; each is right for the decisions that are applied of it.

ALTER TABLE agents
    ADD COLUMN paused_at timestamptz,               -- since when it is; null: it isn't
    ADD COLUMN archived_at timestamptz,
    ADD COLUMN parked_at timestamptz,
    ADD COLUMN run_budget_at timestamptz,           -- when run_budget became what it is now: set, or spent by a dispatch
    ADD COLUMN asking bigint NOT NULL DEFAULT 0,    -- slots reserved for claims that no site has answered yet
    ADD COLUMN standing bigint NOT NULL DEFAULT 0,  -- claims that wait at a site, without a slot
    ADD COLUMN held bigint NOT NULL DEFAULT 0;      -- claims that are granted and whose trigger has not started

UPDATE agents SET
    paused_at = CASE WHEN paused THEN (
        SELECT decided_at FROM decisions
         WHERE decisions.agent_id = agents.agent_id AND command_type = 'pause'
           AND refusal_code IS NULL AND ignored_reason IS NULL
         ORDER BY seq DESC LIMIT 1) END,
    archived_at = CASE WHEN archived THEN (
        SELECT decided_at FROM decisions
         WHERE decisions.agent_id = agents.agent_id AND command_type = 'archive'
           AND refusal_code IS NULL AND ignored_reason IS NULL
         ORDER BY seq DESC LIMIT 1) END,
    parked_at = CASE WHEN parked IS NOT NULL THEN (
        SELECT decided_at FROM decisions
         WHERE decisions.agent_id = agents.agent_id AND command_type = 'park'
         ORDER BY seq DESC LIMIT 1) END
 WHERE paused OR archived OR parked IS NOT NULL;

UPDATE agents SET
    run_budget = run_budget - dispatched,
    run_budget_at = greatest(set_at, last_dispatched_at)
  FROM (SELECT budgeted.agent_id, newest.seq AS set_seq, newest.decided_at AS set_at
          FROM agents AS budgeted
         CROSS JOIN LATERAL (
               SELECT seq, decisions.decided_at
                 FROM decisions
                WHERE decisions.agent_id = budgeted.agent_id AND command_type = 'configure'
                  AND jsonb_path_exists(record, '$.events[*] ? (exists(@.run_budget))')
                ORDER BY seq DESC LIMIT 1) AS newest
         WHERE budgeted.run_budget IS NOT NULL) AS budgets
 CROSS JOIN LATERAL (
        SELECT count(*) AS dispatched, max(dispatched_at) AS last_dispatched_at
          FROM attempts
         WHERE attempts.agent_id = budgets.agent_id AND dispatched_seq >= set_seq) AS since
 WHERE agents.agent_id = budgets.agent_id;

ALTER TABLE triggers
    ADD COLUMN approval_required boolean NOT NULL DEFAULT false,
    ADD COLUMN approved_at timestamptz,             -- null: nobody did
    ADD COLUMN approved_by text COLLATE "C",
    ADD COLUMN failures_approved boolean NOT NULL DEFAULT false, -- it may start although a dependency failed or stopped
    ADD COLUMN degraded boolean NOT NULL DEFAULT false, -- its folder was deleted: it runs without
    ADD COLUMN dependencies bigint NOT NULL DEFAULT 0;  -- how many it was accepted with, repeats left out

-- One row a conversation that a live trigger depends on. They go with the trigger's end.
CREATE TABLE dependencies (
    agent_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    position bigint NOT NULL,                       -- in the trigger's list, from 0
    dependency_agent_id text COLLATE "C" NOT NULL,
    dependency_conversation_id text COLLATE "C" NOT NULL,
    outcome text COLLATE "C",                       -- as its agent told last: finished, failed, stopped, unknown;
                                                    -- null: it lives, or its agent has not answered
    told_at timestamptz,                            -- when that was told; null: it was never anything else
    PRIMARY KEY (agent_id, trigger_id, position)
);

-- One row a live trigger that ever asked a site, as its agent knows it. They go with the trigger's end.
CREATE TABLE trigger_claims (
    agent_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    site text COLLATE "C" NOT NULL,
    n bigint,                                       -- number of its claim; null: it has none now
    state text COLLATE "C",                         -- asking: not answered; standing: it waits at the site;
                                                    -- held: granted, not started; granted: its attempt runs
    since timestamptz NOT NULL,                     -- when it came into that state
    asked_at timestamptz,
    reserves boolean NOT NULL,                      -- a slot is reserved while it asks; not for a forced one
    reason text COLLATE "C",                        -- of a standing one, as the site told when it was asked;
                                                    -- site_not_answering: nothing else is asked of that site
    late bigint NOT NULL,                           -- grants given back because the agent was full
    PRIMARY KEY (agent_id, trigger_id)
) WITH (fillfactor = 70);
CREATE INDEX trigger_claims_asking ON trigger_claims (agent_id) WHERE state = 'asking';
CREATE INDEX trigger_claims_not_answered ON trigger_claims (agent_id, site) WHERE reason = 'site_not_answering';

-- One row a site that has any decision. created is false while nobody configured it: claims wait there.
CREATE TABLE sites (
    site text COLLATE "C" PRIMARY KEY,
    log_partition integer NOT NULL,
    seq bigint NOT NULL,                            -- of its newest decision that is applied
    decided_at timestamptz NOT NULL,                -- when that was
    created boolean NOT NULL,
    created_at timestamptz,
    capacity bigint NOT NULL,                       -- of its pool of workers
    capacity_at timestamptz,                        -- when it became that
    paused boolean NOT NULL,
    paused_at timestamptz,                          -- since when it is; null: it isn't
    -- Now:
    waiting bigint NOT NULL,                        -- claims that wait
    granted bigint NOT NULL,                        -- claims that are granted: what runs there, or is about to
    workers bigint NOT NULL,                        -- those of them that have a worker of the pool
    snapshot_seq bigint NOT NULL                    -- newest in site_snapshots, 0: none
) WITH (fillfactor = 60);

-- One row an organization or department that was ever gated at a site; all others are enabled, without a budget.
CREATE TABLE site_gates (
    site text COLLATE "C" NOT NULL,
    scope text COLLATE "C" NOT NULL,                -- organization, department
    name text COLLATE "C" NOT NULL,
    enabled boolean NOT NULL,
    disabled_at timestamptz,                        -- since when it isn't enabled; null: it is
    run_budget bigint,                              -- attempts that may still be granted; null: not bounded
    run_budget_at timestamptz,                      -- when it became that: set, reserved by a grant or given back
    budget_seq bigint NOT NULL,                     -- the decision that set it; 0: none did
    PRIMARY KEY (site, scope, name)
);

-- One row a claim that stands at a site, waiting or granted, as the site knows it. They go with the claim's end.
CREATE TABLE site_claims (
    site text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    n bigint NOT NULL,
    opened_at timestamptz NOT NULL,
    available_at timestamptz NOT NULL,              -- with created_at, trigger_id and agent_id its place in start order
    created_at timestamptz NOT NULL,
    accepted_at timestamptz NOT NULL,
    worker boolean NOT NULL,
    environment_id text COLLATE "C",
    path text COLLATE "C",                          -- its folder in compared form; null with an environment: deleted
    organization_id text COLLATE "C",
    department_id text COLLATE "C",
    granted_at timestamptz,                         -- null: it waits
    granted_seq bigint,
    passed bigint NOT NULL,                         -- younger ones that were granted past it
    blocks_since timestamptz,                       -- it was passed too often: younger ones wait behind it; null: not yet
    recalled_at timestamptz,                        -- granted, and its agent was asked to give it back unused
    degraded boolean NOT NULL,                      -- its folder was deleted
    PRIMARY KEY (site, agent_id, trigger_id)
) WITH (fillfactor = 70);
CREATE INDEX site_claims_waiting ON site_claims (site, available_at, created_at, trigger_id, agent_id)
    WHERE granted_at IS NULL;
CREATE INDEX site_claims_granted ON site_claims (site, granted_at, agent_id, trigger_id) WHERE granted_at IS NOT NULL;
CREATE INDEX site_claims_workers ON site_claims (site, granted_at, agent_id, trigger_id)
    WHERE granted_at IS NOT NULL AND worker;
CREATE INDEX site_claims_folders ON site_claims (site, environment_id, path)
    WHERE granted_at IS NOT NULL AND path IS NOT NULL;
CREATE INDEX site_claims_blocking ON site_claims (site, environment_id)
    WHERE granted_at IS NULL AND blocks_since IS NOT NULL;
CREATE INDEX site_claims_of_organizations ON site_claims (site, organization_id)
    WHERE granted_at IS NOT NULL AND organization_id IS NOT NULL;
CREATE INDEX site_claims_of_departments ON site_claims (site, department_id)
    WHERE granted_at IS NOT NULL AND department_id IS NOT NULL;

-- Folders that were deleted, and environments (path ''): triggers accepted before do without.
CREATE TABLE site_deletions (
    site text COLLATE "C" NOT NULL,
    environment_id text COLLATE "C" NOT NULL,
    path text COLLATE "C" NOT NULL,
    deleted_at timestamptz NOT NULL,
    PRIMARY KEY (site, environment_id, path)
);

-- The log of the sites itself, as decisions is that of the agents.
CREATE TABLE site_decisions (
    site text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    decided_at timestamptz NOT NULL,
    log_partition integer NOT NULL,
    log_offset bigint NOT NULL,
    command_type text COLLATE "C" NOT NULL,
    command_id text COLLATE "C",
    settles text[] COLLATE "C" NOT NULL,
    refusal_code text COLLATE "C",
    ignored_reason text COLLATE "C",
    record jsonb NOT NULL,
    PRIMARY KEY (site, seq)
);
CREATE UNIQUE INDEX site_decisions_by_position ON site_decisions (log_partition, log_offset);

-- A site after every 1,000th of its decisions, so that a read of the past folds at most 1,000 decisions.
-- state: {"site": ..., "gates": [...], "deletions": [...], "claims": [...]}, rows as the rules keep them.
CREATE TABLE site_snapshots (
    site text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    decided_at timestamptz NOT NULL,
    state jsonb NOT NULL,
    PRIMARY KEY (site, seq)
);

-- Serial is also who has an environment of its own, or is of a type that has one conversation at a time.
CREATE OR REPLACE VIEW slots_of_agents AS
    SELECT agent_id, running, forced, waiting, paused, archived, parked,
           (serial OR agent_type IS NOT DISTINCT FROM 'acp' OR default_environment_id IS NOT NULL) AS serial,
           CASE WHEN serial THEN 1 ELSE parallelism_limit END AS max_parallel,
           greatest(0, CASE WHEN serial THEN 1 ELSE parallelism_limit END - running) AS available
      FROM agents
     WHERE created;

-- What is granted by scope: drained when nothing is left of what a closed gate, or a paused site, covers.
CREATE VIEW site_gate_states AS
    SELECT site_gates.*, inside.granted, (NOT enabled AND inside.granted = 0) AS drained
      FROM site_gates
     CROSS JOIN LATERAL (
            SELECT count(*) AS granted
              FROM site_claims
             WHERE site_claims.site = site_gates.site AND granted_at IS NOT NULL
               AND site_gates.scope = 'organization' AND organization_id = site_gates.name
            HAVING site_gates.scope = 'organization'
             UNION ALL
            SELECT count(*)
              FROM site_claims
             WHERE site_claims.site = site_gates.site AND granted_at IS NOT NULL
               AND site_gates.scope = 'department' AND department_id = site_gates.name
            HAVING site_gates.scope = 'department') AS inside;
