-- Every statement of the ledger, by name. `:rows` stands for a list of value rows: a whole batch is one statement, because
-- each call of SQLite releases the interpreter lock and may have to wait for it afterwards. `OR FAIL`: a failure undoes the whole
-- transaction anyway. Without it SQLite copies every page that such a statement changes, so that it could undo the statement alone;
-- for pages all over a table these copies go to a temporary file. With ON CONFLICT DO UPDATE it copies them anyway. `:is_newest`,
-- `:is_known`, `:is_spare`, `:is_skipped` and `:is_awaited` stand for the conditions of these names: no later version of the image's
-- file is known; the ledger has this version already; nothing needs this version any more; there is nothing of this version but its
-- row; a sink still waits for its record.
-- `+inbox` keeps SQLite from using the index that begins with `inbox`, which has every image that ever was, instead of one that
-- only has the PENDING ones.

-- name: is_newest
NOT EXISTS (
    SELECT 1 FROM image AS newer WHERE newer.inbox = image.inbox AND newer.path = image.path AND newer.id > image.id
)

-- name: is_known
-- It differs only because the daemon moved the file, or because an older daemon stored its device.
EXISTS (
    SELECT 1 FROM image AS old WHERE old.inbox = new.column1 AND old.path = new.column2 AND old.mtime_ns = new.column5
    AND old.size = new.column4 AND (
        old.location IS NOT NULL AND old.ctime_ns >= new.column6  -- a scan may have read its status just before the daemon moved it
        OR old.device <> 0 AND old.status <> 4 AND old.inode = new.column3 AND old.ctime_ns = new.column6
    )
)

-- name: is_spare
-- It ended before `:before` and was never moved, so no file on the disk depends on it alone; and it is not the newest version of
-- its file, unless all are GONE. If it has a result, a later version has one that is published and also old, and the sidecar is
-- that of the later version. If it FAILED, a later version's result or failure has replaced its reason. The newest and the
-- published version of a file are the same with and without it.
image.location IS NULL AND COALESCE(image.finished_at, image.seen_at) < :before AND (
    image.status = 4 AND COALESCE(image.models, '[]') = '[]' AND NOT EXISTS (
        SELECT 1 FROM image AS other WHERE other.inbox = image.inbox AND other.path = image.path
        AND (other.status <> 4 OR other.location IS NOT NULL OR COALESCE(other.models, '[]') <> '[]')
    )
    OR (image.status IN (3, 4) OR image.status IN (1, 2) AND image.emitted = 1) AND EXISTS (
        SELECT 1 FROM image AS later WHERE later.inbox = image.inbox AND later.path = image.path AND later.id > image.id
        AND COALESCE(later.finished_at, later.seen_at) < :before AND (
            later.status = 1 AND later.emitted = 1
            OR COALESCE(image.models, '[]') = '[]' AND image.status IN (3, 4)
            OR COALESCE(image.models, '[]') = '[]' AND image.status = 2 AND later.status = 2 AND later.emitted = 1
        )
    )
)

-- name: is_skipped
-- It has no result, and the daemon has not moved its file.
image.status = 3 AND image.location IS NULL AND COALESCE(image.models, '[]') = '[]'

-- name: is_awaited
-- A sink has not come to the number of its record yet.
EXISTS (SELECT 1 FROM publication WHERE publication.image = image.id AND number > (SELECT MIN(place) FROM sink))

