/* mapping.c -- pool memory by URI: make it, back it, find it again, map it at 2 MiB. */
#define _GNU_SOURCE
#include "coherence/mapping.h"
#include "coherence/sim.h"
#include "coherence/uri.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#ifndef TMPFS_MAGIC
#define TMPFS_MAGIC 0x01021994
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef STATX_ATTR_DAX
#define STATX_ATTR_DAX 0x200000
#endif
enum { MPOL_BIND_POLICY = 2, MPOL_INTERLEAVE_POLICY = 3, HUGE_SHIFT = 26, NODES_MAX = 64 };

int kvp_fail_errno(const char *what, const char *where)
{
    int error = errno;
    int status = error == ENOENT || error == ENODEV || error == ENXIO ? KVP_E_NOTFOUND
               : error == EACCES || error == EPERM                    ? KVP_E_PERMISSION
               : error == ENOSPC || error == ENOMEM                   ? KVP_E_NOSPACE
               : error == EEXIST                                      ? KVP_E_EXISTS
                                                                      : KVP_E_SYSTEM;
    return kvp_fail(status, "%s %s: %s", what, where, strerror(error));
}

/* ---- free memory: what can be promised ---- */

static uint64_t meminfo_available(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");

    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
            break;
    fclose(file);
    return kib ? kib << 10 : UINT64_MAX;
}

static uint64_t read_number(const char *folder, const char *leaf)
{
    char path[512];
    unsigned long long value;

    snprintf(path, sizeof path, "/sys/fs/cgroup%.400s/%s", folder, leaf);
    FILE *file = fopen(path, "re");
    if (!file)
        return UINT64_MAX;
    int found = fscanf(file, "%llu", &value); /* "max" is no number: no limit */
    fclose(file);
    return found == 1 ? value : UINT64_MAX;
}

/* What the control group (v2) of this process leaves: a container's limit kills instead of refusing. */
static uint64_t cgroup_available(void)
{
    char line[512], *folder = NULL;
    FILE *file = fopen("/proc/self/cgroup", "re");

    if (!file)
        return UINT64_MAX;
    while (!folder && fgets(line, sizeof line, file))
        if (strncmp(line, "0::", 3) == 0)
            folder = line + 3;
    fclose(file);
    if (!folder)
        return UINT64_MAX;
    folder[strcspn(folder, "\n")] = '\0';
    uint64_t most = read_number(folder, "memory.max"), now = read_number(folder, "memory.current");
    return most == UINT64_MAX || now == UINT64_MAX ? UINT64_MAX : most > now ? most - now : 0;
}

static uint64_t memory_available(void)
{
    uint64_t machine = meminfo_available(), group = cgroup_available();

    return machine < group ? machine : group;
}

static int is_named_kind(int kind)
{
    return kind == KVP_MAP_SHM || kind == KVP_MAP_FILE || kind == KVP_MAP_SIM;
}

static int check_room(const struct kvp_uri *uri, int fd, uint64_t bytes)
{
    struct statvfs room;
    uint64_t memory = uri->kind == KVP_MAP_FILE || uri->kind == KVP_MAP_DAX ? UINT64_MAX : memory_available();

    if (bytes > memory)
        return kvp_fail(KVP_E_NOSPACE, "%llu bytes asked, %llu bytes missing: %llu bytes of memory are "
                        "available to this process; ask for less", (unsigned long long)bytes,
                        (unsigned long long)(bytes - memory), (unsigned long long)memory);
    if (!is_named_kind(uri->kind))
        return KVP_OK;
    if (fstatvfs(fd, &room))
        return kvp_fail_errno("cannot see the free space of", uri->path);
    uint64_t free_bytes = (uint64_t)room.f_bavail * room.f_frsize;
    if (bytes <= free_bytes)
        return KVP_OK;
    return kvp_fail(KVP_E_NOSPACE, "%llu bytes asked, %llu bytes missing: the file system of %s has %llu bytes "
                    "free; ask for less, or use memfd: (not limited by /dev/shm) or file:PATH on a larger disk",
                    (unsigned long long)bytes, (unsigned long long)(bytes - free_bytes), uri->path,
                    (unsigned long long)free_bytes);
}

/* ---- the backing objects ---- */

/* Where a file system without O_TMPFILE keeps the file until it gets its name: of this process alone. */
static void temporary_path(const char *path, char *out, size_t bytes)
{
    snprintf(out, bytes, "%.380s.%d.new", path, (int)getpid());
}

