/* search.c -- runs of a scenario, one after the other: all of them, within budgets, or random ones. */
#include "engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <time.h>

enum { QUIET_RUNS = 1000, LEARNING_RUNS_MAX = 20000 };

static jmp_buf out_of_check;

void ex_fail(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(ex.message, sizeof ex.message, format, arguments);
    va_end(arguments);
    ex.failed = 1;
    if (ex.phase == RUN)
        ex_leave_run();
    if (ex.phase == CHECK)
        longjmp(out_of_check, 1);
    fprintf(stderr, "setup: %s\n", ex.message);
    exit(2);
}

void ex_allow_two_writers(void)
{
    ex.two_writers = 1;
}

void ex_allow_dirty_invalidate(void)
{
    ex.dirty_invalidate = 1;
}

/* Of the processor: others may use it as well. */
static double seconds_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* One run. Its outcome is in ex: failed, pruned, or void because it learned something. */
static void run_once(const struct ex_scenario *scenario)
{
    ex.phase = SETUP;
    ex_memory_restore();
    ex_private_restore();
    ex_threads_restore();
    ex_trail_rewind();
    ex.left = ex.limit;
    ex.learned = ex.failed = ex.pruned = 0;
    ex.phase = RUN;
    ex_start();
    ex.phase = CHECK;
    if (!ex.failed && !ex.pruned && scenario->check && !setjmp(out_of_check))
        scenario->check();
    ex.phase = SETUP;
}

static void prepare(const struct ex_scenario *scenario)
{
    ex_private_forget();
    memset(&ex, 0, sizeof ex);
    ex.lines = EX_LINES;
    ex_memory_forget();
    ex.died_hook = scenario->died;
    scenario->setup();
    ex_memory_keep();
    ex_private_keep();
    if (!ex.threads)
        ex_fail("%s has no threads", scenario->name);
}

static uint32_t count_racy(void)
{
    uint32_t racy = 0;

    for (uint32_t i = 0; i < ex.lines; i++) {
        racy += ex_line[i].remote && ex_line[i].use.racy;
        for (uint32_t w = 0; w < 8 && !ex_line[i].remote; w++)
            racy += ex_word[i * 8 + w].racy;
    }
    return racy;
}

/* Random runs find out which words matter, so that the search seldom has to start again. */
static void learn(const struct ex_scenario *scenario, const struct request *request)
{
    ex.limit = request->limit;
    if (ex.limit.preemptions < 8)
        ex.limit.preemptions = 8;
    ex_trail_start(NULL, 1, 80);
    int enough = ex.threads == 1 ? 1 : QUIET_RUNS; /* one thread by itself does the same each time */
    for (int i = 0, quiet = 0; quiet < enough && i < LEARNING_RUNS_MAX; i++) {
        run_once(scenario);
        quiet = ex.learned ? 0 : quiet + 1;
    }
}

static int should_stop(const struct request *request, const struct result *result, double start)
{
    if (request->runs && result->runs >= request->runs)
        return 1;
    return request->seconds > 0 && !(result->runs & 255) && seconds_now() - start > request->seconds;
}

static void begin(const struct request *request, struct result *result)
{
    ex_trail_start(NULL, request->seed, 0);
    if (request->prune)
        ex_states_forget();
    result->runs = result->pruned = result->steps = 0;
}

/* All runs within ex.limit. 0: stopped early, or failed. */
static int search(const struct ex_scenario *scenario, const struct request *request, struct result *result, double start)
{
    begin(request, result);
    for (;;) {
        run_once(scenario);
        if (ex.learned) { /* what was explored so far was explored without this choice */
            result->restarts++;
            begin(request, result);
            continue;
        }
        result->runs++;
        result->pruned += (uint64_t)ex.pruned;
        result->steps += (uint64_t)ex.steps;
        if (ex.failed)
            return 0;
        if (!ex_trail_next())
            return !(request->prune && ex_states_full());
        if (should_stop(request, result, start))
            return 0;
    }
}

static void search_random(const struct ex_scenario *scenario, const struct request *request, struct result *result,
                          double start)
{
    ex_trail_start(NULL, request->seed, 32);
    while (result->runs < request->random && !should_stop(request, result, start)) {
        run_once(scenario);
        if (ex.learned)
            continue;
        result->runs++;
        result->steps += (uint64_t)ex.steps;
        result->complete = !ex.failed && ex_trail_depth() == 0; /* nothing to choose: there is one run */
        if (ex.failed || result->complete)
            return;
    }
}

/* One run again, told step by step. */
static void replay(const struct ex_scenario *scenario, const struct request *request, struct result *result)
{
    ex_known_parse(request->known);
    ex.verbose = 1;
    ex_trail_start(request->replay, 0, 0);
    run_once(scenario);
    ex.verbose = 0;
    result->runs = 1;
    result->steps = (uint64_t)ex.steps;
}

struct result ex_search(const struct ex_scenario *scenario, const struct request *request)
{
    struct result result = {.preemptions = request->limit.preemptions};
    double start = seconds_now();

    prepare(scenario);
    if (!request->replay)
        learn(scenario, request);
    ex.lazy = request->lazy;
    ex.hashing = request->prune && !request->random && !request->replay;
    ex.limit = request->limit;
    if (request->replay) {
        replay(scenario, request, &result);
    } else if (request->random) {
        search_random(scenario, request, &result, start);
    } else {
        int rung = request->ladder && bounded() ? 0 : request->limit.preemptions, more;
        do {
            ex.limit.preemptions = result.preemptions = rung;
            result.complete = search(scenario, request, &result, start);
            more = result.complete && rung < request->limit.preemptions;
            rung++;
        } while (more);
    }
    result.failed = ex.failed;
    result.states = request->prune ? ex_states_count() : 0;
    result.racy = count_racy();
    result.seconds = seconds_now() - start;
    return result;
}
