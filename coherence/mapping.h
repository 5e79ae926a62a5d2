/* mapping.h -- private to this folder: what mapping.c lends to other files that make shared memory. */
#ifndef KVP_MAPPING_H
#define KVP_MAPPING_H
#include "coherence/coherence.h"

/* Record errno as the failure of doing `what` with `where`; returns the status that fits. */
int kvp_fail_errno(const char *what, const char *where);
/* Map out->bytes of out->fd at a 2 MiB boundary; sets out->base. */
int kvp_map_aligned(struct kvp_mapping *out);
/* Give the first `bytes` of a file in /dev/shm their memory, so that no later store ends in SIGBUS. The file has that
 * length only once all of it is there. NOSPACE with the missing byte count. */
int kvp_back_file(int fd, uint64_t bytes, const char *path);

#endif
