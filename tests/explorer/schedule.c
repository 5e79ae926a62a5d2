/* schedule.c -- threads of the explored program on one thread of the system: whose step is next, and who dies. */
#include "engine.h"

#include <stdarg.h>
#if !defined(__x86_64__) || defined(EX_UCONTEXT)
#define EX_UCONTEXT_USED 1
#include <ucontext.h>
#endif

struct engine ex;
static uint8_t stack[EX_THREADS][STACK_BYTES] __attribute__((aligned(64)));
static struct thread outside; /* the search */

/* ---- switching ---- */

#ifdef EX_UCONTEXT_USED
static ucontext_t contexts[EX_THREADS + 1];

static void switch_to(struct thread *from, struct thread *to)
{
    swapcontext(from->context, to->context);
}

static void make_context(struct thread *thread, void (*start)(void))
{
    int i = (int)(thread - ex.thread);

    outside.context = &contexts[EX_THREADS];
    thread->context = &contexts[i];
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stack[i];
    contexts[i].uc_stack.ss_size = STACK_BYTES;
    makecontext(&contexts[i], start, 0);
}
#else
void ex_switch(void **from, void *to);
__asm__(".text\n"
        ".globl ex_switch\n"
        "ex_switch:\n"
        " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        " mov %rsp, (%rdi)\n"
        " mov %rsi, %rsp\n"
        " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
        " ret\n");

static void switch_to(struct thread *from, struct thread *to)
{
    ex_switch(&from->context, to->context);
}

static void make_context(struct thread *thread, void (*start)(void))
{
    void **top = (void **)(void *)(stack[thread - ex.thread] + STACK_BYTES - EX_LINE);

    *--top = NULL; /* where `start` would return to: it does not. Keeps the stack aligned as after a call */
    *--top = (void *)start;
    thread->context = top - 6;
}
#endif

void ex_leave_run(void)
{
    switch_to(current(), &outside);
    abort(); /* nobody goes on with a run that was left */
}

