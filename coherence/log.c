/* log.c -- a ring of records with one writer. A seqlock per record: the header says WRITING before the first
 * word changes and COMMITTED after the last; a reader that sees the same COMMITTED header on both sides has
 * the words of exactly that record. The record sits in one line, so a write-back is a snapshot of it. */
#include "coherence/coherence.h"

enum { COMMITTED = 1 };

void kvp_log_append(struct kvp_record *ring, uint64_t records, uint64_t sequence, const uint64_t word[3])
{
    struct kvp_record *record = &ring[sequence & (records - 1)];

    /* Each store releases the ones before it: no reader sees a new word under the old header. */
    nc_store(&record->header, sequence << 1);
    KVP_CRASH_POINT("log.writing");
    for (int i = 0; i < 3; i++)
        nc_store(&record->word[i], word[i]);
    nc_store(&record->header, sequence << 1 | COMMITTED);
    nc_write_back(record, sizeof *record);
}

int kvp_log_read(const struct kvp_record *ring, uint64_t records, uint64_t sequence, uint64_t word[3],
                 uint64_t *newest)
{
    const struct kvp_record *record = &ring[sequence & (records - 1)];

    nc_invalidate(record, sizeof *record);
    nc_read_fence(); /* orders the header's load after the invalidate; absorbed by polling if it is late */
    uint64_t header = nc_load(&record->header);
    if (header >> 1 > sequence) {
        *newest = header >> 1;
        return -1;
    }
    if (header != (sequence << 1 | COMMITTED))
        return 0;
    for (int i = 0; i < 3; i++)
        word[i] = nc_load(&record->word[i]);
    uint64_t again = nc_load(&record->header);
    if (again == header)
        return 1;
    *newest = again >> 1;
    return -1;
}

uint64_t kvp_log_newest(const struct kvp_record *ring, uint64_t records)
{
    uint64_t newest = 0;

    for (uint64_t i = 0; i < records; i++) {
        uint64_t header = nc_load(&ring[i].header);
        /* A position that does not belong here is a damaged header, not a record. */
        if ((header & COMMITTED) && (header >> 1 & (records - 1)) == i && header >> 1 > newest)
            newest = header >> 1;
    }
    return newest;
}
