/* bottom.h -- what the tests of the bottom layer share: REQUIRE, children that die, hosts of a simulated pool. */
#ifndef KVP_TEST_BOTTOM_H
#define KVP_TEST_BOTTOM_H
#include "coherence/coherence.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REQUIRE(condition, ...)                                                                        \
    do {                                                                                               \
        if (!(condition)) {                                                                            \
            fprintf(stderr, "%s:%d: FAILED: %s: ", __FILE__, __LINE__, #condition);                    \
            fprintf(stderr, __VA_ARGS__);                                                              \
            fprintf(stderr, "\n  kvpool says: %s\n", kvp_error_detail());                              \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)
#define MUST(call) REQUIRE((call) == KVP_OK, "refused")

static inline uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

static inline double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static inline nc_u64 *word_at(const struct kvp_mapping *mapping, uint64_t offset)
{
    return (nc_u64 *)(void *)(mapping->base + offset);
}

static inline void wait_for(pid_t child)
{
    int status;

    REQUIRE(waitpid(child, &status, 0) == child, "no child");
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child ended with %#x", status);
}
#endif
