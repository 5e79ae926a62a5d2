/* hostmem.c -- memory that the processes of one host share: found by the pool's identity, made by who comes first. */
#define _GNU_SOURCE
#include "coherence/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { LOCK_TRIES = 10000, LOCK_PAUSE_NS = 1000000, OPEN_TRIES = 100 };

static void memory_path(const uint8_t uuid[16], uint32_t host, char *out, size_t bytes)
{
    char name[33];

    for (int i = 0; i < 16; i++)
        snprintf(name + 2 * i, 3, "%02x", uuid[i]);
    snprintf(out, bytes, "/dev/shm/kvpool.%llu.host.%s.%u", (unsigned long long)getuid(), name, host);
}

/* posix_fallocate gives a file its length last: a file of that length has all of its memory, whoever died meanwhile. */
int kvp_back_file(int fd, uint64_t bytes, const char *path)
{
    struct statvfs room = {0};
    struct stat info = {0};
    int error = EINTR;

    while (error == EINTR)
        error = posix_fallocate(fd, 0, (off_t)bytes);
    if (!error)
        return KVP_OK;
    if (error != ENOSPC && error != ENOMEM)
        return errno = error, kvp_fail_errno("cannot give memory to", path);
    fstat(fd, &info);
    fstatvfs(fd, &room);
    uint64_t have = (uint64_t)info.st_blocks * 512 + (uint64_t)room.f_bavail * room.f_frsize;
    return kvp_fail(KVP_E_NOSPACE, "%s needs %llu bytes, %llu bytes missing in /dev/shm: ask for less, or make /dev/shm "
                    "larger", path, (unsigned long long)bytes, (unsigned long long)(bytes > have ? bytes - have : 0));
}

/* Exclusive, but not for ever: whoever holds it is initialising, or stopped. */
static int lock_file(int fd, const char *path)
{
    for (int tries = 0; tries < LOCK_TRIES; tries++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return KVP_OK;
        if (errno != EWOULDBLOCK && errno != EINTR)
            return kvp_fail_errno("cannot lock", path);
        nanosleep(&(struct timespec){0, LOCK_PAUSE_NS}, NULL);
    }
    return kvp_fail(KVP_E_BUSY, "a process has held the lock of %s for ten seconds: is it stopped? (fuser names it)", path);
}

/* The locked file: empty means new. REPLACED if it lost its name between open and lock: look again. */
static int open_locked(struct kvp_mapping *out, struct stat *info)
{
    int status;

    out->fd = open(out->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (out->fd < 0)
        return kvp_fail_errno("cannot open", out->path);
    if ((status = lock_file(out->fd, out->path)))
        return status;
    if (fstat(out->fd, info))
        return kvp_fail_errno("cannot look at", out->path);
    if (info->st_nlink)
        return KVP_OK;
    close(out->fd);
    out->fd = -1;
    return KVP_E_REPLACED;
}

static int check_file(const struct kvp_mapping *out, const struct stat *info)
{
    if (info->st_uid != getuid())
        return kvp_fail(KVP_E_PERMISSION, "%s belongs to user %u, not to you: remove it, or be another host", out->path,
                        (unsigned)info->st_uid);
    if (!S_ISREG(info->st_mode) || (info->st_size && (uint64_t)info->st_size != out->bytes))
        return kvp_fail(KVP_E_INVALID, "%s has %llu bytes, not %llu: another build of kvpool is this host, or was; end its "
                        "processes and remove the file", out->path, (unsigned long long)info->st_size,
                        (unsigned long long)out->bytes);
    return KVP_OK;
}

int kvp_host_memory_look(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out)
{
    struct stat info;
    int status = KVP_OK;

    *out = (struct kvp_mapping){.page_bytes = KVP_PAGE, .kind = KVP_MAP_SHM};
    out->bytes = (bytes + KVP_PAGE - 1) & ~(uint64_t)(KVP_PAGE - 1);
    memory_path(uuid, host, out->path, sizeof out->path);
    out->fd = open(out->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (out->fd < 0 || fstat(out->fd, &info))
        status = kvp_fail_errno("cannot open", out->path);
    else if ((status = check_file(out, &info)) == KVP_OK && !info.st_size)
        status = kvp_fail(KVP_E_NOTFOUND, "%s is still empty", out->path);
    if (status == KVP_OK)
        status = kvp_map_aligned(out);
    if (status)
        kvp_mapping_close(out);
    return status;
}

int kvp_host_memory_open(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out, int *fresh)
{
    struct stat info;
    int status = KVP_E_REPLACED;

    *fresh = 0;
    *out = (struct kvp_mapping){.fd = -1, .page_bytes = KVP_PAGE, .kind = KVP_MAP_SHM};
    if (!bytes || bytes > INT64_MAX - KVP_HUGE_PAGE)
        return kvp_fail(KVP_E_INVALID, "cannot make host memory of %llu bytes", (unsigned long long)bytes);
    out->bytes = (bytes + KVP_PAGE - 1) & ~(uint64_t)(KVP_PAGE - 1);
    memory_path(uuid, host, out->path, sizeof out->path);
    snprintf(out->uri, sizeof out->uri, "%s", out->path);
    for (int tries = 0; tries < OPEN_TRIES && status == KVP_E_REPLACED; tries++)
        status = open_locked(out, &info);
    if (status == KVP_E_REPLACED)
        status = kvp_fail(KVP_E_BUSY, "%s is removed as fast as it is made", out->path);
    if (status == KVP_OK && (status = check_file(out, &info)) == KVP_OK && !info.st_size) {
        *fresh = 1;
        status = kvp_back_file(out->fd, out->bytes, out->path);
        if (status)
            unlink(out->path); /* empty, and still locked by us */
    }
    if (status == KVP_OK)
        status = kvp_map_aligned(out);
    if (status)
        kvp_mapping_close(out);
    return status;
}

void kvp_host_memory_unlock(struct kvp_mapping *mapping)
{
    flock(mapping->fd, LOCK_UN);
}

int kvp_host_memory_remove(const uint8_t uuid[16], uint32_t host)
{
    char path[128];

    memory_path(uuid, host, path, sizeof path);
    return unlink(path) ? kvp_fail_errno("cannot remove", path) : KVP_OK;
}