/* A nameless file in the folder of `path`, so that a creator that dies leaves nothing. */
static int open_nameless(const struct kvp_uri *uri, struct kvp_mapping *out)
{
    char folder[sizeof uri->path + 32];
    const char *slash = strrchr(uri->path, '/');

    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - uri->path) + 1 : 1, slash ? uri->path : ".");
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd;
    temporary_path(uri->path, folder, sizeof folder);
    unlink(folder); /* of an earlier process with our number, which is dead */
    out->is_temporary = 1;
    return open(folder, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
}

static int open_memfd(const struct kvp_uri *uri)
{
    unsigned flags = MFD_CLOEXEC;

    if (uri->huge_bytes)
        flags |= MFD_HUGETLB | (unsigned)__builtin_ctzll(uri->huge_bytes) << HUGE_SHIFT;
    return memfd_create("kvpool", flags);
}

static int taken(const struct kvp_uri *uri)
{
    if (access(uri->path, F_OK) != 0)
        return KVP_OK;
    return kvp_fail(KVP_E_EXISTS, "%s exists: open it, remove it (kvpool rm %s), or create with replace", uri->path,
                    uri->text);
}

/* device-dax: size and alignment come from sysfs; the node has st_size 0 and cannot be truncated. */
static uint64_t sysfs_number(dev_t device, const char *leaf)
{
    char path[128];
    unsigned long long value = 0;

    snprintf(path, sizeof path, "/sys/dev/char/%u:%u/%s", major(device), minor(device), leaf);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    if (fscanf(file, "%llu", &value) != 1)
        value = 0;
    fclose(file);
    return value;
}

static int open_dax(const struct kvp_uri *uri, uint64_t *bytes, struct kvp_mapping *out)
{
    struct stat info;

    out->fd = open(uri->path, O_RDWR | O_CLOEXEC);
    if (out->fd < 0 && (errno == ENXIO || errno == ENODEV))
        return kvp_fail(KVP_E_NOTFOUND, "%s is there and cannot be used: it is memory of the system (mode system-ram), or "
                        "disabled. `kvpool doctor` says which; `daxctl reconfigure-device --mode=devdax --force %s` makes "
                        "it a device", uri->path, strrchr(uri->path, '/') + 1);
    if (out->fd < 0 && errno == ENOENT)
        return kvp_fail(KVP_E_NOTFOUND, "%s does not exist: its region has no memory behind it, or is not enabled. `kvpool "
                        "doctor` names the devices, and what to type to get one", uri->path);
    if (out->fd < 0)
        return kvp_fail_errno("cannot open the device", uri->path);
    if (fstat(out->fd, &info) || !S_ISCHR(info.st_mode) || !sysfs_number(info.st_rdev, "size"))
        return kvp_fail(KVP_E_INVALID, "%s is not a device-dax node with a size in sysfs; "
                        "`daxctl list` names them, file:PATH is for files", uri->path);
    uint64_t size = sysfs_number(info.st_rdev, "size");
    uint64_t align = sysfs_number(info.st_rdev, "align");
    out->page_bytes = align ? align : KVP_HUGE_PAGE;
    if (uri->huge_bytes > out->page_bytes)
        return kvp_fail(KVP_E_INVALID, "%s is mapped in pages of %llu bytes, not of 2 MiB: `daxctl reconfigure-device` or `ndctl "
                        "create-namespace` with --align 2M", uri->path, (unsigned long long)out->page_bytes);
    if (*bytes > size)
        return kvp_fail(KVP_E_NOSPACE, "%s has %llu bytes, %llu bytes missing", uri->path,
                        (unsigned long long)size, (unsigned long long)(*bytes - size));
    if (*bytes == 0)
        *bytes = size / out->page_bytes * out->page_bytes;
    return KVP_OK;
}

/* ---- mapping ---- */

