/* uri.c -- parsing of pool URIs. Input is a user's: everything is bounded and refused with a reason. */
#include "coherence/uri.h"
#include "coherence/coherence.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAME_MAX_BYTES = 200, EVENTS_MAX = 1 << 20 };

static int parse_number(const char *text, int base, uint64_t most, uint64_t *out)
{
    char *end;

    if (!isxdigit((unsigned char)*text))
        return 0;
    unsigned long long value = strtoull(text, &end, base);
    *out = value;
    return *end == '\0' && value <= most;
}

/* "0,2-3" -> bits */
static int parse_nodes(char *text, uint64_t *nodes)
{
    for (char *save = NULL, *part = strtok_r(text, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        uint64_t first, last;
        char *dash = strchr(part, '-');
        if (dash)
            *dash = '\0';
        if (!parse_number(part, 10, 63, &first))
            return 0;
        last = first;
        if (dash && !parse_number(dash + 1, 10, 63, &last))
            return 0;
        for (uint64_t node = first; node <= last; node++)
            *nodes |= 1ull << node;
    }
    return *nodes != 0;
}

static int parse_option(char *option, struct kvp_uri *out, uint64_t *uid)
{
    uint64_t value;
    char *text = strchr(option, '=');

    if (!text)
        return 0;
    *text++ = '\0';
    if (strcmp(option, "mode") == 0 && parse_number(text, 8, 0777, &value)) {
        out->mode = (unsigned)value;
        return 1;
    }
    if (strcmp(option, "uid") == 0)
        return parse_number(text, 10, UINT32_MAX, uid);
    if (strcmp(option, "inode") == 0)
        return parse_number(text, 10, UINT64_MAX, &out->inode);
    if (strcmp(option, "seed") == 0)
        return out->has_seed = parse_number(text, 10, INT64_MAX, &out->seed);
    if (strcmp(option, "events") == 0)
        return out->has_events = parse_number(text, 10, EVENTS_MAX, &out->events);
    if (strcmp(option, "hugepage") == 0) {
        out->huge_bytes = KVP_HUGE_PAGE;
        return strcmp(text, "2M") == 0 || strcmp(text, "2MiB") == 0;
    }
    out->interleave = strcmp(option, "interleave") == 0;
    return (out->interleave || strcmp(option, "node") == 0) && parse_nodes(text, &out->nodes);
}

static int parse_options(char *options, struct kvp_uri *out, uint64_t *uid)
{
    char *save = NULL;

    for (char *option = strtok_r(options, "&", &save); option; option = strtok_r(NULL, "&", &save))
        if (!parse_option(option, out, uid))
            return kvp_fail(KVP_E_INVALID, "unknown option '%s': mode=0660, uid=N, node=N, interleave=0,1, hugepage=2M exist, "
                            "of sim: seed=N, events=N, and of memfd:PID/FD inode=N", option);
    if (out->inode && strncmp(out->text, "memfd:", 6) != 0)
        return kvp_fail(KVP_E_INVALID, "inode=N is an option of memfd:PID/FD only");
    if ((out->has_seed || out->has_events) && strncmp(out->text, "sim:", 4) != 0)
        return kvp_fail(KVP_E_INVALID, "seed=N and events=N are options of sim: only");
    if (out->huge_bytes && (strncmp(out->text, "sim:", 4) == 0 || strncmp(out->text, "hugetlb:", 8) == 0))
        return kvp_fail(KVP_E_INVALID, "hugepage=2M is an option of shm:, file:, memfd: and dax: (hugetlb: says its size itself)");
    if (out->huge_bytes && out->interleave && strncmp(out->text, "memfd:", 6) != 0)
        return kvp_fail(KVP_E_INVALID, "the kernel makes 2 MiB pages of pages of several nodes on one of them: to spread such "
                        "pages use hugetlb:2MiB?interleave=");
    return KVP_OK;
}

static int parse_shm(const char *name, const char *scheme, uint64_t uid, struct kvp_uri *out)
{
    size_t length = strlen(name);

    if (length == 0 || length > NAME_MAX_BYTES || strchr(name, '/') || name[0] == '.')
        return kvp_fail(KVP_E_INVALID, "%s:NAME needs a name of 1 to %d characters without '/' that does not start "
                        "with '.'", scheme, NAME_MAX_BYTES);
    snprintf(out->path, sizeof out->path, "/dev/shm/kvpool.%llu.%s", (unsigned long long)uid, name);
    return KVP_OK;
}

static int parse_sim(const char *name, uint64_t uid, struct kvp_uri *out)
{
    char full[sizeof "sim." + NAME_MAX_BYTES];
    int status = parse_shm(name, "sim", uid, out);

    if (status)
        return status;
    if (KVP_MODE != KVP_SIM)
        return kvp_fail(KVP_E_INVALID, "sim:%s is memory of simulated hosts: open it with mode='sim'", name);
    if (strstr(name, ".cache"))
        return kvp_fail(KVP_E_INVALID, "sim:%s: '.cache' in a name is for the caches of the hosts", name);
    snprintf(full, sizeof full, "sim.%s", name);
    snprintf(out->path, sizeof out->path, "/dev/shm/kvpool.%llu.%s", (unsigned long long)uid, full);
    return KVP_OK;
}

static int parse_path(const char *path, const char *prefix, struct kvp_uri *out)
{
    size_t length = strlen(path);

    if (length == 0 || length >= sizeof out->path - 8 || strncmp(path, prefix, strlen(prefix)) != 0)
        return kvp_fail(KVP_E_INVALID, "'%s' is not a path%s%s of less than %zu characters", path,
                        *prefix ? " under " : "", prefix, sizeof out->path - 8);
    memcpy(out->path, path, length + 1);
    return KVP_OK;
}

/* memfd: | memfd:FD | memfd:PID/FD */
static int parse_memfd(char *rest, struct kvp_uri *out)
{
    uint64_t pid, fd;
    char *slash = strchr(rest, '/');

    if (*rest == '\0')
        return KVP_OK;
    out->is_open_only = 1;
    if (slash)
        *slash = '\0';
    if (!slash && parse_number(rest, 10, INT32_MAX, &fd)) {
        out->open_fd = (int)fd;
        return KVP_OK;
    }
    if (!slash || !parse_number(rest, 10, INT32_MAX, &pid) || !parse_number(slash + 1, 10, INT32_MAX, &fd))
        return kvp_fail(KVP_E_INVALID, "memfd: takes nothing, FD or PID/FD");
    snprintf(out->path, sizeof out->path, "/proc/%llu/fd/%llu", (unsigned long long)pid, (unsigned long long)fd);
    return KVP_OK;
}

static int parse_hugetlb(const char *rest, struct kvp_uri *out)
{
    static const struct { const char *name; uint64_t bytes; } sizes[] = {
        {"", KVP_HUGE_PAGE}, {"2MiB", KVP_HUGE_PAGE}, {"2M", KVP_HUGE_PAGE}, {"32MiB", 32ull << 20},
        {"1GiB", 1ull << 30}, {"1G", 1ull << 30},
    };

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(rest, sizes[i].name) == 0) {
            out->huge_bytes = sizes[i].bytes;
            return KVP_OK;
        }
    return kvp_fail(KVP_E_INVALID, "hugetlb:SIZE takes 2MiB, 32MiB or 1GiB, not '%s'", rest);
}

