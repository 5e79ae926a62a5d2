/* log.c -- a ring of records with one writer. A seqlock per record: the header says WRITING before the first
 * word changes and COMMITTED after the last; a reader that sees the same COMMITTED header on both sides has
 * the words of exactly that record. The record sits in one line, so a write-back is a snapshot of it. */
#include "coherence/coherence.h"

enum { COMMITTED = 1, SEQUENCE_SHIFT = 8 };

void kvp_log_append_to(struct kvp_record *ring, uint64_t records, uint64_t sequence, unsigned kind, const uint64_t word[3],
                       struct kvp_lines *lines)
{
    struct kvp_record *record = &ring[sequence & (records - 1)];
    uint64_t header = sequence << SEQUENCE_SHIFT | (uint64_t)kind << 1;

    /* Each store releases the ones before it: no reader sees a new word under the old header. */
    nc_store(&record->header, header);
    KVP_CRASH_POINT("log.writing");
    for (int i = 0; i < 3; i++)
        nc_store(&record->word[i], word[i]);
    nc_store(&record->header, header | COMMITTED);
    kvp_lines_note(lines, record);
}

void kvp_log_append(struct kvp_record *ring, uint64_t records, uint64_t sequence, unsigned kind, const uint64_t word[3])
{
    struct kvp_lines lines = {NULL};

    kvp_log_append_to(ring, records, sequence, kind, word, &lines);
    kvp_lines_end(&lines);
}

void kvp_log_refresh(const struct kvp_record *ring, uint64_t records, uint64_t sequence, uint64_t n)
{
    uint64_t first = sequence & (records - 1), whole = n < records ? n : records;
    uint64_t until_end = records - first, direct = whole < until_end ? whole : until_end;

    nc_invalidate(&ring[first], direct * sizeof *ring);
    if (whole > direct)
        nc_invalidate(ring, (whole - direct) * sizeof *ring);
}

int kvp_log_read(const struct kvp_record *ring, uint64_t records, uint64_t sequence, unsigned *kind, uint64_t word[3],
                 uint64_t *newest)
{
    const struct kvp_record *record = &ring[sequence & (records - 1)];
    uint64_t header = nc_load(&record->header);

    if (header >> SEQUENCE_SHIFT > sequence) {
        *newest = header >> SEQUENCE_SHIFT;
        return -1;
    }
    if (header >> SEQUENCE_SHIFT != sequence || !(header & COMMITTED))
        return 0;
    for (int i = 0; i < 3; i++)
        word[i] = nc_load(&record->word[i]);
    uint64_t again = nc_load(&record->header);
    *kind = (unsigned)(header >> 1 & 127);
    if (again == header)
        return 1;
    *newest = again >> SEQUENCE_SHIFT;
    return -1;
}

uint64_t kvp_log_newest(const struct kvp_record *ring, uint64_t records)
{
    uint64_t newest = 0;

    for (uint64_t i = 0; i < records; i++) {
        uint64_t header = nc_load(&ring[i].header), sequence = header >> SEQUENCE_SHIFT;
        /* A position that does not belong here is a damaged header, not a record. */
        if ((header & COMMITTED) && (sequence & (records - 1)) == i && sequence > newest)
            newest = sequence;
    }
    return newest;
}
