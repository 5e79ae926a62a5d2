/* choices.c -- the trail: each choice of a run in order, from which the run can be repeated; and states seen before. */
#include "engine.h"

#include <sys/mman.h>

static struct choice {
    uint16_t n, pick;
} trail[TRAIL_MAX];
static int depth;   /* choices made in this run */
static int length;  /* of the prefix that this run repeats */
static int checked; /* depth at which the state was last looked up */
static int replays; /* picks beyond the prefix: always the first */
static int greed;   /* in random runs, of 256 picks how many are not the first */
static uint64_t random_state;

static uint64_t draw(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 16;
}

/* "POSITION:PICK,..." of the picks that are not the first. */
static void parse(const char *text)
{
    memset(trail, 0, sizeof trail);
    length = 0;
    while (*text) {
        char *end;
        unsigned long position = strtoul(text, &end, 10);
        if (*end != ':' || position >= TRAIL_MAX)
            break;
        trail[position].pick = (uint16_t)strtoul(end + 1, &end, 10);
        length = (int)position + 1;
        text = *end == ',' ? end + 1 : end;
    }
}

void ex_trail_start(const char *replay, uint64_t seed, int random_greed)
{
    depth = length = 0;
    greed = random_greed;
    random_state = seed * 2654435761u + 88172645463325252ull;
    replays = replay != NULL;
    if (replay)
        parse(replay);
}

void ex_trail_rewind(void)
{
    depth = 0;
    checked = -1;
    if (greed)
        length = 0;
}

/* Is it worth looking up the state? Beyond the prefix, and where something was chosen since the last time. */
int ex_trail_new(void)
{
    if (depth < length || depth == checked)
        return 0;
    checked = depth;
    return 1;
}

int ex_trail_next(void)
{
    length = depth;
    while (length && trail[length - 1].pick + 1 >= trail[length - 1].n)
        length--;
    if (!length)
        return 0;
    trail[length - 1].pick++;
    return 1;
}

unsigned ex_choose(unsigned n)
{
    if (n <= 1)
        return 0;
    if (depth == TRAIL_MAX - 1)
        ex_fail("a run of more than %d choices", TRAIL_MAX);
    struct choice *choice = &trail[depth];
    if (depth >= length) {
        choice->pick = (uint16_t)(greed && (int)(draw() & 255) < greed ? draw() % n : 0);
        choice->n = (uint16_t)n;
    } else if (replays) {
        choice->n = (uint16_t)n;
    } else if (choice->n != n) {
        fprintf(stderr, "the scenario does not repeat: choice %d was one of %u, now of %u\n", depth, choice->n, n);
        abort();
    }
    if (choice->pick >= n)
        ex_fail("the trail does not fit: choice %d is one of %u", depth, n);
    depth++;
    return choice->pick;
}

int ex_trail_depth(void)
{
    return depth;
}

void ex_trail_print(FILE *out)
{
    const char *comma = "";

    for (int i = 0; i < depth; i++)
        if (trail[i].pick) {
            fprintf(out, "%s%d:%u", comma, i, trail[i].pick);
            comma = ",";
        }
}

/* ---- states seen before: an open hash table of 64-bit hashes ---- */

enum { TABLE_BITS = 25 };
static const uint64_t table_mask = (1ull << TABLE_BITS) - 1;
static uint64_t *table, count;
static int full;

void ex_states_forget(void)
{
    uint64_t bytes = (table_mask + 1) * sizeof *table;

    if (!table) {
        table = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (table == MAP_FAILED) {
            perror("no memory for the table of states");
            exit(2);
        }
    } else if (count) {
        madvise(table, bytes, MADV_DONTNEED);
    }
    count = 0;
    full = 0;
}

uint64_t ex_states_count(void)
{
    return count;
}

/* Then the search may repeat itself, and what it explores is right but not all of it. */
int ex_states_full(void)
{
    return full;
}

int ex_state_seen(uint64_t hash)
{
    uint64_t at = hash >> 20 & table_mask;

    for (; table[at]; at = (at + 1) & table_mask)
        if (table[at] == hash)
            return 1;
    if (count < table_mask / 4 * 3) {
        table[at] = hash;
        count++;
    } else {
        full = 1;
    }
    return 0;
}
