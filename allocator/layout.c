/* layout.c -- where everything lies: planned once at create, checked at every open. */
#include "allocator/allocator.h"

#include <string.h>

enum {
    SUPERBLOCK_BYTES = 4096,
    HOME_BYTES = 256,
    HOME_ENTRIES = 16, /* and a counter of 8 bytes per home */
    SEGMENT_UNIT = 64 << 10,
};

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static uint64_t clamp(uint64_t value, uint64_t least, uint64_t most)
{
    return value < least ? least : value > most ? most : value;
}

static uint64_t power_of_two(uint64_t value)
{
    uint64_t power = 1;

    while (power < value)
        power <<= 1;
    return power;
}

static uint64_t least_stride(const struct kvp_layout *layout)
{
    uint64_t least = layout->class[0].stride;

    for (uint32_t i = 1; i < layout->classes; i++)
        if (layout->class[i].stride < least)
            least = layout->class[i].stride;
    return least;
}

/* Lay out everything for a payload of `payload` bytes; returns the length of the image. */
static uint64_t place(struct kvp_layout *layout, uint64_t payload)
{
    uint64_t at = SUPERBLOCK_BYTES, most_blocks = payload / least_stride(layout), stride_max = 0;

    layout->payload_bytes = payload;
    layout->pin_slots = (uint32_t)round_up(clamp(most_blocks / 32, clamp(most_blocks, 8, 1024), 1 << 20), 8);
    layout->log_records = (uint32_t)power_of_two(clamp(most_blocks / 512, 32, 1 << 13));
    layout->slots_offset = at;
    layout->pins_offset = at += layout->workers * sizeof(struct kvp_slot);
    layout->logs_offset = at += (uint64_t)layout->workers * layout->pin_slots * 8;
    layout->segments_offset = at += (uint64_t)layout->workers * layout->log_records * sizeof(struct kvp_record);
    at += KVP_SEGMENTS_MAX * 8;
    for (uint32_t i = 0; i < layout->classes; i++) {
        struct kvp_class_layout *class = &layout->class[i];
        class->blocks = payload / class->stride;
        class->words_offset = at;
        class->scores_offset = at += round_up(class->blocks * 8, KVP_LINE);
        class->tags_offset = at += round_up(class->blocks * 8, KVP_LINE);
        class->hints_offset = at += class->blocks * 16 + (class->blocks % 4 ? 64 - class->blocks % 4 * 16 : 0);
        uint64_t hints = (class->blocks + 63) / 64;
        at += round_up((hints + (hints + 63) / 64) * 8, KVP_LINE);
        stride_max = class->stride > stride_max ? class->stride : stride_max;
    }
    at = round_up(at, HOME_BYTES);
    layout->directory_offset = at;
    layout->directory_homes = clamp(round_up(most_blocks * 2, HOME_ENTRIES) / HOME_ENTRIES, 4, UINT32_MAX);
    at += layout->directory_homes * (HOME_BYTES + 8);
    layout->segment_bytes = round_up(clamp(payload / KVP_SEGMENTS_MAX + 1, stride_max * 2, UINT64_MAX), SEGMENT_UNIT);
    layout->segments = (uint32_t)((payload + layout->segment_bytes - 1) / layout->segment_bytes);
    layout->payload_offset = round_up(at, KVP_PAGE); /* huge pages are the mapping's: no more is needed */
    return layout->bytes = layout->payload_offset + payload;
}

static int check_request(const struct kvp_request *request)
{
    if (request->classes < 1 || request->classes > KVP_CLASSES_MAX)
        return kvp_fail(KVP_E_INVALID, "a pool has 1 to %d block classes, not %u", KVP_CLASSES_MAX, request->classes);
    if (request->workers > KVP_WORKERS_MAX)
        return kvp_fail(KVP_E_INVALID, "a pool has at most %u workers, not %u", KVP_WORKERS_MAX, request->workers);
    for (uint32_t i = 0; i < request->classes; i++)
        if (request->stride[i] < KVP_STRIDE_MIN || request->stride[i] % KVP_LINE || request->stride[i] > 1ull << 32)
            return kvp_fail(KVP_E_INVALID, "a block of %llu bytes: block sizes are multiples of 64 bytes",
                            (unsigned long long)request->stride[i]);
    if (request->bytes > 1ull << 50)
        return kvp_fail(KVP_E_INVALID, "%llu bytes is more than a pool can have (2^50)",
                        (unsigned long long)request->bytes);
    if (!request->bytes == !request->blocks || (request->blocks && request->classes != 1))
        return kvp_fail(KVP_E_INVALID, "give the size in bytes, or the number of blocks of the one class");
    return KVP_OK;
}

