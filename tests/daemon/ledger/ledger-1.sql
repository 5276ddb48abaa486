-- A ledger as visiond 0.1.0 made it. Frozen: it stands for the files that users have.
PRAGMA journal_mode = WAL;
PRAGMA application_id = 0x56495344;
PRAGMA user_version = 1;
CREATE TABLE inbox (
    id INTEGER PRIMARY KEY,
    path BLOB NOT NULL UNIQUE             -- absolute
);
CREATE TABLE model (
    id INTEGER PRIMARY KEY,
    stage TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    notice TEXT NOT NULL,                 -- what to say beside its answers, e.g. that its weights are random
    UNIQUE (stage, fingerprint)
);
CREATE TABLE content (                    -- what the bytes are, whatever their file's name
    digest BLOB PRIMARY KEY,              -- SHA-256
    format TEXT NOT NULL,
    width INTEGER NOT NULL,               -- pixels, upright
    height INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE result (                     -- what a model said of the bytes
    digest BLOB NOT NULL,
    model INTEGER NOT NULL REFERENCES model (id),
    payload BLOB NOT NULL,                -- JSON
    seconds REAL NOT NULL,
    UNIQUE (digest, model)
);
CREATE TABLE image (                      -- a version of a file
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    inbox INTEGER NOT NULL REFERENCES inbox (id),
    path BLOB NOT NULL,                   -- relative to the inbox
    device INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    status INTEGER NOT NULL,              -- jobs.JobStatus
    seen_at REAL NOT NULL,                -- Unix seconds
    attempts INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0,   -- Unix seconds; 0: never tried
    location BLOB,                        -- absolute; where the daemon moved the file, if it did
    digest BLOB,
    models TEXT,                          -- JSON array of model ids: those that made its result
    bin TEXT,
    criteria BLOB,                        -- JSON
    reason TEXT,
    detail TEXT,
    finished_at REAL,
    emitted INTEGER NOT NULL DEFAULT 0    -- 1: sidecar, bin and source are as this row says
);
CREATE UNIQUE INDEX version ON image (inbox, path, mtime_ns, ctime_ns, size, inode, device);
CREATE INDEX fresh ON image (priority, id) WHERE status = 0 AND not_before = 0;
CREATE INDEX again ON image (not_before) WHERE status = 0 AND not_before > 0;
CREATE INDEX owed ON image (id) WHERE emitted = 0 AND status IN (1, 2);
INSERT INTO inbox VALUES (1, CAST('/srv/inbox' AS BLOB));
INSERT INTO model VALUES (1, 'ocr', 'sha256:0123456789abcdef', '');
INSERT INTO content VALUES (zeroblob(32), 'JPEG', 640, 480);
INSERT INTO result VALUES (zeroblob(32), 1, CAST('{"lines":[],"count":0,"area_ratio":0.0}' AS BLOB), 0.25);
INSERT INTO image VALUES (1, 1, CAST('a.jpg' AS BLOB), 1, 2, 3, 4, 5, 0, 1, 1e9, 1, 0, NULL, zeroblob(32), '[1]', 'C',
    CAST('{}' AS BLOB), NULL, NULL, 2e9, 1);
INSERT INTO image VALUES (2, 1, CAST('b.jpg' AS BLOB), 1, 3, 3, 4, 5, 0, 2, 1e9, 1, 0, NULL, NULL, NULL, NULL, NULL,
    'truncated', 'its end is missing', 2e9, 1);