static int bind_nodes(const struct kvp_uri *uri, const struct kvp_mapping *mapping)
{
    unsigned long nodes = uri->nodes;
    struct statfs system;

    if (!nodes)
        return KVP_OK;
    if (mapping->kind == KVP_MAP_DAX ||
        (mapping->kind == KVP_MAP_FILE && (fstatfs(mapping->fd, &system) || system.f_type != TMPFS_MAGIC)))
        return kvp_fail(KVP_E_INVALID, "node= and interleave= say where new memory comes from: %s lies where it lies (shm:, "
                        "memfd:, hugetlb: and files on tmpfs do not)", uri->text);
    int policy = uri->interleave ? MPOL_INTERLEAVE_POLICY : MPOL_BIND_POLICY;
    if (syscall(SYS_mbind, mapping->base, mapping->bytes, policy, &nodes, NODES_MAX + 1, 0) == 0)
        return KVP_OK;
    return kvp_fail(KVP_E_INVALID, "cannot bind to the NUMA nodes of %s: %s (see /sys/devices/system/node)",
                    uri->text, strerror(errno));
}

/* A file of a DAX file system is its memory itself, if it is mapped so that the file system's own records are always current:
 * without that the memory may be given to another file when the machine is lost, and hosts would share what is no more ours. */
static int map_flags(const struct kvp_mapping *mapping)
{
    struct statx info;
    int is_dax = mapping->kind == KVP_MAP_FILE && statx(mapping->fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &info) == 0 &&
                 info.stx_attributes & STATX_ATTR_DAX;

    return MAP_FIXED | (is_dax ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED);
}

static int fail_map(const struct kvp_mapping *mapping, int flags)
{
    if (mapping->kind == KVP_MAP_HUGETLB && errno == ENOMEM)
        return kvp_fail(KVP_E_NOSPACE, "%llu bytes of %llu-byte huge pages are not free: reserve them (sysctl "
                        "vm.nr_hugepages), or use shm: or memfd:, which get 2 MiB pages by themselves",
                        (unsigned long long)mapping->bytes, (unsigned long long)mapping->page_bytes);
    if (flags & MAP_SYNC && errno == EOPNOTSUPP)
        return kvp_fail(KVP_E_INVALID, "%s lies on a DAX file system without MAP_SYNC (as on virtio-pmem), so its memory may "
                        "become another file's: mount it without dax, or use the device itself (`ndctl create-namespace "
                        "--mode=devdax`)", mapping->uri);
    return kvp_fail_errno("cannot map", mapping->uri);
}

/* Reserve address space and map over its first 2 MiB boundary: an unaligned mapping silently gets 4 KiB pages. */
int kvp_map_aligned(struct kvp_mapping *out)
{
    uint64_t align = out->page_bytes > KVP_HUGE_PAGE ? out->page_bytes : KVP_HUGE_PAGE;
    uint64_t room = out->bytes + align;
    uint8_t *hole = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (hole == MAP_FAILED)
        return kvp_fail_errno("no address space for", out->uri);
    uint8_t *base = (uint8_t *)(((uintptr_t)hole + align - 1) & ~(uintptr_t)(align - 1));
    int flags = map_flags(out);
    if (mmap(base, out->bytes, PROT_READ | PROT_WRITE, flags, out->fd, 0) == MAP_FAILED) {
        int status = fail_map(out, flags);
        munmap(hole, room);
        return status;
    }
    if (base > hole)
        munmap(hole, (size_t)(base - hole));
    uint64_t mapped = (out->bytes + KVP_PAGE - 1) & ~(uint64_t)(KVP_PAGE - 1);
    if (base + mapped < hole + room)
        munmap(base + mapped, (size_t)(hole + room - base - mapped));
    out->base = base;
    return KVP_OK;
}

static int make_object(const struct kvp_uri *uri, uint64_t *bytes, struct kvp_mapping *out)
{
    int status = KVP_OK;

    switch (uri->kind) {
    case KVP_MAP_SHM:
    case KVP_MAP_FILE:
    case KVP_MAP_SIM:
        if ((status = taken(uri)))
            return status;
        out->fd = open_nameless(uri, out);
        break;
    case KVP_MAP_DAX:
        return open_dax(uri, bytes, out);
    default:
        out->page_bytes = uri->huge_bytes ? uri->huge_bytes : KVP_PAGE;
        out->fd = open_memfd(uri);
    }
    return out->fd < 0 ? kvp_fail_errno("cannot create", uri->text) : KVP_OK;
}

static int size_object(const struct kvp_uri *uri, struct kvp_mapping *out)
{
    uint64_t bytes = uri->kind == KVP_MAP_SIM ? kvp_sim_file_bytes(out->bytes) : out->bytes;
    int status = check_room(uri, out->fd, bytes);

    if (status || uri->kind == KVP_MAP_DAX)
        return status;
    if (fchmod(out->fd, uri->mode) || ftruncate(out->fd, (off_t)bytes))
        return kvp_fail_errno("cannot size", uri->text);
    return KVP_OK;
}