-- name: schema
CREATE TABLE inbox (
    id INTEGER PRIMARY KEY,
    path BLOB NOT NULL UNIQUE,            -- absolute
    marker BLOB NOT NULL DEFAULT x''      -- the last path of a listing that has not ended; empty: all have
);
CREATE TABLE model (
    id INTEGER PRIMARY KEY,
    stage TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    notice TEXT NOT NULL,                 -- shown with its results, for example that its weights are random
    is_current INTEGER NOT NULL DEFAULT 0,  -- 1: the last start used it as the current model of its stage
    provenance TEXT NOT NULL DEFAULT '',  -- CRC-32 and a JSON array: what sidecars say that it is, the newest last; '': not known
    UNIQUE (stage, fingerprint)
);
CREATE TABLE content (                    -- what the bytes are, under any file name
    id INTEGER PRIMARY KEY,               -- in the order in which the first results were stored; digests have no order
    digest BLOB NOT NULL,                 -- SHA-256
    format TEXT NOT NULL,                 -- '': not known any more, see `forget_content`
    width INTEGER NOT NULL,               -- pixels, upright
    height INTEGER NOT NULL,
    pages INTEGER NOT NULL DEFAULT 1,     -- pictures in the file; only the first is read. Before schema 3 not counted
    checksum INTEGER                      -- checksums.of_content; NULL: written by an older visiond, as in the other tables
);
CREATE TABLE result (                     -- a model's result for the bytes
    id INTEGER PRIMARY KEY,
    content INTEGER NOT NULL REFERENCES content (id),
    model INTEGER NOT NULL REFERENCES model (id),
    payload BLOB NOT NULL,                -- JSON
    seconds REAL NOT NULL,
    checksum INTEGER,                     -- checksums.of_result
    UNIQUE (content, model)
);
CREATE TABLE image (                      -- a version of a file
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    inbox INTEGER NOT NULL REFERENCES inbox (id),
    path BLOB NOT NULL,                   -- relative to the inbox
    device INTEGER NOT NULL,              -- 0; older daemons wrote the file's device, which may change at each boot
    inode INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    status INTEGER NOT NULL,              -- jobs.JobStatus
    seen_at REAL NOT NULL,                -- Unix seconds
    attempts INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0,   -- Unix seconds; 0: never tried; 1: due at once, independent of the clock;
                                          -- `finished_at` of an image that has ended: see `note_held`
    location BLOB,                        -- absolute; to where the daemon moved the file, if it did
    digest BLOB,
    models TEXT,                          -- JSON array of the model ids of its last result, which may be older than its status
    bin TEXT,
    criteria BLOB,                        -- JSON
    reason TEXT,
    detail TEXT,
    finished_at REAL,                     -- if PENDING: the time of the result that it keeps until it has a new one
    emitted INTEGER NOT NULL DEFAULT 0,   -- 1: sidecar, bin and source are as this row says
    deaths INTEGER NOT NULL DEFAULT 0,    -- workers that died on it alone
    checksum INTEGER                      -- of how it ended: records.Record.checksum
);
CREATE TABLE publication (                -- the last time that each image's record was published
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- ascending; an image that is published again gets a new one
    image INTEGER NOT NULL UNIQUE REFERENCES image (id),
    told INTEGER                          -- if only its file was renamed since: the number that it has for sinks
);
CREATE TABLE start (                      -- each start of the daemon: what has copied numbers sees here that a backup was restored
    token TEXT NOT NULL,
    number INTEGER NOT NULL               -- the highest of `publication` at that time
);
CREATE TABLE sink (                       -- an additional output, which follows the publications
    name TEXT PRIMARY KEY,
    place INTEGER NOT NULL,               -- publication.number of the last record that it has
    succeeded_at REAL                     -- Unix seconds: when it last took records; NULL: never
) WITHOUT ROWID;
CREATE TABLE look (                       -- a second look that an image waits for, or has had
    image INTEGER NOT NULL REFERENCES image (id),
    name TEXT NOT NULL,                   -- of the look in the configuration
    not_before REAL,                      -- Unix seconds; 0: not tried yet; NULL: it has ended
    attempts INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,    -- workers that died on it alone
    model INTEGER REFERENCES model (id),  -- that ran, or failed; NULL while it waits
    reason TEXT,                          -- NULL: `result` has its answer
    detail TEXT,
    checksum INTEGER,                     -- checksums.of_look
    PRIMARY KEY (image, name)
) WITHOUT ROWID;
CREATE TABLE lost (                       -- DONE, but the last redo could not read its file: nothing can process it again
    image INTEGER PRIMARY KEY REFERENCES image (id)
);
CREATE TABLE renamed (                    -- until it is settled, the path that the file of an image had before
    image INTEGER NOT NULL REFERENCES image (id),  -- PENDING: perhaps another row's file; else: what this path has is to be removed
    path BLOB NOT NULL,
    PRIMARY KEY (image, path)
) WITHOUT ROWID;
CREATE TABLE meta (                       -- one row: which ledger this is; the file `identity` has it too
    id TEXT NOT NULL,
    made_at TEXT NOT NULL                 -- RFC 3339, UTC
);
INSERT INTO meta VALUES (lower(hex(randomblob(16))), strftime('%Y-%m-%dT%H:%M:%SZ', 'now'));
CREATE UNIQUE INDEX bytes ON content (digest);
CREATE UNIQUE INDEX version ON image (inbox, path, mtime_ns, ctime_ns, size, inode, device);
CREATE INDEX fresh ON image (priority, id) WHERE status = 0 AND not_before = 0;
CREATE INDEX again ON image (not_before) WHERE status = 0 AND not_before > 0;
CREATE INDEX owed ON image (id) WHERE emitted = 0 AND status IN (1, 2);
CREATE INDEX made ON image (models) WHERE status = 1 AND models IS NOT NULL;  -- no other query has this condition
CREATE INDEX failures ON image (id) WHERE status = 2 AND location IS NOT NULL;
CREATE INDEX waiting ON look (name, not_before, image) WHERE not_before IS NOT NULL;
CREATE INDEX files ON image (inode, mtime_ns) WHERE location IS NULL;
CREATE INDEX told ON publication (told) WHERE told IS NOT NULL;
CREATE INDEX former ON renamed (path);

-- name: add_inbox
INSERT INTO inbox (path) VALUES (?) ON CONFLICT DO NOTHING;

-- name: inbox_id
SELECT id FROM inbox WHERE path = ?;

-- name: marker
SELECT marker FROM inbox WHERE id = ?;

-- name: keep_marker
UPDATE inbox SET marker = ? WHERE id = ?;

-- name: add_model
INSERT INTO model (stage, fingerprint, notice) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET notice = excluded.notice;

-- name: keep_provenance
UPDATE model SET provenance = ? WHERE id = ?;

-- name: model_id
SELECT id, provenance FROM model WHERE stage = ? AND fingerprint = ?;

-- name: forget_current
UPDATE model SET is_current = 0 WHERE is_current;

-- name: make_current
UPDATE model SET is_current = 1 WHERE id = ?;

-- name: set_priority
-- Files that wait to be unpacked have `:containers` more. If the inbox does not unpack any more, they wait as images from now on.
UPDATE image SET priority = :priority + iif(priority > :least AND :unpacks, :containers, 0)
WHERE status = 0 AND inbox = :inbox AND priority <> :priority + iif(priority > :least AND :unpacks, :containers, 0);

-- name: versions
SELECT path, inode, size, mtime_ns, ctime_ns FROM image WHERE inbox = ? AND status <> 4 AND path IN (:rows);

-- name: files_of
SELECT * FROM (
    SELECT path, size, mtime_ns, status = 0 AS waits FROM image
    WHERE inbox = ? AND status = 0 AND location IS NULL LIMIT 1000
)
UNION ALL SELECT * FROM (
    SELECT path, size, mtime_ns, status = 0 OR EXISTS (
        SELECT 1 FROM look WHERE look.image = image.id AND look.not_before IS NOT NULL
    ) FROM image WHERE inbox = ? AND location IS NULL AND status <> 4 ORDER BY id DESC LIMIT 1000
);

-- name: other_names
-- Of files that are new: the last images with the same inode, time and size under any path. There are file systems on which many
-- files have one inode.
SELECT path, ctime_ns, inode, size, mtime_ns FROM (SELECT ? AS inbox) AS asked CROSS JOIN (VALUES :rows) AS new
CROSS JOIN image ON image.id IN (
    SELECT id FROM image AS other WHERE other.inode = new.column1 AND other.mtime_ns = new.column2 AND other.location IS NULL
    AND +other.inbox = asked.inbox AND other.size = new.column3 AND other.status IN (0, 1, 2) ORDER BY other.id DESC LIMIT 8
) ORDER BY image.id DESC;