void ex_tell(const struct ex_site *site, const char *format, ...)
{
    va_list arguments;

    if (ex.phase != RUN)
        return;
    if (site) {
        char place[80];
        snprintf(place, sizeof place, "%s:%d", site->file, site->line);
        printf("%5d  T%d/host %d  %-30s ", ex.steps, ex.current, current()->host, place);
    } else {
        printf("%-50s", "");
    }
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

/* ---- death ---- */

int ex_host_may_die(int host)
{
    if (ex.resets >> host & 1)
        return 1;
    for (int i = 0; i < ex.threads; i++)
        if (ex.thread[i].host == host && (ex.thread[i].flags & EX_HOST_CRASHABLE))
            return 1;
    return 0;
}

/* Who waits for a death starts; all that the dead did comes before. */
static void wake_waiters(void)
{
    for (int i = 0; i < ex.threads; i++) {
        struct thread *thread = &ex.thread[i];
        if (thread->state != WAITS_FOR_CRASH)
            continue;
        thread->state = READY;
        for (int dead = 0; dead < ex.threads; dead++)
            if (ex.thread[dead].state == DEAD)
                thread->before |= (uint16_t)(1 << dead);
    }
}

/* The process dies, the processor goes on: what it had stored arrives. */
static void kill_worker(int number)
{
    ex_trace(NULL, "*** worker T%d dies ***", number);
    ex_drain_all(&ex.thread[number]);
    ex.thread[number].state = DEAD;
    ex.thread[number].history = 0; /* nobody remembers what it knew */
    ex.died |= 1u << number;
    if (ex.died_hook)
        ex.died_hook(number);
    wake_waiters();
    ex_progress(1);
}

void ex_poke(int thread, void *p, uint64_t value, unsigned bytes)
{
    uint32_t at = ex_offset(p);

    ex_touch_as(thread, at, 1);
    if (!ex.death_shows && ex_word[at / 8].racy)
        ex.learned = 1, ex.death_shows = 1;
    ex_trace(NULL, "the kernel stores %s <- %#llx", ex_name_of(at), (unsigned long long)value);
    ex_write(ex.thread[thread].host, at, value, bytes);
}

static void kill_host(int host)
{
    ex_trace(NULL, "*** host %d dies ***", host);
    for (int i = 0; i < ex.threads; i++) {
        struct thread *thread = &ex.thread[i];
        if (thread->host != host)
            continue;
        while (thread->buffered && ex_choose(2))
            ex_drain(thread, 0);
        thread->buffered = 0;
        if (thread->state != DONE)
            thread->state = DEAD;
        thread->history = 0;
        ex.died |= 1u << i;
    }
    ex.died |= 1u << (16 + host);
    ex_lose_cache(host);
    wake_waiters();
    ex_progress(1);
}

/* ---- whose step is next ---- */

enum what { GO_ON, WORKER_DIES, HOST_DIES, DRAINS };
struct option {
    uint8_t what, thread, entry;
};
struct options {
    int n;
    struct option option[EX_THREADS * 3 + EX_THREADS * BUFFER];
};

static void add(struct options *options, enum what what, int thread, int entry)
{
    options->option[options->n++] = (struct option){(uint8_t)what, (uint8_t)thread, (uint8_t)entry};
}

static int runnable(int i)
{
    return ex.thread[i].state == READY && !ex.thread[i].spinning;
}

static void add_deaths(struct options *options, int full)
{
    int hosts = 0;

    for (int i = 0; i < ex.threads && ex.left.crashes; i++) {
        const struct thread *thread = &ex.thread[i];
        /* Of another worker it makes no difference whether it dies now or at its own last step; while preemptions are
         * counted it would be reached with fewer of them. */
        int may = i == ex.current || (full && !bounded());
        if (thread->state == READY && (thread->flags & EX_CRASHABLE) && may)
            add(options, WORKER_DIES, i, 0);
        if (full && thread->state == READY && (thread->flags & EX_HOST_CRASHABLE) && !(hosts >> thread->host & 1)) {
            add(options, HOST_DIES, i, 0);
            hosts |= 1 << thread->host;
        }
    }
}

static void add_drains(struct options *options, int wanted, int held)
{
    for (int i = 0; i < ex.threads && wanted; i++)
        for (int j = 0; j < ex.thread[i].buffered; j++) {
            const struct entry *entry = &ex.thread[i].buffer[j];
            int is_held = entry->kind == WRITE_BACK && ex_line[entry->at / EX_LINE].held;
            if (is_held == held && ex_may_drain(&ex.thread[i], j))
                add(options, DRAINS, i, j);
        }
}

static void gather(struct options *options, int full)
{
    int mine = runnable(ex.current);

    options->n = 0;
    if (mine)
        add(options, GO_ON, ex.current, 0);
    if ((full && (ex.left.preemptions || !bounded())) || !mine)
        for (int i = 0; i < ex.threads; i++)
            if (i != ex.current && runnable(i))
                add(options, GO_ON, i, 0);
    add_deaths(options, full);
    add_drains(options, full || !mine, 0);
    if (!options->n)
        add_drains(options, 1, 1);
}

static uint64_t state_hash(int full)
{
    uint64_t hash = mix(ex.hash, ex.died | (uint64_t)ex.idle << 40 | (uint64_t)full << 48);

    /* Whose turn it was matters only to who counts turns, and where the others may not come between. */
    if (bounded() || !full)
        hash = mix(hash, (uint64_t)ex.current + 1);
    hash = mix(hash, (uint64_t)ex.left.preemptions << 40 | (uint64_t)ex.left.events << 20 | (uint64_t)ex.left.crashes);
    for (int i = 0; i < ex.threads; i++) {
        const struct thread *thread = &ex.thread[i];
        hash = mix(hash, thread->history);
        hash = mix(hash, (uint64_t)thread->state << 32 | (uint64_t)thread->spinning << 16 | (uint64_t)thread->buffered);
        for (int j = 0; j < thread->buffered; j++) {
            const struct entry *entry = &thread->buffer[j];
            hash = mix(mix(hash, (uint64_t)entry->at << 16 | (uint64_t)entry->kind << 8 | entry->bytes), entry->value);
        }
    }
    for (int i = 0; i < EX_GHOST_BYTES / 8; i++)
        if (((const uint64_t *)(const void *)ex_ghost)[i])
            hash += placed((uint64_t)i | 1ull << 60, ((const uint64_t *)(const void *)ex_ghost)[i]);
    return hash | 1;
}

/* Nobody can go on. Spinners look once more; then those start that wait for the end; then the run has ended. */
static void nobody(const struct ex_site *site)
{
    int spinners = 0;

    for (int i = 0; i < ex.threads; i++)
        spinners += ex.thread[i].state == READY;
    if (spinners && !ex.idle++) {
        for (int i = 0; i < ex.threads; i++)
            ex.thread[i].spinning = 0;
        return;
    }
    if (spinners)
        ex_fail("stuck: every thread waits for another (a stale line, or a wake-up that was lost), the last at %s:%d",
                site->file, site->line);
    for (int i = 0; i < ex.threads; i++)
        if (ex.thread[i].state == WAITS_FOR_ALL) {
            ex.thread[i].state = READY;
            ex.thread[i].before = 0xffff;
            return;
        }
    ex_leave_run();
}

static void go_on_with(int next)
{
    int from = ex.current;

    ex.current = next;
    if (from != next)
        switch_to(&ex.thread[from], &ex.thread[next]);
}

void ex_point(int full, const struct ex_site *site)
{
    for (;;) {
        struct options options;
        int mine = runnable(ex.current);

        if (++ex.steps > STEPS_MAX)
            ex_fail("%d steps and no end, at %s:%d", STEPS_MAX, site->file, site->line);
        gather(&options, full);
        if (options.n == 0) {
            nobody(site);
            continue;
        }
        if (ex.hashing && ex_trail_new() && !ex.verbose && ex_state_seen(state_hash(full))) {
            ex.pruned = 1;
            ex_leave_run();
        }
        struct option option = options.option[ex_choose((unsigned)options.n)];
        if (option.what == DRAINS) {
            ex_drain(&ex.thread[option.thread], option.entry);
        } else if (option.what == GO_ON) {
            if (mine && option.thread != ex.current && bounded())
                ex.left.preemptions--;
            go_on_with(option.thread);
            return;
        } else {
            ex.left.crashes--;
            if (option.what == WORKER_DIES)
                kill_worker(option.thread);
            else
                kill_host(ex.thread[option.thread].host);
            full = 1; /* the step that stood here is not taken: the others are free to choose */
        }
    }
}

/* ---- threads ---- */

static void start(void)
{
    struct thread *thread = current();

    thread->run(thread->argument);
    static const struct ex_site end = {.file = "end of thread", .line = 0};
    current()->state = DONE;
    ex_point(1, &end);
    abort(); /* a thread that is done is not chosen */
}

int ex_spawn(int host, void (*run)(void *), void *argument, unsigned flags)
{
    if (ex.threads == EX_THREADS || host >= EX_HOSTS)
        ex_fail("%d threads, host %d: too many", ex.threads + 1, host);
    struct thread *thread = &ex.thread[ex.threads];
    memset(thread, 0, sizeof *thread);
    thread->host = host;
    thread->run = run;
    thread->argument = argument;
    thread->flags = flags;
    thread->first_state = flags & EX_ON_CRASH ? WAITS_FOR_CRASH : flags & EX_LAST ? WAITS_FOR_ALL : READY;
    return ex.threads++;
}

void ex_threads_restore(void)
{
    for (int i = 0; i < ex.threads; i++) {
        struct thread *thread = &ex.thread[i];
        thread->state = thread->first_state;
        thread->spinning = thread->buffered = 0;
        thread->before = 0;
        thread->history = 0;
        make_context(thread, start);
    }
    ex.died = 0;
    ex.steps = ex.idle = ex.view = 0;
}

/* Run from the first choice, who begins, to the end. */
void ex_start(void)
{
    int ready[EX_THREADS], n = 0;

    for (int i = 0; i < ex.threads; i++)
        if (ex.thread[i].state == READY)
            ready[n++] = i;
    ex.current = ready[ex_choose((unsigned)n)];
    switch_to(&outside, current());
}

int ex_is_running(void)
{
    return ex.phase == RUN;
}

int ex_me(void)
{
    return ex.current;
}

int ex_my_host(void)
{
    return ex.phase == RUN ? current()->host : ex.view;
}

void ex_step_at(struct ex_site *site)
{
    if (ex.phase != RUN)
        return;
    current()->history = mix(current()->history, site->id);
    ex_point(1, site);
}

void ex_spin_at(struct ex_site *site)
{
    if (ex.phase != RUN)
        return;
    ex_trace(site, "waits");
    current()->history = mix(current()->history, site->id);
    current()->spinning = 1;
    ex_point(1, site);
}

void ex_wake(void)
{
    if (ex.phase == RUN)
        ex_progress(1);
}

void ex_merge(uint64_t local)
{
    if (ex.phase == RUN)
        current()->history = mix(local, (uint64_t)ex.current + 1);
}

void ex_reset_host(int host)
{
    static struct ex_site site = {.file = "ex_reset_host", .line = 0};

    ex_step_at(&site);
    EX_CHECK(host != current()->host, "a host does not fence itself");
    if (!(ex.resets >> host & 1))
        ex.learned = 1, ex.resets |= (uint8_t)(1 << host);
    kill_host(host);
}

uint32_t ex_died(void)
{
    return ex.died;
}
