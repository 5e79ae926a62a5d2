/* arena.c -- the first words of a pool, and one worker's pointers into it. */
#include "allocator/allocator.h"

#include <stdlib.h>

/* With one class every block starts FREE; with several, ABSENT until a class holds its segments. */
static void format_class(uint8_t *base, const struct kvp_layout *layout, const struct kvp_class_layout *class)
{
    nc_u64 *words = (nc_u64 *)(void *)(base + class->words_offset);
    enum kvp_state state = layout->classes == 1 ? KVP_FREE : KVP_ABSENT;

    for (uint64_t k = 0; k < class->blocks; k++)
        nc_store_relaxed(&words[k], kvp_word(0, 0, state));
    nc_write_back(words, class->blocks * 8);
}

/* Each host's row names the segments of its share, in epoch 1. The only time that one host writes another's row. */
static void format_owners(uint8_t *base, const struct kvp_layout *layout)
{
    nc_u64 *owners = (nc_u64 *)(void *)(base + layout->owners_offset);

    for (uint32_t s = 0; s < layout->segments; s++) {
        uint32_t host = s / layout->segments_per_host;
        if (host >= layout->hosts)
            host = layout->hosts - 1;
        nc_store_relaxed(&owners[host * kvp_row(layout->segments) + s], kvp_owner_word(1, host, KVP_OWNER_TAKEN));
    }
    nc_write_back(owners, layout->hosts * kvp_row(layout->segments) * 8);
}

void kvp_arena_format(uint8_t *base, const struct kvp_layout *layout)
{
    for (uint32_t c = 0; c < layout->classes; c++)
        format_class(base, layout, &layout->class[c]);
    format_owners(base, layout);
}

static int init_class(struct kvp_arena *arena, uint8_t *base, uint8_t *host, uint32_t number)
{
    const struct kvp_class_layout *from = &arena->layout.class[number];
    struct kvp_class *class = &arena->class[number];

    class->words = (nc_u64 *)(void *)(base + from->words_offset);
    class->labels = (struct kvp_label *)(void *)(base + from->labels_offset);
    class->scores = (co_u64 *)(void *)(host + from->scores_offset);
    class->tags = (struct kvp_tag *)(void *)(host + from->tags_offset);
    class->known = (co_u64 *)(void *)(host + from->known_offset);
    class->hints = (co_u64 *)(void *)(host + from->hints_offset);
    class->summary = class->hints + (from->blocks + 63) / 64;
    class->data = base + arena->layout.payload_offset;
    class->stride = from->stride;
    class->blocks = (uint32_t)from->blocks;
    uint32_t share = class->blocks / arena->layout.hosts / 256 + 1;
    class->magazine.capacity = share < KVP_MAGAZINE ? share : KVP_MAGAZINE;
    class->pin_slot = kvp_table_new(class->blocks * sizeof *class->pin_slot);
    class->victims = calloc(class->blocks / 64 + 1, sizeof *class->victims);
    class->pinned = calloc(class->blocks / 64 + 1, sizeof *class->pinned);
    return class->pin_slot && class->victims && class->pinned ? KVP_OK : KVP_E_NOSPACE;
}

static void init_roster(struct kvp_arena *arena, uint8_t *base, uint8_t *host_base)
{
    const struct kvp_layout *layout = &arena->layout;

    arena->roster = (struct kvp_roster){
        .hosts = (struct kvp_host *)(void *)(base + layout->hosts_offset),
        .sights = (struct kvp_sight *)(void *)(host_base + layout->sights_offset),
        .beaten = &arena->head->beaten,
        .lease_ns = layout->lease_ms * 1000000ull,
        .count = layout->hosts,
        .self = arena->host,
    };
}

int kvp_arena_init(struct kvp_arena *arena, uint8_t *base, uint8_t *host_base, const struct kvp_layout *layout, uint32_t host)
{
    int status = KVP_OK;

    arena->layout = *layout;
    arena->host = host;
    arena->owners = (nc_u64 *)(void *)(base + layout->owners_offset);
    arena->pin_high = (nc_u64 *)(void *)(base + layout->high_offset);
    arena->pins = (nc_u64 *)(void *)(base + layout->pins_offset);
    arena->logs = (struct kvp_record *)(void *)(base + layout->logs_offset);
    arena->head = (struct kvp_head *)(void *)host_base;
    arena->slots = (struct kvp_slot *)(void *)(host_base + layout->slots_offset);
    arena->read = (co_u64 *)(void *)(host_base + layout->read_offset);
    arena->segments = (co_u64 *)(void *)(host_base + layout->segments_offset);
    init_roster(arena, base, host_base);
    arena->pin_count = calloc(layout->pin_slots, sizeof *arena->pin_count);
    arena->pin_free = calloc(layout->pin_slots, sizeof *arena->pin_free);
    if (!arena->pin_count || !arena->pin_free)
        status = KVP_E_NOSPACE;
    for (uint32_t i = 0; i < layout->classes && status == KVP_OK; i++)
        status = init_class(arena, base, host_base, i);
    if (status == KVP_OK)
        return KVP_OK;
    kvp_arena_free(arena);
    return kvp_fail(status, "no private memory for the tables of a pool of this size");
}

void kvp_arena_free(struct kvp_arena *arena)
{
    for (uint32_t i = 0; i < KVP_CLASSES_MAX; i++) {
        kvp_table_free(arena->class[i].pin_slot, arena->class[i].blocks * sizeof *arena->class[i].pin_slot);
        free(arena->class[i].victims);
        free(arena->class[i].pinned);
        arena->class[i].pin_slot = NULL;
        arena->class[i].victims = arena->class[i].pinned = NULL;
    }
    free(arena->pin_count);
    free(arena->pin_free);
    arena->pin_count = arena->pin_free = NULL;
}

uint8_t *kvp_block_data(const struct kvp_arena *arena, uint32_t block)
{
    uint32_t class = kvp_block_class(block), number = kvp_block_number(block);

    if (class >= arena->layout.classes || number >= arena->class[class].blocks)
        return NULL;
    return arena->class[class].data + number * arena->class[class].stride;
}
