/* bench_malloc.c -- nanoseconds of malloc+free of BYTES, of whatever allocator is preloaded; the first byte is written. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PAIRS = 2000, SAMPLES = 41 };

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
    double spent[SAMPLES];

    for (int s = 0; s < SAMPLES; s++) {
        double start = now_ns();
        for (int i = 0; i < PAIRS; i++) {
            volatile char *block = malloc(bytes);
            *block = 1;
            free((void *)block);
        }
        spent[s] = (now_ns() - start) / PAIRS;
    }
    qsort(spent, SAMPLES, sizeof *spent, ascending);
    printf("%.3f\n", spent[SAMPLES / 2]);
    return 0;
}
