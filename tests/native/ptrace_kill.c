/* ptrace_kill.c -- death after every single instruction of the unmodified build.
 *
 *   ptrace_kill                      every operation
 *   ptrace_kill OPERATION            one of them
 *
 * A child is stepped through one operation. After each instruction the image as the survivors would find it is
 * copied, the child's slot is marked dead in the copy as the kernel does it, and a worker that opens the copy must
 * recover it: no block lost, none given twice, nothing leaked, the check clean. A copy costs less than a fork, so
 * every instruction gets its death. Then the child is really killed, at up to REAL_KILLS instructions spread over
 * the operation, to show that the copies tell the truth.
 */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>

enum { BLOCKS = 12, STRIDE = 64, KEYS = 6, REAL_KILLS = 20, VICTIM = 3, EACH_UP_TO = 3000, THEN_EVERY = 7 };

#define MARK() __asm__ volatile("int3" ::: "memory")

static kvp_pool *pool; /* made by the parent, who has left it: its mapping stays */
static char uri[64];
static uint8_t *image;
static uint64_t image_bytes;

/* ---- the operations, in the child ---- */

static void do_reserve(kvp_pool *mine)
{
    uint32_t number;

    MARK();
    kvp_reserve(mine, 0, 1, &number);
    MARK();
}

static void do_withdraw(kvp_pool *mine)
{
    uint32_t numbers[2];

    kvp_reserve(mine, 0, 2, numbers);
    MARK();
    kvp_withdraw(mine, 0, numbers, 2);
    MARK();
}

static void do_publish(kvp_pool *mine)
{
    struct kvp_key key = key_of(50);
    uint32_t number;
    uint64_t ref;

    kvp_reserve(mine, 0, 1, &number);
    payload_write(kvp_block_data(&mine->arena, number), &key, STRIDE);
    MARK();
    kvp_publish(mine, 0, &number, &key, 1, &ref);
    MARK();
}

static void do_pin(kvp_pool *mine)
{
    struct kvp_key keys[2] = {key_of(1), key_of(2)};
    uint64_t refs[2];

    kvp_lookup(mine, 0, keys, 2, refs);
    MARK();
    kvp_pin_refs(mine, refs, 2);
    MARK();
}

static void do_unpin(kvp_pool *mine)
{
    struct kvp_key keys[2] = {key_of(1), key_of(2)};
    uint64_t refs[2];

    kvp_match(mine, 0, keys, 2, refs);
    MARK();
    kvp_unpin_refs(mine, refs, 2);
    MARK();
}

static void do_evict(kvp_pool *mine)
{
    MARK();
    kvp_shrink(mine, 0, 1);
    MARK();
}

/* Removing a pinned block holds it and takes its names away: the one eviction that is undone on purpose. */
static void do_remove_pinned(kvp_pool *mine)
{
    struct kvp_key key = key_of(0);
    uint64_t ref;

    kvp_match(mine, 0, &key, 1, &ref);
    MARK();
    kvp_remove(mine, 0, &key, 1);
    MARK();
}

/* What a dead worker in slot VICTIM would have left is forged; then the recovery itself is stepped through. */
static void do_recover(kvp_pool *mine)
{
    struct kvp_arena *arena = &mine->arena;
    struct kvp_key key = key_of(1);
    uint32_t numbers[3];
    uint64_t ref;

    kvp_reserve(mine, 0, 3, numbers);
    kvp_lookup(mine, 0, &key, 1, &ref);
    REQUIRE(kvp_lock_block(arena, ref), "hold");
    for (uint32_t k = 0; k < BLOCKS; k++) {
        uint64_t word = nc_load(&arena->class[0].words[k]);
        if (kvp_word_state(word) == KVP_OWN || kvp_word_state(word) == KVP_EVICTING)
            nc_store(&arena->class[0].words[k], kvp_word(kvp_word_generation(word), VICTIM, kvp_word_state(word)));
    }
    nc_store(&arena->pins[VICTIM * arena->layout.pin_slots + 1], 1ull << 32 | 2);
    MARK();
    kvp_recover(arena, VICTIM);
    MARK();
}