-- name: waits_as
-- A file that was renamed before it was read.
SELECT * FROM image WHERE inbox = ? AND path = ? AND inode = ? AND size = ? AND mtime_ns = ? AND status = 0 AND finished_at IS NULL
AND location IS NULL AND priority <= ? ORDER BY id DESC LIMIT 1;

-- name: note_renamed
INSERT INTO renamed (image, path) SELECT id, ? FROM image WHERE inbox = ? AND path = ? AND inode = ? AND size = ? AND mtime_ns = ?
AND ctime_ns = ? AND device = 0 AND status = 0 AND finished_at IS NULL AND location IS NULL ON CONFLICT DO NOTHING;

-- name: renamed_before
-- Of images that end: the one whose file theirs is by all that the system says of it. is_published: sidecar, bin and source are as
-- its row says; 0: they will be soon; NULL: its source cannot leave the inbox.
SELECT now.id AS now, now.path AS now_path, now.ctime_ns AS now_ctime_ns,
    iif(old.emitted = 0 AND old.not_before IS old.finished_at AND NOT EXISTS (SELECT 1 FROM renamed WHERE image = old.id), NULL,
        old.emitted) AS is_published,
    now.digest = old.digest AND now.models IS old.models AND now.bin IS old.bin
        AND now.criteria IS old.criteria AND now.reason IS old.reason AND now.detail IS old.detail AS is_same,
    old.*, inbox.path AS inbox_path
FROM renamed JOIN image AS now ON now.id = renamed.image JOIN image AS old ON old.id = (
    SELECT MAX(id) FROM image WHERE inbox = now.inbox AND path = renamed.path AND mtime_ns = now.mtime_ns AND size = now.size
    AND inode = now.inode AND status IN (1, 2)
) JOIN inbox ON inbox.id = old.inbox
WHERE now.inbox IN (SELECT value FROM json_each(?)) AND renamed.image IN (:rows) AND old.location IS NULL
AND now.location IS NULL AND old.path <> now.path AND old.id < now.id ORDER BY old.id DESC;

-- name: later_versions
-- Of a path, without one row. is_renamed: another row waits whose file may be that one's.
SELECT id, status = 4 AND location IS NULL AND NOT EXISTS (SELECT 1 FROM publication WHERE image = later.id) AS is_empty,
    EXISTS (SELECT 1 FROM renamed JOIN image AS now ON now.id = renamed.image
        WHERE renamed.path = later.path AND now.inbox = later.inbox AND now.status = 0) AS is_renamed
FROM image AS later WHERE inbox = ? AND path = ? AND id > ? AND id <> ?;

-- name: rename
UPDATE OR IGNORE image SET path = :path, device = 0, ctime_ns = :ctime_ns, checksum = :checksum, emitted = :emitted,
    not_before = :not_before WHERE id = :id;

-- name: leave
-- A row that says that a path is GONE, if it has no newer version. It has the models of the last one if there are older
-- ones, whose sidecars must not come back.
INSERT INTO image (inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at, models, detail, finished_at)
SELECT inbox, :before, 0, inode, size, mtime_ns, :old_ctime_ns, priority, 4, seen_at,
    iif(status = 1 AND EXISTS (SELECT 1 FROM image AS older WHERE older.inbox = image.inbox AND older.path = :before), models, NULL),
    :detail, :now
FROM image WHERE id = :id AND NOT EXISTS (
    SELECT 1 FROM image AS newer WHERE newer.inbox = image.inbox AND newer.path = :before AND newer.id > image.id
);

-- name: add_renamed
INSERT INTO renamed (image, path) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: forget_renamed
DELETE FROM renamed WHERE image = ?;

-- name: renamed_images
SELECT image FROM renamed WHERE image IN (:rows);

-- name: former
SELECT old.id, renamed.path, EXISTS (
    SELECT 1 FROM image AS later WHERE later.inbox = old.inbox AND later.path = old.path AND later.id > old.id
    AND (later.status = 1 OR later.models <> '[]')
) FROM renamed JOIN image AS old ON old.id = renamed.image WHERE renamed.image IN (:rows);

-- name: settle_renamed
DELETE FROM renamed WHERE image IN (:rows) RETURNING image;

-- name: admit
INSERT OR FAIL INTO image (inbox, path, inode, size, mtime_ns, ctime_ns, priority, status, seen_at, reason, device, emitted)
SELECT * FROM (VALUES :rows) AS new WHERE NOT :is_known ON CONFLICT DO NOTHING RETURNING status, id;

-- name: admit_again
-- Versions that were GONE, and are there again.
UPDATE OR FAIL image SET status = new.column8, reason = new.column10, priority = new.column7, not_before = 1, detail = NULL,
    models = NULL, finished_at = NULL
FROM (VALUES :rows) AS new WHERE image.inbox = new.column1 AND image.path = new.column2 AND image.inode = new.column3
AND image.size = new.column4 AND image.mtime_ns = new.column5 AND image.ctime_ns = new.column6 AND image.device = new.column11
AND image.status = 4 AND NOT :is_known RETURNING image.status, image.id;

-- name: supersede
-- A version that was DONE once is DONE again. CROSS JOIN: SQLite begins with the new rows, as all older ones may be millions.
UPDATE OR FAIL image SET status = iif(finished_at IS NULL, 4, 1), finished_at = COALESCE(finished_at, :now), reason = NULL,
    detail = iif(finished_at IS NULL, 'replaced by a newer version', NULL) WHERE id IN (
    SELECT old.id FROM image AS new CROSS JOIN image AS old ON old.inbox = new.inbox AND old.path = new.path
    WHERE new.id > :last AND old.id <= :last AND old.status = 0
) RETURNING status, id;

-- name: failures_replaced
SELECT COUNT(*) FROM image AS new JOIN image AS old ON old.id = (
    SELECT MAX(id) FROM image WHERE inbox = new.inbox AND path = new.path AND id < new.id
) WHERE new.id > ? AND old.status = 2;

-- name: last_id
SELECT COALESCE(MAX(id), 0) FROM image;

-- name: fresh
SELECT id, inbox, path, location, inode, size, mtime_ns, ctime_ns, attempts, seen_at, deaths,
    finished_at IS NOT NULL AS has_result, priority FROM image