static void describe(const struct kvp_uri *uri, struct kvp_mapping *out)
{
    struct stat info;

    out->kind = uri->kind == KVP_MAP_MEMFD && uri->huge_bytes ? KVP_MAP_HUGETLB : uri->kind;
    out->demands_huge = uri->huge_bytes != 0;
    out->is_spread = uri->interleave;
    if ((uri->kind == KVP_MAP_MEMFD || uri->kind == KVP_MAP_HUGETLB) && fstat(out->fd, &info) == 0)
        snprintf(out->uri, sizeof out->uri, "memfd:%d/%d?inode=%llu", (int)getpid(), out->fd, (unsigned long long)info.st_ino);
    else
        snprintf(out->uri, sizeof out->uri, "%s", uri->text);
    snprintf(out->path, sizeof out->path, "%.*s", (int)sizeof out->path - 1, uri->path);
}

int kvp_mapping_create(const char *text, uint64_t bytes, struct kvp_mapping *out)
{
    struct kvp_uri uri;
    int status = kvp_uri_parse(text, &uri);

    *out = (struct kvp_mapping){.fd = -1, .page_bytes = KVP_PAGE};
    if (status)
        return status;
    if (uri.is_open_only)
        return kvp_fail(KVP_E_INVALID, "%s names memory that exists: create with plain memfd:", text);
    if ((bytes == 0 && uri.kind != KVP_MAP_DAX) || bytes > INT64_MAX - KVP_HUGE_PAGE)
        return kvp_fail(KVP_E_INVALID, "cannot create a pool of %llu bytes", (unsigned long long)bytes);
    if ((status = make_object(&uri, &bytes, out)) == KVP_OK) {
        out->bytes = (bytes + out->page_bytes - 1) / out->page_bytes * out->page_bytes;
        describe(&uri, out);
        KVP_CRASH_POINT("mapping.unnamed");
        if ((status = size_object(&uri, out)) == KVP_OK && (status = kvp_map_aligned(out)) == KVP_OK)
            status = bind_nodes(&uri, out);
        if (status == KVP_OK && uri.kind == KVP_MAP_SIM)
            status = kvp_sim_open(&uri, out, 1);
    }
    if (status)
        kvp_mapping_close(out);
    return status;
}

static int fail_backing(const struct kvp_mapping *mapping, int error)
{
    struct stat info;
    uint64_t have = fstat(mapping->fd, &info) ? 0 : (uint64_t)info.st_blocks * 512;

    return kvp_fail(error == ENOSPC || error == ENOMEM || error == EFAULT ? KVP_E_NOSPACE : KVP_E_SYSTEM,
                    "cannot back all of %s: %llu of %llu bytes missing: %s; ask for less, or use memfd: (not limited by "
                    "/dev/shm) or file:PATH on a larger disk", mapping->uri,
                    (unsigned long long)(mapping->bytes > have ? mapping->bytes - have : 0),
                    (unsigned long long)mapping->bytes, strerror(error));
}

/* A kernel, a file system or a sandbox that does not know or allow a call that we can do without. */
static int is_refused(int error)
{
    return error == EINVAL || error == ENOSYS || error == EPERM || error == EOPNOTSUPP;
}

/* Promise the bytes of a file: from here on a store to them cannot end in SIGBUS. */
static int allocate(const struct kvp_mapping *mapping, uint64_t start, uint64_t end)
{
    int error = EINTR;

    if (mapping->kind == KVP_MAP_DAX || mapping->kind == KVP_MAP_HUGETLB) /* the mapping itself has promised them */
        return KVP_OK;
    while (error == EINTR)
        error = posix_fallocate(mapping->fd, (off_t)start, (off_t)(end - start));
    return error == 0 || is_refused(error) ? KVP_OK : fail_backing(mapping, error);
}

static int populate(const struct kvp_mapping *mapping, uint64_t start, uint64_t end)
{
    int status = start < end ? allocate(mapping, start, end) : KVP_OK;

    if (mapping->kind == KVP_MAP_SIM) /* what nobody has touched stays a hole, which no host's cache has to copy */
        return status;
    while (start < end && status == KVP_OK) {
        if (madvise(mapping->base + start, end - start, MADV_POPULATE_WRITE) == 0)
            break;
        if (is_refused(errno)) /* Linux before 5.14, or a filter of system calls: touch, without changing anything */
            for (; start < end; start += KVP_PAGE)
                co_or((co_u64 *)(void *)(mapping->base + start), 0);
        else if (errno != EAGAIN && errno != EINTR)
            status = fail_backing(mapping, errno);
    }
    return status;
}