/* Metadata grows with the payload: the largest payload that fits is found by bisection over its pages. */
static uint64_t payload_for(struct kvp_layout *layout, uint64_t bytes)
{
    uint64_t low = 0, high = bytes / KVP_PAGE;

    while (low < high) {
        uint64_t middle = low + (high - low + 1) / 2;
        if (place(layout, middle * KVP_PAGE) <= bytes)
            low = middle;
        else
            high = middle - 1;
    }
    return low * KVP_PAGE;
}

int kvp_layout_plan(const struct kvp_request *request, struct kvp_layout *out)
{
    uint64_t payload;
    int status = check_request(request);

    if (status)
        return status;
    memset(out, 0, sizeof *out);
    out->workers = request->workers ? request->workers : KVP_WORKERS_MAX;
    out->classes = request->classes;
    uint64_t stride_max = 0;
    for (uint32_t i = 0; i < request->classes; i++) {
        out->class[i].stride = request->stride[i];
        stride_max = request->stride[i] > stride_max ? request->stride[i] : stride_max;
    }
    if (request->blocks) {
        if (request->blocks > KVP_BLOCKS_MAX || request->blocks > (1ull << 50) / stride_max)
            return kvp_fail(KVP_E_INVALID, "%llu blocks is more than a class can have (%d)",
                            (unsigned long long)request->blocks, KVP_BLOCKS_MAX);
        payload = request->blocks * stride_max;
    } else {
        payload = payload_for(out, request->bytes);
    }
    place(out, payload ? payload : KVP_PAGE);
    for (uint32_t i = 0; i < out->classes; i++)
        if (payload < stride_max || out->class[i].blocks < 1 || out->class[i].blocks > KVP_BLOCKS_MAX)
            return kvp_fail(KVP_E_INVALID, "%llu bytes leave no room for blocks of %llu bytes (metadata takes %llu), or "
                            "make more than %d blocks", (unsigned long long)request->bytes,
                            (unsigned long long)stride_max, (unsigned long long)out->payload_offset, KVP_BLOCKS_MAX);
    out->bytes = round_up(out->bytes, KVP_PAGE);
    return KVP_OK;
}

/* Plan again from what the image says it is made of: every derived number must come out the same. */
int kvp_layout_check(const struct kvp_layout *layout, uint64_t mapped)
{
    struct kvp_layout again;

    if (layout->bytes > mapped)
        return kvp_fail(KVP_E_TRUNCATED, "the image says %llu bytes, %llu are there",
                        (unsigned long long)layout->bytes, (unsigned long long)mapped);
    memset(&again, 0, sizeof again);
    again.workers = layout->workers;
    again.classes = layout->classes;
    if (!layout->classes || layout->classes > KVP_CLASSES_MAX || !layout->workers || layout->workers > KVP_WORKERS_MAX)
        return kvp_fail(KVP_E_CORRUPT, "%u classes, %u workers", layout->classes, layout->workers);
    for (uint32_t i = 0; i < layout->classes; i++) {
        uint64_t stride = layout->class[i].stride;
        if (stride < KVP_STRIDE_MIN || stride % KVP_LINE || stride > layout->payload_bytes)
            return kvp_fail(KVP_E_CORRUPT, "class %u has blocks of %llu bytes", i, (unsigned long long)stride);
        if (layout->payload_bytes / stride > KVP_BLOCKS_MAX)
            return kvp_fail(KVP_E_CORRUPT, "class %u has more than %d blocks", i, KVP_BLOCKS_MAX);
        again.class[i].stride = stride;
    }
    if (layout->payload_bytes > layout->bytes)
        return kvp_fail(KVP_E_CORRUPT, "payload of %llu bytes", (unsigned long long)layout->payload_bytes);
    place(&again, layout->payload_bytes);
    again.bytes = round_up(again.bytes, KVP_PAGE);
    if (memcmp(&again, layout, sizeof again) != 0)
        return kvp_fail(KVP_E_CORRUPT, "the offsets do not fit the sizes");
    return KVP_OK;
}