WHERE status = 0 AND not_before = 0 AND priority = ? AND id > ? AND +inbox IN (SELECT value FROM json_each(?))
ORDER BY id LIMIT ?;

-- name: again
SELECT id, inbox, path, location, inode, size, mtime_ns, ctime_ns, attempts, seen_at, deaths,
    finished_at IS NOT NULL AS has_result, priority FROM image
WHERE status = 0 AND not_before > 0 AND not_before <= ? AND +inbox IN (SELECT value FROM json_each(?))
AND (+priority > ?) = ? ORDER BY not_before LIMIT ?;

-- name: has_containers
SELECT 1 FROM image INDEXED BY fresh WHERE status = 0 AND not_before = 0 AND priority > :least
    AND +inbox IN (SELECT value FROM json_each(:inboxes))
UNION ALL SELECT 1 FROM image INDEXED BY again WHERE status = 0 AND not_before > 0 AND not_before <= :now AND +priority > :least
    AND +inbox IN (SELECT value FROM json_each(:inboxes)) LIMIT 1;

-- name: take_as_image
UPDATE image SET priority = priority - :containers WHERE id = :id AND priority > :least;

-- name: next_again
-- `> 0` is needed: SQLite does not know the parameter when it chooses an index.
SELECT MIN(not_before) FROM image
WHERE status = 0 AND not_before > 0 AND not_before > ? AND +inbox IN (SELECT value FROM json_each(?));

-- name: priorities
SELECT DISTINCT priority FROM image WHERE status = 0 AND not_before = 0 ORDER BY priority DESC;

-- name: contents
SELECT digest, format, width, height, pages, checksum FROM content WHERE digest IN (:rows) AND format IS NOT '';

-- name: results
SELECT content.digest AS digest, model, payload, seconds, result.checksum AS checksum
FROM content CROSS JOIN result ON result.content = content.id WHERE content.digest IN (:rows) AND format IS NOT '';

-- name: keep_content
INSERT OR FAIL INTO content (digest, format, width, height, pages, checksum) VALUES :rows ON CONFLICT DO NOTHING;

-- name: count_pages
UPDATE OR FAIL content SET format = found.column2, width = found.column3, height = found.column4, pages = found.column5,
    checksum = found.column6
FROM (VALUES :rows) AS found WHERE content.digest = found.column1
AND (found.column5 > content.pages OR content.format = '');

-- name: forget_content
-- For a damaged row. It keeps its id, because its results refer to it.
UPDATE content SET format = '', width = 0, height = 0, pages = 1, checksum = NULL WHERE digest = ?;

-- name: forget_content_row
UPDATE content SET format = '', width = 0, height = 0, pages = 1, checksum = NULL WHERE id = ?;

-- name: keep_result
-- After `keep_contents`. WHERE TRUE: SQLite would read ON CONFLICT as a condition of the join.
INSERT OR FAIL INTO result (content, model, payload, seconds, checksum)
SELECT content.id, new.column2, new.column3, new.column4, new.column5
FROM (VALUES :rows) AS new CROSS JOIN content ON content.digest = new.column1 WHERE TRUE ON CONFLICT DO NOTHING;

-- name: drop_result
DELETE FROM result WHERE content = (SELECT id FROM content WHERE digest = ?) AND model = ?;

-- name: drop_result_row
DELETE FROM result WHERE id = ?;

-- name: stand
-- An image that was DONE and cannot be read again stays DONE.
UPDATE image SET status = 1, reason = NULL, detail = NULL
WHERE status = 0 AND finished_at IS NOT NULL AND id IN (:rows) RETURNING id;

-- name: end
UPDATE OR FAIL image SET status = ended.column2, digest = COALESCE(ended.column3, digest), models = COALESCE(ended.column4, models),
    bin = ended.column5, criteria = ended.column6, reason = ended.column7, detail = ended.column8,
    finished_at = ended.column9, attempts = ended.column10, checksum = ended.column11, emitted = 0
FROM (VALUES :rows) AS ended
WHERE image.id = ended.column1 AND image.status = 0 AND image.path = ended.column12 RETURNING image.id;

-- name: repeats
-- Of images that have just ended: the version before of the same file, if it has the same bytes and the same result, and is published.
SELECT now.id, old.id FROM image AS now CROSS JOIN image AS old ON old.id = (
    SELECT MAX(id) FROM image WHERE inbox = now.inbox AND path = now.path AND id < now.id
)
WHERE now.inbox IN (SELECT value FROM json_each(?)) AND now.id IN (:rows) AND now.location IS NULL AND old.location IS NULL
AND old.status = 1 AND old.emitted = 1 AND old.digest = now.digest AND old.models = now.models AND old.bin = now.bin
AND old.criteria = now.criteria;

-- name: drop_image
DELETE FROM image WHERE id = ?;

-- name: has_now
UPDATE image SET device = 0, inode = ?, size = ?, mtime_ns = ?, ctime_ns = ? WHERE id = ?;

-- name: blame
UPDATE image SET deaths = ? WHERE id = ?;

-- name: postpone
UPDATE image SET attempts = ?, not_before = ?, detail = ? WHERE id = ? AND status = 0;

-- name: bound_waits
-- The last daemon's clock may have been set since.
UPDATE image SET not_before = :now + min(:longest, :retry * (1 << min(max(attempts, 1) - 1, 20)))
WHERE status = 0 AND not_before > 0 AND not_before > :now + min(:longest, :retry * (1 << min(max(attempts, 1) - 1, 20)));

-- name: emitted
UPDATE OR FAIL image SET emitted = 1 WHERE id IN (:rows);

-- name: superseded
-- Earlier versions that wait to leave their inbox: a newer one is there now, and the sidecar is that of the newer one.
UPDATE image SET emitted = 1 WHERE id IN (
    SELECT older.id FROM image AS newer JOIN image AS older ON older.inbox = newer.inbox AND older.path = newer.path
    WHERE newer.id IN (:rows) AND older.id < newer.id AND older.emitted = 0 AND older.status IN (1, 2)
);

-- name: number_publications
-- All but those of `note_held`. The earlier number of an image goes.
INSERT OR REPLACE INTO publication (image)
SELECT id FROM image WHERE id IN (:rows) AND not_before IS NOT finished_at ORDER BY id RETURNING number, image;