enum { THREADS_MAX = 64 };

struct part {
    const struct kvp_mapping *mapping;
    uint64_t start, end;
    pthread_t thread;
    int is_threaded, status;
    char detail[512]; /* of the thread that failed, for the one that asked */
};

static void *populate_part(void *argument)
{
    struct part *part = argument;

    part->status = populate(part->mapping, part->start, part->end);
    if (part->status)
        snprintf(part->detail, sizeof part->detail, "%s", kvp_error_detail());
    return NULL;
}

/* All but the first part on threads of their own; where no thread can be had, here. */
int kvp_mapping_populate(const struct kvp_mapping *mapping, uint64_t offset, uint64_t bytes, unsigned threads)
{
    struct part part[THREADS_MAX];
    uint64_t end = offset + bytes < mapping->bytes ? offset + bytes : mapping->bytes;
    unsigned count = threads < 1 ? 1 : threads > THREADS_MAX ? THREADS_MAX : threads;
    int status = KVP_OK;

    if (offset >= end)
        return KVP_OK;
    uint64_t step = ((end - offset) / count + KVP_HUGE_PAGE) & ~(uint64_t)(KVP_HUGE_PAGE - 1);
    for (unsigned i = 0; i < count; i++) {
        uint64_t start = offset + i * step, stop = start + step;
        part[i] = (struct part){.mapping = mapping, .start = start < end ? start : end, .end = stop < end ? stop : end};
        part[i].is_threaded = i && part[i].start < end && !pthread_create(&part[i].thread, NULL, populate_part, &part[i]);
    }
    for (unsigned i = 0; i < count; i++) {
        if (part[i].is_threaded)
            pthread_join(part[i].thread, NULL);
        else
            populate_part(&part[i]);
        if (part[i].status && !status)
            status = kvp_fail(part[i].status, "%s", part[i].detail);
    }
    return status;
}

static int link_object(const struct kvp_mapping *mapping)
{
    char from[sizeof mapping->path + 32];
    int flags = mapping->is_temporary ? 0 : AT_SYMLINK_FOLLOW;

    if (mapping->is_temporary)
        temporary_path(mapping->path, from, sizeof from);
    else
        snprintf(from, sizeof from, "/proc/self/fd/%d", mapping->fd);
    if (linkat(AT_FDCWD, from, AT_FDCWD, mapping->path, flags)) /* fails if the name is taken: of two creators one wins */
        return kvp_fail_errno("cannot name", mapping->path);
    if (mapping->is_temporary)
        unlink(from);
    return KVP_OK;
}

int kvp_mapping_commit(struct kvp_mapping *mapping)
{
    if (!is_named_kind(mapping->kind))
        return KVP_OK;
    KVP_CRASH_POINT("mapping.before_name");
    int status = kvp_sim_name(mapping);
    if (status == KVP_OK && (status = link_object(mapping)) == KVP_OK)
        mapping->is_temporary = 0;
    kvp_sim_named(mapping, status);
    return status;
}

static int open_object(const struct kvp_uri *uri, struct kvp_mapping *out)
{
    struct stat info;

    if (uri->kind == KVP_MAP_DAX)
        return open_dax(uri, &out->bytes, out);
    out->fd = uri->open_fd >= 0 ? fcntl(uri->open_fd, F_DUPFD_CLOEXEC, 3) : open(uri->path, O_RDWR | O_CLOEXEC);
    if (out->fd < 0 || fstat(out->fd, &info))
        return kvp_fail_errno("cannot open", uri->open_fd >= 0 ? uri->text : uri->path);
    if (uri->inode && (uint64_t)info.st_ino != uri->inode)
        return kvp_fail(KVP_E_NOTFOUND, "the pool of %s is gone: that descriptor is something else now", uri->text);
    if (!S_ISREG(info.st_mode))
        return kvp_fail(KVP_E_FOREIGN, "%s is not a file", uri->text);
    out->bytes = (uint64_t)info.st_size;
    out->page_bytes = (uint64_t)info.st_blksize >= KVP_HUGE_PAGE ? (uint64_t)info.st_blksize : KVP_PAGE;
    return uri->kind == KVP_MAP_SIM ? kvp_sim_pool_bytes(out->fd, uri->path, &out->bytes) : KVP_OK;
}

