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

static uint64_t greatest_stride(const struct kvp_layout *layout)
{
    uint64_t greatest = 0;

    for (uint32_t i = 0; i < layout->classes; i++)
        if (layout->class[i].stride > greatest)
            greatest = layout->class[i].stride;
    return greatest;
}

static uint64_t divide_up(uint64_t value, uint64_t by)
{
    return (value + by - 1) / by;
}

/* Segments are what moves between classes and hosts. With many hosts and one class they hold whole lines of 8 words, so
 * that no block is lost between two owners. */
static void cut(struct kvp_layout *layout, uint64_t payload)
{
    uint64_t stride = greatest_stride(layout), hosts = layout->hosts;
    uint64_t a_host = clamp(KVP_SEGMENTS_MAX / hosts, 1, KVP_MANY_HOSTS ? 16 : 64), unit = SEGMENT_UNIT, least = stride * 2;

    if (KVP_MANY_HOSTS && layout->classes == 1)
        unit = least = stride * 8;
    else if (KVP_MANY_HOSTS)
        least = stride * 24;
    uint64_t share = divide_up(divide_up(payload, unit), hosts); /* units a host */
    layout->segment_bytes = unit * clamp(divide_up(share, a_host), divide_up(least, unit), UINT64_MAX);
    layout->segments = (uint32_t)divide_up(payload, layout->segment_bytes);
    layout->segments_per_host = (uint32_t)clamp(divide_up(share * unit, layout->segment_bytes), 1, UINT32_MAX);
}

/* What the hosts see of each other: from the superblock on. */
static uint64_t place_rows(struct kvp_layout *layout, uint64_t most_blocks)
{
    uint64_t at = SUPERBLOCK_BYTES, workers = (uint64_t)layout->hosts * layout->workers;

    layout->pin_slots = (uint32_t)round_up(clamp(most_blocks / 32, clamp(most_blocks, 8, 1024), 1 << 20), 8);
    layout->log_records = (uint32_t)power_of_two(clamp(most_blocks / 512, 32, 1 << 13));
    layout->hosts_offset = at;
    layout->owners_offset = at += layout->hosts * sizeof(struct kvp_host);
    layout->high_offset = at += layout->hosts * kvp_row(layout->segments) * 8;
    layout->pins_offset = at += layout->hosts * kvp_row(layout->workers) * 8;
    layout->logs_offset = at += workers * layout->pin_slots * 8;
    return at + workers * layout->log_records * sizeof(struct kvp_record);
}

static uint64_t place_host_class(struct kvp_class_layout *class, uint64_t at)
{
    uint64_t hints = (class->blocks + 63) / 64;

    class->scores_offset = at;
    class->tags_offset = at += round_up(class->blocks * 8, KVP_LINE);
    at += round_up(class->blocks * sizeof(struct kvp_tag), KVP_LINE);
    if (KVP_MANY_HOSTS) {
        class->known_offset = at;
        at += round_up(class->blocks * 8, KVP_LINE);
    }
    class->hints_offset = at;
    return at + round_up((hints + (hints + 63) / 64) * 8, KVP_LINE);
}

/* What the workers of one host share. */
static void place_host(struct kvp_layout *layout, uint64_t most_blocks)
{
    uint64_t at = sizeof(struct kvp_head);

    layout->sights_offset = at;
    layout->slots_offset = at += round_up(layout->hosts * sizeof(struct kvp_sight), KVP_LINE);
    at += layout->workers * sizeof(struct kvp_slot);
    if (KVP_MANY_HOSTS) {
        layout->read_offset = at;
        at += round_up((uint64_t)layout->hosts * layout->workers * 8, KVP_LINE);
    }
    layout->segments_offset = at;
    at += round_up((uint64_t)layout->segments * 8, KVP_LINE);
    for (uint32_t i = 0; i < layout->classes; i++)
        at = place_host_class(&layout->class[i], at);
    layout->directory_offset = at = round_up(at, HOME_BYTES);
    layout->directory_homes = clamp(round_up(most_blocks * 2, HOME_ENTRIES) / HOME_ENTRIES, 4, UINT32_MAX);
    layout->host_bytes = round_up(at + layout->directory_homes * (HOME_BYTES + 8), KVP_LINE);
}