-- name: number_renamed
-- Sinks know them by the number that they had.
INSERT OR REPLACE INTO publication (image, told) SELECT image, COALESCE(told, number) FROM publication WHERE image IN (
    SELECT id FROM image WHERE id IN (:rows) AND not_before IS finished_at
) ORDER BY number RETURNING number;

-- name: pass_over
-- Sinks that have all that was published before.
UPDATE sink SET place = ? WHERE place = ? AND name NOT IN (SELECT value FROM json_each(?));

-- name: number_all_published
-- In a ledger that was made from sidecars.
INSERT INTO publication (image) SELECT id FROM image WHERE status IN (1, 2) AND emitted = 1 ORDER BY id;

-- name: note_held
-- Their records have been published, but their sources cannot leave the inbox yet: the next start publishes them again.
UPDATE image SET not_before = finished_at
WHERE emitted = 0 AND finished_at IS NOT NULL AND not_before IS NOT finished_at AND id IN (:rows);

-- name: last_publication
-- The highest number ever used. Before schema 7 the table had another name.
SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name IN ('publication', 'outbox');

-- name: note_start
INSERT INTO start (token, number) SELECT lower(hex(randomblob(8))), COALESCE(MAX(seq), 0)
FROM sqlite_sequence WHERE name = 'publication';

-- name: starts
SELECT rowid, token, number FROM start WHERE rowid >= ? ORDER BY rowid;

-- name: publications
-- An image that waits for a new result still has the one that was published.
SELECT publication.number, iif(image.status = 0 AND image.finished_at IS NOT NULL, 1, image.status) AS status, image.*,
    inbox.path AS inbox_path
FROM publication JOIN image ON image.id = publication.image JOIN inbox ON inbox.id = image.inbox
WHERE publication.number > :after ORDER BY publication.number LIMIT :limit;

-- name: publications_for_sinks
-- The same without renames: an image keeps the number that it had before.
SELECT given.number, iif(image.status = 0 AND image.finished_at IS NOT NULL, 1, image.status) AS status, image.*,
    inbox.path AS inbox_path
FROM (
    SELECT number, image FROM publication WHERE number > :after AND told IS NULL
    UNION ALL SELECT told AS number, image FROM publication WHERE told > :after ORDER BY number LIMIT :limit
) AS given JOIN image ON image.id = given.image JOIN inbox ON inbox.id = image.inbox ORDER BY given.number;

-- name: as_published
SELECT iif(image.finished_at IS NOT NULL AND image.status = 0, 1, image.status) AS status, image.*, inbox.path AS inbox_path
FROM image JOIN inbox ON inbox.id = image.inbox WHERE image.id IN (:rows);

-- name: shown
-- Of these publications, those of images that are as they were published, and have no newer version in their place.
SELECT publication.number, publication.image FROM publication JOIN image ON image.id = publication.image
WHERE publication.number IN (:rows) AND (image.status IN (1, 2) OR image.status = 0 AND image.finished_at IS NOT NULL)
AND (image.location IS NOT NULL OR :is_newest);

-- name: shown_images
-- The same of these images.
SELECT image.id, publication.number FROM image JOIN publication ON publication.image = image.id
WHERE image.id IN (:rows) AND (image.status IN (1, 2) OR image.status = 0 AND image.finished_at IS NOT NULL)
AND (image.location IS NOT NULL OR :is_newest);

-- name: shown_before
-- The same of all, newest first.
SELECT publication.number, publication.image FROM publication CROSS JOIN image ON image.id = publication.image
WHERE publication.number < ? AND (image.status IN (1, 2) OR image.status = 0 AND image.finished_at IS NOT NULL)
AND (image.location IS NOT NULL OR :is_newest) ORDER BY publication.number DESC LIMIT ?;

-- name: shown_after
-- The same after a number, oldest first.
SELECT publication.number, publication.image FROM publication CROSS JOIN image ON image.id = publication.image
WHERE publication.number > ? AND (image.status IN (1, 2) OR image.status = 0 AND image.finished_at IS NOT NULL)
AND (image.location IS NOT NULL OR :is_newest) ORDER BY publication.number LIMIT ?;

-- name: pictures
-- What tells which of several images is the best one, of all that are DONE or were.
SELECT publication.number, image.id, coalesce(content.width * content.height, 0), image.size
FROM publication CROSS JOIN image ON image.id = publication.image LEFT JOIN content ON content.digest = image.digest
WHERE publication.number > :after AND publication.number <= :last
AND (image.status = 1 OR image.status = 0 AND image.finished_at IS NOT NULL)
AND (:bins = '[]' OR image.bin IN (SELECT value FROM json_each(:bins)))
AND (image.location IS NOT NULL OR :is_newest) ORDER BY publication.number LIMIT :limit;

-- name: places
-- Where images are, and their sizes.
SELECT image.id AS id, inbox.path AS inbox_path, image.path AS path, location, width, height, size
FROM image JOIN inbox ON inbox.id = image.inbox LEFT JOIN content ON content.digest = image.digest
WHERE image.id IN (:rows);

-- name: number_of
SELECT number FROM publication WHERE image = ?;

-- name: count_publications
SELECT COUNT(*) FROM publication;

-- name: sinks
SELECT name, place, succeeded_at FROM sink;

-- name: add_sink
INSERT INTO sink (name, place) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: drop_sinks
DELETE FROM sink WHERE name NOT IN (SELECT value FROM json_each(?)) RETURNING name, place;

-- name: move_place
UPDATE sink SET place = ?, succeeded_at = ? WHERE name = ?;

-- name: placed
-- Two versions of a file that was moved once would get equal values: the first one keeps them.
UPDATE OR IGNORE image SET location = placed.column2, inode = placed.column3, ctime_ns = placed.column4
FROM (VALUES :rows) AS placed WHERE image.id = placed.column1;

-- name: owed
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE emitted = 0 AND status IN (1, 2) AND image.id > ? ORDER BY image.id LIMIT ?;