static const struct {
    const char *name;
    void (*run)(kvp_pool *mine);
    uint64_t may_go;  /* keys whose absence is right, a bit each */
} operations[] = {
    {"reserve", do_reserve, 0},
    {"withdraw", do_withdraw, 0},
    {"publish", do_publish, 0},
    {"pin", do_pin, 0},
    {"unpin", do_unpin, 0},
    {"evict", do_evict, ~0ull},
    {"remove pinned", do_remove_pinned, 1},
    {"recover", do_recover, 0},
};

/* ---- the survivor ---- */

static void await_free(kvp_pool *survivor)
{
    for (int i = 0; i < 50000; i++) {
        int held = 0;
        for (uint32_t w = 0; w < survivor->arena.layout.workers; w++)
            held += w != survivor->arena.self && co_load32(&survivor->arena.slots[w].lock) != 0;
        if (!held)
            return;
        usleep(20);
    }
    REQUIRE(0, "the dead worker's slot stays taken");
}

static void survive(const char *where, uint64_t may_go)
{
    kvp_pool *survivor;
    int missing = 0;
    int status = kvp_pool_open(where, 0, &survivor);

    REQUIRE(status == KVP_OK, "open: %s", kvp_strerror(status));
    await_free(survivor);
    require_clean(survivor);
    for (uint64_t id = 0; id < KEYS; id++) {
        int found = probe(survivor, 0, id);
        REQUIRE(found >= 0 && (found || may_go >> id & 1), "key %llu: %s", (unsigned long long)id,
                found ? "wrong bytes" : "lost");
        missing += !found;
    }
    REQUIRE(missing <= 1, "%d keys are gone after one eviction", missing);
    REQUIRE(probe(survivor, 0, 50) >= 0, "the new key has wrong bytes");
    require_usable(survivor);
    kvp_pool_free(survivor);
}

/* ---- the tracer ---- */

static pid_t start(size_t op)
{
    int how;
    pid_t child = fork();

    if (child == 0) {
        kvp_pool *mine;
        if (ptrace(PTRACE_TRACEME, 0, 0, 0))
            _exit(77);
        REQUIRE(kvp_pool_open(uri, 0, &mine) == KVP_OK, "open in the child");
        operations[op].run(mine);
        _exit(0);
    }
    REQUIRE(waitpid(child, &how, 0) == child, "wait");
    if (WIFEXITED(how) && WEXITSTATUS(how) == 77) {
        printf("ptrace refused\n");
        exit(0);
    }
    REQUIRE(WIFSTOPPED(how) && WSTOPSIG(how) == SIGTRAP, "the child stopped with %#x before its mark", how);
    return child;
}

/* One instruction further: its address, or 0 at the second mark. */
static uint64_t step(pid_t child)
{
    struct user_regs_struct registers;
    int how;

    REQUIRE(ptrace(PTRACE_SINGLESTEP, child, 0, 0) == 0 && waitpid(child, &how, 0) == child, "step");
    REQUIRE(WIFSTOPPED(how) && WSTOPSIG(how) == SIGTRAP, "the child stopped with %#x", how);
    ptrace(PTRACE_GETREGS, child, 0, &registers);
    long code = ptrace(PTRACE_PEEKTEXT, child, registers.rip, 0);
    return (code & 0xff) == 0xcc ? 0 : registers.rip;
}

static void end_child(pid_t child)
{
    int how;

    kill(child, SIGKILL);
    waitpid(child, &how, 0);
}

static void note(size_t op, uint64_t k, uint64_t rip, const char *kind)
{
    extern char __executable_start;

    snprintf(replay, sizeof replay, "ptrace_kill '%s', %s after instruction %llu, at %#llx (addr2line -fe ptrace_kill)",
             operations[op].name, kind, (unsigned long long)k,
             (unsigned long long)(rip - (uint64_t)(uintptr_t)&__executable_start));
}

