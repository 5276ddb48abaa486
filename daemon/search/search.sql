-- The search index: words and marks of each publication, and how far it has come. `entry` has no content of its own: it is
-- made from the ledger, and the ledger tells which of its rows are still shown.

-- name: schema
CREATE VIRTUAL TABLE entry USING fts5 (
    text, caption, tags, objects, name, marks,
    content = '', tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3'
);
CREATE TABLE about (                      -- one row
    ledger TEXT NOT NULL,                 -- its id
    start INTEGER NOT NULL,               -- the last start of the daemon that the index has seen
    token TEXT NOT NULL,                  -- of that start
    place INTEGER NOT NULL,               -- the last publication that it has
    entries INTEGER NOT NULL,             -- how many it has, also those that are no longer shown
    labels TEXT NOT NULL DEFAULT ''       -- the state of the labels of people that it has seen
);
CREATE TABLE evidence (                   -- how much answers disagree: see evidence.py
    name TEXT,
    block INTEGER,                        -- of publications
    part BLOB NOT NULL,
    PRIMARY KEY (name, block)
) WITHOUT ROWID;
CREATE TABLE matrix (                     -- the embeddings of one model, in files of a folder
    maker TEXT PRIMARY KEY,               -- the model's fingerprint
    dim INTEGER NOT NULL,
    rows INTEGER NOT NULL                 -- that are complete; what the files have behind them is not valid
) WITHOUT ROWID;
CREATE TABLE duplicate (                  -- the groups of near-duplicates that `visiond duplicates` found last
    image INTEGER PRIMARY KEY,
    publication INTEGER,                  -- its last one, as far as the groups have come; NULL: not known, of some best images
    number INTEGER NOT NULL,              -- of the group
    place INTEGER NOT NULL,               -- in it; 0 is the best image
    cosine REAL NOT NULL                  -- with the best one
);
CREATE INDEX by_group ON duplicate (number, place);
CREATE TABLE grouping (                   -- at most one row
    near REAL NOT NULL,
    images INTEGER NOT NULL,              -- that were compared
    last INTEGER NOT NULL,                -- publication of these
    made_at REAL NOT NULL,                -- Unix seconds, without images that were added
    model TEXT NOT NULL,                  -- whose embeddings were compared
    folder TEXT NOT NULL,                 -- with the files of the leaders
    leaders INTEGER NOT NULL              -- how many there are, also of groups of one
);
INSERT INTO about VALUES ('', 0, '', 0, 0, '');

-- name: about
SELECT ledger, start, token, place, entries, labels FROM about;

-- name: note
UPDATE about SET ledger = ?, start = ?, token = ?, place = ?, entries = ?, labels = ?;

-- name: note_labels
UPDATE about SET labels = ?;

-- name: add
INSERT INTO entry (rowid, text, caption, tags, objects, name, marks) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: newest
SELECT rowid FROM entry WHERE entry MATCH ? AND rowid < ? ORDER BY rowid DESC LIMIT ?;

-- name: oldest
SELECT rowid FROM entry WHERE entry MATCH ? AND rowid > ? ORDER BY rowid LIMIT ?;

-- name: best
SELECT rowid FROM entry WHERE entry MATCH ? ORDER BY bm25(entry, 1, 1, 1, 1, 1, 0) LIMIT ?;

-- name: count
SELECT COUNT(*) FROM (SELECT 1 FROM entry WHERE entry MATCH ? LIMIT ?);

-- name: matching
SELECT group_concat(rowid) FROM entry WHERE entry MATCH ? AND rowid > ?;

-- name: matrices
SELECT maker, dim, rows FROM matrix;

-- name: matrix
SELECT dim, rows FROM matrix WHERE maker = ?;

-- name: note_matrix
INSERT INTO matrix (maker, dim, rows) VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET dim = excluded.dim, rows = excluded.rows;

-- name: drop_matrices
DELETE FROM matrix;

-- name: drop_evidence
DELETE FROM evidence;

-- name: drop_duplicates
DELETE FROM duplicate;

-- name: drop_grouping
DELETE FROM grouping;

-- name: add_duplicate
INSERT INTO duplicate (image, publication, number, place, cosine) VALUES (?, ?, ?, ?, ?);

-- name: note_grouping
INSERT INTO grouping (near, images, last, made_at, model, folder, leaders) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: extend_grouping
UPDATE grouping SET images = images + ?, last = ?, leaders = leaders + ?;

-- name: groups_folder
SELECT folder FROM grouping;

-- name: grouped
SELECT image FROM duplicate WHERE image IN (SELECT value FROM json_each(?));

-- name: note_publication
UPDATE duplicate SET publication = ? WHERE image = ?;

-- name: begin_group
-- Of a leader, if it has none.
INSERT OR IGNORE INTO duplicate SELECT ?, NULL, COALESCE(MAX(number), -1) + 1, 0, 1.0 FROM duplicate;

-- name: join_group
INSERT INTO duplicate SELECT :image, :publication, number,
    (SELECT MAX(place) + 1 FROM duplicate AS other WHERE other.number = best.number), :cosine
FROM duplicate AS best WHERE image = :leader;

-- name: grouping
SELECT near, images, last, made_at, model, folder, leaders, (SELECT COUNT(*) FROM duplicate WHERE place = 0),
    (SELECT COUNT(*) FROM duplicate WHERE place > 0)
FROM grouping;

-- name: groups
SELECT number, image, cosine FROM duplicate WHERE number >= ? AND number < ? ORDER BY number, place;

-- name: group_of
SELECT image FROM duplicate WHERE number = (SELECT number FROM duplicate WHERE image = ?) ORDER BY place;

-- name: others
SELECT publication, image FROM duplicate WHERE place > 0;

-- name: better
-- Of these images, the best one of each that is not the best one of its group.
SELECT image, (SELECT best.image FROM duplicate AS best WHERE best.number = duplicate.number AND best.place = 0)
FROM duplicate WHERE place > 0 AND image IN (SELECT value FROM json_each(?));