-- name: count_unwritten
-- What is held has its sidecar. The index `owed` is only used with its own condition.
SELECT COUNT(*) FROM image
WHERE emitted = 0 AND status IN (1, 2) AND status = 1 AND not_before IS NOT finished_at AND finished_at < :before AND :image IN (0, id);

-- name: want_look
INSERT INTO look (image, name, not_before) VALUES :rows ON CONFLICT (image, name) DO UPDATE
SET not_before = 0, attempts = 0, deaths = 0, model = NULL, reason = NULL, detail = NULL, checksum = NULL;

-- name: drop_look
DELETE FROM look WHERE image = ? AND name = ?;

-- name: want_lost_look
-- It was dropped if it was due before the new name of its file was known.
INSERT INTO look (image, name, not_before) VALUES (?, ?, 0) ON CONFLICT DO NOTHING;

-- name: drop_gone_look
-- Unless only the name is gone.
DELETE FROM look WHERE image = ? AND name = ? AND EXISTS (SELECT 1 FROM image WHERE id = look.image AND path = ?);

-- name: next_looks
-- Includes images that cannot be taken: those that are not DONE, not published, or not the newest version of their file.
SELECT image.*, look.attempts AS look_attempts, look.deaths AS look_deaths, :is_newest AS is_newest
FROM look JOIN image ON image.id = look.image WHERE look.name = ? AND look.not_before <= ?
AND +inbox IN (SELECT value FROM json_each(?)) AND (? IS NULL OR image.id IN (SELECT value FROM json_each(?)))
ORDER BY look.not_before, look.image LIMIT ?;

-- name: is_look_wanted
SELECT 1 FROM look JOIN image ON image.id = look.image WHERE look.name = ? AND look.not_before IS NOT NULL
AND image.emitted = 1 AND +inbox IN (SELECT value FROM json_each(?))
AND (? IS NULL OR image.id IN (SELECT value FROM json_each(?))) LIMIT 1;

-- name: drop_unknown_looks
DELETE FROM look WHERE not_before IS NOT NULL AND name NOT IN (SELECT value FROM json_each(:names));

-- name: take_up_looks
UPDATE look INDEXED BY waiting SET not_before = 0 WHERE not_before = :aside AND not_before IS NOT NULL
AND EXISTS (SELECT 1 FROM image WHERE id = look.image AND inbox IN (SELECT value FROM json_each(:inboxes)));

-- name: set_looks_aside
UPDATE look INDEXED BY waiting SET not_before = :aside WHERE not_before IS NOT NULL AND not_before < :aside
AND EXISTS (SELECT 1 FROM image WHERE id = look.image AND inbox NOT IN (SELECT value FROM json_each(:inboxes)));

-- name: postpone_look
UPDATE look SET attempts = ?, not_before = ?, detail = ? WHERE image = ? AND name = ? AND not_before IS NOT NULL;

-- name: waits_for_look
SELECT 1 FROM look WHERE image = ? AND name = ? AND not_before IS NOT NULL;

-- name: blame_look
UPDATE look SET deaths = ? WHERE image = ? AND name = ?;

-- name: end_look
UPDATE look SET attempts = ?, not_before = NULL, model = ?, reason = ?, detail = ?, checksum = ?
WHERE image = ? AND name = ? AND not_before IS NOT NULL RETURNING image;

-- name: publishable
SELECT id FROM image WHERE id IN (:rows) AND status = 1 AND emitted = 1 AND :is_newest;

-- name: publish_again
-- `not_before` as of an image that sinks do not have yet: see `enqueue`.
UPDATE image SET emitted = 0, not_before = 0 WHERE id IN (:rows);

-- name: images
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox WHERE image.id IN (:rows);

-- name: ended_looks
SELECT image, name, model, reason, detail, checksum FROM look WHERE not_before IS NULL AND image IN (:rows);

-- name: restore_look
INSERT INTO look (image, name, not_before, attempts, model, reason, detail, checksum) VALUES :rows ON CONFLICT DO NOTHING;

-- name: count_looks
SELECT COUNT(not_before), COUNT(*) - COUNT(not_before) - COUNT(reason), COUNT(reason) FROM look WHERE name = ?;

-- name: look_names
SELECT DISTINCT name FROM look;

-- name: drop_pruned_looks
DELETE FROM look WHERE image IN (SELECT value FROM json_each(?));

-- name: counts
SELECT status, COUNT(*) FROM image GROUP BY status;

-- name: oldest_pending
SELECT seen_at FROM image WHERE status = 0 AND not_before = 0 AND priority = ? ORDER BY id LIMIT 1;

-- name: waiting_by_inbox
-- Both indexes are partial: no other row is read.
SELECT inbox, COUNT(*) AS images, MIN(seen_at) AS oldest FROM (
    SELECT inbox, seen_at FROM image INDEXED BY fresh WHERE status = 0 AND not_before = 0
    UNION ALL SELECT inbox, seen_at FROM image INDEXED BY again WHERE status = 0 AND not_before > 0
) GROUP BY inbox;

-- name: find_by_path
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE image.inbox = ? AND image.path = ? ORDER BY image.id DESC LIMIT 1;

-- name: find_by_id
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox WHERE image.id = ?;

-- name: find_by_location
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE image.location = ? ORDER BY image.id DESC LIMIT 1;

-- name: find_by_end
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE substr(image.path, -length(?)) = ? AND :is_newest ORDER BY image.id LIMIT 20;

-- name: newest
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE (? IS NULL OR image.status = ?) AND :is_newest ORDER BY image.id DESC LIMIT ?;

-- name: finished
-- An image that the daemon has moved is separate from those that came later under its name.
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE status = 1 AND image.id > ? AND (? = '[]' OR bin IN (SELECT value FROM json_each(?))) AND (location IS NOT NULL OR :is_newest) ORDER BY image.id LIMIT ?;

-- name: drawn
-- Of these numbers, those of images that `finished` returns.
SELECT id FROM image WHERE status = 1 AND (? = '[]' OR bin IN (SELECT value FROM json_each(?)))
AND (location IS NOT NULL OR :is_newest) AND id IN (:rows);

-- name: finished_models
SELECT DISTINCT models FROM image
WHERE status = 1 AND (? = '[]' OR bin IN (SELECT value FROM json_each(?))) AND (location IS NOT NULL OR :is_newest);

