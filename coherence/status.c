/* status.c -- the text of each status, once, and the detail of the last failure of a thread. */
#include "coherence/coherence.h"

#include <stdarg.h>
#include <stdio.h>

static __thread char detail[512];

const char *kvp_error_detail(void)
{
    return detail;
}

int kvp_fail(int status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    return status;
}

const char *kvp_strerror(int status)
{
    switch (status) {
    case KVP_OK: return "success";
    case KVP_E_INVALID: return "invalid argument";
    case KVP_E_NOSPACE: return "the memory cannot be backed";
    case KVP_E_EXISTS: return "a pool of this name exists";
    case KVP_E_NOTFOUND: return "no such pool";
    case KVP_E_PERMISSION: return "permission denied";
    case KVP_E_SYSTEM: return "a system call failed";
    case KVP_E_NOTREADY: return "the pool is not formatted to the end";
    case KVP_E_FOREIGN: return "not a kvpool image";
    case KVP_E_OLDER: return "the image has an older format";
    case KVP_E_NEWER: return "the image has a newer format";
    case KVP_E_LAYOUT: return "the image was made with another layout";
    case KVP_E_CORRUPT: return "the image is corrupt";
    case KVP_E_TRUNCATED: return "the image is cut short";
    case KVP_E_REPLACED: return "the pool was removed or replaced";
    case KVP_E_MODE: return "the pool is of another mode";
    case KVP_E_BUSY: return "the pool is in use";
    case KVP_E_CLOSED: return "the pool handle is closed";
    case KVP_E_FORKED: return "the pool handle belongs to the parent process";
    case KVP_E_HOST: return "not usable as this host";
    case KVP_E_FENCED: return "this host was declared lost";
    case KVP_E_UNQUALIFIED: return "the device is not qualified for mode noncoherent";
    case KVP_E_NOSLOT: return "no free worker slot";
    case KVP_E_FULL: return "the pool is full";
    case KVP_E_RANGE: return "no such block";
    case KVP_E_STALE: return "the block was freed or reused";
    case KVP_E_NOTOWNED: return "the block is not reserved by this worker";
    case KVP_E_PINS: return "no free pin slot";
    }
    return "unknown status";
}