int kvp_mapping_open(const char *text, struct kvp_mapping *out)
{
    struct kvp_uri uri;
    int status = kvp_uri_parse(text, &uri);

    *out = (struct kvp_mapping){.fd = -1, .page_bytes = KVP_PAGE};
    if (status)
        return status;
    if ((uri.kind == KVP_MAP_MEMFD || uri.kind == KVP_MAP_HUGETLB) && !uri.is_open_only)
        return kvp_fail(KVP_E_INVALID, "%s has no name: open memfd:FD (inherited) or memfd:PID/FD, as the creator's "
                        "pool.uri says", text);
    if ((status = open_object(&uri, out)) == KVP_OK) {
        describe(&uri, out);
        snprintf(out->uri, sizeof out->uri, "%s", uri.text);
        if (out->bytes < KVP_PAGE)
            status = kvp_fail(KVP_E_TRUNCATED, "%s has %llu bytes: too short for a pool", text,
                              (unsigned long long)out->bytes);
        else if ((status = kvp_map_aligned(out)) == KVP_OK)
            status = bind_nodes(&uri, out);
        if (status == KVP_OK && uri.kind == KVP_MAP_SIM)
            status = kvp_sim_open(&uri, out, 0);
    }
    if (status)
        kvp_mapping_close(out);
    return status;
}

int kvp_mapping_collapse(const struct kvp_mapping *mapping)
{
    if (mapping->kind == KVP_MAP_SIM || mapping->is_spread) /* the kernel would collapse all to one node */
        return KVP_OK;
    if (mapping->page_bytes >= KVP_HUGE_PAGE)
        return KVP_OK;
    uint64_t whole = mapping->bytes & ~(uint64_t)(KVP_HUGE_PAGE - 1);
    if ((whole && madvise(mapping->base, whole, MADV_COLLAPSE) == 0) || !mapping->demands_huge)
        return KVP_OK;
    return kvp_fail(KVP_E_NOSPACE, "%s has %llu bytes and cannot have them in pages of 2 MiB (%s): leave hugepage=2M out, or "
                    "reserve such pages and use hugetlb:2MiB", mapping->uri, (unsigned long long)mapping->bytes,
                    whole ? strerror(errno) : "too small");
}

void *kvp_table_new(uint64_t bytes)
{
    uint64_t whole = (bytes + KVP_HUGE_PAGE - 1) & ~(uint64_t)(KVP_HUGE_PAGE - 1), room = whole + KVP_HUGE_PAGE;
    uint8_t *start = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (start == MAP_FAILED)
        return NULL;
    uint64_t before = -(uintptr_t)start & (KVP_HUGE_PAGE - 1);
    if (before)
        munmap(start, before);
    munmap(start + before + whole, KVP_HUGE_PAGE - before);
    if (bytes >= KVP_HUGE_PAGE)
        madvise(start + before, whole, MADV_HUGEPAGE);
    return start + before;
}

void kvp_table_free(void *table, uint64_t bytes)
{
    if (table)
        munmap(table, (bytes + KVP_HUGE_PAGE - 1) & ~(uint64_t)(KVP_HUGE_PAGE - 1));
}

void kvp_mapping_close(struct kvp_mapping *mapping)
{
    char temporary[sizeof mapping->path + 32];

    if (mapping->is_temporary) { /* never got its name */
        temporary_path(mapping->path, temporary, sizeof temporary);
        unlink(temporary);
    }
    kvp_sim_close(mapping);
    if (mapping->base)
        munmap(mapping->base, mapping->bytes);
    if (mapping->fd >= 0)
        close(mapping->fd);
    mapping->base = NULL;
    mapping->fd = -1;
}

int kvp_mapping_unlink(const char *text)
{
    struct kvp_uri uri;
    int status = kvp_uri_parse(text, &uri);

    if (status)
        return status;
    if (!is_named_kind(uri.kind))
        return kvp_fail(KVP_E_INVALID, "%s has no name to remove: it goes with its last user", text);
    status = unlink(uri.path) ? kvp_fail_errno("cannot remove", uri.path) : KVP_OK;
    if (uri.kind == KVP_MAP_SIM) /* after the device: who opens it now finds none, and makes no cache */
        kvp_sim_unlink(uri.path);
    return status;
}
