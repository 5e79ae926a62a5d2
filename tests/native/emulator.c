/* emulator.c -- linked in with --wrap=syscall where the machine is emulated: qemu's user mode knows no robust lists,
 * and the keeper rightly refuses to work without. Here nobody dies, so the answer may be yes. */
#define _GNU_SOURCE
#include <sys/syscall.h>

long __real_syscall(long number, long a, long b, long c, long d, long e, long f);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f);

long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    return number == SYS_set_robust_list ? 0 : __real_syscall(number, a, b, c, d, e, f);
}
