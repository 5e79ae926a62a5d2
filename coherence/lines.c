/* lines.c -- mode noncoherent: the instructions that write lines back and drop them, chosen once. */
#include "coherence/coherence.h"

#include <string.h>

#if KVP_MODE == KVP_NONCOHERENT

#if defined(__x86_64__)
#include <cpuid.h>

enum { LEAF_FEATURES = 7, CLFLUSHOPT_BIT = 23, CLWB_BIT = 24 };

static const char *line_of(const void *p)
{
    return (const char *)((uintptr_t)p & ~(uintptr_t)(KVP_LINE - 1));
}

/* Inline assembly and not -mclwb, which would let the compiler use these instructions where a CPU has not got them.
 * The clobber keeps stores to the range before the instruction, and loads of it behind. */
static void walk_clwb(const void *p, uint64_t bytes)
{
    for (const char *at = line_of(p), *end = (const char *)p + bytes; at < end; at += KVP_LINE)
        __asm__ volatile("clwb %0" : : "m"(*at) : "memory");
}

static void walk_clflushopt(const void *p, uint64_t bytes)
{
    for (const char *at = line_of(p), *end = (const char *)p + bytes; at < end; at += KVP_LINE)
        __asm__ volatile("clflushopt %0" : : "m"(*at) : "memory");
}

/* The oldest form: each waits for the one before it. Its order against a store of another CPU's is documented for a
 * full fence only, so each walk ends with one and no caller needs to know which form it has. */
static void walk_clflush(const void *p, uint64_t bytes)
{
    for (const char *at = line_of(p), *end = (const char *)p + bytes; at < end; at += KVP_LINE)
        __asm__ volatile("clflush %0" : : "m"(*at) : "memory");
    __asm__ volatile("mfence" : : : "memory");
}

static const struct form {
    const char *name;
    void (*write_back)(const void *p, uint64_t bytes);
    void (*invalidate)(const void *p, uint64_t bytes);
    unsigned features; /* of leaf 7, EBX */
} forms[] = {
    /* best first */
    {"clwb+clflushopt", walk_clwb, walk_clflushopt, 1u << CLWB_BIT | 1u << CLFLUSHOPT_BIT},
    {"clwb+clflush", walk_clwb, walk_clflush, 1u << CLWB_BIT},
    {"clflushopt", walk_clflushopt, walk_clflushopt, 1u << CLFLUSHOPT_BIT},
    {"clflush", walk_clflush, walk_clflush, 0},
};
enum { FORMS = sizeof forms / sizeof *forms };

static const struct form *form = &forms[FORMS - 1]; /* every x86-64 has it */

static unsigned features(void)
{
    unsigned a, b = 0, c, d;

    return __get_cpuid_count(LEAF_FEATURES, 0, &a, &b, &c, &d) ? b : 0;
}

__attribute__((constructor)) static void choose(void)
{
    unsigned have = features();

    for (int i = FORMS - 1; i >= 0; i--)
        if ((have & forms[i].features) == forms[i].features)
            form = &forms[i];
}

int kvp_line_choose(const char *instructions)
{
    for (int i = 0; i < FORMS; i++)
        if (strcmp(forms[i].name, instructions) == 0 && (features() & forms[i].features) == forms[i].features) {
            form = &forms[i];
            return KVP_OK;
        }
    return kvp_fail(KVP_E_INVALID, "this CPU has no '%.40s': it uses %s", instructions, form->name);
}

void kvp_write_back(const void *p, uint64_t bytes)
{
    form->write_back(p, bytes);
}

void kvp_invalidate(const void *p, uint64_t bytes)
{
    form->invalidate(p, bytes);
}

/* Orders write-backs and non-temporal stores before later stores. */
void kvp_write_fence(void)
{
    __asm__ volatile("sfence" : : : "memory");
}

/* The only fence that orders clflushopt before later loads. */
void kvp_full_fence(void)
{
    __asm__ volatile("mfence" : : : "memory");
}

const char *kvp_line_instructions(void)
{
    return form->name;
}

uint32_t kvp_line_bytes(void)
{
    return KVP_LINE;
}

#elif defined(__aarch64__)

static const char name[] = "dc cvac+dc civac";
static uint64_t step = 4, granule = KVP_LINE; /* until the constructor has run, the smallest there can be */

__attribute__((constructor)) static void measure(void)
{
    uint64_t type;

    __asm__("mrs %0, ctr_el0" : "=r"(type));
    step = 4ull << (type >> 16 & 15);
    granule = type >> 24 & 15 ? 4ull << (type >> 24 & 15) : 2048; /* 0: not said; 2 KiB is the most that is allowed */
}

int kvp_line_choose(const char *instructions)
{
    if (strcmp(instructions, name) == 0)
        return KVP_OK;
    return kvp_fail(KVP_E_INVALID, "this CPU has no '%.40s': it uses %s", instructions, name);
}

void kvp_write_back(const void *p, uint64_t bytes)
{
    for (uintptr_t at = (uintptr_t)p & ~(step - 1), end = (uintptr_t)p + bytes; at < end; at += step)
        __asm__ volatile("dc cvac, %0" : : "r"(at) : "memory");
}

void kvp_invalidate(const void *p, uint64_t bytes)
{
    for (uintptr_t at = (uintptr_t)p & ~(step - 1), end = (uintptr_t)p + bytes; at < end; at += step)
        __asm__ volatile("dc civac, %0" : : "r"(at) : "memory");
}

/* Cache maintenance is complete at a dsb only; the weaker dmb orders it against nothing. */
void kvp_write_fence(void)
{
    __asm__ volatile("dsb sy" : : : "memory");
}

void kvp_full_fence(void)
{
    __asm__ volatile("dsb sy" : : : "memory");
}

const char *kvp_line_instructions(void)
{
    return name;
}

uint32_t kvp_line_bytes(void)
{
    return (uint32_t)granule;
}

#else
#error "mode noncoherent needs cache instructions that a program may use: x86-64 and arm64 have them, this machine does not"
#endif

#else /* the other modes have no instructions */

const char *kvp_line_instructions(void)
{
    return KVP_MODE == KVP_COHERENT ? "none" : KVP_MODE == KVP_SIM ? "simulated" : "explored";
}

int kvp_line_choose(const char *instructions)
{
    if (strcmp(instructions, kvp_line_instructions()) == 0)
        return KVP_OK;
    return kvp_fail(KVP_E_INVALID, "this mode uses '%s', not '%.40s'", kvp_line_instructions(), instructions);
}

uint32_t kvp_line_bytes(void)
{
    return KVP_LINE;
}

#endif

void kvp_lines_write_back(const void *p, uint64_t bytes)
{
    nc_write_back(p, bytes);
    nc_write_fence(); /* the lines are in memory before the caller's next store: what a publication waits for */
}

void kvp_lines_invalidate(const void *p, uint64_t bytes)
{
    nc_invalidate(p, bytes);
    nc_read_fence(); /* the lines are gone before the caller's next load: what a refresh waits for */
}
