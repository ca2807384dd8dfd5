-- What berth verify found when it last read the whole log, for readers who can't run it. The one table that is no copy of
-- the log: a rebuild takes its row over from the tables that it replaces.
CREATE TABLE last_verification (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1), -- one row
    verified_at timestamptz NOT NULL,           -- when it was done
    result jsonb NOT NULL                       -- what berth verify --json prints
);