-- name: count_left
-- Of these contents, those with an answer of this stage, but none of the model with this fingerprint. Reads an index only.
SELECT COUNT(*) FROM json_each(:contents) AS drawn WHERE EXISTS (
    SELECT 1 FROM result JOIN model ON model.id = result.model WHERE content = drawn.value AND stage = :stage
) AND NOT EXISTS (
    SELECT 1 FROM result JOIN model ON model.id = result.model
    WHERE content = drawn.value AND stage = :stage AND fingerprint = :fingerprint
);

-- name: last_content
SELECT COALESCE(MAX(id), 0) FROM content;

-- name: count_results
-- Reads an index of all results: 0.8 s for a million images with four stages.
SELECT COUNT(*) FROM result WHERE model = ?;

-- name: first_answer
SELECT payload FROM result WHERE model = ? LIMIT 1;

-- name: published
-- The sidecar of a file is that of its newest result, also while this waits for a new one. The reason of a failure stays until
-- there is a newer version.
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE emitted = 1 AND image.id > ? AND NOT EXISTS (
    SELECT 1 FROM image AS later WHERE later.inbox = image.inbox AND later.path = image.path AND later.id > image.id
    AND (image.status = 2 AND later.status NOT IN (3, 4) OR later.status = 1 OR later.models <> '[]')
) AND status IN (1, 2) ORDER BY image.id LIMIT ?;

-- name: replaced
-- The versions that `published` leaves out: a newer version of the file has the sidecar, or has replaced the reason.
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE emitted = 1 AND image.id > ? AND EXISTS (
    SELECT 1 FROM image AS later WHERE later.inbox = image.inbox AND later.path = image.path AND later.id > image.id
    AND (image.status = 2 AND later.status NOT IN (3, 4) OR later.status = 1 OR later.models <> '[]')
) AND status IN (1, 2) ORDER BY image.id LIMIT ?;

-- name: pending
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE status = 0 AND image.id > ? ORDER BY image.id LIMIT ?;

-- name: redone
-- Images that wait for a new result, as they were published.
SELECT 1 AS status, image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE image.status = 0 AND finished_at IS NOT NULL AND emitted = 1 AND image.id > ? ORDER BY image.id LIMIT ?;

-- name: set_aside
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE location IS NOT NULL AND image.id > ? AND (status = 4 OR status = 2 AND EXISTS (
    SELECT 1 FROM image AS later WHERE later.inbox = image.inbox AND later.path = image.path AND later.id > image.id
    AND later.status NOT IN (3, 4)
)) ORDER BY image.id LIMIT ?;

-- name: restore
INSERT INTO image (id, inbox, path, inode, size, mtime_ns, ctime_ns, status, seen_at, attempts, location, digest,
    models, bin, criteria, reason, detail, finished_at, checksum, priority, device, emitted)
SELECT *, 0, 0, 1 FROM (VALUES :rows) WHERE true ON CONFLICT DO NOTHING RETURNING id;

-- name: bin_counts
SELECT bin, COUNT(*) AS count FROM image WHERE status = 1 AND (location IS NOT NULL OR :is_newest) GROUP BY bin;

-- name: bins
SELECT DISTINCT bin FROM image WHERE status = 1;

-- name: status_of
SELECT status FROM image WHERE id = ?;

-- name: annotate_again
-- Its stored result is damaged and cannot be published. Of a replaced version, whose result must not follow the newer one's,
-- `clear` keeps only the row. The same is true of a row whose path is damaged: the next scan finds its file as a new one.
-- A damaged time would stop the daemon that writes the new result.
UPDATE image SET status = 0, attempts = 0, deaths = 0, not_before = 1, reason = NULL, detail = NULL,
    finished_at = iif(status = 1, finished_at, NULL),
    seen_at = iif(typeof(seen_at) = 'real' AND seen_at BETWEEN 0 AND 253402300799, seen_at, strftime('%s', 'now'))
WHERE status IN (1, 2) AND id = :id AND typeof(path) = 'blob' AND :is_newest RETURNING id;

-- name: clear
-- A replaced version with damaged data: only the row is kept.
UPDATE image SET status = 4, detail = 'damaged in the ledger, and replaced by a newer version', finished_at = :now,
    digest = NULL, models = NULL, bin = NULL, criteria = NULL, reason = NULL, checksum = NULL
WHERE status IN (1, 2) AND id = :id;

-- name: right
-- Take the data of its sidecar, which is the correct one.
UPDATE image SET digest = COALESCE(?, digest), models = COALESCE(?, models), bin = ?, criteria = ?, reason = ?, detail = ?, attempts = ?, seen_at = ?,
    finished_at = ?, checksum = ? WHERE id = ?;

-- name: put_back
-- A file that was to be unpacked waits as an image if its inbox does not unpack any more.
UPDATE image SET priority = iif(priority > :least AND :unpacking IS NOT NULL
        AND inbox NOT IN (SELECT value FROM json_each(:unpacking)), priority - :containers, priority),
    status = 0, attempts = 0, deaths = 0, not_before = 1, reason = NULL, detail = NULL,
    finished_at = iif(status = 1, finished_at, NULL)
WHERE status = :status AND emitted = 1 AND id = :id AND :is_newest;  -- an image that is not published yet will move its file first

-- name: distrust
-- Results of this image that may be wrong go, so its models run again.
DELETE FROM result WHERE content = (SELECT content.id FROM image JOIN content ON content.digest = image.digest WHERE image.id = :id)
AND model IN (SELECT value FROM image, json_each(image.models) WHERE image.id = :id);

-- name: moved_failures
-- The last ones that the daemon has moved.
SELECT id, location, inode, size, mtime_ns, ctime_ns FROM image INDEXED BY failures
WHERE status = 2 AND location IS NOT NULL AND emitted = 1 AND :is_newest ORDER BY id DESC LIMIT ?;

-- name: renew
-- Its file has changed where the daemon has moved it.
UPDATE image SET size = ?, mtime_ns = ? WHERE id = ? AND status = 2;

-- name: note_lost
INSERT INTO lost SELECT id FROM image WHERE id = ? AND status = 1 ON CONFLICT DO NOTHING;