/* Lay out everything for a payload of `payload` bytes; returns the length of the image. */
static uint64_t place(struct kvp_layout *layout, uint64_t payload)
{
    uint64_t most_blocks = payload / least_stride(layout);

    layout->payload_bytes = payload;
    cut(layout, payload);
    uint64_t at = place_rows(layout, most_blocks);
    for (uint32_t i = 0; i < layout->classes; i++) {
        struct kvp_class_layout *class = &layout->class[i];
        class->blocks = payload / class->stride;
        class->words_offset = at;
        at += round_up(class->blocks * 8, KVP_LINE);
        if (KVP_MANY_HOSTS) {
            class->labels_offset = at;
            at += round_up(class->blocks * sizeof(struct kvp_label), KVP_LINE);
        }
    }
    place_host(layout, most_blocks);
    if (!KVP_MANY_HOSTS) {
        layout->host_offset = at = round_up(at, HOME_BYTES);
        at += layout->host_bytes;
    }
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
    if (!KVP_MANY_HOSTS && (request->hosts > 1 || request->host))
        return kvp_fail(KVP_E_INVALID, "in mode coherent a pool has one host, number 0: choose another mode for %u hosts",
                        request->hosts);
    if (request->hosts > KVP_HOSTS_MAX || (request->host && request->host >= request->hosts))
        return kvp_fail(KVP_E_INVALID, "host %u of %u: a pool has at most %u hosts, numbered from 0", request->host,
                        request->hosts, KVP_HOSTS_MAX);
    if (request->lease_ms && request->lease_ms < KVP_LEASE_MS_MIN)
        return kvp_fail(KVP_E_INVALID, "a lease of %u ms is shorter than beats can be relied on: at least %d", request->lease_ms,
                        KVP_LEASE_MS_MIN);
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
    out->hosts = request->hosts ? request->hosts : 1;
    out->lease_ms = request->lease_ms ? request->lease_ms : KVP_LEASE_MS;
    out->quota = request->quota;
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
    if (out->segments > KVP_SEGMENTS_MAX || (uint64_t)out->segments_per_host * (out->hosts - 1) >= out->segments)
        return kvp_fail(KVP_E_INVALID, "%llu blocks of up to %llu bytes give each of %u hosts no segment of its own: make the "
                        "pool larger, or for fewer hosts", (unsigned long long)(payload / stride_max),
                        (unsigned long long)stride_max, out->hosts);
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
    again.hosts = layout->hosts;
    again.lease_ms = layout->lease_ms;
    again.quota = layout->quota;
    again.classes = layout->classes;
    if (!layout->classes || layout->classes > KVP_CLASSES_MAX || !layout->workers || layout->workers > KVP_WORKERS_MAX)
        return kvp_fail(KVP_E_CORRUPT, "%u classes, %u workers", layout->classes, layout->workers);
    if (!layout->hosts || layout->hosts > (KVP_MANY_HOSTS ? KVP_HOSTS_MAX : 1) || layout->lease_ms < KVP_LEASE_MS_MIN)
        return kvp_fail(KVP_E_CORRUPT, "%u hosts, a lease of %u ms", layout->hosts, layout->lease_ms);
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

int kvp_layout_metadata(const struct kvp_request *request, uint64_t *out)
{
    struct kvp_layout layout;
    int status = kvp_layout_plan(request, &layout);

    if (status)
        return status;
    out[0] = layout.bytes - layout.payload_bytes;
    out[1] = KVP_MANY_HOSTS ? layout.host_bytes : 0;
    return KVP_OK;
}
