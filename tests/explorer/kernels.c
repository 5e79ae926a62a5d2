/* kernels.c -- protocols in their smallest form. They keep the explorer honest: the pool's own code is explored
 * elsewhere; here every operation is known to be needed or not, and tests/test_explorer.py expects exactly that. */
#include "coherence/coherence.h"
#include "explorer.h"
#include "scenarios.h"

#define GHOST ((struct ghost *)(void *)ex_ghost)

/* ---- message passing ---- */

static nc_u64 *data, *flag;

static void send(void *argument)
{
    (void)argument;
    nc_store(data, 7);
    nc_write_back(data, 8); /* kernel: message.data */
    nc_write_fence();       /* kernel: message.order */
    nc_store(flag, 1);
    nc_write_back(flag, 8); /* kernel: message.flag */
}

static void receive(void *argument)
{
    (void)argument;
    for (;;) {
        nc_invalidate(flag, 8); /* kernel: message.poll */
        nc_read_fence();        /* kernel: message.poll_order: a late invalidate of the next round does as well */
        if (nc_load(flag))
            break;
        ex_spin();
    }
    nc_invalidate(data, 8); /* kernel: message.refresh */
    nc_read_fence();        /* kernel: message.refresh_order */
    EX_CHECK(nc_load(data) == 7, "the flag is there and the data is not");
}

static void message_setup(void)
{
    nc_u64 *line = ex_region(4096, EX_NONCOHERENT, 0);

    data = line;
    flag = line + 8;
    ex_label(data, 64, 64, "data");
    ex_label(flag, 64, 64, "flag");
    ex_warm(1, data, 8);
    ex_warm(1, flag, 8);
    ex_spawn(0, send, NULL, 0);
    ex_spawn(1, receive, NULL, 0);
}
const struct ex_scenario scenario_kernel_message = {.name = "kernel-message", .what = "data, then a flag, to another host",
                                           .setup = message_setup, .seconds = 1};

/* ---- pin against evict: one word with generation and state, one slot a pinner ---- */

enum { LIVE = 1, EVICTING = 2 };
struct ghost {
    uint64_t generation, pins;
};
static nc_u64 *word, *payload, *slot, *hint;

static uint64_t make_word(uint64_t generation, uint64_t state)
{
    return generation << 8 | state;
}

static void pin_once(int self, uint64_t generation)
{
    nc_store(&slot[self], generation);
    nc_write_back(&slot[self], 8); /* kernel: pin.slot */
    nc_write_fence();              /* kernel: pin.order */
    nc_invalidate(word, 8);        /* kernel: pin.word */
    nc_invalidate(payload, 8);     /* kernel: pin.payload */
    nc_full_fence();               /* kernel: pin.fence */
    if (nc_load(word) == make_word(generation, LIVE)) {
        EX_CHECK(GHOST->generation == generation, "a pin of generation %llu, and it is reused", (unsigned long long)generation);
        GHOST->pins++;
        ex_step();
        uint64_t seen = nc_load(payload);
        EX_CHECK(seen == generation, "pinned generation %llu shows %llu", (unsigned long long)generation, (unsigned long long)seen);
        GHOST->pins--;
    }
    nc_store(&slot[self], 0);
    nc_write_back(&slot[self], 8); /* kernel: unpin.slot */
}

static void pinner(void *argument)
{
    int self = (int)(intptr_t)argument & 255, rounds = (int)(intptr_t)argument >> 8;

    for (int round = 0; round < rounds; round++) {
        nc_invalidate(hint, 8);
        nc_read_fence();
        pin_once(self, nc_load(hint));
    }
}

static void evict_once(uint64_t generation)
{
    uint64_t seen = make_word(generation, LIVE);

    nc_cas(word, &seen, make_word(generation, EVICTING));
    nc_write_back(word, 8); /* kernel: evict.word */
    nc_write_fence();       /* kernel: evict.order */
    nc_invalidate(slot, 16); /* kernel: evict.slot */
    nc_full_fence();        /* kernel: evict.fence */
    if (nc_load(&slot[0]) || nc_load(&slot[1])) {
        nc_store(word, make_word(generation, LIVE));
        nc_write_back(word, 8); /* kernel: evict.restore */
        return;
    }
    EX_CHECK(GHOST->pins == 0, "a pinned block is reused");
    GHOST->generation = generation + 1;
    nc_store(payload, generation + 1);
    nc_write_back(payload, 8); /* kernel: publish.payload */
    nc_write_fence();          /* kernel: publish.order: either this one or the next is enough */
    nc_store(word, make_word(generation + 1, LIVE));
    nc_write_back(word, 8); /* kernel: publish.word */
    nc_write_fence();       /* kernel: publish.record_order: a hint that comes early finds no such word */
    nc_store(hint, generation + 1);
    nc_write_back(hint, 8);
}

static void evictor(void *argument)
{
    (void)argument;
    evict_once(1);
}

static void pin_check(void)
{
    EX_CHECK(ex_memory_word(&slot[0]) == 0 && ex_memory_word(&slot[1]) == 0, "a pin stays in memory after it was taken back");
    EX_CHECK(ex_memory_word(word) == ex_host_word(0, word), "the word never reaches memory");
}

static void pin_lines(void)
{
    nc_u64 *line = ex_region(4096, EX_NONCOHERENT, 0);

    word = line, payload = line + 8, slot = line + 16, hint = line + 24;
    ex_label(word, 64, 64, "word");
    ex_label(payload, 64, 64, "payload");
    ex_label(slot, 64, 8, "slot");
    ex_label(hint, 64, 64, "hint");
    nc_store(word, make_word(1, LIVE));
    nc_store(payload, 1);
    nc_store(hint, 1);
    GHOST->generation = 1;
}

static void pin_setup(void)
{
    pin_lines();
    ex_spawn(0, evictor, NULL, 0);
    ex_spawn(1, pinner, (void *)(intptr_t)(2 << 8), 0);
}

static void pin_two_setup(void)
{
    pin_lines();
    ex_spawn(0, evictor, NULL, 0);
    ex_spawn(1, pinner, (void *)(intptr_t)(1 << 8), 0);
    ex_spawn(1, pinner, (void *)(intptr_t)(1 << 8 | 1), 0);
}
const struct ex_scenario scenario_kernel_pin = {.name = "kernel-pin", .what = "two pins of one worker against one eviction",
                                       .setup = pin_setup, .check = pin_check, .seconds = 5};
const struct ex_scenario scenario_kernel_pin_two = {.name = "kernel-pin-two", .what = "pins of two workers in one line against one eviction",
                                           .setup = pin_two_setup, .check = pin_check, .seconds = 60};