-- name: forget_lost
DELETE FROM lost WHERE image = ?;

-- name: reasons
-- Of these publications, as `shown`.
SELECT reason, COUNT(*) FROM image WHERE id IN (SELECT image FROM publication WHERE number IN (:rows)) AND status = 2
AND (location IS NOT NULL OR :is_newest) GROUP BY reason;

-- name: unpublished
-- No index has the SKIPPED ones: a part of the table is read, and no index that would read more.
SELECT id FROM image NOT INDEXED WHERE id >= :first AND id < :before AND status = :status
AND (:inboxes IS NULL OR inbox IN (SELECT id FROM inbox AS asked WHERE CAST(asked.path AS TEXT) IN (SELECT value FROM json_each(:inboxes))))
AND NOT EXISTS (SELECT 1 FROM json_each(:words) WHERE instr(lower(CAST(image.path AS TEXT)), value) = 0)
AND :is_newest ORDER BY id DESC LIMIT :limit;

-- name: failed
SELECT id FROM image WHERE status = 2 AND :is_newest ORDER BY id;

-- name: newest_done
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE status = 1 AND emitted = 1 AND image.id > ? AND :is_newest ORDER BY image.id LIMIT ?;

-- name: current_models
SELECT id FROM model WHERE is_current;

-- name: next_models
-- The next set of models that made some result, in the order of its text.
SELECT models FROM image INDEXED BY made WHERE status = 1 AND models > ? ORDER BY models LIMIT 1;

-- name: count_made
-- Of the last `:limit` versions with results of these models: their number, and how many are the newest of their file, in one of
-- these inboxes, and could be read by the last redo.
SELECT COUNT(*), COALESCE(SUM(inbox IN (SELECT value FROM json_each(:inboxes)) AND :is_newest
    AND NOT EXISTS (SELECT 1 FROM lost WHERE lost.image = image.id)), 0) FROM (
    SELECT id, inbox, path FROM image INDEXED BY made WHERE status = 1 AND models = :models ORDER BY id DESC LIMIT :limit
) AS image;

-- name: models
SELECT id, stage, fingerprint, notice, provenance FROM model;

-- name: last_model
SELECT COALESCE(MAX(id), 0) FROM model;

-- name: has_results
SELECT 1 FROM image WHERE inbox = ? AND status IN (1, 2) LIMIT 1;

-- name: inboxes
SELECT id, path FROM inbox;

-- name: meta
SELECT id, made_at FROM meta;

-- name: last_number
-- The highest number that an image ever got.
SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'image';

-- name: all_contents
-- The cast is for a digest that became text by a flipped bit.
SELECT id, CAST(digest AS BLOB) AS digest, format, width, height, pages, checksum FROM content
WHERE id > ? ORDER BY id LIMIT ?;

-- name: all_results
-- The view of an older ledger has the digest as the number of its content, also of results without content.
SELECT result.id AS id, CAST(COALESCE(content.digest, iif(typeof(content) = 'blob', content, x'')) AS BLOB) AS digest, model,
    payload, seconds, result.checksum AS checksum
FROM result LEFT JOIN content ON content.id = result.content WHERE result.id > ? ORDER BY result.id LIMIT ?;

-- name: all_endings
SELECT image.*, inbox.path AS inbox_path FROM image JOIN inbox ON inbox.id = image.inbox
WHERE image.id > ? AND status IN (1, 2) ORDER BY image.id LIMIT ?;

-- name: spare
-- About 200 bytes of a row are its numbers and its entries in the indexes.
SELECT id, status, 200 + length(path) + COALESCE(length(criteria), 0) + COALESCE(length(detail), 0) AS bytes FROM image
WHERE id > :after AND :is_spare ORDER BY id LIMIT :limit;

-- name: prune
DELETE FROM image WHERE NOT :is_awaited AND id IN (SELECT value FROM json_each(:ids)) AND :is_spare RETURNING id, status;

-- name: drop_pruned_publications
DELETE FROM publication WHERE image IN (SELECT value FROM json_each(?));

-- name: drop_pruned_renamed
DELETE FROM renamed WHERE image IN (SELECT value FROM json_each(?));

-- name: drop_pruned_lost
DELETE FROM lost WHERE image IN (SELECT value FROM json_each(?));

-- name: skipped
-- No index has them: the table is read, in the order of its numbers.
SELECT id, inbox, path, seen_at, reason FROM image NOT INDEXED
WHERE id > :after AND id <= :last AND :is_skipped AND inbox IN (SELECT value FROM json_each(:inboxes))
AND typeof(path) = 'blob' AND typeof(seen_at) = 'real' ORDER BY id LIMIT :limit;

-- name: forget_skipped
-- Of these rows. No other version of the file becomes the newest, unless that is a row like this or GONE.
DELETE FROM image WHERE id IN (SELECT value FROM json_each(:ids)) AND :is_skipped AND NOT :is_awaited
AND (NOT :is_newest OR NOT EXISTS (
    SELECT 1 FROM image AS older WHERE older.inbox = image.inbox AND older.path = image.path AND older.id < image.id
    AND (older.status NOT IN (3, 4) OR older.location IS NOT NULL OR COALESCE(older.models, '[]') <> '[]')
)) RETURNING id;

-- name: leave_skipped
-- The others stand for their file, in the place of earlier versions.
UPDATE image SET status = 4, reason = NULL, detail = :detail, finished_at = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND :is_skipped AND :is_newest RETURNING id;

-- name: unreferenced
-- Bytes that no version has once the spare ones are removed.
SELECT digest FROM content WHERE digest > :after
EXCEPT SELECT digest FROM image WHERE digest IS NOT NULL AND NOT (:is_spare) ORDER BY digest LIMIT :limit;

-- name: sizes_of_results
SELECT length(payload) + 100 FROM content CROSS JOIN result ON result.content = content.id WHERE content.digest IN (:rows);

-- name: drop_results
DELETE FROM result WHERE content IN (SELECT id FROM content WHERE digest IN (:rows)) RETURNING length(payload) + 100;

-- name: drop_contents
DELETE FROM content WHERE digest IN (:rows) RETURNING length(digest);
