-- 1,000 agents and 1,000,000 triggers as the projector would leave them: for each agent 990 that are over, 3 that run
-- and 7 that wait, with attempts, decisions and texts. %(agents)s and %(triggers)s (of each agent) are numbers.
INSERT INTO agents
SELECT 'agent-' || lpad(a::text, 6, '0'), a %% 8, 2 * %(triggers)s, now(), true, now() - interval '9 days', 3, false, 1000, NULL,
       NULL, NULL, NULL, NULL, NULL, NULL, false, false, NULL, 3, 0, 7, 0, %(triggers)s, %(triggers)s - 7,
       %(triggers)s - 10, 0, 0, 0, 0, 0, 0
  FROM generate_series(1, %(agents)s) AS a;
INSERT INTO triggers
SELECT 'agent-' || lpad(a::text, 6, '0'), 't-' || lpad(t::text, 7, '0'), 'c-' || t / 10,
       CASE WHEN t > %(triggers)s - 7 THEN 'waiting' WHEN t > %(triggers)s - 10 THEN 'running' ELSE 'finished' END,
       at, 'task_assigned', false, NULL, 'upstream', at, at, NULL, at, 2 * t - 1, md5(t::text), NULL, false, NULL, NULL,
       CASE WHEN t %% 10 = 0 THEN 'org-' || a %% 20 END, NULL, 'standard', NULL, NULL, NULL, NULL, 1800, NULL, 3, 100,
       1, t, CASE WHEN t > %(triggers)s - 7 THEN 0 ELSE 1 END, 0, 0,
       CASE WHEN t <= %(triggers)s - 7 THEN 'x' || a || '-' || 2 * t - 1 || '-3' END, NULL, NULL, NULL,
       CASE WHEN t <= %(triggers)s - 10 THEN at + interval '5 seconds' END, NULL, NULL
  FROM generate_series(1, %(triggers)s) AS t, generate_series(1, %(agents)s) AS a,
       LATERAL (SELECT now() - interval '8 days' + t * interval '1 minute' * 11 + a * interval '1 millisecond' AS at) AS times;
INSERT INTO attempts
SELECT agent_id, trigger_id, execution_id, conversation_id, 1, 1 + accepted_seq / 2 %% 3, false, accepted_at, accepted_seq,
       accepted_at + interval '35 minutes', ended_at, CASE WHEN ended_at IS NOT NULL THEN accepted_seq + 1 END,
       CASE WHEN ended_at IS NOT NULL THEN 'finished' END, NULL, NULL, NULL
  FROM triggers WHERE execution_id IS NOT NULL;
INSERT INTO decisions
SELECT agent_id, accepted_seq, accepted_at, 0, row_number() OVER (), 'trigger', trigger_id, ARRAY[trigger_id], NULL, NULL,
       jsonb_build_object('type', 'decision', 'agent_id', agent_id, 'command', jsonb_build_object('type', 'trigger',
           'id', trigger_id, 'conversation_id', conversation_id, 'content_sha256', repeat(md5(trigger_id), 2)), 'events',
           jsonb_build_array(jsonb_build_object('type', 'accepted', 'trigger_id', trigger_id, 'position', 0),
           jsonb_build_object('type', 'placed', 'trigger_id', trigger_id, 'place', '[1, 1]'::jsonb)))
  FROM triggers;
INSERT INTO decision_ids SELECT agent_id, trigger_id, accepted_seq FROM triggers;
INSERT INTO texts
SELECT agent_id, trigger_id, '', 'message', to_jsonb('Please look at this and tell me: ' || repeat(md5(trigger_id), 3)),
       false, accepted_at, 0, accepted_seq
  FROM triggers;
INSERT INTO conversations
SELECT agent_id, conversation_id, min(accepted_at), count(*), count(*) FILTER (WHERE ended_at IS NULL), 'finished', now(), false
  FROM triggers GROUP BY agent_id, conversation_id;
ANALYZE;
