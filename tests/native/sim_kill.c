/* sim_kill.c -- mode sim: processes killed in the middle of lines leave no torn line, no stuck lock, no lost store.
 *
 *   sim_kill SECONDS SEED [STRIDE]
 *
 * First a child is killed after each single instruction (or each STRIDE-th) of one store, write-back and invalidate. Then writers of host 0
 * and readers of host 1 are killed at random while they work on neighbouring lines.
 */
#define _GNU_SOURCE
#include "tests/native/bottom.h"

#include <sys/prctl.h>
#include <sys/ptrace.h>

enum { BYTES = 1 << 20, LINES = 8, AT = 4096, WRITERS = 2, READERS = 2, CHILDREN = WRITERS + READERS, WORDS = 8 };

#define MARK() __asm__ volatile("int3" ::: "memory")

static char uri[64];
static struct kvp_mapping host[2]; /* the parent's */

static nc_u64 *words_of(const struct kvp_mapping *mapping, int line)
{
    return word_at(mapping, AT + (uint64_t)line * KVP_LINE);
}

static void make(const char *options)
{
    char text[120];

    snprintf(text, sizeof text, "%s?%s", uri, options);
    kvp_mapping_unlink(uri);
    MUST(kvp_mapping_create(text, BYTES, &host[0]));
    MUST(kvp_mapping_attach(&host[0], 0));
    MUST(kvp_mapping_commit(&host[0]));
    MUST(kvp_mapping_open(uri, &host[1]));
    MUST(kvp_mapping_attach(&host[1], 1));
}

static void drop(void)
{
    struct kvp_sim_counts counts;

    MUST(kvp_sim_counts_read(&host[0], &counts));
    REQUIRE(counts.conflicts == 0, "%llu conflicts, at %llu", (unsigned long long)counts.conflicts,
            (unsigned long long)counts.conflict_offset);
    kvp_mapping_close(&host[0]);
    kvp_mapping_close(&host[1]);
    kvp_mapping_unlink(uri);
}

/* A line is stored to from its last word to its first, so in every snapshot of it the words do not fall from the first to
 * the last, and whoever loads them in that order sees them not fall either, even if the line is fetched again
 * meanwhile. A line that is exchanged word by word breaks that. */
static void store_line(const struct kvp_mapping *mapping, int line, uint64_t value)
{
    for (int i = WORDS - 1; i >= 0; i--)
        nc_store(&words_of(mapping, line)[i], value);
}

static uint64_t check_line(const struct kvp_mapping *mapping, int line, const char *who)
{
    uint64_t value[WORDS];

    for (int i = 0; i < WORDS; i++)
        value[i] = nc_load(&words_of(mapping, line)[i]);
    for (int i = 1; i < WORDS; i++)
        REQUIRE(value[i - 1] <= value[i], "%s: line %d is torn: word %d is %llu, word %d is %llu", who, line, i - 1,
                (unsigned long long)value[i - 1], i, (unsigned long long)value[i]);
    return value[0];
}

/* ---- every instruction ---- */

/* One more line of the other host's is there to be fetched. What a thread does only once is done before. */
static void one_round(uint64_t value)
{
    nc_store(words_of(&host[0], LINES), value);
    nc_write_back(words_of(&host[0], LINES), KVP_LINE);
    nc_invalidate(words_of(&host[0], LINES), KVP_LINE);
    MARK();
    nc_store(&words_of(&host[0], 0)[0], value);
    nc_write_back(words_of(&host[0], 0), KVP_LINE);
    nc_invalidate(words_of(&host[0], 1), KVP_LINE);
    MARK();
}

/* Step the child to its n-th instruction after the first mark and kill it there: 0 if the second mark came first. */
static int kill_after(pid_t child, long n)
{
    int status, marks = 0;

    while (marks < 1) {
        REQUIRE(waitpid(child, &status, 0) == child && WIFSTOPPED(status), "the child ended with %#x", status);
        marks += WSTOPSIG(status) == SIGTRAP;
        if (marks < 1)
            ptrace(PTRACE_CONT, child, NULL, NULL);
    }
    for (long i = 0; i < n; i++) {
        siginfo_t info;
        ptrace(PTRACE_SINGLESTEP, child, NULL, NULL);
        REQUIRE(waitpid(child, &status, 0) == child && WIFSTOPPED(status), "the child ended with %#x", status);
        ptrace(PTRACE_GETSIGINFO, child, NULL, &info);
        if (info.si_code == SI_KERNEL) { /* the second mark */
            marks++;
            break;
        }
    }
    kill(child, SIGKILL);
    REQUIRE(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "not killed");
    return marks == 1;
}

