/* rack_seats.h -- the driver's side of the workers of the rack: they are started, replaced when they die, watched, and given
 * orders. */
#ifndef KVP_TEST_RACK_SEATS_H
#define KVP_TEST_RACK_SEATS_H
#include "tests/native/rack_worker.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { BLOCKED_S = 30, TICK_US = 5000, LOST_AT_ONCE = 2, HISTORY = 24 };
#define LEASE_S (LEASE_MS * 1e-3)

/* What becomes of a host. */
enum plan {
    UP,
    KILLED,    /* its processes die, its cache lives on; it comes back */
    LOST,      /* its cache is lost too; it comes back, at once or late */
    FENCED,    /* lost, adopted by the survivor that is named, and back after that */
    STOPPED,   /* for longer than its lease, and nobody fences it */
};
static const char *const plan_names[] = {"up", "killed", "lost", "fenced", "stopped"};

struct host {
    enum plan plan;
    double until;             /* when the next thing happens */
    uint32_t adopter;
    int is_adopted;
    struct seat *asked;       /* who is to fence it; NULL: nobody has been asked */
    uint32_t serial;
};
static struct host hosts[HOSTS];
static double respawn_at[SEATS]; /* 0: the seat is not to be filled */
static struct { uint64_t progress; double since; } seen[SEATS];
static uint64_t dice, kills, deaths, events[5], strict_rounds, adopted_segments, lost_lines, found_keys;
static char history[HISTORY][128];
static uint32_t history_count;
static double started;

static uint64_t roll(uint64_t n) { return draw_from(&dice, n); }

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    char *line = history[history_count++ % HISTORY];
    int length = snprintf(line, 16, "%8.3f ", seconds() - started);
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(line + length, 128 - (size_t)length, format, arguments);
    va_end(arguments);
}

static void kill_all(void)
{
    for (int i = 0; i < SEATS; i++)
        if (rack->seats[i].pid)
            kill(rack->seats[i].pid, SIGKILL), waitpid(rack->seats[i].pid, NULL, 0);
}

__attribute__((noreturn, format(printf, 1, 2))) static void give_up(const char *format, ...)
{
    va_list arguments;

    fflush(stdout);
    for (uint32_t i = history_count > HISTORY ? history_count - HISTORY : 0; i < history_count; i++)
        fprintf(stderr, "%s\n", history[i % HISTORY]);
    va_start(arguments, format);
    fprintf(stderr, "%8.3f FAILED in round %u: ", seconds() - started, rack->round);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  replay: %s\n", replay);
    kill_all();
    kvp_pool_remove(rack->uri, 1);
    exit(1);
}

/* ---- seats ---- */

static uint32_t host_of(const struct seat *at) { return (uint32_t)(at - rack->seats) / WORKERS; }

static void spawn(uint32_t number)
{
    struct seat *at = &rack->seats[number];
    pid_t driver = getpid();

    respawn_at[number] = 0;
    at->spawns++;
    at->done = at->serial;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        be_worker(number, driver);
        _exit(0);
    }
    if (child < 0)
        give_up("fork");
    at->pid = child;
    seen[number].since = seconds();
}

/* Those that have died are noted, and replaced after a while unless their host is down. */
static void reap(void)
{
    int how;

    for (pid_t child; (child = waitpid(-1, &how, WNOHANG)) > 0;)
        for (uint32_t i = 0; i < SEATS; i++) {
            if (rack->seats[i].pid != child)
                continue;
            rack->seats[i].pid = 0;
            deaths++;
            if (!WIFSIGNALED(how) || WTERMSIG(how) != SIGKILL)
                give_up("worker %u of host %u ended with %#x while doing %u", i % WORKERS, i / WORKERS, how,
                        rack->seats[i].doing);
            if (hosts[i / WORKERS].plan == UP || hosts[i / WORKERS].plan == STOPPED)
                respawn_at[i] = seconds() + 0.001 * (double)roll(80);
        }
}

static void fill_seats(void)
{
    for (uint32_t i = 0; i < SEATS; i++)
        if (respawn_at[i] && seconds() >= respawn_at[i])
            spawn(i);
}

static void show_stacks(pid_t pid)
{
    char command[160];

    fflush(stderr);
    snprintf(command, sizeof command, "gdb -q -batch -p %d -ex 'thread apply all bt 12' 2>/dev/null | grep -E '^(#|Thread)' >&2",
             pid);
    if (system(command) != 0)
        fprintf(stderr, "no debugger: what process %d waits for is not known\n", pid);
}

static void watch_for_the_blocked(void)
{
    double now = seconds();

    for (uint32_t i = 0; i < SEATS; i++) {
        struct seat *at = &rack->seats[i];
        uint64_t progress = shared_load(&at->progress);
        if (!at->pid || progress != seen[i].progress || hosts[i / WORKERS].plan == STOPPED) {
            seen[i].progress = progress;
            seen[i].since = now;
        } else if (now - seen[i].since > BLOCKED_S) {
            show_stacks(at->pid);
            give_up("worker %u of host %u is blocked in %s %u", i % WORKERS, i / WORKERS, at->doing < VERBS ? "verb" : "order",
                    at->doing < VERBS ? at->doing : at->doing - VERBS);
        }
    }
}

static void tick(void)
{
    usleep(TICK_US);
    reap();
    fill_seats();
    watch_for_the_blocked();
}

/* ---- orders ---- */

static uint32_t give_order(struct seat *at, enum order order, uint32_t argument)
{
    at->order = order;
    at->argument = argument;
    shared_store(&at->serial, at->serial + 1);
    return at->serial;
}

/* Who is asked on behalf of a host. */
static struct seat *speaker(uint32_t host)
{
    for (uint32_t i = host * WORKERS; i < (host + 1) * WORKERS; i++)
        if (rack->seats[i].pid)
            return &rack->seats[i];
    return NULL;
}

/* Ask, and wait for the answer; ask whoever follows if the first one dies. */
static int64_t ask_seat(struct seat *at, enum order order, uint32_t argument)
{
    for (;;) {
        uint32_t spawns = at->spawns, serial = give_order(at, order, argument);
        while (at->pid && at->spawns == spawns && shared_load(&at->done) != serial)
            tick();
        if (at->spawns == spawns && shared_load(&at->done) == serial)
            return at->answer;
        while (!at->pid)
            tick();
    }
}

static int64_t ask_host(uint32_t host, enum order order, uint32_t argument)
{
    while (!speaker(host))
        tick();
    return ask_seat(speaker(host), order, argument);
}

static int64_t ask_hosts(enum order order)
{
    int64_t sum = 0;

    for (uint32_t h = 0; h < HOSTS; h++)
        sum += ask_host(h, order, 0);
    return sum;
}

/* To all at once: none waits for another. */
static void tell_everybody(enum order order)
{
    shared_store(&rack->is_quiet, order == ORDER_QUIET);
    for (uint32_t i = 0; i < SEATS; i++)
        if (rack->seats[i].pid)
            give_order(&rack->seats[i], order, 0);
    for (uint32_t i = 0; i < SEATS; i++)
        while (!rack->seats[i].pid || shared_load(&rack->seats[i].done) != rack->seats[i].serial)
            tick();
}
#endif