/* The image with every held slot marked as the kernel marks it, in memory of its own. */
static void copy_dead(uint8_t *copy, uint64_t slots_offset, uint32_t workers)
{
    memcpy(copy, image, image_bytes);
    struct kvp_slot *slots = (struct kvp_slot *)(void *)(copy + slots_offset);
    for (uint32_t w = 0; w < workers; w++) {
        uint32_t lock = co_load32(&slots[w].lock);
        if (lock || w == VICTIM)
            co_store32(&slots[w].lock, lock | FUTEX_OWNER_DIED);
        co_store(&slots[w].boot, 0); /* gone to its last thread */
    }
}

static void restock(void)
{
    kvp_pool *stocker;

    REQUIRE(kvp_pool_open(uri, 0, &stocker) == KVP_OK, "open");
    await_free(stocker);
    kvp_shrink(stocker, 0, UINT32_MAX);
    for (uint64_t id = 0; id < KEYS; id++)
        REQUIRE(put_one(stocker, 0, id) == 1, "put");
    kvp_pool_free(stocker);
}

/* Every instruction, on copies. Returns how many there are. */
static uint64_t walk(size_t op, uint8_t *copy, const char *copy_uri)
{
    restock();
    pid_t child = start(op);
    uint64_t k = 0;

    for (uint64_t rip; (rip = step(child)) != 0;) {
        if (++k > EACH_UP_TO && k % THEN_EVERY)
            continue;
        note(op, k, rip, "the image");
        copy_dead(copy, pool->arena.layout.host_offset + pool->arena.layout.slots_offset, pool->arena.layout.workers);
        survive(copy_uri, operations[op].may_go);
    }
    end_child(child);
    return k;
}

static void really_kill(size_t op, uint64_t instructions)
{
    for (uint64_t i = 0; i < REAL_KILLS; i++) {
        uint64_t target = 1 + i * instructions / REAL_KILLS, rip = 1;
        restock();
        pid_t child = start(op);
        for (uint64_t k = 0; k < target && rip; k++)
            rip = step(child);
        note(op, target, rip, "killed");
        if (op == 7) /* the forged victim dies with it */
            co_store32(&pool->arena.slots[VICTIM].lock, FUTEX_OWNER_DIED);
        end_child(child);
        survive(uri, operations[op].may_go);
    }
}

int main(int argc, char **argv)
{
    struct kvp_request request = {.blocks = BLOCKS, .workers = 4, .classes = 1, .stride = {STRIDE}};
    char copy_uri[32];

    alarm(200);
    REQUIRE(kvp_pool_create("memfd:", &request, "lru", &pool) == KVP_OK, "create");
    kvp_pool_leave(pool);
    snprintf(uri, sizeof uri, "memfd:%d", kvp_pool_fd(pool));
    image = pool->mapping.base, image_bytes = pool->mapping.bytes;
    int fd = memfd_create("copy", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)image_bytes) == 0, "memfd");
    uint8_t *copy = mmap(NULL, image_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(copy != MAP_FAILED, "mmap");
    snprintf(copy_uri, sizeof copy_uri, "memfd:%d", fd);
    for (size_t op = 0; op < sizeof operations / sizeof *operations; op++) {
        if (argc > 1 && strcmp(argv[1], operations[op].name) != 0)
            continue;
        double begin = seconds();
        uint64_t instructions = walk(op, copy, copy_uri);
        really_kill(op, instructions);
        printf("%-14s %5llu instructions, each up to %d (then every %dth), %d real kills, %.2f s\n",
               operations[op].name, (unsigned long long)instructions, EACH_UP_TO, THEN_EVERY, REAL_KILLS,
               seconds() - begin);
        fflush(stdout);
    }
    return 0;
}
