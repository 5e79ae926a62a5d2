/* content.c -- what the bytes of a file would be taken for on a device, before and after they are cleared. */
#define _GNU_SOURCE
#include "native/handle.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int count, char **words)
{
    struct stat info;
    int fd = count == 2 ? open(words[1], O_RDWR) : -1;

    if (fd < 0 || fstat(fd, &info))
        return 2;
    uint64_t bytes = (uint64_t)info.st_size;
    uint8_t *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return 2;
    for (int cleared = 0; cleared < 2; cleared++) {
        const char *what = kvp_device_content(base, bytes);
        puts(what ? what : "nothing");
        if (!cleared)
            kvp_device_wipe(base, bytes);
    }
    return 0;
}