static void check_round(uint64_t before, uint64_t after)
{
    uint64_t mine = nc_load(words_of(&host[0], 0));

    REQUIRE(mine == before || mine == after, "the host sees %llu", (unsigned long long)mine);
    nc_write_back(words_of(&host[0], 0), KVP_LINE); /* needs the lock of the dead */
    nc_invalidate(words_of(&host[1], 0), KVP_LINE);
    for (int i = 0; i < WORDS; i++)
        REQUIRE(nc_load(&words_of(&host[1], 0)[i]) == (i ? 0 : mine), "what the host sees did not reach the device");
    check_line(&host[0], 1, "the fetched line");
    nc_store(words_of(&host[0], 0), after);
    nc_write_back(words_of(&host[0], 0), KVP_LINE);
    store_line(&host[1], 1, after);
    nc_write_back(words_of(&host[1], 1), KVP_LINE);
}

static long every_instruction(long stride)
{
    long n = 0;
    uint64_t value = 1;

    make("events=0");
    nc_store(words_of(&host[0], 0), 1);
    nc_write_back(words_of(&host[0], 0), KVP_LINE);
    store_line(&host[1], 1, 1);
    nc_write_back(words_of(&host[1], 1), KVP_LINE);
    for (int going = 1; going; n += stride) {
        value++;
        pid_t child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
                _exit(3);
            one_round(value);
            _exit(0);
        }
        going = kill_after(child, n);
        check_round(value - 1, value);
    }
    drop();
    return n;
}

/* ---- at random ---- */

static void write_lines(int self)
{
    uint64_t dice = mix((uint64_t)getpid());

    for (;;) {
        int line = (int)(dice % (LINES / WRITERS)) * WRITERS + self;
        dice = mix(dice + 1);
        kvp_sim_events(&host[0]);
        /* The predecessor may have died between two words: the last is the newest. */
        store_line(&host[0], line, nc_load(&words_of(&host[0], line)[WORDS - 1]) + 1);
        if (dice >> 32 & 1)
            nc_write_back(words_of(&host[0], line), KVP_LINE);
        check_line(&host[0], line ^ 1, "a writer"); /* the other writer's, in our cache */
    }
}

static void read_lines(void)
{
    uint64_t dice = mix((uint64_t)getpid());

    for (;;) {
        int line = (int)(dice % LINES);
        dice = mix(dice + 1);
        kvp_sim_events(&host[1]);
        if (dice >> 32 & 1)
            nc_invalidate(words_of(&host[1], line), KVP_LINE);
        check_line(&host[1], line, "a reader");
    }
}

static pid_t start(int self)
{
    pid_t child = fork();

    if (child)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(120); /* one that is stuck ends, and is reported */
    if (self < WRITERS)
        write_lines(self);
    read_lines();
    return 0;
}

static long at_random(double duration, uint64_t seed)
{
    char options[64];
    pid_t child[CHILDREN];
    uint64_t dice = seed;
    long kills = 0, total = 0;

    snprintf(options, sizeof options, "seed=%llu", (unsigned long long)seed);
    make(options);
    kvp_sim_hot(&host[0], AT + LINES * KVP_LINE), kvp_sim_hot(&host[1], AT + LINES * KVP_LINE);
    for (int i = 0; i < CHILDREN; i++)
        child[i] = start(i);
    for (double end = seconds() + duration; seconds() < end; kills++) {
        int victim = (int)((dice = mix(dice + 1)) % CHILDREN), status;
        usleep((unsigned)(dice >> 32) % 2000);
        kill(child[victim], SIGKILL);
        REQUIRE(waitpid(child[victim], &status, 0) == child[victim] && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
                "child %d ended with %#x", victim, status);
        child[victim] = start(victim);
    }
    for (int i = 0; i < CHILDREN; i++) {
        kill(child[i], SIGKILL);
        waitpid(child[i], NULL, 0);
    }
    for (int line = 0; line < LINES; line++) {
        uint64_t last = check_line(&host[0], line, "at the end, host 0");
        nc_write_back(words_of(&host[0], line), KVP_LINE);
        nc_invalidate(words_of(&host[1], line), KVP_LINE);
        REQUIRE(check_line(&host[1], line, "at the end, host 1") == last, "line %d was not written back", line);
        total += (long)last;
    }
    REQUIRE(total > 100, "only %ld stores", total);
    drop();
    return kills;
}

int main(int argc, char **argv)
{
    double duration = argc > 1 ? atof(argv[1]) : 3;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    long stride = argc > 3 ? atol(argv[3]) : 1;

    snprintf(uri, sizeof uri, "sim:kill-%d", (int)getpid());
    signal(SIGALRM, SIG_DFL);
    alarm(300);
    pid_t probe = fork();
    if (probe == 0)
        _exit(ptrace(PTRACE_TRACEME, 0, NULL, NULL) ? 1 : 0);
    int status;
    waitpid(probe, &status, 0);
    if (status)
        printf("ptrace refused\n");
    else
        printf("%ld instructions, a death after every %ld\n", every_instruction(stride), stride);
    printf("%ld deaths at random, seed %llu\n", at_random(duration, seed), (unsigned long long)seed);
    return 0;
}
