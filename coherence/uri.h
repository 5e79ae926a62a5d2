/* uri.h -- private to this folder: a pool URI taken apart (the forms are in coherence.h, "mapping"). */
#ifndef KVP_URI_H
#define KVP_URI_H
#include <stdint.h>

struct kvp_uri {
    int kind;            /* enum kvp_mapping_kind */
    int is_open_only;    /* memfd:FD and memfd:PID/FD */
    int open_fd;         /* of memfd:FD; -1 else */
    int interleave;      /* spread over nodes instead of binding to them */
    unsigned mode;       /* permissions */
    uint64_t nodes;      /* NUMA nodes, a bit each; 0: no wish */
    uint64_t inode;      /* of memfd:PID/FD?inode=N, for both numbers are used again; 0: any */
    uint64_t huge_bytes; /* of hugetlb:SIZE, or of hugepage= */
    uint64_t seed, events; /* of sim: */
    int has_seed, has_events;
    char path[400];      /* of shm:, sim:, file:, dax: and memfd:PID/FD */
    char text[512];      /* the URI without options, but those that say which pool it is */
};

/* INVALID with the reason for anything that is not a pool URI. */
int kvp_uri_parse(const char *text, struct kvp_uri *out);

#endif