int kvp_uri_parse(const char *text, struct kvp_uri *out)
{
    char copy[sizeof out->text];
    uint64_t uid = (uint64_t)getuid();
    size_t length = strlen(text);

    *out = (struct kvp_uri){.open_fd = -1, .mode = 0600};
    if (length >= sizeof copy)
        return kvp_fail(KVP_E_INVALID, "a pool URI has less than %zu characters", sizeof copy);
    memcpy(copy, text, length + 1);
    char *options = strchr(copy, '?');
    if (options)
        *options++ = '\0';
    snprintf(out->text, sizeof out->text, "%s", copy);
    if (options) {
        int status = parse_options(options, out, &uid);
        if (status)
            return status;
        if (uid != (uint64_t)getuid())
            snprintf(out->text, sizeof out->text, "%.480s?uid=%llu", copy, (unsigned long long)uid);
        if (out->inode)
            snprintf(out->text, sizeof out->text, "%.480s?inode=%llu", copy, (unsigned long long)out->inode);
    }
    char *rest = strchr(copy, ':');
    if (rest) {
        *rest++ = '\0';
        if (strcmp(copy, "shm") == 0)
            return out->kind = KVP_MAP_SHM, parse_shm(rest, "shm", uid, out);
        if (strcmp(copy, "sim") == 0)
            return out->kind = KVP_MAP_SIM, parse_sim(rest, uid, out);
        if (strcmp(copy, "file") == 0)
            return out->kind = KVP_MAP_FILE, parse_path(rest, "", out);
        if (strcmp(copy, "dax") == 0)
            return out->kind = KVP_MAP_DAX, parse_path(rest, "/dev/", out);
        if (strcmp(copy, "memfd") == 0)
            return out->kind = KVP_MAP_MEMFD, parse_memfd(rest, out);
        if (strcmp(copy, "hugetlb") == 0)
            return out->kind = KVP_MAP_HUGETLB, parse_hugetlb(rest, out);
    }
    return kvp_fail(KVP_E_INVALID, "'%.200s' is not a pool URI: shm:NAME, file:PATH, memfd:, hugetlb:2MiB, dax:/dev/daxX.Y "
                    "or sim:NAME", text);
}
