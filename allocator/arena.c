/* arena.c -- the first words of a pool, and one worker's pointers into it. */
#include "allocator/allocator.h"

#include <stdlib.h>

static void format_class(uint8_t *base, const struct kvp_class_layout *class)
{
    nc_u64 *words = (nc_u64 *)(void *)(base + class->words_offset);
    co_u64 *hints = (co_u64 *)(void *)(base + class->hints_offset);
    uint64_t hint_words = (class->blocks + 63) / 64;

    for (uint64_t k = 0; k < class->blocks; k++)
        nc_store_relaxed(&words[k], kvp_word(0, 0, KVP_FREE));
    for (uint64_t i = 0; i < hint_words; i++) {
        uint64_t left = class->blocks - i * 64;
        co_store_relaxed(&hints[i], left >= 64 ? UINT64_MAX : (1ull << left) - 1);
        co_or(&hints[hint_words + i / 64], 1ull << i % 64);
    }
    nc_write_back(words, class->blocks * 8);
}

void kvp_arena_format(uint8_t *base, const struct kvp_layout *layout)
{
    co_u64 *segments = (co_u64 *)(void *)(base + layout->segments_offset);

    if (layout->classes == 1) {
        for (uint32_t i = 0; i < layout->segments; i++)
            co_store_relaxed(&segments[i], KVP_SEGMENT_HELD);
        format_class(base, &layout->class[0]);
    }
    nc_write_fence(); /* the words are there before the superblock says the pool is ready */
}

static int init_class(struct kvp_class *class, uint8_t *base, const struct kvp_layout *layout, uint32_t number)
{
    const struct kvp_class_layout *from = &layout->class[number];

    class->words = (nc_u64 *)(void *)(base + from->words_offset);
    class->scores = (co_u64 *)(void *)(base + from->scores_offset);
    class->tags = (struct kvp_tag *)(void *)(base + from->tags_offset);
    class->hints = (co_u64 *)(void *)(base + from->hints_offset);
    class->summary = class->hints + (from->blocks + 63) / 64;
    class->data = base + layout->payload_offset;
    class->stride = from->stride;
    class->blocks = (uint32_t)from->blocks;
    uint32_t share = class->blocks / 256 + 1;
    class->magazine.capacity = share < KVP_MAGAZINE ? share : KVP_MAGAZINE;
    class->pin_slot = calloc(class->blocks, sizeof *class->pin_slot);
    class->victims = calloc(class->blocks / 64 + 1, sizeof *class->victims);
    class->pinned = calloc(class->blocks / 64 + 1, sizeof *class->pinned);
    return class->pin_slot && class->victims && class->pinned ? KVP_OK : KVP_E_NOSPACE;
}

int kvp_arena_init(struct kvp_arena *arena, uint8_t *base, const struct kvp_layout *layout)
{
    int status = KVP_OK;

    arena->layout = *layout;
    arena->slots = (struct kvp_slot *)(void *)(base + layout->slots_offset);
    arena->pins = (nc_u64 *)(void *)(base + layout->pins_offset);
    arena->logs = (struct kvp_record *)(void *)(base + layout->logs_offset);
    arena->segments = (co_u64 *)(void *)(base + layout->segments_offset);
    arena->pin_count = calloc(layout->pin_slots, sizeof *arena->pin_count);
    arena->pin_free = calloc(layout->pin_slots, sizeof *arena->pin_free);
    if (!arena->pin_count || !arena->pin_free)
        status = KVP_E_NOSPACE;
    for (uint32_t i = 0; i < layout->classes && status == KVP_OK; i++)
        status = init_class(&arena->class[i], base, layout, i);
    if (status == KVP_OK)
        return KVP_OK;
    kvp_arena_free(arena);
    return kvp_fail(status, "no private memory for the tables of a pool of this size");
}

void kvp_arena_free(struct kvp_arena *arena)
{
    for (uint32_t i = 0; i < KVP_CLASSES_MAX; i++) {
        free(arena->class[i].pin_slot);
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
